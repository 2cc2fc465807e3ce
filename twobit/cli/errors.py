"""From an exception to what the user sees: one table of message, hint and exit code.

Exit codes: 0 done, 1 failed, 2 usage, 130 interrupted.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from twobit.cli import output
from twobit.errors import TwobitError, UsageError

EXTRAS = {
    "torch": 'pip install "twobit[quantize]"',
    "safetensors": 'pip install "twobit[quantize]"',
}
DEBUG = "TWOBIT_DEBUG"


@dataclass(frozen=True)
class Rule:
    """How exceptions of one kind are told. message None: nothing is said."""

    kind: type[BaseException]
    code: int
    message: Callable[[BaseException], str | None] = str
    hint: Callable[[BaseException], str | None] = lambda error: None


def _own_hint(error: BaseException) -> str | None:
    return getattr(error, "hint", None)


def _missing_module(error: BaseException) -> str:
    return f"the Python package {getattr(error, 'name', None) or error} is not installed"


def _extra(error: BaseException) -> str:
    name = str(getattr(error, "name", None) or "").split(".")[0]
    return EXTRAS.get(name, "install twobit again: pip install --force-reinstall twobit")


def _system(error: BaseException) -> str:
    assert isinstance(error, OSError)
    what = error.strerror or str(error) or type(error).__name__
    return f"{error.filename}: {what}" if error.filename is not None else what


RULES = (  # the first that fits counts
    Rule(UsageError, 2, hint=_own_hint),
    Rule(TwobitError, 1, hint=_own_hint),
    Rule(KeyboardInterrupt, 130, lambda error: "interrupted"),
    Rule(output.ReaderGone, 0, lambda error: None),  # it has all it wanted
    Rule(ModuleNotFoundError, 1, _missing_module, _extra),
    Rule(MemoryError, 1, lambda error: "out of memory", lambda error: "a smaller --ctx needs less"),
    Rule(OSError, 1, _system),
)


def report(error: BaseException) -> int:
    """Tell the user about `error`; returns the exit code."""
    rule = next((rule for rule in RULES if isinstance(error, rule.kind)), None)
    if os.environ.get(DEBUG):
        output.usage("".join(traceback.format_exception(error)).rstrip())
    if rule is None:
        output.error(
            f"unexpected {type(error).__name__}: {error}",
            f"this is a bug in twobit; {DEBUG}=1 shows where it happened",
        )
        return 1
    message = rule.message(error)
    if message is not None:
        output.error(message, rule.hint(error))
    if isinstance(error, output.ReaderGone):
        output.abandon_stdout()
    return rule.code
