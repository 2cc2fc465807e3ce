"""The promise: the text with drafting is the text without, token for token, at any temperature and thread count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from families import FAMILIES, VOCAB
from packed import packed_model

from twobit.runtime.model import Model
from twobit.runtime.sampling import Sampling
from twobit.runtime.session import Session, StepOptions, StepResult, Use

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


def generate(
    model: Model, sampling: Sampling, options: StepOptions, *, n: int = 160, threads: int = 1, repeat: bool = False
) -> tuple[list[int], list[float], list[list[tuple[int, float]]], list[StepResult]]:
    """(prompt and n tokens, their log probabilities, the likeliest tokens with theirs, the steps)."""
    prompt = np.random.default_rng(3).integers(5, VOCAB, 12).tolist() * (4 if repeat else 1)
    history, session = list(prompt), Session(model, 512, threads)
    session.sync(history[:-1])
    logprobs: list[float] = []
    tops: list[list[tuple[int, float]]] = []
    steps = []
    while len(history) < len(prompt) + n:
        step = session.step(history, sampling, replace(options, budget=len(prompt) + n - len(history), logprobs=5))
        assert len(step.tokens) == len(step.logprobs) == len(step.top_logprobs)
        assert step.accepted <= step.depth <= step.drafted
        history += step.tokens
        logprobs += step.logprobs
        tops += step.top_logprobs
        steps.append(step)
    assert session.tokens == history[:-1]
    return history, logprobs, tops, steps


@pytest.mark.parametrize("variant", FAMILIES)
def test_trees_give_the_same_tokens_and_bits(variant: str) -> None:
    """Log probabilities are compared bit for bit: a branch sees exactly what plain decoding would have shown it."""
    model = Model.open(packed_model(variant))
    branched = 0
    for sampling in (GREEDY, SAMPLED):
        ids, logprobs, tops, _ = generate(model, sampling, StepOptions(draft_max=0))
        for draft, threads in ((3, 2), (13, 1), (40, 2)):
            options = StepOptions(draft_max=draft, draft_tree=True, use=Use.ALL & ~Use.SHORT_HEAD)
            found = generate(model, sampling, options, threads=threads)
            assert found[:3] == (ids, logprobs, tops), f"tree of {draft}"
            branched += sum(step.accepted_by_kind[2] + step.accepted_by_kind[3] for step in found[3])
    assert branched > 0, "no branch but the first was ever taken: the test would prove little"


@pytest.mark.parametrize("use", [*range(8), *range(8, 32, 5), 31])
def test_no_proposer_changes_the_text(use: int) -> None:
    model = Model.open(packed_model("mistral"))
    for sampling in (GREEDY, SAMPLED):
        plain = generate(model, sampling, StepOptions(draft_max=0), repeat=True)
        for options in (
            StepOptions(draft_max=20, use=Use(use), draft_vocab=64),
            StepOptions(draft_max=20, use=Use(use), draft_vocab=64, draft_tree=True),
        ):
            found = generate(model, sampling, options, repeat=True)
            assert found[:3] == plain[:3]
            proposed = np.sum([step.drafted_by_kind for step in found[3]], axis=0)
            assert not proposed[0] or use & Use.LOOKUP
            assert not proposed[1:3].any() or use & Use.DRAFT
            assert not proposed[3] or use & Use.RECYCLED


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_short_head_gives_the_same_text(sampling: Sampling) -> None:
    for variant in ("llama", "gemma2"):
        model = Model.open(packed_model(variant))
        plain = generate(model, sampling, StepOptions(draft_max=0))
        for rows in (16, 100, 165):
            options = StepOptions(draft_max=6, draft_fixed=True, draft_vocab=rows)
            found = generate(model, sampling, options)
            assert found[:3] == plain[:3]
            assert sum(step.accepted for step in found[3]) > 0


def test_log_probabilities_are_the_models_own() -> None:
    model = Model.open(packed_model("qwen2"))
    sampling = Sampling(temperature=0.7, top_k=5, logit_bias={9: 3.0}, repeat_penalty=1.3, seed=5)
    ids, logprobs, tops, _ = generate(model, sampling, StepOptions(), n=40)
    logits = Session(model, 512, 1).eval(ids, every=True)
    assert logits is not None
    rows = logits[11:-1].astype(np.float64)
    exact = rows - np.log(np.exp(rows - rows.max(1, keepdims=True)).sum(1, keepdims=True)) - rows.max(1, keepdims=True)
    for i, (token, logprob, top) in enumerate(zip(ids[12:], logprobs, tops, strict=True)):
        assert logprob == pytest.approx(exact[i, token], abs=1e-5)
        assert [t for t, _ in top] == np.argsort(-exact[i], kind="stable")[:5].tolist()
        assert [value for _, value in top] == pytest.approx([exact[i, t] for t, _ in top], abs=1e-5)


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
