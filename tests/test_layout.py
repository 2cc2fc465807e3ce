"""layout.py against a scalar transcription of the format's definition, over awkward shapes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twobit.errors import FormatError
from twobit.format import layout

KINDS = [(b, r, g) for b, r in layout.KINDS for g in layout.RESIDUAL_GROUPS]
SHAPES = [(1, 1), (16, 16), (16, 64), (17, 17), (33, 96), (5, 172), (64, 65), (331, 40), (48, 256)]


def random_matrix(rows: int, cols: int, kind: tuple[int, int, int] = (2, 6, 16), seed: int = 0) -> layout.Matrix:
    b, r_bits, group = kind
    rng = np.random.default_rng(seed)
    units, half = layout.ceil_div(cols, 16), 1 << (r_bits - 1)
    return layout.Matrix(
        b,
        r_bits,
        group,
        rng.integers(0, 1 << b, (rows, cols), np.uint8),
        rng.integers(0, 16, (rows, units), np.uint8),
        rng.integers(-8, 8, (rows, units), np.int8),
        rng.random(rows, np.float32) * np.float32(1e-4),
        rng.integers(0, 3, rows, np.uint8) << layout.KINDS[b, r_bits].shift,
        rng.integers(-8, 9, rows, np.int8),
        rng.integers(-half, half, (rows, cols), np.int16),
        rng.integers(0, 16, (rows, layout.ceil_div(cols, group)), np.uint8),
    )


def assert_same(a: layout.Matrix, b: layout.Matrix) -> None:
    for name in ("codes", "s", "m", "row_scale", "row_a", "row_b", "residual", "f"):
        x, y = getattr(a, name), getattr(b, name)
        assert x.dtype == y.dtype and np.array_equal(x, y), name


def scalar_planes(w: layout.Matrix) -> dict[str, bytes]:
    """The definition of FORMAT.md written out one weight at a time, with Python integers."""
    rows, cols = w.shape
    b, r_bits, group = w.draft_bits, w.residual_bits, w.residual_group
    blocks, units = -(-rows // 16), -(-cols // 16)
    quads = -(-units // 4)
    code_bytes, residual_bytes = {2: 64, 3: 96, 4: 128}[b], {4: 128, 6: 192, 8: 256}[r_bits]
    codes = bytearray(blocks * units * code_bytes)
    residual = bytearray(blocks * units * residual_bytes)
    scales = bytearray(blocks * quads * 64)
    factors = bytearray(blocks * quads * (32 if group == 16 else 16))
    for row in range(rows):
        block, i = divmod(row, 16)
        for col in range(cols):
            unit, k = divmod(col, 16)
            j, lane = divmod(k, 4)
            at = 32 * (i >> 3) + 4 * (i & 7) + lane
            base = (block * units + unit) * code_bytes
            c = int(w.codes[row, col])
            if b == 4:
                codes[base + 64 * (j >> 1) + at] |= c << 4 * (j & 1)
            else:
                codes[base + at] |= (c & 3) << 2 * j
            if b == 3:
                codes[base + 64 + 2 * i + (k >> 3)] |= (c >> 2) << (k & 7)
            base = (block * units + unit) * residual_bytes
            u = int(w.residual[row, col]) + (1 << (r_bits - 1))
            if r_bits == 4:
                residual[base + 64 * (j >> 1) + at] |= u << 4 * (j & 1)
            elif r_bits == 8:
                residual[base + 64 * j + at] = u
            elif j < 3:
                residual[base + 64 * j + at] |= u
            else:
                for line in range(3):
                    residual[base + 64 * line + at] |= (u >> 2 * line & 3) << 6
        for unit in range(units):
            quad, lane = divmod(unit, 4)
            at = (block * quads + quad) * 64 + 32 * (i >> 3) + 4 * (i & 7) + lane
            scales[at] = int(w.s[row, unit]) | (int(w.m[row, unit]) + 8) << 4
            if group == 16:
                factors[(block * quads + quad) * 32 + 2 * i + (lane >> 1)] |= int(w.f[row, unit]) << 4 * (lane & 1)
        if group == 32:
            for pair in range(w.f.shape[1]):
                factors[(block * quads + pair // 2) * 16 + i] |= int(w.f[row, pair]) << 4 * (pair & 1)
    extra = blocks * 16 - rows
    return {
        "draft_codes": bytes(codes),
        "draft_scales": bytes(scales),
        "row_scale": w.row_scale.astype("<f4").tobytes() + bytes(4 * extra),
        "row_a": w.row_a.tobytes() + bytes(extra),
        "row_b": w.row_b.tobytes() + bytes(extra),
        "residual_codes": bytes(residual),
        "residual_scales": bytes(factors),
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(17, 17), (5, 172), (33, 96)])
def test_planes_are_as_defined(kind: tuple[int, int, int], shape: tuple[int, int]) -> None:
    w = random_matrix(*shape, kind)
    planes = layout.pack(w)
    expected = scalar_planes(w)
    assert list(planes) == list(expected) == [*layout.DRAFT_PLANES, *layout.RESIDUAL_PLANES]
    for name, data in expected.items():
        assert planes[name].tobytes() == data + bytes(-len(data) % 64), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_round_trip(kind: tuple[int, int, int], shape: tuple[int, int]) -> None:
    w = random_matrix(*shape, kind)
    planes = layout.pack(w)
    assert {k: v.size for k, v in planes.items()} == layout.plane_sizes(*shape, *kind)
    assert_same(layout.unpack(planes, *shape, *kind), w)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 70),
    cols=st.integers(1, 200),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_round_trip_of_row_ranges(rows: int, cols: int, kind: tuple[int, int, int], seed: int, data) -> None:
    w = random_matrix(rows, cols, kind, seed)
    planes = layout.pack(w)
    start = data.draw(st.integers(0, rows - 1))
    stop = data.draw(st.integers(start + 1, rows))
    part = layout.unpack(planes, rows, cols, *kind, (start, stop))
    q2, q = layout.lattice(w)
    part_q2, part_q = layout.lattice(part)
    assert np.array_equal(part_q2, q2[start:stop]) and np.array_equal(part_q, q[start:stop])
    assert np.array_equal(part.row_scale, w.row_scale[start:stop])


def test_small_chunks_give_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    w = random_matrix(331, 172)
    whole = layout.pack(w)
    monkeypatch.setattr(layout, "_CHUNK_WEIGHTS", 3000)
    for name, plane in layout.pack(w).items():
        assert np.array_equal(plane, whole[name]), name
    assert_same(layout.unpack(whole, 331, 172, 2, 6, 16), w)
    q = layout.lattice(w)[1]
    assert np.array_equal(layout.lattice(layout.unpack(whole, 331, 172, 2, 6, 16, (21, 299)))[1], q[21:299])


@pytest.mark.parametrize("kind", KINDS)
def test_row_chunks_concatenate(kind: tuple[int, int, int]) -> None:
    w = random_matrix(150, 90, kind)
    whole = layout.pack(w)
    bounds = [(0, 64), (64, 128), (128, 150)]
    parts = [layout.pack(layout.unpack(whole, 150, 90, *kind, bound)) for bound in bounds]
    for name, plane in whole.items():
        joined = np.concatenate([p[name] for p in parts])
        assert np.array_equal(joined[: plane.size], plane) and not joined[plane.size :].any(), name


@pytest.mark.parametrize("kind", KINDS)
def test_lattice_and_weights(kind: tuple[int, int, int]) -> None:
    b, _, group = kind
    w = random_matrix(19, 50, kind, seed=3)
    q2, q = layout.lattice(w)
    draft, full = layout.dequantize(w)
    bound = layout.row_bound(w.row_a, w.row_b, *kind[:2])
    for row in range(19):
        for col in range(50):
            a, bb, u = int(w.row_a[row]), int(w.row_b[row]), w.row_scale[row]
            s, m = int(w.s[row, col // 16]), int(w.m[row, col // 16])
            level = a * s * (2 * int(w.codes[row, col]) - (2**b - 1)) + bb * m
            whole = level + int(w.f[row, col // group]) * int(w.residual[row, col])
            assert (q2[row, col], q[row, col]) == (level, whole)
            assert draft[row, col] == np.float32(level) * u and full[row, col] == np.float32(whole) * u
            assert abs(whole) <= bound[row]


def test_a_large_value_in_the_tail_survives() -> None:
    """Columns that fill no whole unit or group are coded like the others (1.5 groups, the row's peak in the tail)."""
    cols = 24
    w = random_matrix(16, cols, (2, 6, 16))
    w.codes[:] = 1
    w.codes[:, 20:] = 3
    w.s[:] = [1, 15]
    w.row_a[:] = 10
    draft, _ = layout.dequantize(layout.unpack(layout.pack(w), 16, cols, 2, 6, 16))
    centre = w.row_b.astype(np.int32)[:, None] * w.m
    assert np.array_equal(draft[:, 20:], ((450 + centre[:, 1:]) * w.row_scale[:, None]).repeat(4, 1).astype(np.float32))


def test_padding_is_zero_bytes() -> None:
    w = random_matrix(17, 17, (4, 6, 32))
    w.codes[:], w.s[:], w.m[:], w.f[:], w.residual[:] = 15, 15, 7, 15, 31
    ones = {name: int(np.unpackbits(plane).sum()) for name, plane in layout.pack(w).items()}
    assert ones["draft_codes"] == 17 * 17 * 4
    assert ones["draft_scales"] == 17 * 2 * 8
    assert ones["residual_codes"] == 17 * 17 * 6
    assert ones["residual_scales"] == 17 * 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("codes", 4),
        ("s", 16),
        ("m", 8),
        ("m", -9),
        ("residual", 32),
        ("residual", -33),
        ("f", 16),
        ("row_scale", np.nan),
        ("row_scale", np.inf),
        ("row_scale", -1.0),
    ],
)
def test_pack_refuses_values_out_of_bounds(field: str, value: float) -> None:
    w = random_matrix(20, 20)
    getattr(w, field).flat[7] = value
    with pytest.raises(FormatError, match=field):
        layout.pack(w)


