"""The vector operations: against double precision, and bit for bit between levels."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import native
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

F32 = np.float32
SIZES = [1, 7, 8, 9, 31, 32, 33, 64, 100, 331, 576, 1536]


def mapped(name: str, x: np.ndarray) -> np.ndarray:
    """A scalar function of scalar.c over an array."""
    ffi, lib = native.library()
    x = np.ascontiguousarray(x, dtype=F32)
    out = np.full_like(x, np.nan)
    lib.map(ffi.addressof(lib, name), native.pointer(out), native.pointer(x), x.size)
    return out


def ulps(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Distance from the exact value, in units of the last place of a normal float."""
    exponent = np.floor(np.log2(np.maximum(np.abs(want), 2.0**-126)))
    return np.abs(got.astype(np.float64) - want) / 2.0 ** (exponent - 23)


def every_level(run: Any) -> list[Any]:
    """run(table) per level; asserts that all results have the same bits and returns the first."""
    results = [run(native.table(level)) for level in native.levels()]
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert a.tobytes() == b.tobytes()
    return results[0]


def padded(n: int) -> np.ndarray:
    """An output of n floats with a guard behind it."""
    return np.full(n + 16, np.nan, dtype=F32)


def test_exp_is_within_two_ulps_and_underflows_to_zero() -> None:
    rng = np.random.default_rng(1)
    x = np.concatenate([rng.uniform(-104, 88.7, 400_000), rng.uniform(-1, 1, 200_000)]).astype(F32)
    got, want = mapped("tb_expf", x), np.exp(x.astype(np.float64))
    normal = want >= 2.0**-126
    assert ulps(got[normal], want[normal]).max() <= 2
    assert np.abs(got[~normal] - want[~normal]).max() <= 2.0**-149 * 1.01
    edge = mapped("tb_expf", np.array([0, -0.0, -104, -1000, -np.inf, 89, 1e30, np.inf, np.nan], dtype=F32))
    assert edge[:5].tolist() == [1, 1, 0, 0, 0] and np.isposinf(edge[5:8]).all() and np.isnan(edge[8])


def test_exp_hardly_ever_steps_down() -> None:
    x = np.sort(np.random.default_rng(2).uniform(-30, 0, 500_000).astype(F32))
    y = mapped("tb_expf", x).astype(np.float64)
    assert (np.diff(y) / y[1:]).min() > -(2.0**-22)


def test_log_is_within_two_ulps() -> None:
    rng = np.random.default_rng(3)
    x = np.concatenate([2 ** rng.uniform(-126, 127.9, 300_000), rng.uniform(0.5, 2, 300_000), [1.0]]).astype(F32)
    assert ulps(mapped("tb_logf", x), np.log(x.astype(np.float64)))[np.abs(x - 1) > 1e-6].max() <= 2
    assert mapped("tb_logf", np.array([1], dtype=F32))[0] == 0


def test_tanh_is_accurate_also_for_small_arguments() -> None:
    rng = np.random.default_rng(4)
    x = np.concatenate([rng.uniform(-12, 12, 200_000), 10 ** rng.uniform(-30, 0, 100_000), [0.0, -0.0]]).astype(F32)
    got = mapped("tb_tanhf", x)
    assert ulps(got, np.tanh(x.astype(np.float64))).max() <= 3
    assert np.array_equal(mapped("tb_tanhf", -x), -got)
    edge = mapped("tb_tanhf", np.array([np.inf, -np.inf, 100, np.nan], dtype=F32))
    assert edge[:3].tolist() == [1, -1, 1] and np.isnan(edge[3])


def test_erf_error_is_1e_7() -> None:
    x = np.concatenate([np.linspace(-5, 5, 100_001), [np.inf, -np.inf]]).astype(F32)
    want = np.array([math.erf(v) for v in x.astype(np.float64)])
    assert np.abs(mapped("tb_erff", x) - want).max() < 1.2e-7
    small = (10 ** np.random.default_rng(5).uniform(-20, -1, 1000)).astype(F32)
    want = np.array([math.erf(v) for v in small.astype(np.float64)])
    assert (np.abs(mapped("tb_erff", small) - want) / want).max() < 3e-7


def test_vector_exp_has_the_bits_of_the_scalar_one() -> None:
    x = np.random.default_rng(6).uniform(-110, 95, 10_007).astype(F32)

    def run(ops: Any) -> list[np.ndarray]:
        out = padded(x.size)
        ops.exps(native.pointer(out), native.pointer(x), x.size)
        assert np.isnan(out[x.size :]).all()
        return [out[: x.size]]

    assert every_level(run)[0].tobytes() == mapped("tb_expf", x).tobytes()


