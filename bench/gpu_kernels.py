#!/usr/bin/env python3
"""The device's product kernels against its bandwidth: what of it they reach with one token, and what more tokens cost.

    python bench/gpu_kernels.py [--device cuda|opencl|plain] [--rows 16384] [--cols 8192] [--json]

The bandwidth is that of the summing kernel in the same run, which reads two buffers and writes one.
Matrices of random bytes that no cache holds; the time is of many launches in a row.
"""

from __future__ import annotations

import argparse
import json

import numpy as np

from twobit.runtime.device import Device
from twobit.runtime.lib import call, ffi, lib


def seconds(
    on: Device, kernel: str, groups: tuple[int, int], buffers: dict[int, np.ndarray], repeat: int, **params: int
) -> float:
    """Of one launch, the mean over `repeat` in a row after one that does not count."""
    pointers, sizes = ffi.new("uint8_t *[8]"), ffi.new("size_t[8]")
    for i, a in buffers.items():
        pointers[i], sizes[i] = ffi.cast("uint8_t *", a.ctypes.data), a.nbytes
    struct, took = ffi.new("tbg_params *", params), ffi.new("double *")
    for n in (1, repeat):
        call(lib.tb_gpu_run, on.c_gpu, kernel.encode(), [*groups, 1], pointers, sizes, struct, n, took)
    return took[0] / repeat


def main() -> None:
    parser = argparse.ArgumentParser(description="product kernels against bandwidth")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--cols", type=int, default=8192)
    parser.add_argument("--repeat", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    on = Device(args.device)
    rng = np.random.default_rng(0)
    rows, cols, units = args.rows, args.cols, args.cols // 16
    blocks, quads = rows // 16, units // 4
    weights = rows * cols

    floats = max(weights // 4, 1 << 16)  # as many bytes as the codes of 8 bits have
    y, table = np.zeros(floats, np.float32), np.zeros((1, 16), np.int32)
    table[0, [0, 7]] = floats, -1
    probe = 12 * floats / seconds(on, "sum_parts", (floats // 64, 1), {0: y, 1: table, 3: y}, args.repeat, m=1, count=1)

    results = []
    for kernel, bits, residual in (
        ("draft2_a8", 2, False),
        ("draft2_a16", 2, False),
        ("draft4_a16", 4, False),
        ("residual6", 6, True),
        ("residual8", 8, True),
    ):
        codes, scales = blocks * units * 32 * bits, blocks * quads * (32 if residual else 64)
        planes = rng.integers(0, 256, codes + scales, dtype=np.uint8)
        rest = np.zeros(rows * 6, np.uint8)  # U, A, B
        row = [
            rows,
            cols,
            blocks,
            units,
            quads,
            2,
            0,
            -1,
            0,
            codes // 16,
            0,
            rows // 4,
            rows // 4 + rows // 16,
            0,
            codes // 16,
            16,
        ]
        for m in (1, 8, 16, 64):
            acts = np.zeros(m * (quads * 144 + cols // 64 * 4), np.uint8)
            buffers = {0: planes, 1: np.array([row], np.int32), 2: acts, 3: np.zeros(m * rows, np.float32), 4: rest}
            time = seconds(
                on, f"{kernel}_t{1 if m == 1 else 8}", ((m + 7) // 8, blocks), buffers, args.repeat, m=m, count=1
            )
            results.append(
                {
                    "kernel": kernel,
                    "m": m,
                    "seconds": time,
                    "share": len(planes) / time / probe,
                    "gmac_s": m * weights / time * 1e-9,
                }
            )
    if args.json:
        print(
            json.dumps({"device": on.name, "rows": rows, "cols": cols, "probe_gb_s": probe * 1e-9, "results": results})
        )
        return
    print(f"{on.name}: {probe * 1e-9:.0f} GB/s in the summing kernel; {rows} x {cols}\n")
    print("| kernel | tokens | us | share of bandwidth | GMAC/s |\n|---|---:|---:|---:|---:|")
    for r in results:
        print(f"| {r['kernel']} | {r['m']} | {r['seconds'] * 1e6:.1f} | {r['share']:.0%} | {r['gmac_s']:.0f} |")


if __name__ == "__main__":
    main()
