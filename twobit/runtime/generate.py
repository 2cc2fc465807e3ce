"""Generation as a stream of events: one `Piece` per token, then one `Result`.

Everything that ends a text is applied token by token in order, also inside a block of accepted drafts, so that the
outcome does not depend on how tokens came in steps: end tokens, stop strings, the token budget, the end of the context.
"""

from __future__ import annotations

import signal
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from twobit.errors import UsageError

if TYPE_CHECKING:
    from twobit.runtime.sampling import Sampling
    from twobit.runtime.session import Belief, Session, StepOptions, StepResult
    from twobit.runtime.tokenizer import Tokenizer

T = TypeVar("T")
KINDS = ("lookup", "draft", "sibling", "recycled")
"""Kinds of proposals, in the order of the C runtime: the text itself, the 2-bit model's first choice, its others, what
the full model found likely after the same token before."""


@dataclass(frozen=True)
class Piece:
    """What one token brought: `text` that is now certain, often empty while characters or stop strings are open.

    token None: text held back until the end. from_draft: it was proposed, and the full model agreed.
    """

    text: str
    token: int | None
    from_draft: bool


@dataclass(frozen=True)
class Result:
    """The outcome, after the last piece.

    text: all pieces joined; an end token and a stop string are not part of it. token_ids: every token emitted, the end
    token and those that spell the stop string included. finish_reason: "eos", "stop", "length" (token budget or context
    used up) or "interrupted". Times in seconds; `prefill_tokens` were evaluated before the first step. accepted counts
    the drafted tokens among token_ids; by depth: how many steps drafted / accepted a first, second, ... token; by kind
    of proposal: drafted and accepted tokens. chained: of draft_passes, those that a device started without the host;
    overlapped: passes that drafted while the CPU verified, and of drafted and of accepted tokens those that came from
    them; full_steps: steps that drafted at full precision where the residual is in the GPU's memory. weight_bytes: read
    while decoding. logprobs: per token of token_ids its log probability under the model alone, and top_logprobs the
    likeliest tokens with theirs; empty unless asked
    for.
    """

    text: str
    token_ids: list[int]
    prompt_ids: list[int]
    finish_reason: str
    prefill_tokens: int
    prefill_s: float
    decode_s: float
    draft_s: float
    verify_s: float
    sample_s: float
    steps: int
    drafted: int
    accepted: int
    drafted_by_depth: list[int]
    accepted_by_depth: list[int]
    by_kind: dict[str, tuple[int, int]] = field(default_factory=dict)
    draft_passes: int = 0
    chained: int = 0
    overlapped: tuple[int, int, int] = (0, 0, 0)
    full_steps: int = 0
    weight_bytes: float = 0.0
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    belief: Belief | None = None

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens emitted per second of decoding."""
        return len(self.token_ids) / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens evaluated per second."""
        return self.prefill_tokens / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens emitted per step: 1 without drafting."""
        return len(self.token_ids) / self.steps if self.steps else 0.0

    @property
    def bytes_per_token(self) -> float:
        """Bytes of weights read per emitted token."""
        return self.weight_bytes / len(self.token_ids) if self.token_ids else 0.0

    @property
    def read_gb_s(self) -> float:
        """Gigabytes of weights read per second of drafting and verifying."""
        seconds = self.draft_s + self.verify_s
        return self.weight_bytes / seconds * 1e-9 if seconds > 0 else 0.0

    def _logprobs_json(self) -> dict[str, Any]:
        if not self.logprobs:
            return {}
        tops = self.top_logprobs or [[] for _ in self.logprobs]
        return {
            "logprobs": [
                {
                    "token_id": token,
                    "logprob": logprob,
                    "top": [{"token_id": other, "logprob": value} for other, value in top],
                }
                for token, logprob, top in zip(self.token_ids, self.logprobs, tops, strict=True)
            ]
        }

    def _device_json(self) -> dict[str, Any]:
        """What only a device brings, where it did."""
        found: dict[str, Any] = {"chained": self.chained} if self.chained else {}
        if self.overlapped[0]:
            found["overlapped"] = dict(zip(("passes", "drafted", "accepted"), self.overlapped, strict=True))
        if self.full_steps:
            found["full_precision_steps"] = self.full_steps
        return found

    def _belief_json(self) -> dict[str, Any]:
        if self.belief is None:
            return {}
        return {
            "belief": {
                "plain_s": self.belief.plain_s,
                "rate": self.belief.rate,
                "draft": self.belief.draft,
                "verify": self.belief.verify,
                "draft_head_rows": self.belief.head_rows,
            }
        }

    def to_json(self) -> dict[str, Any]:
        """The share of `twobit run --json` that generation knows."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "prompt_tokens": len(self.prompt_ids),
            "finish_reason": self.finish_reason,
            "timing": {
                "prefill_s": self.prefill_s,
                "prefill_tokens_per_s": self.prefill_tokens_per_s,
                "decode_s": self.decode_s,
                "decode_tokens_per_s": self.decode_tokens_per_s,
                "draft_s": self.draft_s,
                "verify_s": self.verify_s,
                "sample_s": self.sample_s,
            },
            "speculation": {
                "steps": self.steps,
                "drafted": self.drafted,
                "accepted": self.accepted,
                "tokens_per_step": self.tokens_per_step,
                "accepted_by_depth": self.accepted_by_depth,
                "drafted_by_depth": self.drafted_by_depth,
                "by_kind": {kind: {"drafted": d, "accepted": a} for kind, (d, a) in self.by_kind.items()},
                "draft_passes": self.draft_passes,
                **self._device_json(),
                "bytes_per_token": self.bytes_per_token,
                "read_gb_s": self.read_gb_s,
                **self._belief_json(),
            },
            **self._logprobs_json(),
        }


