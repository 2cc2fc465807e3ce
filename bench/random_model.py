#!/usr/bin/env python3
"""A packed model of random weights with the shapes of a checkpoint: for measuring speed where its text does not matter.

    python bench/random_model.py CHECKPOINT OUT [--rule PATTERN=BITS] [--seed 0]

CHECKPOINT needs config.json and the tokenizer's files, no weights. A minute per billion weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from twobit.architecture import Architecture
from twobit.format.manifest import parse_json
from twobit.format.writer import ModelWriter, PackedTensor
from twobit.quant.recipe import Recipe, Rule, entries
from twobit.synthetic import matrix_planes

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)


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
    specs, wanted = architecture.tensors(), entries(architecture, recipe)
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
                bits, entry = recipe.bits(spec.module, spec.role), wanted[spec.module]
                planes = matrix_planes(entry, rng)
                packed = PackedTensor.from_planes(
                    planes, spec.shape, bits.draft, bits.residual, bits.group, wide=bits.wide
                )
                stored = {spec.module: packed}
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