def test_pack_and_unpack_refuse_wrong_shapes() -> None:
    w = random_matrix(20, 20)
    planes = layout.pack(w)
    with pytest.raises(FormatError, match="draft_codes"):
        layout.unpack({**planes, "draft_codes": planes["draft_codes"][:-64]}, 20, 20, 2, 6, 16)
    with pytest.raises(FormatError, match="rows 3"):
        layout.unpack(planes, 20, 20, 2, 6, 16, (3, 21))
    with pytest.raises(FormatError, match="5\\+6 draft"):
        layout.plane_sizes(20, 20, 5, 6, 16)
    object.__setattr__(w, "f", w.f[:, :1])
    with pytest.raises(FormatError, match="f is uint8"):
        layout.pack(w)


def test_range_check_names_the_row() -> None:
    u = np.ones(3, np.float32)
    a, b = np.array([34, 34, 34], np.uint8), np.array([0, 4, 5], np.int8)  # 45 A + 8 |B| + 480
    with pytest.raises(FormatError, match=r"x\.q_proj: row 2 .* 2050, more than 2047 of the narrow range"):
        layout.check_rows("x.q_proj", u, a, b, 2, 6, wide=False)
    layout.check_rows("x.q_proj", u[:2], a[:2], b[:2], 2, 6, wide=False)
    layout.check_rows("x.q_proj", u, a & 0xF8, b, 2, 8, wide=True)
    with pytest.raises(FormatError, match=r"row 0 has A = 33, which is not 2 times 0 to 17"):
        layout.check_rows("x.q_proj", u, a - 1, b, 2, 6, wide=False)
    with pytest.raises(FormatError, match=r"row 0 has A = 34, which is not 8 times 0 to 17"):
        layout.check_rows("x.q_proj", u, a, b, 2, 8, wide=True)
    a -= 2
    u[1] = np.nan
    with pytest.raises(FormatError, match="row 1 has scale nan"):
        layout.check_rows("x.q_proj", u, a, b, 2, 8, wide=True)