class StopStrings:
    """Cuts a stream of text before the first stop string, however the text is split.

    `push` returns text that no stop string can reach any more; what may be the beginning of one is held. Of several
    the one that is complete first counts, and of those the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise UsageError("a stop string is empty")
        self._stops = tuple(dict.fromkeys(stops))
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Add text; returns what is certain. Nothing after a stop string comes out."""
        if self.found is not None:
            return ""
        text = self._held + text
        ends = [(text.find(s) + len(s), text.find(s), s) for s in self._stops if s in text]
        if ends:
            _, start, self.found = min(ends)
            self._held = ""
            return text[:start]
        keep = next(
            (k for k in range(min(self._longest - 1, len(text)), 0, -1) if self._may_start(text[-k:])),
            0,
        )
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What is still held, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _may_start(self, tail: str) -> bool:
        return any(s.startswith(tail) for s in self._stops)


@dataclass
class _Counts:
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    sample_s: float = 0.0
    decode_s: float = 0.0
    drafted_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)

    draft_passes: int = 0
    chained: int = 0
    overlapped: tuple[int, int, int] = (0, 0, 0)
    full_steps: int = 0
    weight_bytes: float = 0.0
    by_kind: dict[str, tuple[int, int]] = field(default_factory=dict)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)

    def add(self, step: StepResult, used: int) -> None:
        """A step of which `used` tokens count."""
        accepted = min(used, step.accepted)
        self.steps += 1
        self.draft_s += step.draft_s
        self.verify_s += step.verify_s
        self.sample_s += step.sample_s
        self.drafted += step.drafted
        self.accepted += accepted
        self.draft_passes += step.draft_passes
        self.chained += step.chained
        self.full_steps += step.full
        passes, early, good = self.overlapped
        self.overlapped = (
            passes + step.overlapped_passes,
            early + step.early,
            good + min(used, step.early_accepted),
        )
        self.weight_bytes += step.bytes
        self.logprobs += step.logprobs[:used]
        self.top_logprobs += step.top_logprobs[:used]
        for kind, drafted, good in zip(KINDS, step.drafted_by_kind, step.accepted_by_kind, strict=True):
            before = self.by_kind.get(kind, (0, 0))
            if drafted or kind in self.by_kind:
                self.by_kind[kind] = (before[0] + drafted, before[1] + good)
        for counts, n in ((self.drafted_by_depth, step.depth), (self.accepted_by_depth, accepted)):
            counts.extend([0] * (n - len(counts)))
            for depth in range(n):
                counts[depth] += 1