def test_sine_and_cosine() -> None:
    ffi, lib = native.library()
    s, c = ffi.new("float *"), ffi.new("float *")
    rng = np.random.default_rng(7)
    for x in [*rng.uniform(-10, 10, 3000), *rng.uniform(-1e7, 1e7, 3000), *(np.arange(-40, 41) * math.pi / 4), 0.0]:
        lib.tb_sincos(x, s, c)
        assert abs(s[0] - math.sin(x)) < 4e-8 and abs(c[0] - math.cos(x)) < 4e-8


def test_every_half_float_and_its_roundings() -> None:
    lib = native.library()[1]
    halves = np.arange(65536, dtype=np.uint16)
    floats = np.array([lib.tb_half_to_float(int(h)) for h in halves], dtype=F32)
    assert np.array_equal(floats, halves.view(np.float16).astype(F32), equal_nan=True)
    finite = floats[np.isfinite(floats)]
    between = (finite[:-1].astype(np.float64) + finite[1:]) / 2
    x = np.concatenate(
        [
            floats,
            between.astype(F32),
            np.nextafter(between.astype(F32), F32(np.inf)),
            [65519.99, 65520, -65520, 1e30, 1e-30],
        ]
    ).astype(F32)
    with np.errstate(over="ignore"):
        want = x.astype(np.float16)
    got = np.array([lib.tb_float_to_half(float(v)) for v in x], dtype=np.uint16)
    nan = np.isnan(x)
    assert np.array_equal(got[~nan], want.view(np.uint16)[~nan])
    assert np.isnan(got[nan].view(np.float16)).all()

    def run(ops: Any) -> list[np.ndarray]:
        out = np.zeros(x.size, dtype=np.uint16)
        ops.store_value(native.pointer(out, "uint16_t *"), native.pointer(x), x.size, 0)
        return [out]

    assert np.array_equal(every_level(run)[0][~nan], got[~nan])


