#!/usr/bin/env python3
"""Prints results of bench/ as the tables of the documents.

python bench/show.py bench/results/llama-*.json bench/results/kernels-*.json [--shape 8960x1536]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def show_llama(data: dict[str, Any]) -> None:
    """Results of compare_llama.py."""
    here = data["machine"]
    print(f"{data['model']}, {here['cpu']}, kernels {here['kernel']}, medians of {data['rounds']} alternated rounds")
    print("probe: " + ", ".join(f"{n} thread(s) {v:.1f} GB/s" for n, v in data["probe_gb_s"].items()) + "\n")
    print("| threads | test | engine | tokens/s | lowest-highest | to llama.cpp | GB/s |")
    print("|---|---|---|---:|---:|---:|---:|")
    for row in data["results"]:
        spread, read = f"{row['low']:.1f}-{row['high']:.1f}", f"{row['gb_s']:.1f}" if "gb_s" in row else ""
        print(
            f"| {row['threads']} | {row['test']} | {row['engine']} | {row['tokens_per_s']:.1f} | {spread} "
            f"| {row['ratio']:.2f} | {read} |"
        )


def show_kernels(data: dict[str, Any], shape: str) -> None:
    """Results of `twobit bench --kernels --json`: time to M = 1, and share of the nearer limit, by op and threads."""
    sizes = (1, 2, 4, 8, 16, 64)
    for probe in data["probes"]:
        print(f"{probe['threads']} thread(s): reads {probe['read_gb_s']:.1f} GB/s, ", end="")
        print(f"multiplies {probe['gmac_s']:.0f} GMAC/s (draft {probe['draft_gmac_s']:.0f}), ", end="")
        print(f"a parallel section takes {probe['section_us']:.2f} us")
    here = data["machine"]
    print(f"\n{shape}, {here['cpu']}, kernels {here['kernel']}; time to M = 1 (share of the limit)\n")
    print("| op | threads | M = 1 | GB/s | " + " | ".join(f"M = {m}" for m in sizes[1:]) + " | GMAC/s at 64 |")
    print("|---|---|---:|---:|" + "---:|" * len(sizes))
    rows = [row for row in data["kernels"] if f"{row['rows']}x{row['cols']}" == shape]
    for op, threads in dict.fromkeys((row["op"], row["threads"]) for row in rows):
        of = {row["m"]: row for row in rows if (row["op"], row["threads"]) == (op, threads)}
        cells = [f"{of[m]['ratio_to_m1']:.2f} ({of[m]['roofline_fraction']:.0%})" for m in sizes[1:]]
        one = of[1]
        print(
            f"| {op} | {threads} | {one['seconds'] * 1e3:.2f} ms ({one['roofline_fraction']:.0%}) | {one['gb_s']:.1f}"
            + " | "
            + " | ".join(cells)
            + f" | {of[64]['gmac_s']:.0f} |"
        )
    if not data["valid"]:
        print("\nnot valid: a kernel was faster than the probes")


def main() -> None:
    parser = argparse.ArgumentParser(description="results as tables")
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--shape", default="8960x1536")
    args = parser.parse_args()
    for path in args.files:
        data = json.loads(path.read_text())
        if data.get("kernels"):
            show_kernels(data, args.shape)
        else:
            show_llama(data)
        print()


if __name__ == "__main__":
    main()
