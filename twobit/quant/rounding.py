"""Weights to codes: the draft's lattice and the residual's grid, by GPTQ in the metric of the layer's inputs.

With H = X^T X of the inputs, the error that matters is e H e^T per row e of (weights - rounded weights). H is written as
F diag(d) F^T with F unit upper triangular; then that error is sum_j d_j (e_j + sum_{i<j} e_i F_ij)^2, so columns are
rounded left to right, each towards its weight plus the errors already made, fed through F (GPTQ, Frantar et al. 2022, in
the LDL form of QuIP, Chee et al. 2023, Theorem 1; needs one Cholesky factorization and no inverse). The loops are in
csrc/rounding_body.inc.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from twobit.errors import CalibrationError, CheckpointError
from twobit.runtime.lib import ffi, lib

GROUP = 16
ROWS_PER_TASK = 32
"""Rows of one task; fixed by the C loops' tile, of no influence on the result."""

MAX_DAMPING = 100.0
DOUBLE_COLUMNS = 4096
"""Hessians up to this size are factored in double precision, wider ones in single to halve the memory."""


@dataclass(frozen=True)
class Factor:
    """F and d of a damped Hessian, in units of its mean diagonal; shared by all matrices with the same inputs.

    factor: fp32 [padded, stride], strictly upper part used, None for the identity; energy: d, fp32 [padded], 0 in the
    padding; padded: columns rounded up to 32; damping: what was added to the diagonal, in mean diagonals;
    note: what had to be changed for the factorization to succeed, or None.
    """

    columns: int
    factor: npt.NDArray[np.float32] | None
    energy: npt.NDArray[np.float32]
    damping: float
    note: str | None

    @property
    def padded(self) -> int:
        return self.energy.shape[0]


