"""The sampler against a plain reference: sort everything, filter one by one, add noise, take the maximum."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import native
import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

F32 = np.float32
OK, EINVAL, ENONFINITE = 0, 1, 3


@dataclass
class Sampling:
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int = 64
    seed: int = 0
    bias: dict[int, float] = field(default_factory=dict)


@pytest.fixture(autouse=True)
def best_level() -> None:
    native.table(native.levels()[-1])


def choose(level: str) -> None:
    if level not in native.levels():
        pytest.skip(f"this processor does not run {level}")
    native.table(level)


each_level = pytest.mark.parametrize("level", ["generic", "avx2"])


class Undecided(Exception):
    """Rounding would decide: the reference has no say."""


class Failure(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


def c_sampling(s: Sampling, keep: list[Any]) -> Any:
    ffi = native.library()[0]
    ids, values = ffi.new("int32_t[]", list(s.bias)), ffi.new("float[]", list(s.bias.values()))
    keep += [ids, values]
    return ffi.new(
        "tb_sampling *",
        {
            "temperature": s.temperature,
            "top_p": s.top_p,
            "min_p": s.min_p,
            "repeat_penalty": s.repeat_penalty,
            "presence_penalty": s.presence_penalty,
            "frequency_penalty": s.frequency_penalty,
            "top_k": s.top_k,
            "repeat_last_n": s.repeat_last_n,
            "seed": s.seed,
            "n_bias": len(s.bias),
            "bias_ids": ids,
            "bias_values": values,
        },
    )


def sample(logits: np.ndarray, s: Sampling, position: int = 0, history: tuple[int, ...] = ()) -> int:
    ffi, lib = native.library()
    keep: list[Any] = []
    token, err = ffi.new("int32_t *", -1), ffi.new("char[256]")
    before = logits.tobytes()
    past = ffi.new("int32_t[]", list(history))
    code = lib.tb_sample(
        native.pointer(logits), logits.size, past, len(history), c_sampling(s, keep), position, token, err, 256
    )
    assert logits.tobytes() == before
    if code != OK:
        raise Failure(code, ffi.string(err).decode())
    return int(token[0])


def sample_with_confidence(
    logits: np.ndarray, s: Sampling, position: int, history: tuple[int, ...]
) -> tuple[int, float]:
    """Through the step's entry, with scratch memory of exactly the size asked for, behind it a guard."""
    ffi, lib = native.library()
    keep: list[Any] = []
    size = lib.tb_sample_scratch_bytes(logits.size)
    assert size % 64 == 0
    memory = np.full(size + 128, 0xA5, dtype=np.uint8)
    start = -memory.ctypes.data % 64
    token, confidence = ffi.new("int32_t *", -1), ffi.new("float *", math.nan)
    scratch = ffi.cast("void *", memory.ctypes.data + start)
    past = ffi.new("int32_t[]", list(history))
    code = lib.tb_sample_with(
        native.pointer(logits),
        logits.size,
        past,
        len(history),
        c_sampling(s, keep),
        position,
        token,
        confidence,
        scratch,
    )
    assert (memory[start + size :] == 0xA5).all() and (memory[:start] == 0xA5).all()
    if code != OK:
        raise Failure(code, "")
    return int(token[0]), float(confidence[0])


# --- the reference ---


def decided(condition: bool) -> None:
    if not condition:
        raise Undecided


