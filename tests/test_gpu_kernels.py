"""Every kernel of the device against double precision, on each kind of device, and between them bit for bit."""

from __future__ import annotations

import functools
from typing import Any

import gpu
import numpy as np
import pytest
from gpu import KINDS, device, run

from twobit.format import layout
from twobit.runtime.device import Device
from twobit.runtime.lib import ffi, lib

F32, F64 = np.float32, np.float64
ADD, FINISH, GATED, HAS_H, TREE, KEYS, V_NORM, TIED, FULL, LISTED = 2, 1, 4, 8, 16, 32, 64, 128, 256, 512
AHEAD, CHUNK, SPAN, BEST, FOUND = 65, 512, 1024, 4, 5


@pytest.fixture(scope="module", params=KINDS)
def on(request: pytest.FixtureRequest) -> Device:
    return device(request.param)


def same(key: Any, on: Device, found: np.ndarray) -> None:
    """The bits of the plain-C build, which comes first."""
    if on.kind == "plain":
        _plain[key] = found.copy()
    elif key in _plain:  # absent where only the tests of the other device were chosen
        assert found.tobytes() == _plain[key].tobytes(), f"{key}: other bits than the plain-C build"


_plain: dict[Any, np.ndarray] = {}


def close(found: np.ndarray, expected: np.ndarray, tolerance: float = 2e-6) -> None:
    assert np.isfinite(found).all()
    assert np.abs(found - expected).max() <= tolerance * max(1e-30, np.abs(expected).max())


@pytest.mark.parametrize("kind", range(3))
@pytest.mark.parametrize("cols", [40, 200, 576])
def test_rounding_is_the_formats(on: Device, kind: int, cols: int) -> None:
    rng = np.random.default_rng(cols + kind)
    x = rng.standard_normal((3, cols)).astype(F32)
    x[1, : min(cols, 130)] = 0
    x[2] *= F32(1e-31)
    q, scale = gpu.rounded(x, kind)
    expected = gpu.pack_acts(q, scale, kind)
    out = run(
        on,
        "round_acts",
        (scale.shape[1], 3),
        {0: x, 2: np.full(len(expected), 77, np.uint8), 3: np.zeros(1, np.int32)},
        m=3,
        n=cols,
        kind=kind,
        place=5,
    )
    assert out[2].tobytes() == expected.tobytes()
    assert out[3][0] == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_reported(on: Device, value: float) -> None:
    x = np.ones((2, 70), F32)
    x[1, 69] = value
    buffers = {0: x, 2: np.zeros(1000, np.uint8), 3: np.zeros(1, np.int32)}
    assert run(on, "round_acts", (1, 2), buffers, m=2, n=70, kind=1, place=42)[3][0] == 42


@pytest.mark.parametrize("activation", range(3))
def test_activations(on: Device, activation: int) -> None:
    from math import erf

    rng = np.random.default_rng(activation)
    gate, up = (3 * rng.standard_normal((2, 2, 150))).astype(F32)
    g = gate.astype(F64)
    act = (
        g / (1 + np.exp(-g)),
        g / (1 + np.exp(-1.5957691216057308 * (g + 0.044715 * g**3))),
        g * (0.5 + 0.5 * np.vectorize(erf)(g / 2**0.5)),
    )[activation]
    buffers = {
        0: np.concatenate([gate, up]),
        1: np.zeros((2, 150), F32),
        2: np.zeros(2000, np.uint8),
        3: np.zeros(1, "i4"),
    }
    out = run(on, "round_acts", (2, 2), buffers, m=2, n=150, kind=1, flags=GATED, activation=activation)
    close(out[1], act * up)
    same(("gate", activation), on, out[1])


@functools.cache
def problem(b: int, r: int, group: int) -> tuple[list[layout.Matrix], np.ndarray, tuple[np.ndarray, ...]]:
    """Two matrices that are multiplied with the same 9 tokens: a short last group, rows beyond a block."""
    rng = np.random.default_rng(100 * b + 10 * r + group)
    matrices = [gpu.random_matrix(rng, rows, 344, b, r, group) for rows in (19, 32)]
    return matrices, rng.standard_normal((9, 344)).astype(F32), gpu.describe(matrices, [3, -1])


