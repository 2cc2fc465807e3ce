"""Weights to codes: the draft's lattice and the residual's grid, by GPTQ in the metric of the layer's inputs.

With H = X^T X of the inputs, the error that matters is e H e^T per row e of (weights - rounded weights). H is written
as F diag(d) F^T with F unit upper triangular; then that error is sum_j d_j (e_j + sum_{i<j} e_i F_ij)^2, so columns are
rounded left to right, each towards its weight plus the errors already made, fed through F. This is GPTQ (Frantar et al.
2022) in the LDL form of QuIP (Chee et al. 2023, Theorem 1), which needs one Cholesky factorization and no inverse.
The loops are in csrc/rounding_body.inc.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from twobit.errors import CalibrationError, CheckpointError
from twobit.format.layout import COLS, KINDS, Q_NARROW, Q_WIDE, RESIDUAL_GROUPS, Matrix, ceil_div
from twobit.runtime.lib import cpu_level, ffi, lib

ROWS_PER_TASK = 32
"""Rows of one task; fixed by the C loops' tile, of no influence on the result."""

MAX_DAMPING = 100.0
PANEL = 256
SOLVED_ROWS = 256  # of a target, found together
DOUBLE_COLUMNS = 4096
"""Hessians up to this size are factored in double precision, wider ones in single to halve the memory."""
BLOCK = 1024  # columns of a wide matrix that are factored together


@dataclass(frozen=True)
class Factor:
    """F and d of a damped Hessian, in units of its mean diagonal; shared by all matrices with the same inputs.

    factor: fp32 [padded, stride], strictly upper part used, None for the identity; energy: d, fp32 [padded], 0 in the
    padding; padded: columns rounded up to 32; damping: what was added to the diagonal, in mean diagonals;
    note: what had to be changed for the factorization to succeed, or None. hessian: as it came, fp32 [padded, padded],
    with scale = 1 / mean diagonal (the caller's memory where that has this form); local and local_energy: F [padded /
    16, 16, 16] and d [padded] of its damped 16 x 16 diagonal blocks; None for the identity.
    """

    columns: int
    factor: npt.NDArray[np.float32] | None
    energy: npt.NDArray[np.float32]
    damping: float
    note: str | None
    hessian: npt.NDArray[np.float32] | None = None
    scale: float = 1.0
    local: npt.NDArray[np.float32] | None = None
    local_energy: npt.NDArray[np.float32] | None = None

    @property
    def padded(self) -> int:
        return self.energy.shape[0]


@dataclass(frozen=True, eq=False)
class Rounded(Matrix):
    """A matrix on the lattice, and how far it is from the weights.

    draft_error and full_error: root of error energy over weight energy, in the metric of the damped Hessian.
    note: see Factor.
    """

    draft_error: float
    full_error: float
    note: str | None


def draft_weights(matrix: Matrix) -> torch.Tensor:
    """fp32 [rows, cols] of a matrix's draft."""
    rows, cols = matrix.shape
    step = torch.from_numpy(matrix.row_a.astype(np.int32)[:, None] * matrix.s)
    centre = torch.from_numpy(matrix.row_b.astype(np.int32)[:, None] * matrix.m)
    codes = torch.nn.functional.pad(torch.from_numpy(matrix.codes).int(), (0, -cols % COLS)).view(rows, -1, COLS)
    q2 = (2 * codes - (1 << matrix.draft_bits) + 1) * step[..., None] + centre[..., None]
    return q2.view(rows, -1)[:, :cols].float() * torch.from_numpy(matrix.row_scale)[:, None]


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Linear algebra on one thread: its bits may depend on how many there are."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _cholesky(root: torch.Tensor, pool: Executor | None) -> bool:
    """Puts the lower Cholesky factor of a symmetric matrix into its lower triangle, the upper one is scratch; False
    where the matrix is not positive definite.

    Wide ones are factored in blocks, which the pool works on at the same time, torch computing on one thread in each
    worker; the result does not depend on the pool.
    """
    columns, step = len(root), BLOCK if len(root) > DOUBLE_COLUMNS and not root.is_cuda else len(root)
    blocks = [slice(first, min(first + step, columns)) for first in range(0, columns, step)]

    def each(work: Callable[..., None], *arguments: Sequence[slice]) -> None:
        list((map if pool is None else pool.map)(work, *arguments))

    for i, block in enumerate(blocks):
        info = torch.empty((), dtype=torch.int32, device=root.device)
        corner = root[block, block]
        torch.linalg.cholesky_ex(corner, out=(corner, info))
        if int(info) or not bool(torch.isfinite(corner.diagonal()).all()):
            return False
        below = blocks[i + 1 :]

        def divide(rows: slice, block: slice = block, corner: torch.Tensor = corner) -> None:
            root[rows, block] = torch.linalg.solve_triangular(corner.T, root[rows, block], upper=True, left=False)

        def subtract(rows: slice, cols: slice, block: slice = block) -> None:
            root[rows, cols].addmm_(root[rows, block], root[cols, block].T, alpha=-1)

        each(divide, below)
        pairs = [(rows, cols) for rows in below for cols in below if cols.start <= rows.start]
        each(subtract, [rows for rows, _ in pairs], [cols for _, cols in pairs])
    return True