@dataclass
class Rounded:
    """A matrix on the lattice: U (A s (2c - (2^b - 1)) + B m + f r), and how far it is from the weights.

    codes (c) u8 and residual (r) i16 [rows, cols]; s u8 and m i8 [rows, ceil(cols / 16)]; f u8 [rows, ceil(cols /
    residual_group)]; row_scale (U) f32, row_a (A) u8, row_b (B) i8 [rows]. draft_error and full_error: root of error
    energy over weight energy, in the metric of the damped Hessian. note: see Factor.
    """

    codes: npt.NDArray[np.uint8]
    s: npt.NDArray[np.uint8]
    m: npt.NDArray[np.int8]
    row_scale: npt.NDArray[np.float32]
    row_a: npt.NDArray[np.uint8]
    row_b: npt.NDArray[np.int8]
    residual: npt.NDArray[np.int16]
    f: npt.NDArray[np.uint8]
    draft_error: float
    full_error: float
    note: str | None


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Linear algebra on one thread: its bits may depend on how many there are."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def identity(columns: int, note: str | None = None) -> Factor:
    """The factor of uncorrelated inputs of equal size: no feedback, plain rounding to nearest."""
    energy = np.zeros((columns + 31) // 32 * 32, np.float32)
    energy[:columns] = 1
    return Factor(columns, None, energy, 0.0, note)


def prepare(hessian: torch.Tensor, damping: float = 0.1) -> Factor:
    """Factor a Hessian [columns, columns] (symmetric, fp32 or fp64; only its upper triangle is read).

    `damping` mean diagonals are added to the diagonal, which also covers columns that were always zero. Where that is
    not enough it is raised tenfold up to MAX_DAMPING, and then the identity stands in; `note` says so.
    Raises CalibrationError when the Hessian holds a NaN or an infinity.
    """
    columns = hessian.shape[0]
    if hessian.shape != (columns, columns):
        raise ValueError(f"hessian of shape {tuple(hessian.shape)}")
    mean = float(hessian.diagonal().double().mean())
    if not bool(torch.isfinite(hessian.sum(dtype=torch.float64))):
        raise CalibrationError("the calibration Hessian holds values that are not finite")
    if mean <= 1e-30:
        return identity(columns, "calibration inputs are all zero: rounded to nearest")
    asked, note = damping, None
    with _one_torch_thread():
        while True:
            # flipped, so that the lower Cholesky factor is the upper one of H = F diag(d) F^T
            flipped = hessian.flip(0, 1).to(torch.float64 if columns <= DOUBLE_COLUMNS else torch.float32).div_(mean)
            flipped.diagonal().add_(damping)
            root, info = torch.linalg.cholesky_ex(flipped)
            del flipped
            if int(info) == 0 and bool(torch.isfinite(root.diagonal()).all()):
                break
            del root
            damping = max(10 * damping, 0.01)
            if damping > MAX_DAMPING:
                return identity(columns, "the calibration Hessian is not positive definite: rounded to nearest")
            note = f"the calibration Hessian is not positive definite: damping raised from {asked:g} to {damping:g}"
        padded = (columns + 31) // 32 * 32
        # an odd number of cache lines per row, so that a column strip does not fall into a few cache sets
        stride = padded if padded // 16 % 2 else padded + 16
        diagonal = root.diagonal().flip(0)
        energy = np.zeros(padded, np.float32)
        energy[:columns] = (diagonal * diagonal).float().numpy()
        factor = np.zeros((padded, stride), np.float32)
        view = torch.from_numpy(factor)[:columns, :columns]
        view.copy_(root.flip(0, 1))
        view.div_(diagonal.float())
    return Factor(columns, factor, energy, damping, note)


def range_limit(draft_bits: int, residual_bits: int) -> int:
    """Q, the most that |q| may be: 8191 where the residual has 8 bits or 6 on a 4-bit draft (wide), else 2047."""
    return 8191 if residual_bits == 8 or (draft_bits, residual_bits) == (4, 6) else 2047


def round_matrix(
    weight: torch.Tensor | npt.NDArray[np.float32],
    hessian: Factor | torch.Tensor,
    *,
    draft_bits: int = 2,
    residual_bits: int = 6,
    residual_group: int = 16,
    damping: float = 0.1,
    threads: int = 1,
) -> Rounded:
    """Round a matrix [rows, cols] fp32, given the Hessian of its inputs or its factor (`prepare`).

    draft_bits 2, 3 or 4; residual_bits 4, 6 or 8; residual_group 16 or 32. The result does not depend on `threads`.
    Rows whose largest weight is under 1e-30 and groups of 16 under 2^-40 of their row's largest become zero.
    Raises CheckpointError when a weight is not finite.
    """
    if draft_bits not in (2, 3, 4) or residual_bits not in (4, 6, 8) or residual_group not in (16, 32):
        raise ValueError(f"no lattice for {draft_bits}+{residual_bits} bits, groups of {residual_group}")
    factor = hessian if isinstance(hessian, Factor) else prepare(hessian, damping)
    array = weight.detach().numpy() if isinstance(weight, torch.Tensor) else weight
    array = np.ascontiguousarray(array, np.float32)
    rows, cols = array.shape
    if cols != factor.columns:
        raise ValueError(f"weight of shape {array.shape} with a Hessian of {factor.columns} columns")
    if not np.isfinite(array).all():
        row = int(np.flatnonzero(~np.isfinite(array).all(axis=1))[0])
        raise CheckpointError(f"row {row} holds a weight that is not finite")
    groups, residual_groups = -(-cols // GROUP), -(-cols // residual_group)
    out = Rounded(
        codes=np.empty((rows, cols), np.uint8),
        s=np.empty((rows, groups), np.uint8),
        m=np.empty((rows, groups), np.int8),
        row_scale=np.empty(rows, np.float32),
        row_a=np.empty(rows, np.uint8),
        row_b=np.empty(rows, np.int8),
        residual=np.empty((rows, cols), np.int16),
        f=np.empty((rows, residual_groups), np.uint8),
        draft_error=0.0,
        full_error=0.0,
        note=factor.note,
    )
    errors = np.empty((rows, 3), np.float64)
    keep = [array, factor.energy, errors]
    task = ffi.new("tb_rounding *")
    task.rows, task.cols, task.padded = rows, cols, factor.padded
    task.draft_bits, task.residual_bits, task.residual_group = draft_bits, residual_bits, residual_group
    task.range = range_limit(draft_bits, residual_bits)
    task.weight = ffi.cast("float *", array.ctypes.data)
    if factor.factor is not None:
        task.factor = ffi.cast("float *", factor.factor.ctypes.data)
        task.stride = factor.factor.shape[1]
    task.energy = ffi.cast("float *", factor.energy.ctypes.data)
    task.codes = ffi.cast("uint8_t *", out.codes.ctypes.data)
    task.s = ffi.cast("uint8_t *", out.s.ctypes.data)
    task.m = ffi.cast("int8_t *", out.m.ctypes.data)
    task.row_scale = ffi.cast("float *", out.row_scale.ctypes.data)
    task.row_a = ffi.cast("uint8_t *", out.row_a.ctypes.data)
    task.row_b = ffi.cast("int8_t *", out.row_b.ctypes.data)
    task.residual = ffi.cast("int16_t *", out.residual.ctypes.data)
    task.f = ffi.cast("uint8_t *", out.f.ctypes.data)
    task.errors = ffi.cast("double *", errors.ctypes.data)
    level = 0 if os.environ.get("TWOBIT_CPU") == "generic" else 1

    def work(first: int) -> None:
        if lib.tb_round_rows(task, first, min(first + ROWS_PER_TASK, rows), level) != 0:
            raise MemoryError("no memory to round a matrix")

    with ThreadPoolExecutor(max(threads, 1)) as pool:
        list(pool.map(work, range(0, rows, ROWS_PER_TASK)))
    del keep
    draft, full, energy = (float(np.add.accumulate(errors[:, i])[-1]) if rows else 0.0 for i in range(3))
    if energy > 0:
        out.draft_error, out.full_error = (draft / energy) ** 0.5, (full / energy) ** 0.5
    return out
