"""A conversation: messages, the session that has evaluated them, and answers as a stream of events.

The prompt of a turn is what the model's chat template makes of all messages. Of it only what is new is evaluated: the
session keeps the common prefix, and an answer stays the tokens that the model emitted where they spell the same text
as the template's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twobit.errors import TwobitError, UsageError
from twobit.runtime.generate import Piece, Result, generate

if TYPE_CHECKING:
    from twobit.runtime.sampling import Sampling
    from twobit.runtime.session import Session, StepOptions
    from twobit.runtime.tokenizer import Tokenizer

THINK, THOUGHT = "<think>", "</think>"
_MOST = 64 << 20  # bytes of a saved conversation
_CACHE = ".cache"  # beside a saved conversation: what the session had evaluated


class Conversation:
    """messages: what was said so far, {"role", "content"} each, a system message first where there is one."""

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer,
        sampling: Sampling,
        step: StepOptions,
        *,
        system: str | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self.session, self.tokenizer = session, tokenizer
        self.sampling, self.step, self.max_tokens = sampling, step, max_tokens
        self.messages: list[dict[str, str]] = []
        self.last: Result | None = None
        self._ids: list[int] = []  # prompt and answer of the last turn
        self.set_system(system)

    @property
    def system(self) -> str | None:
        """The system message."""
        return self.messages[0]["content"] if self.messages and self.messages[0]["role"] == "system" else None

    def set_system(self, text: str | None) -> None:
        """Replace the system message; None or "" leaves none."""
        rest = self.messages[1:] if self.system is not None else self.messages
        self.messages = [*([{"role": "system", "content": text}] if text else []), *rest]

    def clear(self) -> None:
        """Forget everything but the system message."""
        self.messages = self.messages[:1] if self.system is not None else []
        self._ids, self.last = [], None

    def reply(self, text: str) -> Iterator[Piece | Result]:
        """Say `text` and stream the answer; the first piece may be an opened `<think>` of the template.

        Where it fails, the conversation is as before. An answer that was interrupted stays, as far as it came.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        rendered = self.tokenizer.chat_text(asked).rstrip()
        opened = THINK + "\n" if rendered.endswith(THINK) else ""
        ids = continued(self.tokenizer, self._ids, self.tokenizer.chat_ids(asked))
        if opened:
            yield Piece(opened, None, False)
        for event in generate(self.session, self.tokenizer, ids, self.sampling, self.step, max_tokens=self.max_tokens):
            if isinstance(event, Result):
                self.messages = [*asked, {"role": "assistant", "content": opened + event.text}]
                self._ids, self.last = [*event.prompt_ids, *event.token_ids], event
            yield event

    def save(self, path: Path) -> None:
        """Write the messages as JSON to `path`, and beside it what was evaluated, for `load` to use."""
        data = json.dumps({"twobit_conversation": 1, "messages": self.messages, "ids": self._ids}, ensure_ascii=False)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            part.write_text(data + "\n", encoding="utf-8")
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
        self.session.save(path.with_name(path.name + _CACHE))

    def load(self, path: Path) -> bool:
        """Replace the conversation by a saved one; returns whether what it had evaluated could be used too.

        Raises UsageError where the file is no saved conversation; nothing has changed then.
        """
        (self.messages, ids), self.last = _read(path), None
        rows = self.session.model.vocab
        self._ids = ids if all(0 <= i < rows for i in ids) else []
        try:
            self.session.load(path.with_name(path.name + _CACHE))
        except (TwobitError, OSError):  # of another model, or not there: it is evaluated again
            return False
        return True


def _read(path: Path) -> tuple[list[dict[str, str]], list[int]]:
    """Messages of a saved conversation, and the tokens of its last turn."""
    hint = "/save writes such a file"
    with open(path, "rb") as file:
        data = file.read(_MOST + 1)
    try:
        saved = json.loads(data.decode("utf-8")) if len(data) <= _MOST else None
    except (ValueError, RecursionError):
        saved = None
    messages = saved.get("messages") if isinstance(saved, dict) and saved.get("twobit_conversation") == 1 else None
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise UsageError(f"{path} is not a saved conversation", hint)
    ids = saved.get("ids") if isinstance(saved, dict) else None
    known = isinstance(ids, list) and all(type(i) is int for i in ids)
    return [{"role": m["role"], "content": m["content"]} for m in messages], ids if known and ids else []


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and message.get("role") in ("system", "user", "assistant")
        and isinstance(message.get("content"), str)
    )


def continued(tokenizer: Tokenizer, old: Sequence[int], new: Sequence[int]) -> list[int]:
    """`new`, its beginning replaced by `old` where that spells the same text in other tokens.

    A model's own answer need not be split as the tokenizer would split its text; seen by the model it is what it said.
    """
    new = list(new)
    if not old or new[: len(old)] == list(old):
        return new
    text = tokenizer.spell(old)
    low, high = 0, len(new)
    while low < high:  # the shortest beginning of `new` that is as long as the text
        middle = (low + high) // 2
        if len(tokenizer.spell(new[:middle])) < len(text):
            low = middle + 1
        else:
            high = middle
    made = [*old, *new[low:]]
    return made if tokenizer.spell(new[:low]) == text and tokenizer.spell(made) == tokenizer.spell(new) else new


class Thoughts:
    """Tells a model's reasoning, between `<think>` and `</think>`, from its answer, in text that comes in pieces."""

    def __init__(self) -> None:
        self.inside = False
        self._held = ""

    def push(self, text: str, last: bool = False) -> list[tuple[str, bool]]:
        """(text, whether it is reasoning) of what is certain; what may be the beginning of a tag waits until `last`."""
        text, out = self._held + text, []
        while (at := text.find(tag := THOUGHT if self.inside else THINK)) >= 0:
            end = at + len(tag) if self.inside else at  # both tags belong to the reasoning
            out.append((text[:end], self.inside))
            text, self.inside = text[end:], not self.inside
        keep = 0 if last else next((k for k in range(len(tag) - 1, 0, -1) if text.endswith(tag[:k])), 0)
        self._held = text[len(text) - keep :]
        out.append((text[: len(text) - keep], self.inside))
        return [(piece, inside) for piece, inside in out if piece]