def generate(
    session: Session,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    sampling: Sampling,
    options: StepOptions,
    *,
    stop: Sequence[str] = (),
    max_tokens: int | None = None,
) -> Iterator[Piece | Result]:
    """Continue `ids` until an end token (`options.eos`), a stop string, `max_tokens` or the end of the context.

    What the session's cache shares with `ids` from the start is not evaluated again. Ctrl-C stops a step
    that is under way: the text so far comes out, and the Result says "interrupted".

    Raises UsageError where `ids` is empty or does not fit the context, TokenizerError where the model has no row for
    one, RuntimeFailure where the runtime stops.
    """
    prompt, context = len(ids), session.max_context
    if not prompt:
        raise UsageError(
            "the prompt is empty, and this model has no token to begin a text with", "give some text as PROMPT"
        )
    if prompt > context:
        raise UsageError(
            f"the prompt has {prompt} tokens, but the context holds {context}",
            "shorten the prompt, or raise --ctx where the model allows it",
        )
    tokenizer.check_ids(ids)
    history = array("i", ids)
    room = context - prompt
    left = room if max_tokens is None else min(max_tokens, room)

    stream, stops, counts = tokenizer.stream(), StopStrings(stop), _Counts()
    texts: list[str] = []
    reason = None if left > 0 else "length"
    prefilled, prefill_s = 0, 0.0
    with _Interrupts(session) as interrupts:
        try:
            if reason is None:
                start = time.perf_counter()
                prefilled = interrupts.call(partial(session.sync, history[:-1]))
                prefill_s = time.perf_counter() - start if prefilled else 0.0
            while reason is None:
                start = time.perf_counter()
                step = interrupts.call(partial(session.step, history, sampling, replace(options, budget=left)))
                counts.decode_s += time.perf_counter() - start
                used = 0
                for token in step.tokens:
                    drafted = used < step.accepted
                    used += 1
                    left -= 1
                    history.append(token)
                    if token in options.eos:
                        reason, text = "eos", ""
                    else:
                        text = stops.push(stream.push(token))
                        if stops.found is not None:
                            reason = "stop"
                        elif left == 0:
                            reason = "length"
                    texts.append(text)
                    yield Piece(text, token, drafted)
                    if reason is not None:
                        break
                counts.add(step, used)
        except KeyboardInterrupt:
            reason = "interrupted"
    rest = stops.push(stream.flush())
    if stops.found is not None:
        reason = "stop"
    rest += stops.flush()
    if rest:
        texts.append(rest)
        yield Piece(rest, None, False)
    yield Result(
        text="".join(texts),
        token_ids=history[prompt:].tolist(),
        prompt_ids=history[:prompt].tolist(),
        finish_reason=reason or "length",
        prefill_tokens=prefilled,
        prefill_s=prefill_s,
        decode_s=counts.decode_s,
        draft_s=counts.draft_s,
        verify_s=counts.verify_s,
        sample_s=counts.sample_s,
        steps=counts.steps,
        drafted=counts.drafted,
        accepted=counts.accepted,
        drafted_by_depth=counts.drafted_by_depth,
        accepted_by_depth=counts.accepted_by_depth,
        by_kind=counts.by_kind,
        draft_passes=counts.draft_passes,
        chained=counts.chained,
        overlapped=counts.overlapped,
        full_steps=counts.full_steps,
        weight_bytes=counts.weight_bytes,
        logprobs=counts.logprobs,
        top_logprobs=counts.top_logprobs,
        belief=session.belief,
    )


class _Interrupts:
    """Lets Ctrl-C stop a call into C.

    Python runs signal handlers on the main thread only, between its own instructions: while that thread is inside C,
    Ctrl-C waits. So calls from the main thread run on a helper thread while the main thread waits for them; the handler
    then runs at once and sets the abort flag that C polls. A second Ctrl-C raises KeyboardInterrupt as usual.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._pool: ThreadPoolExecutor | None = None
        self._previous: Any = None

    def __enter__(self) -> _Interrupts:
        on_main = threading.current_thread() is threading.main_thread()
        if on_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._pool = ThreadPoolExecutor(1, "twobit-step")
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._pool is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._pool.shutdown()
        self._session.abort(False)

    def call(self, function: Callable[[], T]) -> T:
        """`function()`, interruptible; KeyboardInterrupt where the session was told to stop."""
        if self._pool is None:
            return function()
        future: Future[T] = self._pool.submit(function)
        while not wait([future], timeout=0.1).done:  # without a timeout, Windows would not run the handler
            pass
        return future.result()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, self._previous)
        self._session.abort()
