"""How the numbers of one matrix lie in bytes: the numpy reference that every kernel is tested against.

A unit is 16 rows x 16 columns, a block 16 rows over all columns, a quad 4 units side by side (64 columns).
Every 64-byte line holds 16 rows x 4 bytes: byte 4 i + b belongs to row i, so one 32-bit lane is one row, and
column k = 4 j + b of a unit is found in byte b. Codes and scales follow the same rule (FORMAT.md, "Planes").

    draft     q2 = A s (2c - (2^b - 1)) + B m        w2 = U q2
    verifier  q  = q2 + f r                          w  = U q
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from twobit.errors import FormatError

ROWS = 16  # rows of a block
COLS = 16  # columns of a unit
QUAD = 4  # units of a scale record
ALIGN = 64  # bytes; every plane starts at a multiple and is padded to one


class Kind(NamedTuple):
    """What comes with a matrix's bits: the range of its integers, and that A = 2^shift * a with a <= MAX_A."""

    wide: bool
    shift: int


KINDS = {
    (2, 6): Kind(False, 1),
    (3, 6): Kind(False, 0),
    (4, 4): Kind(False, 0),
    (2, 8): Kind(True, 3),
    (3, 8): Kind(True, 2),
    (4, 6): Kind(True, 1),
}
"""(draft bits, residual bits) that exist."""
MAX_A = 17  # a * s fits one byte
RESIDUAL_GROUPS = (16, 32)
DRAFT_PLANES = ("draft_codes", "draft_scales", "row_scale", "row_a", "row_b")
RESIDUAL_PLANES = ("residual_codes", "residual_scales")
EMBEDDING_PLANES = ("embedding_codes", "embedding_scales")
EMBEDDING_GROUP = 32  # columns per fp16 scale of an input embedding
EMBEDDING_MOST = 127.0 * 65504.0  # the largest weight: 127 fp16 scales
Q_NARROW = 2047  # bound of |q|: its product with 128 activations of +-8191 stays inside int32
Q_WIDE = 8191  # the same with 64 activations of +-4095

_CODE_BYTES = {2: 64, 3: 96, 4: 128}  # per unit, by draft bits
_RESIDUAL_BYTES = {4: 128, 6: 192, 8: 256}  # per unit, by residual bits
_RESIDUAL_SCALE_BYTES = {16: 32, 32: 16}  # per quad, by residual group
_CHUNK_WEIGHTS = 1 << 21  # weights packed at a time, so that temporaries stay in the tens of MB

