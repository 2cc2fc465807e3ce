#!/usr/bin/env python3
"""How near `twobit plan` comes to this machine: its measured and its named prediction beside plain decoding of MODEL.

    python bench/plan_accuracy.py MODEL [-r 5] [-n 8]

Rounds alternate the three; MODEL runs plainly, without drafting, behind 64 tokens of context.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np

from twobit.predict import Cpu, Hardware, Shape, cpu_passes
from twobit.rates import POSITION, measure
from twobit.runtime.model import Model
from twobit.runtime.sampling import Sampling
from twobit.runtime.session import Session, StepOptions


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("-r", type=int, default=5, help="rounds")
    parser.add_argument("-n", type=int, default=8, help="tokens decoded in a round")
    args = parser.parse_args()
    model = Model.open(args.model)
    tensors = model.packed.manifest.tensors
    session = Session(model, POSITION + args.n + 8)
    ids = np.random.default_rng(2).integers(0, model.vocab, POSITION).tolist()
    rows: dict[str, list[float]] = {"measured": [], "plan, processor measured": [], "plan, processor named": []}
    for number in range(-1, args.r):  # round -1 warms up
        session.rewind(0)
        session.eval(ids[:-1], logits=False)
        history, start = list(ids), time.perf_counter()
        for _ in range(args.n):
            history += session.step(history, Sampling(), StepOptions(draft_max=0)).tokens
        seconds = (time.perf_counter() - start) / args.n
        found = measure(model.architecture, tensors)
        named = Cpu.of(Hardware(0, found.read_gb_s, found.gmac_s))
        verify_s = cpu_passes(Shape(model.architecture, tensors, POSITION), named).verify_s
        if number >= 0:
            for row, value in zip(rows.values(), (seconds, found.plain_s, verify_s(1)), strict=True):
                row.append(1 / value)
    truth = statistics.median(rows["measured"])
    print(f"{args.model.name}, {args.r} rounds, {session.threads} threads, plain decoding")
    for name, values in rows.items():
        median = statistics.median(values)
        print(f"{name:<26}{median:8.2f} tokens/s ({min(values):.2f} to {max(values):.2f}), {median / truth:.3f}")


if __name__ == "__main__":
    main()
