"""Devices for tests, and single kernels on them: the plain-C build everywhere, OpenCL where a device is installed."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from twobit.errors import RuntimeFailure
from twobit.format import layout
from twobit.runtime.device import Device
from twobit.runtime.lib import call, ffi, lib

KINDS = ("plain", "opencl", "cuda")
LIMITS = ((127, 128), (8191, 128), (4095, 64))  # by kind of activations: largest value, columns of a group


@functools.cache
def _open(kind: str) -> Device | str:
    try:
        return Device(kind)
    except RuntimeFailure as error:
        return str(error)


def device(kind: str) -> Device:
    """The device, opened once; skips the test where there is none."""
    found = _open(kind)
    if isinstance(found, str):
        hint = " (Debian: pocl-opencl-icd)" if kind == "opencl" else ""
        pytest.skip(f"no device of kind {kind}{hint}: {found}")
    return found


def run(on: Device, kernel: str, groups: tuple[int, ...], buffers: dict[int, np.ndarray], **params: Any) -> Any:
    """Runs one kernel on copies of `buffers` (by number); returns the copies, by number."""
    copies = {i: np.ascontiguousarray(a).copy() for i, a in buffers.items()}
    pointers, sizes = ffi.new("uint8_t *[8]"), ffi.new("size_t[8]")
    for i, a in copies.items():
        pointers[i], sizes[i] = ffi.cast("uint8_t *", a.ctypes.data), a.nbytes
    struct = ffi.new("tbg_params *", params)
    by = [*groups, *[1] * (3 - len(groups))]
    call(lib.tb_gpu_run, on.c_gpu, kernel.encode(), by, pointers, sizes, struct, 1, ffi.NULL)
    return copies


def rounded(x: np.ndarray, kind: int) -> tuple[np.ndarray, np.ndarray]:
    """(integers [m, cols], scales [m, groups]) as FORMAT.md says."""
    limit, size = LIMITS[kind]
    m, cols = x.shape
    groups = layout.ceil_div(cols, size)
    full = np.zeros((m, groups * size), np.float32)
    full[:, :cols] = x
    full = full.reshape(m, groups, size)
    amax = np.abs(full).max(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        q = np.clip(np.rint(full * (np.float32(limit) / amax)[..., None]), -limit, limit)
    zero = amax < 1e-30
    q[zero] = 0
    scale = np.where(zero, 0, amax / np.float32(limit)).astype(np.float32)
    return q.reshape(m, -1)[:, :cols].astype(np.int32), scale


def pack_acts(q: np.ndarray, scale: np.ndarray, kind: int) -> np.ndarray:
    """Rounded activations as the kernels have them: bytes."""
    m, cols = q.shape
    quads = layout.ceil_div(cols, 64)
    full = np.zeros((m, quads * 64), np.int32)
    full[:, :cols] = q
    units = full.reshape(m, quads * 4, 16)
    low, high = units & 127, units >> 7
    data = units.astype(np.int8) if kind == 0 else np.concatenate([high, low], -1).astype(np.int8)
    return np.concatenate([part.ravel().view(np.uint8) for part in (data, units.sum(-1, dtype=np.int32), scale)])


def random_matrix(rng: np.random.Generator, rows: int, cols: int, b: int, r: int, group: int) -> layout.Matrix:
    """A matrix whose integers keep FORMAT.md's range."""
    units, half = layout.ceil_div(cols, 16), 1 << (r - 1)
    kind = layout.KINDS[b, r]
    a = (rng.integers(1, 8 if kind.wide else 6, rows) << kind.shift).astype(np.uint8)
    return layout.Matrix(
        draft_bits=b,
        residual_bits=r,
        residual_group=group,
        codes=rng.integers(0, 1 << b, (rows, cols)).astype(np.uint8),
        s=rng.integers(0, 16, (rows, units)).astype(np.uint8),
        m=rng.integers(-8, 8, (rows, units)).astype(np.int8),
        row_scale=(1e-3 * rng.random(rows) + 1e-4).astype(np.float32),
        row_a=a,
        row_b=rng.integers(-30, 31, rows).astype(np.int8),
        residual=rng.integers(-half, half, (rows, cols)).astype(np.int16),
        f=rng.integers(0, 16, (rows, layout.ceil_div(cols, group))).astype(np.uint8),
    )


DESCRIPTION = [
    *("ROWS", "COLS", "BLOCKS", "UNITS", "QUADS", "GROUP_QUADS", "OUT", "BIAS"),
    *("CODES", "SCALES", "U", "A", "B", "RCODES", "RSCALES", "RGROUP"),
]  # as TBG_ROWS ... in csrc/gpu/params.h


def describe(matrices: list[layout.Matrix], biases: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(draft planes, residual planes, descriptions) of matrices that are multiplied together."""
    draft, rest, table, out = b"", b"", [], 0
    for matrix, bias in zip(matrices, biases, strict=True):
        rows, cols = matrix.shape
        planes = layout.pack(matrix)
        at = {}
        for name, key in (
            ("draft_codes", "CODES"),
            ("draft_scales", "SCALES"),
            ("row_scale", "U"),
            ("row_a", "A"),
            ("row_b", "B"),
        ):
            at[key] = len(draft) // 16
            draft += planes[name].tobytes()
        for name, key in (("residual_codes", "RCODES"), ("residual_scales", "RSCALES")):
            at[key] = len(rest) // 16
            rest += planes[name].tobytes()
        units = layout.ceil_div(cols, 16)
        values = at | {
            "ROWS": rows,
            "COLS": cols,
            "BLOCKS": layout.ceil_div(rows, 16),
            "UNITS": units,
            "QUADS": layout.ceil_div(units, 4),
            "GROUP_QUADS": 1 if layout.KINDS[matrix.draft_bits, matrix.residual_bits].wide else 2,
            "OUT": out,
            "BIAS": bias,
            "RGROUP": matrix.residual_group,
        }
        table.append([values[key] for key in DESCRIPTION])
        out += rows
    return np.frombuffer(draft, np.uint8), np.frombuffer(rest, np.uint8), np.array(table, np.int32)