U8 = NDArray[np.uint8]
Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Matrix:
    """The integers of one matrix W[rows, cols] before they are packed.

    codes u8 [rows, cols] in 0..2^b-1; s u8 and m i8 [rows, ceil(cols / 16)] in 0..15 and -8..7; row_scale (U) f32,
    row_a (A) u8, row_b (B) i8 [rows]; residual (r) i16 [rows, cols] in -2^(R-1)..2^(R-1)-1; f u8
    [rows, ceil(cols / residual_group)] in 0..15.
    """

    draft_bits: int
    residual_bits: int
    residual_group: int
    codes: U8
    s: U8
    m: NDArray[np.int8]
    row_scale: NDArray[np.float32]
    row_a: U8
    row_b: NDArray[np.int8]
    residual: NDArray[np.int16]
    f: U8

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, cols)."""
        return self.codes.shape[0], self.codes.shape[1]


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def padded(n: int) -> int:
    """n bytes rounded up to the alignment of planes."""
    return ceil_div(n, ALIGN) * ALIGN


def _check_kind(draft_bits: int, residual_bits: int, residual_group: int) -> None:
    if (draft_bits, residual_bits) not in KINDS:
        kinds = ", ".join(f"{b}+{r}" for b, r in KINDS)
        raise FormatError(f"{draft_bits}+{residual_bits} draft + residual bits are not one of {kinds}")
    if residual_group not in RESIDUAL_GROUPS:
        raise FormatError(f"residual group {residual_group} is not one of {', '.join(map(str, RESIDUAL_GROUPS))}")


def _used_sizes(rows: int, cols: int, draft_bits: int, residual_bits: int, residual_group: int) -> dict[str, int]:
    """Bytes of each plane before it is padded to 64."""
    _check_kind(draft_bits, residual_bits, residual_group)
    blocks, units = ceil_div(rows, ROWS), ceil_div(cols, COLS)
    quads = ceil_div(units, QUAD)
    return {
        "draft_codes": blocks * units * _CODE_BYTES[draft_bits],
        "draft_scales": blocks * quads * 64,
        "row_scale": blocks * ROWS * 4,
        "row_a": blocks * ROWS,
        "row_b": blocks * ROWS,
        "residual_codes": blocks * units * _RESIDUAL_BYTES[residual_bits],
        "residual_scales": blocks * quads * _RESIDUAL_SCALE_BYTES[residual_group],
    }


def plane_sizes(rows: int, cols: int, draft_bits: int, residual_bits: int, residual_group: int) -> dict[str, int]:
    """Stored bytes (a multiple of 64) of every plane of a matrix, in file order."""
    return {k: padded(n) for k, n in _used_sizes(rows, cols, draft_bits, residual_bits, residual_group).items()}


def embedding_sizes(rows: int, cols: int) -> dict[str, int]:
    """Stored bytes of the planes of an input embedding [rows, cols]."""
    return {
        "embedding_codes": padded(rows * cols),
        "embedding_scales": padded(rows * ceil_div(cols, EMBEDDING_GROUP) * 2),
    }


# -- one row chunk: logical arrays <-> bytes ----------------------------------------------------------------


def _lanes(a: Array, rows: int, units: int) -> Array:
    """u8 [rows, cols] -> u32 [4, blocks, units, 16]: lane j of a row holds columns 4 j .. 4 j + 3; padding is zero."""
    blocks = ceil_div(rows, ROWS)
    full = np.zeros((blocks * ROWS, units * COLS), np.uint8)
    full[: a.shape[0], : a.shape[1]] = a
    return np.ascontiguousarray(full.view("<u4").reshape(blocks, ROWS, units, 4).transpose(3, 0, 2, 1))


def _from_lanes(lanes: Array, rows: int, cols: int) -> Array:
    blocks, units = lanes.shape[1:3]
    full = np.ascontiguousarray(lanes.transpose(1, 3, 2, 0)).view(np.uint8)
    return full.reshape(blocks * ROWS, units * COLS)[:rows, :cols]


def _lines(lines: Sequence[Array]) -> Array:
    """64-byte lines, u32 [blocks, units, 16] each -> bytes [blocks, units, 64 * lines]."""
    return np.stack(lines, axis=2).view(np.uint8).reshape(*lines[0].shape[:2], -1)


def _split_lines(data: Array) -> list[Array]:
    lines = np.ascontiguousarray(data).view("<u4").reshape(*data.shape[:2], -1, ROWS)
    return [np.ascontiguousarray(lines[:, :, i]) for i in range(lines.shape[2])]


def _every(byte: int) -> np.uint32:
    """The mask that has `byte` in each of the four bytes of a lane."""
    return np.uint32(byte * 0x01010101)


def _pack2(c: Array) -> Array:
    # byte (row, b):  7 6  | 5 4 | 3 2 | 1 0
    #         column  12+b | 8+b | 4+b |  b
    return _lines([c[0] | c[1] << 2 | c[2] << 4 | c[3] << 6])


def _unpack2(data: Array) -> Array:
    (line,) = _split_lines(data)
    return np.stack([line >> (2 * j) & _every(3) for j in range(4)])


def _pack4(c: Array) -> Array:
    # line l, byte (row, b):   7 6 5 4  | 3 2 1 0
    #                 column  8l + 4 + b | 8l + b
    return _lines([c[0] | c[1] << 4, c[2] | c[3] << 4])


def _unpack4(data: Array) -> Array:
    low, mask = _split_lines(data), _every(15)
    return np.stack([part for line in low for part in (line & mask, line >> 4 & mask)])


def _pack_high(c: Array) -> Array:
    """Bit 2 of every column: 32 bytes per unit, little-endian u16 at 2 * row, bit k = column k."""
    # the product moves bits 0, 8, 16, 24 to 24, 25, 26, 27
    nibbles = [((lane >> 2 & _every(1)) * np.uint32(0x01020408)) >> 24 & np.uint32(15) for lane in c]
    rows = nibbles[0] | nibbles[1] << 4 | nibbles[2] << 8 | nibbles[3] << 12
    return rows.astype("<u2").view(np.uint8)


def _unpack_high(data: Array) -> Array:
    rows = np.ascontiguousarray(data).view("<u2").astype("<u4")
    # the product copies a nibble to bits 0, 7, 14, 21, so that bit b of it comes to stand at bit 8 b
    return np.stack([(rows >> (4 * j) & np.uint32(15)) * np.uint32(0x00204081) & _every(1) for j in range(4)]) << 2


def _pack_codes(c: Array, bits: int) -> Array:
    """Lanes of codes -> bytes [blocks, units, n]."""
    if bits == 4:
        return _pack4(c)
    if bits == 2:
        return _pack2(c)
    return np.concatenate([_pack2(c & _every(3)), _pack_high(c)], axis=-1)


def _unpack_codes(data: Array, bits: int) -> Array:
    if bits == 4:
        return _unpack4(data)
    if bits == 2:
        return _unpack2(data)
    return _unpack2(data[..., :64]) | _unpack_high(data[..., 64:])


def _pack_residual(u: Array, bits: int) -> Array:
    """Lanes of stored values r + 2^(R-1) -> bytes [blocks, units, n]."""
    if bits == 4:
        return _pack4(u)
    if bits == 8:  # line j, byte (row, b) = column 4 j + b
        return _lines(list(u))
    # line j < 3, byte (row, b):       7 6        | 5 4 3 2 1 0
    #                     bits 2j+1..2j of 12 + b |   4 j + b
    return _lines([u[j] | (u[3] >> (2 * j) & _every(3)) << 6 for j in range(3)])


def _unpack_residual(data: Array, bits: int) -> Array:
    if bits == 4:
        return _unpack4(data)
    lines = _split_lines(data)
    if bits == 8:
        return np.stack(lines)
    last = [(line >> 6 & _every(3)) << (2 * j) for j, line in enumerate(lines)]
    return np.stack([*(line & _every(63) for line in lines), last[0] | last[1] | last[2]])


def _records(a: Array, rows: int, quads: int, per_quad: int) -> Array:
    """[rows, n] -> [blocks, quads, 16 rows, per_quad], padding zero."""
    blocks = ceil_div(rows, ROWS)
    full = np.zeros((blocks * ROWS, quads * per_quad), np.uint8)
    full[: a.shape[0], : a.shape[1]] = a
    return full.reshape(blocks, ROWS, quads, per_quad).transpose(0, 2, 1, 3)


def _from_records(a: Array, rows: int, n: int) -> Array:
    blocks, quads, _, per_quad = a.shape
    return a.transpose(0, 2, 1, 3).reshape(blocks * ROWS, quads * per_quad)[:rows, :n]


def _chunks(rows: int, cols: int) -> Iterator[tuple[int, int]]:
    step = max(1, _CHUNK_WEIGHTS // (ROWS * cols)) * ROWS
    return ((r, min(r + step, rows)) for r in range(0, rows, step))


# -- whole matrices -----------------------------------------------------------------------------------------


def check_matrix(matrix: Matrix) -> None:
    """FormatError unless every array of `matrix` has the shape, type and bounds that `Matrix` states."""
    _check_kind(matrix.draft_bits, matrix.residual_bits, matrix.residual_group)
    if matrix.codes.ndim != 2 or 0 in matrix.codes.shape:
        raise FormatError(f"codes have shape {matrix.codes.shape}, expected [rows, cols]")
    rows, cols = matrix.shape
    units, groups = ceil_div(cols, COLS), ceil_div(cols, matrix.residual_group)
    half = 1 << (matrix.residual_bits - 1)
    expected: tuple[tuple[str, type, tuple[int, ...], int, int], ...] = (
        ("codes", np.uint8, (rows, cols), 0, (1 << matrix.draft_bits) - 1),
        ("s", np.uint8, (rows, units), 0, 15),
        ("m", np.int8, (rows, units), -8, 7),
        ("row_a", np.uint8, (rows,), 0, 255),
        ("row_b", np.int8, (rows,), -128, 127),
        ("residual", np.int16, (rows, cols), -half, half - 1),
        ("f", np.uint8, (rows, groups), 0, 15),
    )
    for name, dtype, shape, low, high in expected:
        a = getattr(matrix, name)
        if a.dtype != dtype or a.shape != shape:
            raise FormatError(f"{name} is {a.dtype} {list(a.shape)}, expected {np.dtype(dtype)} {list(shape)}")
        if a.min() < low or a.max() > high:
            raise FormatError(f"{name} lies in {a.min()}..{a.max()}, allowed is {low}..{high}")
    u = matrix.row_scale
    if u.dtype != np.float32 or u.shape != (rows,):
        raise FormatError(f"row_scale is {u.dtype} {list(u.shape)}, expected float32 [{rows}]")
    if not (np.isfinite(u) & (u >= 0)).all():
        raise FormatError("row_scale holds a value that is negative or not finite")


def pack(matrix: Matrix) -> dict[str, U8]:
    """Planes of a matrix, each a u8 vector whose length is a multiple of 64. FormatError on a value out of bounds.

    Planes of consecutive row chunks, each but the last a multiple of 64 rows, concatenate to the planes of the whole.
    """
    check_matrix(matrix)
    rows, cols = matrix.shape
    units = ceil_div(cols, COLS)
    quads = ceil_div(units, QUAD)
    used = _used_sizes(rows, cols, matrix.draft_bits, matrix.residual_bits, matrix.residual_group)
    planes = {name: np.zeros(padded(n), np.uint8) for name, n in used.items()}
    planes["row_scale"].view("<f4")[:rows] = matrix.row_scale
    planes["row_a"][:rows] = matrix.row_a
    planes["row_b"][:rows] = matrix.row_b.view(np.uint8)
    offset = 1 << (matrix.residual_bits - 1)
    blocks = ceil_div(rows, ROWS)
    for r0, r1 in _chunks(rows, cols):
        n = r1 - r0
        f = _records(matrix.f[r0:r1], n, quads, QUAD * COLS // matrix.residual_group)
        pairs = f[..., 0::2] | f[..., 1::2] << 4  # two factors per byte, the left one low
        s: Array = matrix.s[r0:r1] | (matrix.m[r0:r1] + 8).astype(np.uint8) << 4
        stored = (matrix.residual[r0:r1] + offset).astype(np.uint8)
        for name, part in (
            ("draft_codes", _pack_codes(_lanes(matrix.codes[r0:r1], n, units), matrix.draft_bits)),
            ("draft_scales", _records(s, n, quads, QUAD)),
            ("residual_codes", _pack_residual(_lanes(stored, n, units), matrix.residual_bits)),
            ("residual_scales", pairs),
        ):
            size = used[name] // blocks
            first = r0 // ROWS * size
            planes[name][first : first + part.size] = part.reshape(-1)
    return planes


def unpack(
    planes: Mapping[str, U8],
    rows: int,
    cols: int,
    draft_bits: int,
    residual_bits: int,
    residual_group: int,
    row_range: tuple[int, int] | None = None,
) -> Matrix:
    """The logical arrays of a matrix, or of its rows [row_range[0], row_range[1]). FormatError on a wrong length."""
    used = _used_sizes(rows, cols, draft_bits, residual_bits, residual_group)
    for name, n in used.items():
        if planes[name].dtype != np.uint8 or planes[name].shape != (padded(n),):
            raise FormatError(f"{name} has {planes[name].size} bytes, expected {padded(n)}")
    start, stop = row_range or (0, rows)
    if not 0 <= start < stop <= rows:
        raise FormatError(f"rows {start}..{stop} are not inside 0..{rows}")
    units = ceil_div(cols, COLS)
    quads = ceil_div(units, QUAD)
    groups = ceil_div(cols, residual_group)
    blocks = ceil_div(rows, ROWS)
    first = start // ROWS  # block
    out = Matrix(
        draft_bits,
        residual_bits,
        residual_group,
        np.empty((stop - start, cols), np.uint8),
        np.empty((stop - start, units), np.uint8),
        np.empty((stop - start, units), np.int8),
        planes["row_scale"].view("<f4")[start:stop].astype(np.float32),
        planes["row_a"][start:stop].copy(),
        planes["row_b"].view(np.int8)[start:stop].copy(),
        np.empty((stop - start, cols), np.int16),
        np.empty((stop - start, groups), np.uint8),
    )
    for c0, c1 in _chunks(stop - first * ROWS, cols):
        b0, n = first + c0 // ROWS, c1 - c0

        def blocks_of(name: str, *shape: int, b0: int = b0, n: int = n) -> U8:
            size = used[name] // blocks
            count = ceil_div(n, ROWS)
            return planes[name][b0 * size : (b0 + count) * size].reshape(count, *shape)

        skip = max(start - b0 * ROWS, 0)  # rows of the first block that were not asked for
        to = slice(b0 * ROWS + skip - start, b0 * ROWS + n - start)
        scales = _from_records(blocks_of("draft_scales", quads, ROWS, QUAD), n, units)[skip:]
        packed_f = blocks_of("residual_scales", quads, ROWS, -1)
        f = np.stack([packed_f & 15, packed_f >> 4], axis=-1).reshape(*packed_f.shape[:3], -1)
        residual = _from_lanes(_unpack_residual(blocks_of("residual_codes", units, -1), residual_bits), n, cols)
        out.codes[to] = _from_lanes(_unpack_codes(blocks_of("draft_codes", units, -1), draft_bits), n, cols)[skip:]
        out.s[to] = scales & 15
        out.m[to] = (scales >> 4).astype(np.int8) - 8
        out.residual[to] = residual[skip:].astype(np.int16) - (1 << (residual_bits - 1))
        out.f[to] = _from_records(f, n, groups)[skip:]
    return out


def lattice(matrix: Matrix) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """(q2, q) int32 [rows, cols]: the integers of the draft and of the verifier."""
    rows, cols = matrix.shape

    def grouped(a: Array, group: int) -> NDArray[np.int32]:
        full = np.zeros((rows, ceil_div(cols, group) * group), np.int32)
        full[:, :cols] = a
        return full.reshape(rows, -1, group)

    q2 = grouped(matrix.codes, COLS)
    q2 *= 2
    q2 -= (1 << matrix.draft_bits) - 1
    q2 *= (matrix.row_a.astype(np.int32)[:, None] * matrix.s)[..., None]
    q2 += (matrix.row_b.astype(np.int32)[:, None] * matrix.m)[..., None]
    q = grouped(matrix.residual, matrix.residual_group)
    q *= matrix.f[..., None]
    draft, full = q2.reshape(rows, -1)[:, :cols], q.reshape(rows, -1)[:, :cols]
    full += draft
    return draft, full


def dequantize(matrix: Matrix) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(draft, full) weights fp32 [rows, cols]: float(q) * U, rounded once."""
    q2, q = lattice(matrix)
    u = matrix.row_scale[:, None]
    return q2.astype(np.float32) * u, q.astype(np.float32) * u


