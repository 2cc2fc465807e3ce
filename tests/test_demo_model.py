"""The promises on a real model: the one that `make demo` builds. Part of the long tests."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from twobit.runtime.model import Model
from twobit.runtime.sampling import Sampling
from twobit.runtime.session import Session, StepOptions
from twobit.runtime.tokenizer import Tokenizer

DEMO = Path(__file__).resolve().parent.parent / "build" / "demo" / "smollm2-2bit"
PROMPT = "Explain how a bicycle stays upright, then write a short poem about it."
SAMPLED = Sampling(
    temperature=0.8,
    top_p=0.9,
    repeat_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    seed=11,
)

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not DEMO.exists(), reason=f"{DEMO} is not there: run `make demo` first"),
]


@cache
def model() -> Model:
    return Model.open(DEMO)


@cache
def prompt() -> list[int]:
    tokenizer = Tokenizer.load(DEMO, config=model().config, rows=model().vocab)
    ids = tokenizer.chat_ids([{"role": "user", "content": PROMPT}])
    tokenizer.close()
    return ids


def run(sampling: Sampling, draft: int, threads: int, n: int = 208) -> list[int]:
    history = list(prompt())
    session = Session(model(), len(history) + n + 1, threads)
    session.eval(history[:-1], logits=False)
    while len(history) < len(prompt()) + n:
        left = len(prompt()) + n - len(history)
        history += session.step(history, sampling, StepOptions(draft_max=draft, draft_fixed=True, budget=left)).tokens
    return history


@cache
def plain(sampling_is_greedy: bool) -> list[int]:
    return run(Sampling() if sampling_is_greedy else SAMPLED, 0, 2)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("draft", range(1, 9))
@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
def test_ids_with_drafting_equal_ids_without(greedy: bool, draft: int, threads: int) -> None:
    assert run(Sampling() if greedy else SAMPLED, draft, threads) == plain(greedy)


@pytest.mark.parametrize("threads", [1, 2])
def test_logits_do_not_depend_on_the_batch(threads: int) -> None:
    ids = plain(True)[:128]
    whole = Session(model(), 256, 2).eval(ids, every=True)
    assert whole is not None
    for chunk in (1, 2, 7, 16, 64):
        part = Session(model(), 256, threads).eval(ids, chunk=chunk, every=True)
        assert part is not None
        assert np.array_equal(part.view(np.uint32), whole.view(np.uint32)), f"chunk {chunk}"
