#!/usr/bin/env python3
"""What a draft that leaves out layers would yield: drafted tokens accepted of 8, in torch, over the checkpoint's cache.

    python bench/draft_layers.py CHECKPOINT MODEL TEXTS [--texts 12]

TEXTS is `texts.json` of bench/quality.py (part acceptance): the model's own continuations. Layers are left out one at
a time to rank them, then the least harmful ones together. A layer saved is worth 1 / layers of what a pass costs
without its head.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from twobit.format import layout
from twobit.format.reader import open_model
from twobit.quant.decoder import Cache, Decoder
from twobit.quant.source import Checkpoint
from twobit.quant.tune import BLOCK, drafting


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--texts", type=int, default=12, dest="most", help="how many of them [12]")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    opened, packed = Checkpoint.open(args.checkpoint), open_model(args.model)
    architecture, specs = opened.architecture, opened.architecture.tensors()
    decoder, depth = Decoder(architecture), len(architecture.layers)
    weights = {s.name: opened.read(s) for s in specs if not (architecture.tied and s.role == "head")}
    draft = weights | {
        s.name: torch.from_numpy(layout.dequantize(packed.matrix(s.module))[0]) for s in specs if s.role == "linear"
    }
    head = {
        "lm_head.weight": torch.from_numpy(layout.dequantize(packed.matrix("lm_head"))[0]),
        "model.norm.weight": weights["model.norm.weight"],
    }
    made: list[tuple[list[int], int, Cache]] = []
    every = json.loads(args.texts.read_text(encoding="utf-8"))
    for text in every[:: max(1, len(every) // args.most)]:
        ids, first = text["ids"], text["first"]
        if len(ids) >= first + BLOCK + 1:
            cache, x = Cache(), decoder.embed(ids[:-1], weights)
            for i in range(depth):
                x = decoder.layer(i, x, weights, cache=cache)
            made.append((ids, first, cache))

    def accepted(left_out: set[int]) -> float:
        runs: list[int] = []
        for ids, first, cache in made:
            x: Any = decoder.embed(ids[:-1], weights)
            for i in range(depth):
                if i not in left_out:
                    x = decoder.layer(i, x, draft, attend=drafting(*cache.of(i), first=(first - 1) % BLOCK))
            hits = decoder.head(x[first - 1 :], head).argmax(-1) == torch.tensor(ids[first:])
            runs += [int(run.long().cumprod(0).sum()) for run in hits.split(BLOCK) if len(run) == BLOCK]
        return sum(runs) / len(runs)

    whole = accepted(set())
    alone = {i: accepted({i}) for i in range(depth)}
    order = sorted(alone, key=lambda i: -alone[i])
    print(f"{len(made)} texts; all {depth} layers: {whole:.2f} of {BLOCK}")
    print("one layer less: " + ", ".join(f"{i} {alone[i]:.2f}" for i in order))
    for n in (2, 3, 4, 6):
        print(f"without {sorted(order[:n])}: {accepted(set(order[:n])):.2f}")


if __name__ == "__main__":
    main()