def identity(columns: int, note: str | None = None) -> Factor:
    """The factor of uncorrelated inputs of equal size: no feedback, plain rounding to nearest."""
    energy = np.zeros((columns + 31) // 32 * 32, np.float32)
    energy[:columns] = 1
    return Factor(columns, None, energy, 0.0, note)


def prepare(hessian: torch.Tensor, damping: float = 0.1, pool: Executor | None = None) -> Factor:
    """Factor a Hessian [columns, columns] (symmetric, fp32 or fp64), which must not change while the factor is used.

    It is factored on its device; the factor lies on the CPU. pool: see `_cholesky`.
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
            # flipped, so that the lower Cholesky factor is the upper one of H = F diag(d) F^T; factored in place
            root = hessian.flip(0, 1).to(torch.float64 if columns <= DOUBLE_COLUMNS else torch.float32).div_(mean)
            root.diagonal().add_(damping)
            if _cholesky(root, pool):
                break
            damping = max(10 * damping, 0.01)
            if damping > MAX_DAMPING:
                return identity(columns, "the calibration Hessian is not positive definite: rounded to nearest")
            note = f"the calibration Hessian is not positive definite: damping raised from {asked:g} to {damping:g}"
        root, hessian = root.cpu(), hessian.cpu()
        padded = (columns + 31) // 32 * 32
        # an odd number of cache lines per row, so that a column strip does not fall into a few cache sets
        stride = padded if padded // 16 % 2 else padded + 16
        diagonal = root.diagonal().flip(0)
        energy = np.zeros(padded, np.float32)
        energy[:columns] = (diagonal * diagonal).float().numpy()
        factor = np.zeros((padded, stride), np.float32)
        view = torch.from_numpy(factor)
        for row in range(0, columns, PANEL):
            end = min(row + PANEL, columns)
            view[row:end, :columns] = root[columns - end : columns - row].flip(0, 1).div_(diagonal)
        del root
        whole = hessian.to(torch.float32)
        if padded > columns or not whole.is_contiguous():
            whole = torch.nn.functional.pad(whole, (0, padded - columns, 0, padded - columns))
        local, local_energy = _block_factors(whole, columns, mean, damping)
    return Factor(columns, factor, energy, damping, note, whole.numpy(), 1 / mean, local, local_energy)


def targets(
    hessian: torch.Tensor, cross: torch.Tensor, outputs: bool, damping: float, pool: Executor | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """weight [rows, columns] -> the matrix that a draft with these inputs should come close to (see Statistics).

    It is the weight and the regression of what is missing on the draft's inputs, damped by `damping` mean diagonals:
    in fp32, since so much damping bounds the condition by the columns over `damping`. pool: see `_cholesky`.
    """
    mean = float(hessian.diagonal().double().mean())
    with _one_torch_thread():
        root = hessian / max(mean, 1e-30)
        root.diagonal().add_(damping)
        definite = _cholesky(root, pool)
    if not mean > 1e-30 or not definite:
        return lambda weight: weight

    def by_rows(work: Callable[..., torch.Tensor], *matrices: torch.Tensor) -> torch.Tensor:
        """`work` on SOLVED_ROWS rows of all matrices at a time."""
        with _one_torch_thread():
            parts = (map if pool is None else pool.map)(work, *(m.split(SOLVED_ROWS) for m in matrices))
            found = matrices[0].new_empty(len(matrices[0]), len(root))
            for part, rows in zip(parts, found.split(SOLVED_ROWS), strict=True):
                rows.copy_(part)
            return found

    def solve(b: torch.Tensor) -> torch.Tensor:
        """b (H + damping)^-1"""
        return torch.cholesky_solve((b / mean).T, root).T

    through = None if outputs else by_rows(solve, cross)

    def target(weight: torch.Tensor) -> torch.Tensor:
        there = weight.to(root.device)
        if through is None:
            missing = by_rows(lambda asked, rows: solve(asked - rows @ hessian), cross, there)
        else:
            missing = by_rows(lambda rows: rows @ through, there)
        return weight + _alive(weight) * missing.to(weight.device)

    return target


def _alive(weight: torch.Tensor) -> torch.Tensor:
    """0 for weights in groups that the rounding takes for zeros, else 1."""
    cols = weight.shape[1]
    size = torch.nn.functional.pad(weight.abs(), (0, -cols % COLS)).unflatten(1, (-1, COLS)).amax(2)
    most = size.amax(1, keepdim=True)
    alive = (most >= 1e-30) & (size >= most * 2.0**-40)
    return alive.repeat_interleave(COLS, 1)[:, :cols].float()


def _block_factors(
    hessian: torch.Tensor, columns: int, mean: float, damping: float
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """F [blocks, 16, 16] and d [padded] of the damped 16 x 16 diagonal blocks of a padded Hessian."""
    padded = hessian.shape[0]
    at = torch.arange(0, padded, COLS)[:, None] + torch.arange(COLS)
    blocks = hessian[at[:, :, None], at[:, None, :]].double() / mean
    blocks.diagonal(dim1=1, dim2=2).add_(damping)
    blocks.diagonal(dim1=1, dim2=2)[at >= columns] = 1
    root = torch.linalg.cholesky(blocks.flip(1, 2)).flip(1, 2)
    diagonal = root.diagonal(dim1=1, dim2=2)
    energy = diagonal.square().reshape(-1).float().numpy()
    energy[columns:] = 0
    return (root / diagonal[:, None, :]).float().contiguous().numpy(), energy


def range_limit(draft_bits: int, residual_bits: int) -> int:
    """Q, the most that |q| may be: 8191 where the residual has 8 bits or 6 on a 4-bit draft (wide), else 2047."""
    return Q_WIDE if residual_bits == 8 or (draft_bits, residual_bits) == (4, 6) else Q_NARROW


def round_matrix(
    weight: torch.Tensor | npt.NDArray[np.float32],
    hessian: Factor | torch.Tensor,
    *,
    draft_bits: int = 2,
    residual_bits: int = 6,
    residual_group: int = 16,
    damping: float = 0.1,
    threads: int = 1,
    refine: bool = True,
    draft: Rounded | None = None,
) -> Rounded:
    """Round a matrix [rows, cols] fp32, given the Hessian of its inputs or its factor (`prepare`).

    (draft_bits, residual_bits) is one of layout.KINDS; residual_group 16 or 32.
    The result does not depend on `threads`.
    `refine`: choose every group of the draft once more, given all others.
    `draft`: keep this one's draft (`round_draft`, the same as without) and find the residual alone.
    Rows whose largest weight is under 1e-30 and groups of 16 under 2^-40 of their row's largest become zero.
    Raises CheckpointError when a weight is not finite.
    """
    if (draft_bits, residual_bits) not in KINDS or residual_group not in RESIDUAL_GROUPS:
        raise ValueError(f"no lattice for {draft_bits}+{residual_bits} bits, groups of {residual_group}")
    factor = hessian if isinstance(hessian, Factor) else prepare(hessian, damping)
    if draft is None:
        draft = round_draft(weight, factor, draft_bits=draft_bits, threads=threads, refine=refine)
    return _round(weight, factor, draft_bits, residual_bits, residual_group, threads, refine, draft)


def round_draft(
    weight: torch.Tensor | npt.NDArray[np.float32],
    factor: Factor,
    *,
    draft_bits: int = 2,
    threads: int = 1,
    refine: bool = True,
) -> Rounded:
    """The draft of `round_matrix` alone, with an empty residual. It is the same whatever residual follows."""
    residual_bits = next(r for b, r in KINDS if b == draft_bits)
    return _round(weight, factor, draft_bits, residual_bits, COLS, threads, refine, None)


def _round(
    weight: torch.Tensor | npt.NDArray[np.float32],
    factor: Factor,
    draft_bits: int,
    residual_bits: int,
    residual_group: int,
    threads: int,
    refine: bool,
    draft: Rounded | None,
) -> Rounded:
    """The residual of `draft`, or with None the draft."""
    array = weight.detach().numpy() if isinstance(weight, torch.Tensor) else weight
    array = np.ascontiguousarray(array, np.float32)
    rows, cols = array.shape
    if cols != factor.columns:
        raise ValueError(f"weight of shape {array.shape} with a Hessian of {factor.columns} columns")
    if not np.isfinite(array).all():
        row = int(np.flatnonzero(~np.isfinite(array).all(axis=1))[0])
        raise CheckpointError(f"row {row} holds a weight that is not finite")
    groups, residual_groups = ceil_div(cols, COLS), ceil_div(cols, residual_group)
    codes, s, m = (
        np.empty((rows, cols), np.uint8),
        np.empty((rows, groups), np.uint8),
        np.empty((rows, groups), np.int8),
    )
    row_scale, row_a, row_b = np.empty(rows, np.float32), np.empty(rows, np.uint8), np.empty(rows, np.int8)
    if draft is not None:
        codes[:], s[:], m[:] = draft.codes, draft.s, draft.m
        # the same levels in units of the residual's kind
        finer = 2 if KINDS[draft_bits, residual_bits].wide and not KINDS[draft_bits, draft.residual_bits].wide else 1
        row_scale[:], row_a[:], row_b[:] = draft.row_scale / finer, draft.row_a * finer, draft.row_b * finer
    residual = np.empty((rows, 0 if draft is None else cols), np.int16)
    f = np.empty((rows, 0 if draft is None else residual_groups), np.uint8)
    errors = np.empty((rows, 3), np.float64)
    task = ffi.new("tb_rounding *")
    task.rows, task.cols, task.padded = rows, cols, factor.padded
    task.draft_bits, task.residual_bits, task.residual_group = draft_bits, residual_bits, residual_group
    task.range, task.steps = range_limit(draft_bits, residual_bits), 1 if draft is None else 2
    pointers: dict[str, npt.NDArray[Any]] = {
        "weight": array, "energy": factor.energy, "codes": codes, "s": s, "m": m, "row_scale": row_scale,
        "row_a": row_a, "row_b": row_b, "residual": residual, "f": f, "errors": errors,
    }  # fmt: skip
    if factor.factor is not None:
        pointers["factor"] = factor.factor
        task.stride = factor.factor.shape[1]
    if (
        refine
        and draft is None
        and factor.hessian is not None
        and factor.local is not None
        and factor.local_energy is not None
    ):
        pointers |= {"hessian": factor.hessian, "local": factor.local, "local_energy": factor.local_energy}
        task.hessian_stride, task.hessian_scale, task.damping = factor.padded, factor.scale, factor.damping
    for name, values in pointers.items():
        setattr(task, name, ffi.cast("void *", values.ctypes.data))
    level = {"generic": 0, "avx2": 1}.get(cpu_level(), 2)

    def work(first: int) -> None:
        if lib.tb_round_rows(task, first, min(first + ROWS_PER_TASK, rows), level) != 0:
            raise MemoryError("no memory to round a matrix")

    with ThreadPoolExecutor(max(threads, 1)) as pool:
        list(pool.map(work, range(0, rows, ROWS_PER_TASK)))
    sums = [float(sum(errors[:, i].tolist())) for i in range(3)]

    def root(i: int) -> float:
        return (max(sums[i], 0.0) / sums[2]) ** 0.5 if sums[2] > 0 else 0.0  # no error at all may come out as -1e-20

    return Rounded(
        draft_bits=draft_bits,
        residual_bits=residual_bits,
        residual_group=residual_group,
        codes=codes,
        s=s,
        m=m,
        row_scale=row_scale,
        row_a=row_a,
        row_b=row_b,
        residual=residual,
        f=f,
        draft_error=root(0) if draft is None else draft.draft_error,
        full_error=root(1),
        note=factor.note,
    )
