#!/usr/bin/env python3
"""The tables of docs/plan.md: what `twobit plan` predicts for common cards and model sizes, beside two others.

    python bench/plan_tables.py [--write docs/plan.md]

Nothing is measured. --write puts the tables into the page, between its two marks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twobit.architecture import Architecture
from twobit.predict import (
    DRIVER,
    LAYER_S,
    Q8_0,
    SHARE_GPU,
    Cpu,
    Hardware,
    Passes,
    Shape,
    best_depth,
    llama_pass,
    predict,
    tokens_per_step,
)
from twobit.quant.recipe import Recipe, entries
from twobit.runtime.placement import MARGIN

BEGIN, END = "<!-- tables: bench/plan_tables.py -->", "<!-- end of tables -->"
GIB = 1 << 30
CARDS = ((12, 504.0), (16, 672.0), (24, 1008.0))  # GiB of VRAM, GB/s
# 8 cores with VNNI: 32 multiply-adds per cycle at 5 GHz; two channels of DDR5 as a probe reads them; PCIe 4.0 x16
RAM, RAM_GBS, CORES_GMACS, BUS_GBS = 96 * 10**9, 60.0, 8 * 160.0, 25.0
CONTEXT = 4096
ACCEPTANCES = (0.7, 0.8, 0.9)
MTP_DRAFTED, MTP_TOKENS = 3, 1 + 3 * 0.75
SUBSPEC_BYTES, SUBSPEC_ACCEPTANCE, SUBSPEC_DEPTH = 4.5 / 8, 0.95, 32
PLAIN_AIM, DRAFTER_AIM = 4.0, 1.25


def _qwen2(hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    }


MODELS = {  # shapes of Qwen2.5-14B, Qwen2.5-32B and Llama-3.1-70B
    "14B": _qwen2(5120, 13824, 48, 40),
    "32B": _qwen2(5120, 27648, 64, 40),
    "70B": {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
}


def mtp(shape: Shape, rival: Callable[[int], float], hardware: Hardware) -> float:
    """Tokens/s of llama.cpp with a drafter of one layer and the head in VRAM, in Q8_0, MTP_DRAFTED tokens a step."""
    size = Q8_0 * (max(shape.weights) + shape.head)
    drafted = size / (SHARE_GPU * hardware.vram_gbs * 1e9) + LAYER_S
    return MTP_TOKENS / (MTP_DRAFTED * drafted + rival(MTP_DRAFTED + 1))


def subspec(shape: Shape, hardware: Hardware) -> float | None:
    """Tokens/s of SubSpec: 4-bit substitutes of all layers that do not stay in VRAM as bf16; those are streamed over
    the bus to verify. None where not even the substitutes fit."""
    weights = sum(shape.weights) + shape.head
    left = hardware.vram - DRIVER - MARGIN - shape.cache - SUBSPEC_BYTES * weights
    if left < 0:
        return None
    resident = min(weights, left / (2 - SUBSPEC_BYTES))
    streamed = weights - resident
    gpu, layers = SHARE_GPU * hardware.vram_gbs * 1e9, LAYER_S * len(shape.weights)
    draft_s = (SUBSPEC_BYTES * streamed + 2 * resident) / gpu + layers
    verify_s = 2 * streamed / (hardware.bus_gbs * 1e9) + 2 * resident / gpu + layers
    return tokens_per_step(SUBSPEC_ACCEPTANCE, SUBSPEC_DEPTH) / (SUBSPEC_DEPTH * draft_s + verify_s)


def needed(passes: Passes, aim: float) -> str:
    """The acceptance at which drafting reaches `aim` tokens/s."""
    for percent in range(0, 100):
        if best_depth(passes, percent / 100)[0] >= aim:
            return f"{percent} %"
    return "never"


def tables() -> str:
    lines: list[str] = []
    reached: list[str] = []
    for gib, vram_gbs in CARDS:
        lines += [
            f"**{gib} GiB of VRAM at {vram_gbs:.0f} GB/s** (predicted)",
            "",
            "| model | in VRAM | GB in RAM | twobit plain | drafting at 70, 80, 90 % | llama.cpp plain | with drafter "
            "| SubSpec | to plain at 70, 80, 90 % | needed for 4 | to drafter at 70, 80, 90 % | needed for 1.25 |",
            "|---|---|---:|---:|---|---:|---:|---:|---|---:|---|---:|",
        ]
        for name, config in MODELS.items():
            lines.append(_row(name, config, gib, vram_gbs, reached))
        lines.append("")
    lines += [*reached, ""]
    return "\n".join(lines)


def _row(name: str, config: dict[str, Any], gib: int, vram_gbs: float, reached: list[str]) -> str:
    from twobit.predict import cpu_passes, hybrid_passes

    architecture = Architecture.from_config(config)
    tensors = entries(architecture, Recipe())
    hardware = Hardware(RAM, RAM_GBS, CORES_GMACS, gib * GIB, vram_gbs, BUS_GBS)
    shape, cpu = Shape(architecture, tensors, CONTEXT), Cpu.of(hardware)
    found = predict(architecture, tensors, hardware, context=CONTEXT)
    placed = found.placement
    passes = hybrid_passes(shape, placed, cpu, hardware) if placed.hybrid else cpu_passes(shape, cpu)
    rates = [best_depth(passes, a)[0] for a in ACCEPTANCES]
    rival = llama_pass(shape, cpu, hardware)
    plain, drafter, other = 1 / rival(1), mtp(shape, rival, hardware), subspec(shape, hardware)
    if placed.hybrid:
        where = f"2-bit, residual of {placed.residual_layers} of {len(shape.weights)} layers"
        where += " and the head" if placed.residual_head else ""
    else:
        where = f"nothing: {placed.missing / 1e9:.1f} GB short"
    for what, aim, base in (("plain", PLAIN_AIM, plain), ("with a drafter", DRAFTER_AIM, drafter)):
        ratio = rates[1] / base
        verdict = "reached" if ratio >= aim else "**not reached**"
        better = "; it fits the VRAM at Q8_0: llama.cpp is the better choice" if found.q8_fits_vram else ""
        reached.append(
            f"- {name}, {gib} GiB: {aim:g} times llama.cpp {what} is {verdict} at 80 % ({ratio:.2f}){better}."
        )
    return (
        f"| {name} | {where} | {placed.ram / 1e9:.1f} | {found.speed.plain:.2f} | "
        f"{', '.join(f'{r:.1f}' for r in rates)} | {plain:.2f} | {drafter:.2f} | "
        f"{'does not fit' if other is None else f'{other:.2f}'} | "
        f"{', '.join(f'{r / plain:.2f}' for r in rates)} | {needed(passes, PLAIN_AIM * plain)} | "
        f"{', '.join(f'{r / drafter:.2f}' for r in rates)} | {needed(passes, DRAFTER_AIM * drafter)} |"
    )


def insert(page: str) -> str:
    """`page` with the tables between its marks."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{rest.split(END)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", type=Path, help="the page to put them into")
    args = parser.parse_args()
    if args.write is None:
        print(tables())
    else:
        args.write.write_text(insert(args.write.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
