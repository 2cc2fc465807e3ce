#!/usr/bin/env python3
"""A packed model of random weights with the shapes of a checkpoint: for measuring speed where its text does not matter.

    python bench/random_model.py CHECKPOINT OUT [--rule PATTERN=BITS] [--seed 0]

CHECKPOINT needs config.json and the tokenizer's files, no weights. Every bit of the codes is random; the rows' scales
give weights the size that keeps activations where a trained model has them. A minute per billion weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from twobit.architecture import Architecture, TensorSpec
from twobit.format import layout
from twobit.format.manifest import parse_json
from twobit.format.writer import ModelWriter, PackedTensor
from twobit.quant.recipe import Bits, Recipe, Rule

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)


def matrix(spec: TensorSpec, bits: Bits, rng: np.random.Generator) -> PackedTensor:
    """Random codes; q takes about two thirds of its range, which U scales to a square mean of 1 / columns."""
    rows, cols = spec.shape
    planes = {
        name: rng.integers(0, 256, size, dtype=np.uint8)
        for name, size in layout.plane_sizes(rows, cols, bits.draft, bits.residual, bits.group).items()
    }
    kind = layout.KINDS[bits.draft, bits.residual]
    limit = layout.Q_WIDE if kind.wide else layout.Q_NARROW
    left = limit - 15 * (1 << (bits.residual - 1))
    a = min((2 * left // 3) // (15 * ((1 << bits.draft) - 1)) >> kind.shift, 17) << kind.shift
    scale = np.zeros(planes["row_scale"].size // 4, np.float32)
    scale[:rows] = 2.0 / limit / np.sqrt(cols)
    planes["row_scale"] = scale.view(np.uint8)
    used = np.arange(planes["row_a"].size) < rows
    planes["row_a"] = np.where(used, a, 0).astype(np.uint8)
    planes["row_b"] = np.where(used, left // 24, 0).astype(np.uint8)
    return PackedTensor.from_planes(planes, (rows, cols), bits.draft, bits.residual, bits.group, wide=bits.wide)


def main() -> None:
    parser = argparse.ArgumentParser(description="a packed model of random weights")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rule", action="append", default=[], help="PATTERN=BITS, as in twobit quantize")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    config = parse_json((args.checkpoint / "config.json").read_bytes(), "config.json")
    architecture = Architecture.from_config(config)
    recipe = Recipe(rules=tuple(Rule.parse(text) for text in args.rule))
    specs = architecture.tensors()
    count = sum(int(np.prod(spec.shape)) for spec in specs)
    keys = []
    with ModelWriter(args.out, {"random": args.seed}, restart=True) as writer:
        for number, spec in enumerate(specs):
            if spec.role == "embedding":
                if architecture.tied:
                    continue
                weight = rng.standard_normal(spec.shape, dtype=np.float32)
                stored = {spec.module: PackedTensor.embedding(weight * np.float32(0.02))}
            elif len(spec.shape) == 2:
                stored = {spec.module: matrix(spec, recipe.bits(spec.module, spec.role), rng)}
            else:
                fill = 0.0 if spec.name.endswith("bias") else 1.0
                stored = {spec.name: PackedTensor.plain(np.full(spec.shape, fill, np.float32), "F32", spec.shape)}
            keys.append(f"t-{number:05d}")
            writer.store(keys[-1], stored)
        writer.finish(
            keys,
            config=config,
            family=architecture.family,
            parameters=count,
            recipe=recipe.to_json(),
            calibration={"source": "random weights"},
            producer="bench/random_model.py",
            files={name: args.checkpoint / name for name in FILES if (args.checkpoint / name).is_file()},
        )
    print(args.out)


if __name__ == "__main__":
    main()
