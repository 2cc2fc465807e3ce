"""What decides about drafts, without a model: belief.c with a draft whose chances are given."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import cffi
import native
import numpy as np
import pytest

DRAFT, BINS, SURE = 1, 16, 7  # TB_KIND_DRAFT, TB_BINS; from this bin on the draft is sure


@functools.cache
def library() -> tuple[Any, Any]:
    """(ffi, lib) over belief.c."""
    ffi = cffi.FFI()
    ffi.cdef(native.declarations("tb.h") + native.declarations("belief.h"))
    with tempfile.TemporaryDirectory() as name:
        native.compile_c("cc", Path(name) / "belief.so", [native.CSRC / "belief.c"], ["-shared"])
        return ffi, ffi.dlopen(f"{name}/belief.so")


class Text:
    """A session's belief beside a draft: `often` comes a bin of confidence, and is right as `right` says, by bin."""

    def __init__(self, often: np.ndarray, right: np.ndarray, *, draft: float = 0.1, token: float = 0.02) -> None:
        self.ffi, self.lib = library()
        self.belief = self.ffi.new("tb_belief *")
        self.lib.tb_belief_init(self.belief)
        self.rng = np.random.default_rng(5)
        self.often, self.right, self.draft, self.token = often / often.sum(), right, draft, token
        self.full = 0

    def step(self, depth: int = 4) -> None:
        """Drafts a chain of `depth` and verifies it."""
        b, lib = self.belief, self.lib
        lib.tb_belief_choose(b)
        lib.tb_belief_rate(b)
        self.full += b.full
        right = np.sqrt(self.right) if b.full else self.right
        context, good, depth = 1, 0, depth if b.steps else 0
        for at in range(depth):
            bin = int(self.rng.choice(BINS, p=self.often))
            lib.tb_belief_learn_often(b, context, bin)
            context = int(lib.tb_belief_context(bin))
            if good == at:  # what lies behind a wrong one is not judged
                found = bool(self.rng.random() < right[bin])
                lib.tb_belief_learn(b, DRAFT, bin, found)
                good += found
        cost = self.draft * (b.dearer if b.full else 1)
        passes = self.ffi.new("tb_pass_time[]", [(1, 0, cost) for _ in range(depth)])
        lib.tb_belief_learn_step(b, passes, depth, depth + 1, 1 + self.token * depth, 0, good + 1)


def bins(*, low: float, high: float) -> np.ndarray:
    return np.array([low] * SURE + [high] * (BINS - SURE))


@pytest.mark.parametrize(
    "often,right",
    [
        (bins(low=0.02, high=1), bins(low=0.4, high=0.98)),
        (bins(low=0.2, high=1), bins(low=0.3, high=0.95)),
        (bins(low=1, high=1), bins(low=0.2, high=0.9)),
        (bins(low=1, high=0.1), bins(low=0.1, high=0.9)),
    ],
)
def test_a_chain_is_as_long_as_its_passes_would_be_asked_for(often: np.ndarray, right: np.ndarray) -> None:
    """Against many runs of the level-by-level draft under the same belief: how often it asks for a k-th pass."""
    text = Text(often, right)
    for _ in range(100):
        text.step()
    b, lib, rng = text.belief, text.lib, np.random.default_rng(6)
    rate = lib.tb_belief_rate(b)
    wanted = np.zeros(9)
    for _ in range(1500):
        context, c = 1, 1.0
        for m in range(1, 9):
            if m == 8 or (m > 1 and lib.tb_belief_worth(b, context, m, c, b.best, b.draft[1].mean) <= 0):
                break
            wanted[m] += 1 / 1500
            odds = np.array(list(b.often[context]))
            bin = int(rng.choice(BINS, p=odds / odds.sum()))
            context, c = int(lib.tb_belief_context(bin)), c * b.likely[bin]
    assert rate >= 1
    lengths = []
    for share in (0.01, 0.3, 0.6, 0.9, 1.0):
        b.chained.mean = share
        if np.abs(wanted[2:] - share).min() > 0.08:  # else it is a matter of a grid's points
            assert lib.tb_belief_chain(b, 1, 1, 1.0, 8) == 1 + (wanted[2:] > share).sum()
        lengths.append(lib.tb_belief_chain(b, 1, 1, 1.0, 8))
    assert lengths == sorted(lengths, reverse=True) and lengths[-1] == 1
    assert lib.tb_belief_chain(b, 1, 1, 1.0, 2) <= 2


def test_what_a_chained_pass_costs_is_learned() -> None:
    text = Text(bins(low=0.02, high=1), bins(low=0.4, high=0.98))
    b, lib, ffi = text.belief, text.lib, text.ffi
    for more in (0, 4) * 60:  # one pass, or five: the first with the host, four of half the price
        passes = ffi.new("tb_pass_time[]", [(1, more, 0.1 * (1 + 0.5 * more))])
        lib.tb_belief_learn_step(b, passes, 1, 2 + more, 1 + 0.02 * (1 + more), 0, 2)
    assert b.plain_s * b.draft[1].mean == pytest.approx(0.1, rel=0.1)
    assert b.chained.mean == pytest.approx(0.5, rel=0.2)
    for share, low, high in ((1.3, 1, 1.4), (0.0, 0.8, 1)):  # a chain that loses is given up, and tried again later
        for more in (0, 4 * (share > 0)) * 100:
            passes = ffi.new("tb_pass_time[]", [(1, more, 0.1 * (1 + share * more))])
            lib.tb_belief_learn_step(b, passes, 1, 2 + more, 1 + 0.02 * (1 + more), 0, 2)
        assert low < b.chained.mean < high


@pytest.mark.parametrize(
    "dearer,right,full",
    [
        (1.2, bins(low=0.2, high=0.6), True),  # worth it
        (3.0, bins(low=0.2, high=0.6), False),
        (2.0, bins(low=0.9, high=0.99), False),  # hardly better
        (1.0, bins(low=0.2, high=0.6), False),  # there are no such layers
    ],
)
def test_the_precision_is_the_one_that_pays(dearer: float, right: np.ndarray, full: bool) -> None:
    """At full precision drafts are right with the square root of the chance. The other is tried now and then."""
    text = Text(bins(low=1, high=1), right, draft=0.15)
    text.belief.dearer = dearer
    for _ in range(300):
        text.step()
    at_start, text.full = text.full, 0
    for _ in range(300):
        text.step()
    assert text.full >= 270 if full else text.full <= 30
    assert (at_start > 0) == (dearer > 1)
