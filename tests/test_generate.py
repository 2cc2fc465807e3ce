"""Generation: where a text ends, what comes out when, and that steps of any size give the same."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from fake_runtime import FakeOptions, FakeSession
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import byte_level

from twobit.errors import TokenizerError, UsageError
from twobit.runtime.generate import Piece, Result, StopStrings, generate
from twobit.runtime.tokenizer import Tokenizer

EOS = 2
TOKENIZER = Tokenizer(byte_level(), rows=400)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def letters(text: str) -> list[int]:
    """One token per character."""
    return [ids(c)[0] for c in text]


def run(
    text: str | Sequence[int],
    *,
    prompt: str | Sequence[int] = "hello",
    block: int = 1,
    context: int = 1000,
    end: bool = True,
    stop: Sequence[str] = (),
    max_tokens: int | None = None,
    session: FakeSession | None = None,
) -> tuple[list[Piece], Result]:
    script = [*(ids(text) if isinstance(text, str) else text), *([EOS] * end)]
    session = session or FakeSession(script, context=context, block=block)
    options: Any = FakeOptions(eos=frozenset([EOS]))
    start = ids(prompt) if isinstance(prompt, str) else prompt
    fake: Any = session
    events = list(generate(fake, TOKENIZER, start, fake, options, stop=stop, max_tokens=max_tokens))
    pieces, result = events[:-1], events[-1]
    assert isinstance(result, Result)
    assert "".join(p.text for p in pieces if isinstance(p, Piece)) == result.text
    return [p for p in pieces if isinstance(p, Piece)], result


def test_ends_with_an_end_token_that_is_not_shown() -> None:
    pieces, result = run("The answer is 42. 😸")
    assert result.text == "The answer is 42. 😸"
    assert result.finish_reason == "eos"
    assert result.token_ids == [*ids(result.text), EOS]
    assert [p.token for p in pieces] == result.token_ids
    assert result.prompt_ids == ids("hello")


@pytest.mark.parametrize("block", range(1, 9))
def test_steps_of_any_size_give_the_same(block: int) -> None:
    for stop, budget in [((), None), (("answer is",), None), (("42", "is 4"), None), ((), 3), ((), 7), (("dog",), 5)]:
        one = run("The answer is 42, 日本 😸", stop=stop, max_tokens=budget)[1]
        many = run("The answer is 42, 日本 😸", stop=stop, max_tokens=budget, block=block)[1]
        assert (many.text, many.token_ids, many.finish_reason) == (one.text, one.token_ids, one.finish_reason)


def test_statistics() -> None:
    result = run(letters("abcdefg"), block=3)[1]
    assert (result.steps, result.drafted, result.accepted) == (3, 6, 6)
    assert result.drafted_by_depth == [3, 3]
    assert result.accepted_by_depth == [3, 3]
    assert result.tokens_per_step == pytest.approx(8 / 3)
    assert (result.draft_s, result.verify_s, result.sample_s) == (0.75, 1.5, 0.375)
    data = result.to_json()
    assert data["speculation"] == {
        "steps": 3,
        "drafted": 6,
        "accepted": 6,
        "tokens_per_step": result.tokens_per_step,
        "accepted_by_depth": [3, 3],
        "drafted_by_depth": [3, 3],
        "by_kind": {"draft": {"drafted": 6, "accepted": 6}},
        "draft_passes": 3,
        "bytes_per_token": 3e9 / 8,
        "read_gb_s": pytest.approx(3 / 2.25),
    }
    assert data["timing"]["decode_tokens_per_s"] == pytest.approx(8 / result.decode_s)


def test_drafted_tokens_are_marked() -> None:
    pieces, _ = run(letters("abcdefg"), block=3)
    assert [p.from_draft for p in pieces[:6]] == [True, True, False] * 2


def test_stop_string_inside_a_block_discards_the_rest() -> None:
    tokens = ids("a b c d e f g h")
    result = run(tokens, block=8, stop=[" c"])[1]
    assert result.text == "a b"
    assert result.finish_reason == "stop"
    assert result.token_ids == tokens[: len(result.token_ids)]
    assert result.token_ids[-1] != tokens[-1]
    assert result.accepted == len(result.token_ids)


def test_stop_string_may_begin_late_and_fail() -> None:
    pieces, result = run(letters("xx##ab##stop"), stop=["##stop"], end=False, max_tokens=12)
    assert result.text == "xx##ab"
    assert [p.text for p in pieces] == ["x", "x", "", "", "##a", "b", "", "", "", "", "", ""]


def test_held_text_comes_out_at_the_end() -> None:
    pieces, result = run("abc##", stop=["##stop"])
    assert result.text == "abc##"
    assert pieces[-1] == Piece("##", None, False)
    assert result.finish_reason == "eos"


def test_unfinished_character_comes_out_at_the_end() -> None:
    tokens = ids("😸")
    assert len(tokens) > 1
    result = run(tokens[:-1], end=False, max_tokens=len(tokens) - 1)[1]
    assert set(result.text) == {"\ufffd"}
    assert result.finish_reason == "length"
    assert run(tokens[:-1], end=False, max_tokens=len(tokens) - 1, stop=["\ufffd"])[1].finish_reason == "stop"


@pytest.mark.parametrize("block", [1, 8])
def test_token_budget(block: int) -> None:
    tokens = ids("The quick brown fox jumps over the lazy dog. What is the answer?")
    for budget in (0, 1, 2, 5):
        session = FakeSession([*tokens, EOS], block=block)
        result = run("", session=session, max_tokens=budget)[1]
        assert result.token_ids == tokens[:budget]
        assert result.finish_reason == "length"
        assert all(1 <= b <= budget for b in session.budgets)


@pytest.mark.parametrize("block", [1, 8])
def test_end_token_as_the_last_of_the_budget(block: int) -> None:
    tokens = ids("ab")
    assert run(tokens, block=block, max_tokens=len(tokens) + 1)[1].finish_reason == "eos"


@pytest.mark.parametrize("block", [1, 3, 8])
def test_context_is_filled_exactly(block: int) -> None:
    prompt = ids("hello there")
    tokens = ids("The quick brown fox jumps over the lazy dog.")
    result = run(tokens, prompt=prompt, block=block, context=len(prompt) + 5)[1]
    assert result.token_ids == tokens[:5]
    assert result.finish_reason == "length"


def test_prompt_that_fits_exactly_and_one_that_does_not() -> None:
    session = FakeSession([], context=5)
    result = run("", prompt=[5] * 5, session=session)[1]
    assert (result.token_ids, result.finish_reason, result.text) == ([], "length", "")
    assert session.evaluated == [] and result.steps == 0 and result.tokens_per_step == 0.0
    with pytest.raises(UsageError, match="100 tokens, but the context holds 32"):
        run("", prompt=[5] * 100, context=32)


def test_prompts_that_cannot_be_used() -> None:
    with pytest.raises(UsageError, match="empty"):
        run("x", prompt=[])
    with pytest.raises(TokenizerError, match="id 400, but the model has 400"):
        run("x", prompt=[5, 400])
    with pytest.raises(UsageError, match="stop string"):
        run("x", stop=["a", ""])


def test_prefill_leaves_out_the_last_token_and_what_the_cache_holds() -> None:
    prompt = ids("hello there, system")
    session = FakeSession([EOS])
    result = run("", prompt=prompt, session=session)[1]
    assert session.evaluated == prompt[:-1]
    assert result.prefill_tokens == len(prompt) - 1
    session = FakeSession([EOS])
    session.length = 2
    result = run("", prompt=prompt, session=session)[1]
    assert session.evaluated == prompt[2:-1]
    assert result.prefill_tokens == len(prompt) - 3
    assert run("x", prompt=[7])[1].prefill_tokens == 0


def test_ctrl_c_inside_a_step_keeps_the_text() -> None:
    session = FakeSession(ids("The answer is 42"), slow=True, block=2)
    threading.Thread(target=lambda: (wait_for_second_step(session), os.kill(os.getpid(), signal.SIGINT))).start()
    before = signal.getsignal(signal.SIGINT)
    result = run("", session=session)[1]
    assert result.finish_reason == "interrupted"
    assert result.token_ids == ids("The answer is 42")[:2]
    assert result.text == TOKENIZER.decode(result.token_ids)
    assert signal.getsignal(signal.SIGINT) is before
    assert not session._stop.is_set()


def wait_for_second_step(session: FakeSession) -> None:
    while len(session.budgets) < 2:
        session.entered.wait(0.01)


def test_abort_from_another_thread_without_signals() -> None:
    session = FakeSession(ids("The answer is 42"), slow=True)
    results: list[Result] = []
    worker = threading.Thread(target=lambda: results.append(run("", session=session)[1]))
    worker.start()
    wait_for_second_step(session)
    session.abort()
    worker.join()
    assert results[0].finish_reason == "interrupted"


def test_errors_of_the_runtime_pass_through() -> None:
    class Failing(FakeSession):
        def step(self, history: Sequence[int], sampling: object, options: Any) -> Any:
            raise MemoryError

    with pytest.raises(MemoryError):
        run("", session=Failing([1]))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# -- stop strings --


def reference(text: str, stops: Sequence[str]) -> str:
    """Character by character: the first stop string to be complete cuts, of several the longest."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("abc", max_size=4), max_size=8),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_in_any_split(parts: list[str], stops: list[str]) -> None:
    cut = StopStrings(stops)
    pieces = [cut.push(p) for p in parts]
    assert "".join([*pieces, cut.flush()]) == reference("".join(parts), stops)
    assert (cut.found is None) == (reference("".join(parts), stops) == "".join(parts))


def test_nothing_is_held_without_need() -> None:
    cut = StopStrings(["stop", "##"])
    assert [cut.push(p) for p in ("text s", "o", " st", "art #", "1")] == ["text ", "so", " ", "start ", "#1"]
