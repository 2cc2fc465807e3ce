"""Free proposals and the cost model, each on its own: what is found in a text, what is believed after what was seen."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cffi
import native
from hypothesis import given, settings
from hypothesis import strategies as st

VOCAB = 50


@functools.cache
def library() -> tuple[Any, Any]:
    ffi = cffi.FFI()
    headers = "".join(native.declarations(name) for name in ("tb.h", "belief.h", "lookup.h"))
    ffi.cdef(headers + "float tb_gumbel(uint64_t seed, int32_t position, int32_t token);")
    sources = [native.CSRC / name for name in ("lookup.c", "belief.c", "scalar.c")]
    with tempfile.TemporaryDirectory() as name:
        native.compile_c("cc", Path(name) / "lookup.so", sources, ["-shared"])
        return ffi, ffi.dlopen(f"{name}/lookup.so")


class Lookup:
    def __init__(self) -> None:
        self.ffi, self.lib = library()
        self.c = self.ffi.gc(self.ffi.new("tb_lookup *"), self.lib.tb_lookup_free)

    def find(self, text: Sequence[int]) -> tuple[int, int]:
        """(start of the continuation or -1, bin)"""
        tokens, found = self.ffi.new("int32_t[]", list(text)), self.ffi.new("int32_t *", -1)
        assert self.lib.tb_lookup_follow(self.c, tokens, len(text), VOCAB) == 0
        return self.lib.tb_lookup_find(self.c, found), found[0]


def brute(text: Sequence[int]) -> int:
    """Length of the longest earlier match of the text's end, at most 32."""
    n = len(text)
    lengths = [0]
    for end in range(1, n):
        k = 0
        while k < min(end, 32) and text[end - 1 - k] == text[n - 1 - k]:
            k += 1
        lengths.append(k)
    return max(lengths)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=80))
def test_finds_the_longest_match(text: list[int]) -> None:
    start, _ = Lookup().find(text)
    longest = brute(text)
    if longest == 0 or len(text) < 2:
        assert start == -1
    else:
        assert all(text[start - 1 - k] == text[len(text) - 1 - k] for k in range(longest))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30), min_size=1, max_size=6))
def test_a_text_that_changes_is_taken_up_anew(texts: list[list[int]]) -> None:
    """What is found never depends on the texts before, cursor aside: positions stay inside the text."""
    lookup = Lookup()
    for text in texts:
        for end in range(1, len(text) + 1):
            start, found = lookup.find(text[:end])
            assert -1 <= start < end
            assert start == -1 or 0 <= found < 16


def test_longer_matches_are_trusted_more() -> None:
    line = list(range(40))
    bins = [Lookup().find([*line, 49, *line[:k]])[1] for k in (1, 2, 3, 4, 6, 9, 14, 24, 30)]
    assert bins == [0, 1, 2, 3, 4, 5, 6, 7, 7]
    assert library()[1].tb_lookup_next_bin(0) == 1
    assert library()[1].tb_lookup_next_bin(7) == 7


def test_a_copy_goes_on_behind_a_replaced_word() -> None:
    """After "a b c d e f g" the copy says "a b c X": what follows is looked for behind d, though X was never seen."""
    source, lookup = list(range(20)), Lookup()
    text = [*source, 49, *source[:6]]
    assert lookup.find(text)[0] == 6
    start, found = lookup.find([*text, 48])
    assert (start, found) == (7, 8)
    assert lookup.find([*text, 48, 7])[0] == 8
    for strange in range(30, 37):
        text = [*text, strange]
        start, _ = lookup.find(text)
    assert start == -1, "a copy that has ended is not followed for ever"


def recycled(temperature: float, position: int = 0) -> tuple[list[int], list[int]]:
    ffi, lib = library()
    table = ffi.gc(ffi.new("tb_recycled *"), lib.tb_recycled_free)
    logits = ffi.new("float[]", [0.0] * VOCAB)
    ids = [7, 3, 9, 11]
    for rank, token in enumerate(ids):
        logits[token] = 5.0 - rank
    assert lib.tb_recycled_keep(table, VOCAB, 4, ffi.new("int32_t[]", ids), logits) == 0
    sampling = ffi.new("tb_sampling *", {"temperature": temperature, "seed": 3})
    out, bins = ffi.new("int32_t[4]"), ffi.new("int32_t[4]")
    assert lib.tb_recycled_find(table, 5, sampling, position, out, bins) == 0
    n = lib.tb_recycled_find(table, 4, sampling, position, out, bins)
    return list(out)[:n], list(bins)[:n]


def test_recycled_successors_come_in_the_samplers_order() -> None:
    assert recycled(0.0) == ([7, 3, 9, 11], [1, 5, 9, 13])
    lib = library()[1]
    for position in range(20):
        score = {t: -rank / 0.8 + lib.tb_gumbel(3, position, t) for rank, t in enumerate([7, 3, 9, 11])}
        assert recycled(0.8, position)[0] == sorted(score, key=lambda t: -score[t])


