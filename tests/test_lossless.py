"""The promise: the text with drafting is the text without, token for token, at any temperature and thread count."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from families import FAMILIES, VOCAB
from packed import packed_model

from twobit.runtime.model import Model
from twobit.runtime.sampling import Sampling
from twobit.runtime.session import Session, StepOptions

GREEDY = Sampling()
SAMPLED = Sampling(
    temperature=0.8,
    top_p=0.9,
    repeat_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    repeat_last_n=64,
    seed=7,
)


def run(
    model: Model, sampling: Sampling, n: int, draft: int, *, threads: int = 1, context: int = 512, prompt: int = 12
) -> tuple[list[int], int, int]:
    """(prompt and n tokens, drafted, accepted); draft -1 chooses the length by measured cost."""
    history = np.random.default_rng(3).integers(5, VOCAB, prompt).tolist()
    session = Session(model, context, threads)
    if prompt > 1:
        session.eval(history[:-1], logits=False)
    drafted = accepted = 0
    while len(history) < prompt + n:
        options = StepOptions(
            draft_max=16 if draft < 0 else draft, draft_fixed=draft >= 0, budget=prompt + n - len(history)
        )
        result = session.step(history, sampling, options)
        history += result.tokens
        drafted += result.drafted
        accepted += result.accepted
    return history, drafted, accepted


def compare(variant: str, sampling: Sampling, drafts: Sequence[int]) -> None:
    model = Model.open(packed_model(variant))
    plain, drafted, _ = run(model, sampling, 208, 0)
    assert drafted == 0
    total = 0
    for draft in drafts:
        ids, drafted, accepted = run(model, sampling, 208, draft, threads=1 + draft % 2)
        assert ids == plain, f"draft length {draft}"
        assert draft < 0 or drafted > 0
        total += accepted
    assert total > 0, "no draft was ever accepted: the test would prove little"


@pytest.mark.parametrize("variant", FAMILIES)
def test_ids_with_drafting_equal_ids_without(variant: str) -> None:
    first = FAMILIES.index(variant) % 4 + 1
    compare(variant, GREEDY, (-1, first, first + 4))
    compare(variant, SAMPLED, (first, first + 4))


@pytest.mark.full
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("variant", FAMILIES)
def test_every_draft_length(variant: str, sampling: Sampling) -> None:
    compare(variant, sampling, (-1, *range(1, 9)))


def test_seeds_differ_and_repeat() -> None:
    model = Model.open(packed_model("llama"))
    texts = [run(model, Sampling(temperature=1.0, seed=seed), 64, 4)[0] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_the_context_fills_exactly_as_without_drafting() -> None:
    model = Model.open(packed_model("llama"))
    plain = run(model, GREEDY, 5, 0, context=64, prompt=60)[0]
    assert run(model, GREEDY, 5, 8, context=64, prompt=60)[0] == plain
    assert len(plain) == 65


def test_eos_ends_a_block() -> None:
    model = Model.open(packed_model("llama"))
    plain = run(model, GREEDY, 40, 0)[0]
    stop = plain[12 + 20]
    history = plain[:12]
    session = Session(model, 256)
    session.eval(history[:-1], logits=False)
    hit = False
    while not hit:
        result = session.step(history, GREEDY, StepOptions(draft_max=6, draft_fixed=True, eos=frozenset({stop})))
        history += result.tokens
        hit = result.hit_eos
    assert history == plain[: plain.index(stop, 12) + 1]
    assert session.length == len(history) - 1