def expected_product(matrix: layout.Matrix, x: np.ndarray, kind: int, *, rest: bool) -> np.ndarray:
    """In double precision, from the exact integers of each group."""
    draft, full = (q.astype(np.int64) for q in layout.lattice(matrix))
    q, scale = gpu.rounded(x, kind)
    size, weights = gpu.LIMITS[kind][1], full - draft if rest else draft
    total = np.zeros((len(x), len(weights)))
    for g in range(scale.shape[1]):
        at = slice(g * size, (g + 1) * size)
        dot = q[:, at].astype(np.int64) @ weights[:, at].T
        assert np.abs(dot).max() < 2**31
        total += dot * scale[:, g : g + 1].astype(F64)
    return total * matrix.row_scale


def multiply(on: Device, b: int, r: int, group: int, m: int, *, rest: bool, act: int, many: bool) -> np.ndarray:
    _, x, (draft, residual, table) = problem(b, r, group)
    kind = 0 if act == 8 else 2 if layout.KINDS[b, r].wide else 1
    acts = gpu.pack_acts(*gpu.rounded(x[:m], kind), kind)
    name = f"residual{r}" if rest else f"draft{b}_a{act}"
    buffers = {
        0: residual if rest else draft,
        1: table,
        2: acts,
        3: np.full(m * 51, 0.25 if rest else np.nan, F32),
        4: draft,
        5: np.arange(40, dtype=F32),
    }
    groups = ((m + 7) // 8 if many else m, int(table[:, 2].sum()))
    flags = ADD | FINISH if rest else 0
    return run(on, f"{name}_t{8 if many else 1}", groups, buffers, m=m, first=0, count=2, flags=flags)[3]


@pytest.mark.parametrize("kind", layout.KINDS, ids=lambda kind: f"{kind[0]}+{kind[1]}")
def test_products(on: Device, kind: tuple[int, int]) -> None:
    b, r = kind
    matrices, x, _ = problem(b, r, 16)
    for rest, act in ((False, 8), (False, 16), (True, 16)):
        rounding = 0 if act == 8 else 2 if layout.KINDS[kind].wide else 1
        found = multiply(on, b, r, 16, 9, rest=rest, act=act, many=True)
        assert multiply(on, b, r, 16, 9, rest=rest, act=act, many=False).tobytes() == found.tobytes()
        for matrix, y, bias in zip(matrices, np.split(found, [9 * 19]), (np.arange(3, 22), 0), strict=True):
            exact = expected_product(matrix, x, rounding, rest=rest)
            close(y.reshape(9, -1), exact + 0.25 + bias if rest else exact)
        same((kind, rest, act), on, found)


def test_results_do_not_depend_on_the_number_of_tokens(on: Device) -> None:
    for rest, act in ((False, 8), (False, 16), (True, 16)):
        whole = multiply(on, 2, 6, 32, 9, rest=rest, act=act, many=True)
        for m in (1, 2, 8):
            part = multiply(on, 2, 6, 32, m, rest=rest, act=act, many=m > 1)
            for of_all, of_some in zip(np.split(whole, [9 * 19]), np.split(part, [m * 19]), strict=True):
                assert of_some.tobytes() == of_all[: len(of_some)].tobytes()


def test_a_product_of_some_rows(on: Device) -> None:
    """Listed blocks of 16 rows, in any order: the same bits as of all, and nothing elsewhere."""
    _, x, (draft, _, table) = problem(2, 6, 16)
    whole = multiply(on, 2, 6, 16, 3, rest=False, act=8, many=True)
    buffers = {
        0: draft,
        1: table,
        2: gpu.pack_acts(*gpu.rounded(x[:3], 0), 0),
        3: np.full(3 * 51, 9, F32),
        4: draft,
        5: np.arange(40, dtype=F32),
        6: np.array([3, 0], np.int32),
    }
    y = run(on, f"draft{2}_a8_t8", (1, 2), buffers, m=3, first=0, count=2, flags=LISTED)[3]
    rows = np.concatenate([np.tile(np.arange(19) < 16, 3), np.tile(np.arange(32) >= 16, 3)])
    assert y[rows].tobytes() == whole[rows].tobytes()
    assert (y[~rows] == 9).all()


def test_parts_are_summed(on: Device) -> None:
    rng = np.random.default_rng(1)
    _, _, (_, _, table) = problem(2, 6, 16)
    y, rest, bias = (rng.standard_normal(n).astype(F32) for n in (4 * 51, 4 * 51, 40))
    out = run(on, "sum_parts", (1, 4), {0: y, 1: table, 3: rest, 5: bias}, m=4, count=2)[0]
    expected = y + rest
    expected[: 4 * 19] += np.tile(bias[3:22], 4)
    assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("has_h", [False, True])
def test_norms(on: Device, has_h: bool) -> None:
    rng = np.random.default_rng(2)
    x, h, w = rng.standard_normal((3, 700)), rng.standard_normal((3, 700)), rng.standard_normal(1400)
    x, h, w = x.astype(F32), h.astype(F32), w.astype(F32)

    def norm(v: np.ndarray, weights: np.ndarray) -> np.ndarray:
        return v / np.sqrt((v.astype(F64) ** 2).mean(-1, keepdims=True) + 1e-5) * weights

    buffers = {0: x, 1: h, 2: w, 3: np.zeros_like(x)}
    out = run(on, "norm_step", (1, 3), buffers, m=3, n=700, flags=HAS_H * has_h, w0=700, w1=0, scale=0.5, eps=1e-5)
    stream = (x + norm(h, w[700:])) * 0.5 if has_h else x
    close(out[0], stream)
    close(out[3], norm(stream, w[:700]))
    same(("norm", has_h), on, out[3])
    for m in (1, 2):
        one = run(
            on,
            "norm_step",
            (1, m),
            buffers,
            m=m,
            n=700,
            flags=HAS_H * has_h,
            w0=700,
            w1=0,
            scale=0.5,
            eps=1e-5,
        )
        assert one[3][:m].tobytes() == out[3][:m].tobytes()


@pytest.mark.parametrize("values_are_keys", [False, True])
def test_heads_are_normed_turned_and_stored(on: Device, values_are_keys: bool) -> None:
    """Partial rotation (half of 6 of 40 dimensions), norms of q, k and v."""
    m, heads, kv, hd, ring, rope = 3, 4, 2, 40, 24, 6
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((m, n, hd)).astype(F32) for n in (heads, kv, kv))
    w, angle = rng.standard_normal(2 * hd).astype(F32), rng.random((m, 2 + rope))
    angles = np.concatenate([np.zeros((m, 4)), np.cos(angle[:, :rope]), np.sin(angle[:, :rope])], 1).astype(F32)
    cache = np.zeros((kv, ring, hd), np.float16)
    slots = np.array([5, 6, 23], np.int32)
    positions = slots + ring  # one turn of the ring later
    y = np.concatenate([q.ravel(), k.ravel(), v.ravel()])
    out = run(
        on,
        "place_heads",
        (heads + kv, m),
        {0: y, 1: angles, 2: w, 3: cache, 4: cache, 5: positions},
        m=m,
        heads=heads,
        kv_heads=kv,
        head_dim=hd,
        ring=ring,
        rope=rope,
        rope_skip=4,
        angles=angles.shape[1],
        w0=0,
        w1=hd,
        eps=1e-6,
        flags=V_NORM | KEYS * values_are_keys,
    )

    def norm(x: np.ndarray, weights: np.ndarray | float) -> np.ndarray:
        return x / np.sqrt((x.astype(F64) ** 2).mean(-1, keepdims=True) + 1e-6) * weights

    def turn(x: np.ndarray) -> np.ndarray:
        a, b, out = x[..., :rope], x[..., rope : 2 * rope], x.copy()
        c, s = angles[:, None, 4 : 4 + rope], angles[:, None, 4 + rope :]
        out[..., :rope], out[..., rope : 2 * rope] = a * c - b * s, b * c + a * s
        return out

    close(out[0][: q.size].reshape(q.shape), turn(norm(q, w[:hd])))
    expected_k, expected_v = turn(norm(k, w[hd:])), norm(k if values_are_keys else v, 1.0)
    for found, expected in ((out[3], expected_k), (out[4], expected_v)):
        close(found[:, slots].astype(F64), expected.transpose(1, 0, 2), 1e-3)
        assert not np.delete(found, slots, 1).any()
    same(("heads", values_are_keys), on, out[3])
    same(("values", values_are_keys), on, out[4])