def believe() -> Any:
    ffi, lib = library()
    belief = ffi.new("tb_belief *")
    lib.tb_belief_init(belief)
    return belief


def teach(belief: Any, m: int, verify: float, passes: Sequence[tuple[int, float]] = (), tokens: int = 1) -> None:
    ffi, lib = library()
    times = ffi.new("tb_pass_time[]", [{"m": k, "seconds": s} for k, s in passes] or [{"m": 0, "seconds": 0}])
    lib.tb_belief_learn_step(belief, times, len(passes), m, verify, 0, tokens)


def test_costs_are_learned_whatever_the_speed_of_the_machine() -> None:
    """Every second step the machine is 1.7 times as slow: ratios come out all the same."""
    lib, belief = library()[1], believe()
    for step in range(400):
        speed = 0.01 * (1.7 if step % 2 else 1.0)
        if step % 4 < 2:
            teach(belief, 1, speed)
        else:
            teach(belief, 5, 1.6 * speed, [(1, 0.25 * speed)] * 4)
    assert abs(lib.tb_belief_verify(belief, 5) - 1.6) < 0.2
    assert abs(lib.tb_belief_draft(belief, 1) - 0.25) < 0.05
    assert 1.2 < lib.tb_belief_verify(belief, 3) < 1.5
    assert lib.tb_belief_verify(belief, 7) > lib.tb_belief_verify(belief, 5)


def test_an_interrupted_step_teaches_nothing_about_ratios() -> None:
    lib, belief = library()[1], believe()
    for _ in range(20):
        teach(belief, 3, 0.012, [(1, 0.003)] * 2)
    before = [lib.tb_belief_verify(belief, 3), lib.tb_belief_draft(belief, 1)]
    teach(belief, 3, 1.0, [(1, 0.003)] * 2)
    assert [lib.tb_belief_verify(belief, 3), lib.tb_belief_draft(belief, 1)] == before


def test_the_rate_is_at_least_plain_and_what_drafts_promise() -> None:
    lib, belief = library()[1], believe()
    for _ in range(60):
        teach(belief, 1, 0.01, tokens=1)
    for _ in range(60):
        teach(belief, 2, 0.0115, [(1, 0.003)], tokens=2)
        promise = lib.tb_belief_rate(belief)
    assert 1 < promise < 2
    for _ in range(60):
        teach(belief, 9, 0.02, tokens=9)
        assert lib.tb_belief_rate(belief) < 2, "a streak of lookups does not stop the draft"
    for _ in range(300):
        for confidence in range(16):
            lib.tb_belief_learn(belief, 1, confidence, False)
        lib.tb_belief_rate(belief)
    assert lib.tb_belief_rate(belief) == 1


def test_a_loss_raises_what_drafting_must_promise() -> None:
    lib, gained, lost = library()[1], believe(), believe()
    for _ in range(60):
        teach(gained, 2, 0.0115, [(1, 0.003)], tokens=2)
        teach(lost, 2, 0.0115, [(1, 0.003)], tokens=1)
    assert lib.tb_belief_rate(lost) > 1.5 * lib.tb_belief_rate(gained)


def test_a_pass_is_worth_more_where_more_may_follow() -> None:
    """At the end of the look ahead nothing follows; a dearer pass is worth less by what it costs more."""
    lib, belief = library()[1], believe()
    for _ in range(20):
        rate = lib.tb_belief_rate(belief)
    worth = [lib.tb_belief_worth(belief, 3, m, 1.0, rate, 0.3) for m in (1, 4, 7)]
    assert worth == sorted(worth, reverse=True) and worth[0] > worth[2]
    dear = lib.tb_belief_worth(belief, 3, 1, 1.0, rate, 0.5)
    assert abs(worth[0] - dear - 0.2 * rate) < 1e-9
    assert lib.tb_belief_worth(belief, 3, 1, 0.0, rate, 0.3) <= -0.3


def test_chances_follow_what_is_seen() -> None:
    lib, belief = library()[1], believe()
    for i in range(300):
        lib.tb_belief_learn(belief, 1, 3, i % 4 == 0)
    assert abs(belief.accept[1][3].mean - 0.25) < 0.05
    before = lib.tb_belief_chance(belief, 0, 7)
    for _ in range(8):
        lib.tb_belief_learn(belief, 0, 5, False)
    assert lib.tb_belief_chance(belief, 0, 7) < 0.6 * before, "a kind that fails is trusted less at once, in all bins"
    lib.tb_belief_new_text(belief)
    assert lib.tb_belief_chance(belief, 0, 7) == before
    bins = [lib.tb_belief_draft_bin(c) for c in (0.0, 0.05, 0.5, 0.72, 0.99, 1.0)]
    assert bins == sorted(bins) and bins[0] == 0 and bins[-1] == 15