def row_bound(row_a: U8, row_b: NDArray[np.int8], draft_bits: int, residual_bits: int) -> NDArray[np.int32]:
    """The largest |q| that each row can express, int32 [rows]: 15 (2^b - 1) A + 8 |B| + 15 * 2^(R-1)."""
    a, b = row_a.astype(np.int32), row_b.astype(np.int32)
    return 15 * ((1 << draft_bits) - 1) * a + 8 * np.abs(b) + 15 * (1 << (residual_bits - 1))


def check_rows(
    name: str,
    row_scale: NDArray[np.float32],
    row_a: U8,
    row_b: NDArray[np.int8],
    draft_bits: int,
    residual_bits: int,
    wide: bool,
) -> None:
    """FormatError naming the tensor and the first row whose U is unusable or whose integers may leave their range."""
    bad = ~(np.isfinite(row_scale) & (row_scale >= 0))
    if bad.any():
        row = int(bad.argmax())
        raise FormatError(f"{name}: row {row} has scale {row_scale[row]}, which is negative or not finite")
    limit = Q_WIDE if wide else Q_NARROW
    bound = row_bound(row_a, row_b, draft_bits, residual_bits)
    if bound.size and bound.max() > limit:
        row = int((bound > limit).argmax())
        kind = "wide" if wide else "narrow"
        raise FormatError(f"{name}: row {row} may reach |q| = {bound[row]}, more than {limit} of the {kind} range")
    shift = KINDS[draft_bits, residual_bits].shift
    bad = (row_a % (1 << shift) != 0) | (row_a >> shift > MAX_A)
    if bad.any():
        row = int(bad.argmax())
        raise FormatError(f"{name}: row {row} has A = {row_a[row]}, which is not {1 << shift} times 0 to {MAX_A}")