@pytest.mark.parametrize("n", SIZES)
def test_elementwise_operations(n: int) -> None:
    rng = np.random.default_rng(n)
    x, y, w = (rng.normal(0, 3, n).astype(F32) for _ in range(3))
    wide = np.concatenate([x * 40, [0.0, -200.0, 200.0]]).astype(F32)[-n:]
    codes = rng.integers(-128, 128, n).astype(np.int8)
    scales = rng.uniform(0, 0.1, (n + 31) // 32).astype(np.float16)
    p = native.pointer

    def run(ops: Any) -> list[np.ndarray]:
        out = [padded(n) for _ in range(9)]
        ops.rms_norm(p(out[0]), p(x), p(w), n, 1e-6)
        ops.rms_norm(p(out[1]), p(x), native.library()[0].NULL, n, 1e-6)
        out[2][:n], out[3][:n], out[4][:n] = x, x, wide
        ops.add(p(out[2]), p(y), n)
        ops.scale(p(out[3]), 1.7, n)
        ops.softcap(p(out[4]), 30.0, n)
        for activation in range(3):
            ops.gate(p(out[5 + activation]), p(wide), p(y), n, activation)
        ops.embedding_row(p(out[8]), p(codes, "int8_t *"), p(scales, "uint16_t *"), n)
        assert all(np.isnan(o[n:]).all() for o in out)
        return [o[:n] for o in out]

    got = every_level(run)
    x64, y64, w64, wide64 = (a.astype(np.float64) for a in (x, y, w, wide))
    normed = x64 / np.sqrt((x64**2).mean() + 1e-6)
    with np.errstate(over="ignore"):
        silu = wide64 / (1 + np.exp(-wide64))
    gelu_tanh = 0.5 * wide64 * (1 + np.tanh(math.sqrt(2 / math.pi) * (wide64 + 0.044715 * wide64**3)))
    gelu = 0.5 * wide64 * (1 + np.array([math.erf(v / math.sqrt(2)) for v in wide64]))
    want = [
        normed * w64,
        normed,
        x64 + y64,
        x64 * 1.7,
        30 * np.tanh(wide64 / 30),
        silu * y64,
        gelu_tanh * y64,
        gelu * y64,
        codes * np.repeat(scales, 32)[:n].astype(np.float64),
    ]
    for g, expected in zip(got, want, strict=True):
        np.testing.assert_allclose(g, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dim", [2, 6, 16, 20, 64, 96, 128])
def test_rope_turns_pairs_half_a_head_apart(dim: int) -> None:
    rng = np.random.default_rng(dim)
    head, angle = rng.normal(size=dim).astype(F32), rng.uniform(0, 6, dim // 2)
    cos, sin = np.cos(angle).astype(F32), np.sin(angle).astype(F32)

    def run(ops: Any) -> list[np.ndarray]:
        out = padded(dim)
        out[:dim] = head
        ops.rope(native.pointer(out), native.pointer(cos), native.pointer(sin), dim)
        assert np.isnan(out[dim:]).all()
        return [out[:dim]]

    a, b = head[: dim // 2], head[dim // 2 :]
    np.testing.assert_allclose(
        every_level(run)[0], np.concatenate([a * cos - b * sin, b * cos + a * sin]), rtol=1e-5, atol=1e-6
    )


class Cache:
    """One kv head's ring, filled through store_key and store_value; slots never written hold NaN."""

    def __init__(self, ops: Any, k: np.ndarray, v: np.ndarray, ring: int, first: int, last: int) -> None:
        self.ops, self.ring, self.head_dim = ops, ring, k.shape[1]
        self.keys = np.full(ring * self.head_dim, 0x7E00, dtype=np.uint16)
        self.values = self.keys.copy()
        for position in range(first, last + 1):
            ops.store_key(
                native.pointer(self.keys, "uint16_t *"), native.pointer(k[position]), self.head_dim, position % ring
            )
            ops.store_value(
                native.pointer(self.values, "uint16_t *"), native.pointer(v[position]), self.head_dim, position % ring
            )

    def attend(self, q: np.ndarray, first: int, last: int, scale: float, softcap: float) -> np.ndarray:
        ffi = native.library()[0]
        a = ffi.new(
            "tb_attention *",
            {
                "keys": native.pointer(self.keys, "uint16_t *"),
                "values": native.pointer(self.values, "uint16_t *"),
                "head_dim": self.head_dim,
                "ring": self.ring,
                "first": first,
                "last": last,
                "scale": scale,
                "softcap": softcap,
            },
        )
        out = padded(q.size)
        scores = np.full(len(q) * (last - first + 17) + 1, np.nan, dtype=F32)
        self.ops.attend(a, native.pointer(q), native.pointer(out), len(q), native.pointer(scores))
        assert np.isnan(out[q.size :]).all() and np.isnan(scores[-1])
        return out[: q.size].reshape(q.shape)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    head_dim=st.sampled_from([1, 8, 20, 64, 72, 100, 128, 256]),
    heads=st.integers(1, 9),
    first=st.integers(0, 90),
    length=st.integers(1, 150),
    softcap=st.sampled_from([0.0, 20.0]),
    extra=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_attention(head_dim: int, heads: int, first: int, length: int, softcap: float, extra: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    last = first + length - 1
    k, v = rng.normal(size=(2, last + 1, head_dim)).astype(F32)
    q = rng.normal(0, 2, size=(heads, head_dim)).astype(F32)
    scale = 1 / math.sqrt(head_dim)
    tight = (length + 7) // 8 * 8 + 8 * extra
    big = (last + 8) // 8 * 8

    def run(ops: Any) -> list[np.ndarray]:
        ring = Cache(ops, k, v, tight, first, last)
        together = ring.attend(q, first, last, scale, softcap)
        alone = np.concatenate([ring.attend(q[h : h + 1], first, last, scale, softcap) for h in range(heads)])
        unwrapped = Cache(ops, k, v, big, first, last).attend(q, first, last, scale, softcap)
        assert together.tobytes() == alone.tobytes() == unwrapped.tobytes()
        return [together]

    k64, v64 = (a[first : last + 1].astype(np.float16).astype(np.float64) for a in (k, v))
    s = q.astype(np.float64) @ k64.T * scale
    if softcap:
        s = softcap * np.tanh(s / softcap)
    p = np.exp(s - s.max(1, keepdims=True))
    np.testing.assert_allclose(every_level(run)[0], p @ v64 / p.sum(1, keepdims=True), rtol=1e-4, atol=5e-6)


def test_attention_over_a_long_context() -> None:
    rng = np.random.default_rng(11)
    n, head_dim = 3001, 64
    k, v = rng.normal(size=(2, n, head_dim)).astype(F32)
    q = rng.normal(0, 3, size=(7, head_dim)).astype(F32)
    got = every_level(lambda ops: [Cache(ops, k, v, 3008, 0, n - 1).attend(q, 0, n - 1, 0.125, 0.0)])[0]
    k64, v64 = (a.astype(np.float16).astype(np.float64) for a in (k, v))
    s = q.astype(np.float64) @ k64.T * 0.125
    p = np.exp(s - s.max(1, keepdims=True))
    np.testing.assert_allclose(got, p @ v64 / p.sum(1, keepdims=True), rtol=1e-4, atol=5e-6)


PROGRAM = r"""
#include "ops.h"
#include "sampler.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void choose(const char *level);
int has_avx2(void);
int has_avx512(void);

static void *some(size_t bytes) { return memset(malloc(bytes), 0x3c, bytes); }

static void attention(const tb_ops *ops, int32_t head_dim, int32_t n, int32_t first, int32_t last)
{
    int32_t ring = (last - first + 8) / 8 * 8;
    size_t cache = (size_t)ring * (size_t)head_dim * 2, row = (size_t)head_dim * 4;
    uint16_t *keys = some(cache), *values = some(cache);
    float *q = some(row * (size_t)n), *out = some(row * (size_t)n);
    float *scores = some((size_t)(n * (last - first + 17)) * 4);
    tb_attention a = {keys, values, head_dim, ring, first, last, 0.1f, n & 1 ? 30.0f : 0.0f, NULL, NULL, 0};
    ops->store_key(keys, q, head_dim, ring - 1);
    ops->store_value(values, q, head_dim, ring - 1);
    ops->attend(&a, q, out, n, scores);
    free(keys); free(values); free(q); free(out); free(scores);
}

static void rows(const tb_ops *ops, int32_t n)
{
    size_t bytes = (size_t)n * 4;
    float *x = some(bytes), *y = some(bytes), *tops = some((size_t)((n + 31) / 32) * 4);
    int8_t *codes = some((size_t)n);
    uint16_t *scales = some((size_t)((n + 31) / 32) * 2);
    ops->rms_norm(y, x, x, n, 1e-5f);
    ops->add(x, y, n);
    ops->scale(x, 0.5f, n);
    if (n % 2 == 0) ops->rope(x, y, y, n);
    for (int32_t activation = 0; activation < 3; activation++) ops->gate(y, x, y, n, activation);
    ops->softcap(x, 3.0f, n);
    ops->embedding_row(x, codes, scales, n);
    ops->block_max(tops, x, n);
    ops->exps(y, x, n);
    free(x); free(y); free(tops); free(codes); free(scales);
}

static void sampling(int32_t vocab)
{
    float *logits = some((size_t)vocab * 4), values[1] = {-INFINITY};
    int32_t *history = some(12), ids[1] = {vocab - 1}, token;
    char err[80];
    history[0] = history[1] = 0;
    history[2] = vocab - 1;
    for (int32_t i = 0; i < vocab; i++) logits[i] = (float)(i * 7 % 11) * 0.7f;
    for (int c = 0; c < 64; c++) {
        tb_sampling s = {c & 1 ? 0.8f : 0.0f, c & 2 ? 0.9f : 1.0f, c & 4 ? 0.05f : 0.0f, c & 8 ? 1.2f : 1.0f,
                         0.1f, 0.1f, c & 16 ? 5 : 0, -1, 1, c & 32 && vocab > 1, ids, values};
        int rc = tb_sample(logits, vocab, history, 3, &s, c, &token, err, sizeof err);
        if (rc != TB_OK || token < 0 || token >= vocab) {
            fprintf(stderr, "vocabulary %d, case %d: %d\n", (int)vocab, c, rc);
            exit(1);
        }
    }
    free(logits);
    free(history);
}

int main(void)
{
    static const char *const levels[] = {"generic", "avx2", "avx512"};
    for (int level = 0; level <= has_avx2() + (has_avx2() && has_avx512()); level++) {
        choose(levels[level]);
        const tb_ops *ops = tb_ops_get();
        for (int32_t n = 1; n <= 9; n++)
            for (int32_t head_dim = 1; head_dim <= 88; head_dim += 29)
                for (int32_t first = 0; first < 20; first += 3)
                    attention(ops, head_dim, n, first, first + first * first / 4);
        for (int32_t n = 1; n <= 70; n++) rows(ops, n);
        for (int32_t n = 1; n <= 70; n++) sampling(n);
    }
    puts("ok");
    return 0;
}
"""


def test_no_bad_accesses(tmp_path: Path) -> None:
    flags = ["-O0", *native.sanitizer(tmp_path, "address,undefined")]
    (tmp_path / "program.c").write_text(PROGRAM)
    native.compile_ops(tmp_path, tmp_path / "program", [tmp_path / "program.c"], flags, [])
    native.run(tmp_path / "program")