def philox(counter: list[Any], key: list[int]) -> list[Any]:
    """Philox4x32-10 as in Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"; words may be arrays."""
    c, k = [np.asarray(word, dtype=np.uint64) for word in counter], list(key)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(b >> half) ^ c[1] ^ np.uint64(k[0]), b & low, (a >> half) ^ c[3] ^ np.uint64(k[1]), a & low]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def gumbel(seed: int, position: int, tokens: np.ndarray) -> np.ndarray:
    words = philox([8 * (tokens // 32) + tokens % 8, position, 0, 0], [seed & 0xFFFFFFFF, seed >> 32])
    word = np.choose(tokens // 8 % 4, np.broadcast_arrays(*words))
    v = np.minimum(((word // np.uint64(2)).astype(F32) + F32(0.5)).astype(np.float64) / 2**31, 1 - 2**-24)
    return -np.log(-np.log1p(-v))


def survivors(logits: np.ndarray, s: Sampling, history: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(token ids in order, their z, their probabilities)."""
    x = logits.copy()
    with np.errstate(over="ignore", invalid="ignore"):
        for i, value in s.bias.items():
            x[i] += F32(value)
        if s.repeat_last_n >= 0:
            history = history[len(history) - min(len(history), s.repeat_last_n) :]
        for t in set(history):
            x[t] = x[t] / F32(s.repeat_penalty) if x[t] > 0 else x[t] * F32(s.repeat_penalty)
            x[t] -= F32(history.count(t)) * F32(s.frequency_penalty) + F32(s.presence_penalty)
    if np.isnan(x).any() or np.isposinf(x).any() or not np.isfinite(x).any():
        raise Failure(ENONFINITE, "")
    ids = np.lexsort((np.arange(x.size), -x.astype(np.float64)))
    if s.temperature == 0:
        p = np.exp(x.astype(np.float64) - x.max())
        return ids[:1], np.zeros(1), p[ids[:1]] / p.sum()
    with np.errstate(over="ignore"):
        z = ((x - x.max()) / F32(s.temperature)).astype(F32)
    ids = np.lexsort((np.arange(z.size), -z.astype(np.float64)))
    if s.top_k:
        ids = ids[: s.top_k]
    e = np.exp(z[ids].astype(np.float64))
    if s.top_p < 1:
        sums, target = np.cumsum(e), float(F32(s.top_p)) * e.sum()
        off = np.abs(sums - target)
        decided(not ((off > 0) & (off < 2e-7 * e.sum())).any())
        ids = ids[: int(np.argmax(sums >= target)) + 1]
        e = e[: len(ids)]
    if s.min_p > 0:
        off = np.abs(e - float(F32(s.min_p)))
        decided(not ((off > 0) & (off < 4e-7 * s.min_p)).any())
        ids, e = ids[e >= float(F32(s.min_p))], e[e >= float(F32(s.min_p))]
    return ids, z[ids], e / e.sum()


def reference(logits: np.ndarray, s: Sampling, position: int, history: tuple[int, ...]) -> tuple[int, float]:
    ids, z, p = survivors(logits, s, history)
    if s.temperature == 0:
        return int(ids[0]), float(p[0])
    sums = z.astype(np.float64) + gumbel(s.seed, position, ids)
    best = int(np.argmax(sums))
    decided(np.sum(sums > sums[best] - 1e-4) == 1)
    return int(ids[best]), float(p[best])


# --- tests ---

NUMBERS = st.one_of(
    st.integers(-3, 3).map(float),
    st.floats(-12, 12, width=32),
    st.sampled_from([-math.inf, -3.0e38, 3.0e38, 1e30, 0.0, -0.0, 1e-40, 17.0]),
)
SAMPLING = st.builds(
    Sampling,
    temperature=st.one_of(st.sampled_from([0.0, 1e-6, 0.8, 1.0, 1.0, 1e30, 1e-38]), st.floats(0.125, 4, width=32)),
    top_k=st.sampled_from([0, 0, 1, 2, 3, 40, 10**9]),
    top_p=st.one_of(st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.0]), st.floats(0, 1, width=32)),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.3, 1.0, 1e-35]),
    repeat_penalty=st.sampled_from([1.0, 1.0, 1.25, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25]),
    repeat_last_n=st.sampled_from([64, 0, 3, -1]),
    seed=st.integers(0, 2**64 - 1),
    bias=st.dictionaries(st.integers(0, 4), st.sampled_from([5.0, -100.0, -math.inf, 0.5]), max_size=2),
)


@each_level
@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    data=st.data(),
    s=SAMPLING,
    position=st.integers(0, 2**31 - 1),
    live=st.lists(NUMBERS, min_size=1, max_size=20),
    n=st.integers(5, 150),
)
def test_equals_the_reference(
    level: str, data: st.DataObject, s: Sampling, position: int, live: list[float], n: int
) -> None:
    choose(level)
    rng = np.random.default_rng(n)
    logits = rng.choice(np.array(live, dtype=F32), n)
    history = tuple(data.draw(st.lists(st.integers(0, n - 1), max_size=12)))
    try:
        want, probability = reference(logits, s, position, history)
    except Failure as failure:
        with pytest.raises(Failure) as caught:
            sample(logits, s, position, history)
        assert caught.value.code == failure.code and caught.value.text
        return
    except Undecided:
        reject()
    assert sample(logits, s, position, history) == want
    token, confidence = sample_with_confidence(logits, s, position, history)
    assert token == want and confidence == pytest.approx(probability, rel=1e-4, abs=1e-9)


@each_level
@pytest.mark.parametrize("spread", [0.01, 1.0, 3.0])
def test_equals_the_reference_on_a_large_vocabulary(level: str, spread: float) -> None:
    choose(level)
    logits = np.random.default_rng(5).normal(0, spread, 20_011).astype(F32)
    logits[::7] = np.round(logits[::7])
    for s in [
        Sampling(top_k=40),
        Sampling(top_k=5000),
        Sampling(top_p=0.9),
        Sampling(min_p=0.02),
        Sampling(top_p=0.99, min_p=0.001),
        Sampling(top_k=300, top_p=0.7, min_p=0.01),
        Sampling(top_k=20_010),
    ]:
        s.temperature, s.seed = 1.25, 77
        ids, z, p = survivors(logits, s, ())
        for position in range(3):
            sums = z.astype(np.float64) + gumbel(s.seed, position, ids)
            best = int(np.argmax(sums))
            token, confidence = sample_with_confidence(logits, s, position, ())
            assert token == ids[best] and confidence == pytest.approx(p[best], rel=1e-3)


def test_philox_known_answers() -> None:
    # From the Random123 distribution (kat_vectors).
    assert philox([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    assert philox(pi, [0xA4093822, 0x299F31D0]) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def test_noise_is_keyed_and_equals_the_reference() -> None:
    lib = native.library()[1]
    rng = np.random.default_rng(8)
    for _ in range(20):
        seed, position, tokens = (
            int(rng.integers(2**63)) * 2 + 1,
            int(rng.integers(2**31)),
            rng.integers(2**18, size=200),
        )
        got = [lib.tb_gumbel(seed, position, int(token)) for token in tokens]
        np.testing.assert_allclose(got, gumbel(seed, position, tokens), rtol=1e-6, atol=1e-6)
    different = {lib.tb_gumbel(a, b, c) for a in (0, 1, 1 << 32) for b in (0, 1, 7) for c in (0, 1, 8, 32, 1000)}
    assert len(different) == 45


LIVE = np.array([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5], dtype=F32)
DRAWS = 20_000


def live_vocabulary() -> np.ndarray:
    logits = np.full(100, -np.inf, dtype=F32)
    logits[[3, 31, 32, 33, 64, 70, 98, 99]] = LIVE
    return logits


def chi_square(counts: np.ndarray, p: np.ndarray) -> float:
    expected = p * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


# The 99.9 % quantile of chi-square by degrees of freedom.
QUANTILE = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32, 8: 26.12, 9: 27.88, 35: 66.62}


@pytest.mark.parametrize(
    "s",
    [
        Sampling(1.0, seed=1),
        Sampling(1.0, top_p=0.9, seed=2),
        Sampling(1.0, top_k=3, seed=3),
        Sampling(1.0, min_p=0.1, seed=4),
        Sampling(0.7, seed=5),
    ],
)
def test_draws_follow_the_distribution(s: Sampling) -> None:
    logits = live_vocabulary()
    ids, _, p = survivors(logits, s, ())
    ids, p = ids[p > 0], p[p > 0]
    tokens = np.array([sample(logits, s, position) for position in range(DRAWS)])
    counts = np.array([(tokens == t).sum() for t in ids])
    assert counts.sum() == DRAWS
    assert chi_square(counts, p) < QUANTILE[len(ids) - 1]


def test_neighbouring_positions_are_independent() -> None:
    s = Sampling(1.0, top_k=6, seed=9)
    logits = live_vocabulary()
    ids, _, p = survivors(logits, s, ())
    index = {int(t): i for i, t in enumerate(ids)}
    tokens = [index[sample(logits, s, position)] for position in range(DRAWS)]
    counts = np.zeros((6, 6))
    for a, b in zip(tokens[::2], tokens[1::2], strict=True):
        counts[a, b] += 1
    assert chi_square(counts.ravel(), np.outer(p, p).ravel()) < QUANTILE[35]


def test_a_pure_function_of_its_arguments() -> None:
    logits = np.random.default_rng(10).normal(0, 2, 1000).astype(F32)
    s = Sampling(0.9, top_p=0.95, repeat_penalty=1.1, seed=123)
    first = [sample(logits, s, p, (5, 6, 7)) for p in range(50)]
    assert first == [sample(logits, s, p, (5, 6, 7)) for p in reversed(range(50))][::-1]
    assert len(set(first)) > 10
    assert first != [
        sample(logits, Sampling(0.9, top_p=0.95, repeat_penalty=1.1, seed=124), p, (5, 6, 7)) for p in range(50)
    ]


def test_levels_draw_the_same_tokens() -> None:
    logits = np.random.default_rng(12).normal(0, 2, 5003).astype(F32)
    drawn = []
    for name in native.levels():
        native.table(name)
        drawn.append(
            [
                sample_with_confidence(logits, s, p, (1, 2))
                for p in range(40)
                for s in (
                    Sampling(1.0),
                    Sampling(0.8, top_p=0.9),
                    Sampling(1.5, top_k=50),
                    Sampling(presence_penalty=1.0),
                )
            ]
        )
    assert all(d == drawn[0] for d in drawn)


def test_temperature_zero_tiny_and_set() -> None:
    logits = np.random.default_rng(13).normal(0, 3, 500).astype(F32)
    best = int(np.argmax(logits))
    for seed in (0, 1):
        assert sample(logits, Sampling(0.0, seed=seed)) == best
        assert sample(logits, Sampling(0.0, top_k=50, top_p=0.5, seed=seed)) == best
        for tiny in (1e-6, 1e-20, 1e-45):
            token, confidence = sample_with_confidence(logits, Sampling(tiny, seed=seed), 3, ())
            assert token == best and confidence == 1.0
    tokens = [[sample(logits, Sampling(1.0, top_k=50, seed=seed), p) for p in range(20)] for seed in (0, 1)]
    assert tokens[0] != tokens[1]


def test_ties_go_to_the_lower_id() -> None:
    logits = np.zeros(300, dtype=F32)
    logits[[40, 70, 200]] = 1
    assert sample(logits, Sampling()) == 40
    for s in (Sampling(1.0, top_k=1), Sampling(1.0, top_p=0.0)):
        assert {sample(logits, s, p) for p in range(50)} == {40}
    for s in (Sampling(1.0, top_k=2), Sampling(50.0, top_k=2)):
        assert {sample(logits, s, p) for p in range(50)} == {40, 70}
    assert {sample(logits, Sampling(1.0, min_p=1.0), p) for p in range(80)} == {40, 70, 200}


def test_penalties_and_bias_before_greedy() -> None:
    logits = np.array([2.0, 1.9, -1.0, -1.2], dtype=F32)
    assert sample(logits, Sampling(repeat_penalty=1.2), 0, (0,)) == 1
    assert sample(logits, Sampling(repeat_penalty=1.2, repeat_last_n=1), 0, (0, 3)) == 0
    assert sample(logits, Sampling(repeat_penalty=1.2, repeat_last_n=0), 0, (0,)) == 0
    assert sample(logits, Sampling(frequency_penalty=0.04), 0, (0, 0, 0)) == 1
    assert sample(logits, Sampling(frequency_penalty=0.04), 0, (0, 0)) == 0
    assert sample(logits, Sampling(presence_penalty=0.11), 0, (0, 0)) == 1
    assert sample(logits, Sampling(bias={2: 4.0})) == 2
    assert sample(logits, Sampling(bias={0: -math.inf, 1: -math.inf})) == 2
    negative = np.array([-1.0, -1.1], dtype=F32)
    assert sample(negative, Sampling(repeat_penalty=1.2), 0, (0,)) == 1


@each_level
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 31, 32, 64, 69])
def test_logits_that_are_not_finite(level: str, bad: float, at: int) -> None:
    choose(level)
    logits = np.zeros(70, dtype=F32)
    logits[at] = bad
    for s in (Sampling(), Sampling(1.0), Sampling(1.0, top_k=2), Sampling(repeat_penalty=1.1)):
        with pytest.raises(Failure, match="position 5") as caught:
            sample(logits, s, 5, (at,))
        assert caught.value.code == ENONFINITE
    masked = np.full(70, -np.inf, dtype=F32)
    with pytest.raises(Failure, match="masked"):
        sample(masked, Sampling(1.0))
    masked[at] = -5.0
    assert sample(masked, Sampling(1.0)) == sample(masked, Sampling()) == at


@pytest.mark.parametrize(
    "field_name, values",
    [
        ("temperature", [math.nan, -1.0, math.inf, -1e-9]),
        ("top_p", [math.nan, -0.1, 1.5, math.inf]),
        ("min_p", [math.nan, -0.1, 1.5]),
        ("top_k", [-1]),
        ("repeat_penalty", [math.nan, 0.0, -1.0, math.inf]),
        ("presence_penalty", [math.nan, math.inf]),
        ("frequency_penalty", [math.nan, -math.inf]),
        ("repeat_last_n", [-2]),
        ("bias", [{10: 1.0}, {-1: 1.0}, {0: math.nan}, {0: math.inf}]),
    ],
)
def test_arguments_are_checked(field_name: str, values: list[Any]) -> None:
    logits = np.zeros(10, dtype=F32)
    for value in values:
        with pytest.raises(Failure) as caught:
            sample(logits, Sampling(**{field_name: value}))
        assert caught.value.code == EINVAL
        assert {"bias": "logit_bias"}.get(field_name, field_name) in caught.value.text


def test_history_outside_the_vocabulary_is_refused() -> None:
    for token in (-1, 10):
        with pytest.raises(Failure, match="vocabulary of 10") as caught:
            sample(np.zeros(10, dtype=F32), Sampling(repeat_penalty=1.1), 0, (token,))
        assert caught.value.code == EINVAL


def test_at_least_one_token_survives() -> None:
    logits = np.random.default_rng(14).normal(0, 1, 200).astype(F32)
    best = int(np.argmax(logits))
    assert sample(logits, Sampling(1.0, top_k=1, top_p=0.8, min_p=1.0)) == best
    assert sample(logits, Sampling(1.0, top_p=0.0)) == best
    assert 0 <= sample(logits, Sampling(1.0, top_k=10**9)) < 200
    assert sample(np.array([-3.0], dtype=F32), Sampling(1.0, top_p=0.5)) == 0