@pytest.mark.parametrize("shape", [(1, 1), (331, 17), (7, 96), (3, 172)])
def test_embedding(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    weight = rng.standard_normal(shape).astype(np.float32)
    planes = layout.pack_embedding(weight)
    assert {k: v.size for k, v in planes.items()} == layout.embedding_sizes(*shape)
    back = layout.dequantize_embedding(planes, *shape)
    codes, scales = layout.unpack_embedding(planes, *shape)
    assert codes.dtype == np.int8 and scales.dtype == np.float16
    step = np.repeat(scales.astype(np.float32), 32, axis=1)[:, : shape[1]]
    assert (np.abs(back - weight) <= 0.501 * step).all()


def test_embedding_of_tiny_groups_is_finite() -> None:
    peaks = [0.0, 1e-45, 1e-40, 1e-30, 1e-20, 1e-8, 1e-6, 1e-5, 1.0, 8e6]
    weight = np.zeros((len(peaks), 64), np.float32)
    weight[:, 5] = peaks
    weight[:, 40] = 1e-30
    planes = layout.pack_embedding(weight)
    _, scales = layout.unpack_embedding(planes, *weight.shape)
    back = layout.dequantize_embedding(planes, *weight.shape)
    assert np.isfinite(scales).all() and np.isfinite(back).all()
    assert (np.abs(back - weight) <= 0.501 * np.repeat(scales, 32, axis=1).astype(np.float32)).all()
    assert not back[0].any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 9e6])
