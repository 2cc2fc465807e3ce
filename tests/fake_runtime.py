"""A session without weights: it emits a script, in steps of any size, as the real one would."""

from __future__ import annotations

import json
import sys
import threading
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twobit.runtime.tokenizer import Tokenizer


@dataclass(frozen=True)
class FakeOptions:
    draft_max: int = 16
    draft_fixed: bool = False
    budget: int = 1 << 30
    draft_only: bool = False
    eos: frozenset[int] = field(default_factory=frozenset)
    logprobs: int | None = None


@dataclass(frozen=True)
class FakeStep:
    tokens: list[int]
    drafted: int
    accepted: int
    hit_eos: bool
    draft_s: float = 0.25
    verify_s: float = 0.5
    sample_s: float = 0.125
    draft_passes: int = 1
    chained: int = 0
    overlapped_passes: int = 0
    full: bool = False
    early: int = 0
    early_accepted: int = 0
    bytes: float = 1e9
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)

    @property
    def depth(self) -> int:
        return self.drafted

    @property
    def drafted_by_kind(self) -> list[int]:
        return [0, self.drafted, 0, 0]

    @property
    def accepted_by_kind(self) -> list[int]:
        return [0, self.accepted, 0, 0]


class FakeSession:
    """Emits `script` after the prompt, `block` tokens per step. `slow`: steps wait for `abort`."""

    def __init__(self, script: Sequence[int], *, context: int = 1000, block: int = 1, slow: bool = False) -> None:
        self.script = list(script)
        self.max_context = context
        self.block = block
        self.length = 0
        self.threads = 2
        self.evaluated: list[int] = []
        self.budgets: list[int] = []
        self.entered = threading.Event()
        self._slow = slow
        self._stop = threading.Event()
        self._start: int | None = None
        self.belief = None

    def eval(self, ids: Sequence[int], *, logits: bool = True, **options: Any) -> None:
        self.evaluated += ids
        self.length += len(ids)

    def sync(self, ids: Sequence[int]) -> int:
        rest, self._start = ids[self.length :], None
        if rest:
            self.eval(rest, logits=False)
        self.length = len(ids)
        return len(rest)

    def step(self, history: Sequence[int], sampling: object, options: Any) -> FakeStep:
        assert self.length == len(history) - 1, "the cache holds all but the last token"
        self._start = len(history) if self._start is None else self._start
        self.budgets.append(options.budget)
        self.entered.set()
        if self._stop.wait(30 if self._slow and len(self.budgets) > 1 else 0):
            raise KeyboardInterrupt
        at = len(history) - self._start
        room = min(options.budget, self.max_context - len(history), self.block)
        tokens = self.script[at : at + room]
        for i, token in enumerate(tokens):
            if token in options.eos:
                tokens = tokens[: i + 1]
        assert tokens, "the script is over"
        self.length += len(tokens)
        top = options.logprobs
        probabilities = {
            "logprobs": [] if top is None else [-0.5] * len(tokens),
            "top_logprobs": [[(t, -0.5)] * top for t in tokens] if top else [],
        }
        accepted = min(len(tokens), self.block - 1)
        return FakeStep(tokens, self.block - 1, accepted, tokens[-1] in options.eos, **probabilities)

    def abort(self, on: bool = True) -> None:
        (self._stop.set if on else self._stop.clear)()


def install(answer: str, *, block: int = 3, context: int = 4096, slow: bool = False) -> list[dict[str, Any]]:
    """Put stand-ins for the modules that need the C extension, so that the command line runs without a model.

    Every session answers `answer` and its end token. Returns a list that gets one entry per session: what the command
    made of its options.
    """
    made: list[dict[str, Any]] = []

    @dataclass(frozen=True)
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
        logit_bias: dict[int, float] = field(default_factory=dict)

    class Model:
        level, vocab, placed = "generic", 600, None
        architecture = types.SimpleNamespace(max_context=context)

        def __init__(self, path: Path) -> None:
            self.path = path
            self.config = json.loads((path / "config.json").read_text())

        open = classmethod(lambda cls, path, draft_only=False: cls(path))

    class Session(FakeSession):
        def __init__(self, model: Model, max_context: int, threads: int | None = None) -> None:
            tokenizer = Tokenizer.load(model.path)
            self.eos_set = tokenizer.eos_ids
            script = tokenizer.encode(answer) + ([min(self.eos_set)] if self.eos_set else [])
            tokenizer.close()
            super().__init__(script, context=max_context, block=block, slow=slow)
            self.threads = threads or 2
            made.append({"session": self, "context": max_context, "threads": threads})

        def step(self, history: Sequence[int], sampling: object, options: Any) -> FakeStep:
            made[-1] |= {"sampling": sampling, "options": options, "prompt": made[-1].get("prompt", list(history))}
            return super().step(history, sampling, options)

    for name, content in {
        "model": {"Model": Model},
        "session": {"Session": Session, "StepOptions": FakeOptions},
        "sampling": {"Sampling": Sampling},
    }.items():
        module = types.ModuleType(f"twobit.runtime.{name}")
        module.__dict__.update(content)
        sys.modules[module.__name__] = module
    return made


if __name__ == "__main__":  # python fake_runtime.py ANSWER-AS-JSON slow|fast ARGS: the command line
    from twobit.cli.main import main

    install(json.loads(sys.argv[1]), slow=sys.argv[2] == "slow")
    sys.exit(main(sys.argv[3:]))
