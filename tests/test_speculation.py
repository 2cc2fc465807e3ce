"""Decisions about drafting under given costs: repeatable, and right where there is no doubt."""

from __future__ import annotations

import numpy as np
import pytest
from families import VOCAB
from packed import packed_model

from twobit.errors import UsageError
from twobit.runtime.model import Model
from twobit.runtime.sampling import Sampling
from twobit.runtime.session import Session, StepOptions, StepResult, Use

TOKENS = 160


def text(draft: list[float], verify: list[float], use: Use = Use.ALL, temperature: float = 0.0) -> list[StepResult]:
    """The steps that emit TOKENS tokens with these costs, and the session's account checked against them."""
    session = Session(Model.open(packed_model("llama")), 512, 1)
    session.pin_costs(draft, verify)
    history = np.random.default_rng(3).integers(5, VOCAB, 12).tolist()
    session.sync(history[:-1])
    steps = []
    while (left := 12 + TOKENS - len(history)) > 0:
        options = StepOptions(budget=left, use=use)
        steps.append(session.step(history, Sampling(temperature=temperature, seed=5), options))
        history += steps[-1].tokens
    if use == Use.DRAFT:  # chains, a pass for each token
        cost = sum(verify_cost(verify, 1 + s.drafted) + draft[0] * s.draft_passes for s in steps)
        assert session.belief.spent == pytest.approx(cost)
    return steps


def verify_cost(verify: list[float], m: int) -> float:
    beyond = max(0, m - len(verify))
    return verify[min(m, len(verify)) - 1] + beyond * (verify[-1] - verify[-2])


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_decisions_depend_on_the_text_alone(temperature: float) -> None:
    costs = ([0.3, 0.36], [1.0, 1.1, 1.2])
    first, second = (text(*costs, temperature=temperature) for _ in range(2))
    shape = [(s.tokens, s.drafted, s.draft_passes, s.draft_tokens) for s in first]
    assert shape == [(s.tokens, s.drafted, s.draft_passes, s.draft_tokens) for s in second]


def test_drafts_as_dear_as_plain_steps_are_hardly_asked_for() -> None:
    steps = text([1.0, 1.5], [1.0, 1.5], use=Use.DRAFT)
    assert sum(s.draft_passes for s in steps) <= 6  # once to learn, then looks after 16, 32, 64, ... steps


def test_drafts_for_nothing_are_asked_for() -> None:
    steps = text([0.001, 0.001], [1.0, 1.001], use=Use.DRAFT)
    assert sum(s.draft_passes > 0 for s in steps) >= len(steps) - 2  # the last has no room


@pytest.mark.parametrize(("prompt", "plain"), [(40, 0), (9, 1)])
def test_the_draft_is_tried_as_soon_as_costs_can_be_told_apart(prompt: int, plain: int) -> None:
    """At once behind a prompt long enough to be timed, after a plain step behind a short one."""
    session = Session(Model.open(packed_model("llama")), 512, 1)
    history = np.random.default_rng(3).integers(5, VOCAB, prompt).tolist()
    session.sync(history[:-1])
    passes = []
    for _ in range(2):
        step = session.step(history, Sampling(), StepOptions(budget=50, use=Use.DRAFT))
        passes.append(step.draft_passes)
        history += step.tokens
    assert [n > 0 for n in passes[: plain + 1]] == [False] * plain + [True]


@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize("use", [Use.ALL, Use.DRAFT, Use.LOOKUP | Use.RECYCLED])
def test_what_trying_costs_is_bounded(use: Use, temperature: float) -> None:
    """Whatever the proposals are worth here: against plain decoding at most a few percent are lost."""
    draft, verify = [0.45, 0.6], [1.0, 1.2, 1.45, 1.7]
    session = Session(Model.open(packed_model("llama")), 512, 1)
    session.pin_costs(draft, verify)
    history = np.random.default_rng(4).integers(5, VOCAB, 12).tolist()
    session.sync(history[:-1])
    while (left := 12 + TOKENS - len(history)) > 0:
        options = StepOptions(budget=left, use=use)
        history += session.step(history, Sampling(temperature=temperature, seed=6), options).tokens
    assert session.belief.spent < 1.04 * TOKENS


def test_costs_that_are_none_are_refused() -> None:
    session = Session(Model.open(packed_model("llama")), 64, 1)
    for draft, verify in (([0.1], [1.0, 1.1]), ([0.1, 0.2], [1.0]), ([0.0, 0.1], [1.0, 1.1])):
        with pytest.raises(UsageError, match="costs of passes"):
            session.pin_costs(draft, verify)