def attend(on: Device, q: np.ndarray, keys: np.ndarray, values: np.ndarray, **params: Any) -> np.ndarray:
    m, heads, hd = q.shape
    positions, path = params.pop("positions"), params.pop("path")
    window = params["window"]
    first = min(p - window + 1 if window and p >= window else 0 for p in positions)
    c0, c1 = first // CHUNK, max(positions) // CHUNK
    common = {
        "m": m,
        "heads": heads,
        "kv_heads": len(keys),
        "head_dim": hd,
        "ring": keys.shape[1],
        "chunk": c0,
        "chunks": c1 - c0 + 1,
        **params,
    }
    parts = np.full((m, heads, c1 - c0 + 1, hd + 2), np.nan, F32)
    at = np.array(positions, np.int32)
    parts = run(
        on, "attend_chunk", (heads, m, c1 - c0 + 1), {0: q, 1: keys, 2: values, 3: parts, 4: at, 5: path}, **common
    )[3]
    return run(on, "attend_join", (heads, m), {0: parts, 1: np.zeros_like(q), 2: at}, **common)[1]


@pytest.mark.parametrize("case", ["full", "window", "softcap", "tree"])
def test_attention(on: Device, case: str) -> None:
    """Positions across three chunks, in a ring that has wrapped around where there is a window."""
    heads, kv, hd = 4, 2, 16 if case != "softcap" else 20
    ring, base = (640, 1100) if case == "window" else (1200, 1022)
    m, window = 4, 300 if case == "window" else 0
    rng = np.random.default_rng(len(case))
    q = rng.standard_normal((m, heads, hd)).astype(F32)
    keys, values = (rng.standard_normal((kv, ring, hd)).astype(np.float16) for _ in range(2))
    path = np.zeros((m, AHEAD), np.int32)
    tree = [[0], [0, 1], [0, 2], [0, 2, 3]] if case == "tree" else [list(range(t + 1)) for t in range(m)]
    for t, slots in enumerate(tree):
        path[t, : len(slots)] = slots
    positions = [base + len(slots) - 1 for slots in tree]
    params = {
        "position": base,
        "window": window,
        "scale": 0.3,
        "softcap": 2.0 if case == "softcap" else 0.0,
        "flags": TREE if case == "tree" else 0,
    }
    found = attend(on, q, keys, values, positions=positions, path=path, **params)
    for t in range(m):
        last = positions[t]
        seen = range(last - window + 1 if window and last >= window else 0, last + 1)
        slots = [(base + tree[t][p - base] if p >= base else p) % ring for p in seen]
        for h in range(heads):
            k, v = keys[h // 2, slots].astype(F64), values[h // 2, slots].astype(F64)
            score = k @ q[t, h].astype(F64) * F32(0.3)
            if case == "softcap":
                score = 2 * np.tanh(score / 2)
            weight = np.exp(score - score.max())
            close(found[t, h], weight @ v / weight.sum(), 5e-6)
    same(("attention", case), on, found)
    if case != "tree":
        alone = attend(on, q[2:3], keys, values, positions=positions[2:3], path=path[2:3], **params)
        assert alone.tobytes() == found[2:3].tobytes()


def test_slots_move_in_order(on: Device) -> None:
    rng = np.random.default_rng(5)
    keys, values = (rng.integers(0, 30000, (2, 16, 5)).astype(np.uint16) for _ in range(2))
    slots = np.array([0, 2, 3, 6], np.int32)
    out = run(on, "move_slots", (2,), {0: slots, 3: keys, 4: values}, n=4, position=13, ring=16, head_dim=5)
    for found, before in ((out[3], keys), (out[4], values)):
        expected = before.copy()
        for d, slot in enumerate(slots):
            expected[:, (13 + d) % 16] = before[:, (13 + slot) % 16]
        assert found.tobytes() == expected.tobytes()


def test_the_next_token_of_a_chain(on: Device) -> None:
    """Behind token 1 of three: its ancestors and its own slot come first, then the new one's."""
    ranked = np.array([[7, 1], [-1, 2], [41, 3]], np.int32)  # ids of rows p.a / 2
    ids, positions, slots = (np.array(a, np.int32) for a in ([5, 6, 9], [20, 21, 22], [20, 25, 26]))
    path, angles = np.full((3, AHEAD), -1, np.int32), np.arange(5 * 70, dtype=F32).reshape(5, 70)
    path[1, :2] = [0, 5]
    buffers = {0: ranked, 1: ids, 2: positions, 3: slots, 4: path, 5: angles}
    for row, expected in ((2, 41), (1, 0)):
        out = run(on, "next_token", (1,), buffers, m=1, n=3, position=20, angles=70, a=2 * row)
        assert (out[1][0], out[2][0], out[3][0], out[4][0, :3].tolist()) == (expected, 22, 26, [0, 5, 6])
        assert out[5][0].tolist() == angles[3].tolist()
        assert all((out[i][1:] == buffers[i][1:]).all() for i in range(1, 6))


def test_softcap_of_logits(on: Device) -> None:
    x = (20 * np.random.default_rng(6).standard_normal((2, 100))).astype(F32)
    x[1, 50] = -np.inf  # a row that was not computed
    found = run(on, "cap_logits", (2, 2), {0: x}, m=2, n=100, softcap=7.0)[0]
    assert found[1, 50] == -np.inf
    x[1, 50] = found[1, 50] = 0
    close(found, 7 * np.tanh(x.astype(F64) / 7))
    same("cap", on, found)


@pytest.mark.parametrize("b,r,full", [(4, 4, True), (4, 4, False), (2, 6, True), (3, 8, True)])
def test_rows_of_a_tied_embedding(on: Device, b: int, r: int, full: bool) -> None:
    rng = np.random.default_rng(7)
    matrix = gpu.random_matrix(rng, 50, 150, b, r, 32)
    draft, rest, table = gpu.describe([matrix], [-1])
    ids = np.array([0, 17, 49], np.int32)
    flags = TIED | FULL * full
    buffers = {2: draft, 3: table, 4: rest, 6: ids, 7: np.zeros((3, 150), F32)}
    out = run(on, "embed", (3, 3), buffers, m=3, n=150, flags=flags, kind=256 * b + r, scale=1.0)[7]
    assert out.tobytes() == layout.dequantize(matrix)[int(full)][ids].tobytes()


def test_rows_of_an_embedding(on: Device) -> None:
    rng = np.random.default_rng(8)
    codes, scales = rng.integers(-127, 128, (9, 70)).astype(np.int8), rng.random((9, 3)).astype(np.float16)
    ids = np.array([8, 0], np.int32)
    buffers = {0: codes, 1: scales, 6: ids, 7: np.zeros((2, 70), F32)}
    out = run(on, "embed", (2, 2), buffers, m=2, n=70, scale=3.0)[7]
    exact = np.repeat(scales.astype(F32), 32, 1)[:, :70] * codes * F32(3.0)
    assert out.tobytes() == exact[ids].astype(F32).tobytes()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_best_logits_with_keyed_noise(on: Device, temperature: float) -> None:
    """The sampler's own noise, so that the token is the one that the sampler would draw without filters."""
    from test_sampler import gumbel

    from twobit.runtime.sampling import Sampling

    rng = np.random.default_rng(9)
    logits = rng.standard_normal((2, 2500)).astype(F32)
    logits[0, [7, 1500]] = 5
    seed, positions = 0x1234567890, np.array([30, 41], np.int32)
    words = {"seed0": seed & 0xFFFFFFFF, "seed1": seed >> 32, "temperature": temperature}
    best = np.zeros((2, 3, FOUND, 2), np.int32)
    whole = run(on, "top_logits", (3, 2), {0: logits, 1: best, 2: positions}, m=2, n=2500, **words)[1]
    out, sums = whole[:, :, :BEST], whole[:, :, BEST, 1].view(F32)
    for t in range(2):
        ids = out[t, :, :, 0].ravel()
        assert (out[t, :, :, 1].ravel().view(F32) == logits[t, ids]).all()
        struct, keep = Sampling(temperature=temperature, seed=seed).to_c()
        token, error = ffi.new("int32_t *"), ffi.new("char[256]")
        row, history = ffi.from_buffer("float[]", logits[t].copy()), ffi.new("int32_t[1]")
        assert not lib.tb_sample(row, 2500, history, 1, struct, int(positions[t]) + 1, token, error, 256)
        assert token[0] in out[t, :, 0, 0], "what the sampler draws is not the best of its span"
        del keep
        if temperature == 0:
            for span in range(3):
                part = logits[t, span * SPAN : (span + 1) * SPAN]
                assert out[t, span, :, 0].tolist() == (span * SPAN + np.argsort(-part, kind="stable")[:BEST]).tolist()
                close(sums[t, span], np.exp(part.astype(F64) - part.max()).sum())
    same(("top", temperature), on, whole)
    ranked = np.zeros((2, BEST, 2), np.int32)
    for count in (2, BEST):
        found = run(on, "rank_tokens", (2,), {0: whole, 1: ranked, 2: positions}, m=2, n=2500, count=count, **words)[1]
        same(("ranked", temperature, count), on, found)
        for t in range(2):
            noise = np.zeros(2500)
            if temperature:
                noise = gumbel(seed, int(positions[t]) + 1, np.arange(2500))
            value = logits[t].astype(F64) / (temperature or 1.0) + noise
            order = np.argsort(-value, kind="stable")[:count]
            assert found[t, :, 0].tolist() == [*order.tolist(), *[-1] * (BEST - count)]
            chance = np.exp(value[order] - value.max())
            chance /= chance.sum() if temperature else np.exp(value - value.max()).sum()
            close(found[t, :count, 1].copy().view(F32), chance, 1e-5)


def test_ranking_where_there_is_nothing(on: Device) -> None:
    """Logits that are not numbers give no choice, and no endless one."""
    logits, positions = np.full((1, 1500), np.nan, F32), np.zeros(1, np.int32)
    found = run(
        on, "top_logits", (2, 1), {0: logits, 1: np.zeros((1, 2, FOUND, 2), np.int32), 2: positions}, m=1, n=1500
    )
    buffers = {0: found[1], 1: np.zeros((1, BEST, 2), np.int32), 2: positions}
    assert (run(on, "rank_tokens", (1,), buffers, m=1, n=1500, count=BEST)[1][0, :, 0] == -1).all()


def test_every_kernel_is_tested() -> None:
    """A name that this file does not run would be a kernel that nobody compares."""
    import re
    from pathlib import Path

    header = (Path(__file__).parent.parent / "csrc/gpu/params.h").read_text()
    names = re.findall(r"X\((\w+), \d+\)", header)
    text = Path(__file__).read_text()
    products = {f"draft{b}_a{a}_t{t}" for b in (2, 3, 4) for a in (8, 16) for t in (1, 8)}
    products |= {f"residual{r}_t{t}" for r in (4, 6, 8) for t in (1, 8)}
    assert {name for name in names if f'"{name}"' not in text} == products