def test_embedding_refuses_what_fp16_scales_cannot_hold(value: float) -> None:
    weight = np.ones((5, 40), np.float32)
    weight[3, 39] = value
    with pytest.raises(FormatError, match="row 3"):
        layout.pack_embedding(weight)


def test_worked_example_of_the_format_document() -> None:
    text = (Path(__file__).parents[1] / "FORMAT.md").read_text(encoding="utf-8").split("## 6. Worked example")[1]
    given, listing, integers = (block for _, block in re.findall(r"```(json)?\n(.*?)```", text, re.DOTALL))
    example = json.loads(given)
    types = {"row_scale": np.float32, "residual": np.int16, "m": np.int8, "row_b": np.int8}
    arrays = {k: np.array(v, types.get(k, np.uint8)) for k, v in example.items() if isinstance(v, list)}
    bits = (example["draft_bits"], example["residual_bits"], example["residual_group"])
    matrix = layout.Matrix(*bits, **arrays)
    expected: dict[str, bytearray] = {}
    for line in listing.splitlines():
        if not line.startswith(" "):
            name, size = line.split()
            expected[name] = bytearray(int(size))
        else:
            at, *data = line.split()
            expected[name][int(at) : int(at) + len(data)] = bytes.fromhex("".join(data))
    planes = layout.pack(matrix)
    assert list(planes) == list(expected)
    for name, plane in planes.items():
        assert plane.tobytes() == bytes(expected[name]), name
    q2, q = layout.lattice(layout.unpack(planes, *matrix.shape, *bits))
    assert {"q2": q2.tolist(), "q": q.tolist()} == json.loads(integers)
    draft, full = layout.dequantize(matrix)
    assert (draft[0, 0], full[0, 0]) == (-41, -57)
    assert layout.row_bound(matrix.row_a, matrix.row_b, 2, 6)[1] == 2030