# -- input embedding ----------------------------------------------------------------------------------------


def pack_embedding(weight: NDArray[np.float32]) -> dict[str, U8]:
    """Planes of an input embedding fp32 [rows, cols]: int8 codes, one fp16 scale per 32 columns, weight = scale * code.

    The scale is amax / 127 in fp16, one step up where rounding it down would clip the largest weight, so a scale is
    zero only for a group of zeros. FormatError on a value that is not finite or too large for fp16.
    """
    rows, cols = weight.shape
    groups = ceil_div(cols, EMBEDDING_GROUP)
    sizes = embedding_sizes(rows, cols)
    planes = {name: np.zeros(n, np.uint8) for name, n in sizes.items()}
    codes = planes["embedding_codes"].view(np.int8)[: rows * cols].reshape(rows, cols)
    scales = planes["embedding_scales"].view("<f2")[: rows * groups].reshape(rows, groups)
    for r0, r1 in _chunks(rows, cols):
        flat = np.zeros((r1 - r0, groups * EMBEDDING_GROUP), np.float32)
        flat[:, :cols] = weight[r0:r1]
        w = flat.reshape(r1 - r0, groups, EMBEDDING_GROUP)
        amax = np.abs(w).max(axis=2)
        if not (amax <= EMBEDDING_MOST).all():  # also NaN
            row = r0 + int((~(amax <= EMBEDDING_MOST)).any(axis=1).argmax())
            raise FormatError(f"embedding row {row} holds a value that is not finite or too large")
        scale = (amax / np.float32(127)).astype(np.float16)
        up = np.nextafter(scale, np.float16(np.inf))
        scale = np.where(amax > scale.astype(np.float32) * np.float32(127.5), up, scale)
        divisor = np.where(scale > 0, scale, np.float16(1)).astype(np.float32)
        q = np.clip(np.rint(w / divisor[..., None]), -127, 127).astype(np.int8)
        codes[r0:r1] = q.reshape(r1 - r0, -1)[:, :cols]
        scales[r0:r1] = scale
    return planes


def unpack_embedding(planes: Mapping[str, U8], rows: int, cols: int) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """(codes i8 [rows, cols], scales fp16 [rows, ceil(cols / 32)]) as views of the planes."""
    groups = ceil_div(cols, EMBEDDING_GROUP)
    for name, n in embedding_sizes(rows, cols).items():
        if planes[name].dtype != np.uint8 or planes[name].shape != (n,):
            raise FormatError(f"{name} has {planes[name].size} bytes, expected {n}")
    codes = planes["embedding_codes"].view(np.int8)[: rows * cols].reshape(rows, cols)
    return codes, planes["embedding_scales"].view("<f2")[: rows * groups].reshape(rows, groups)


def dequantize_embedding(planes: Mapping[str, U8], rows: int, cols: int) -> NDArray[np.float32]:
    """The embedding as fp32 [rows, cols]: float(scale) * code, rounded once."""
    codes, scales = unpack_embedding(planes, rows, cols)
    spread = np.repeat(scales.astype(np.float32), EMBEDDING_GROUP, axis=1)[:, :cols]
    return spread * codes
