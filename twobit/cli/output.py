"""The only place that prints. Text and results go to stdout, everything else to stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence

from twobit.errors import TwobitError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TextIO

_RED, _YELLOW, _DIM, _PLAIN = "\033[31m", "\033[33m", "\033[2m", "\033[0m"


class ReaderGone(Exception):
    """Whoever read stdout went away, as in `| head`. Not an OSError: those are failures."""


def prepare() -> None:
    """UTF-8 on both streams whatever the locale says; what has no UTF-8 form (lone surrogates) becomes "?"."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="replace")


def text(piece: str) -> None:
    """Generated text to stdout, shown at once."""
    if sys.stdout is None:
        raise TwobitError("stdout is closed")
    try:
        sys.stdout.write(piece)
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise ReaderGone from error
    except OSError as error:
        raise TwobitError(f"stdout cannot be written: {error.strerror or error}") from error


def dim_text(piece: str) -> str:
    """`piece` of an answer, dimmed where stdout is a terminal with colours."""
    return f"{_DIM}{piece}{_PLAIN}" if sys.stdout is not None and _colour(sys.stdout) else piece


def line(content: str = "") -> None:
    """A line of a result to stdout."""
    text(content + "\n")


def end_text(written: str) -> None:
    """After generated text: what follows starts on a new line. To a file or pipe nothing is added."""
    if sys.stdout is None or not written or written.endswith("\n"):
        return
    if sys.stdout.isatty():
        text("\n")
    else:
        _err("")


def result(data: Any) -> None:
    """One JSON object to stdout."""
    import json

    line(json.dumps(data, ensure_ascii=False, allow_nan=False, indent=2))


def table(rows: Iterable[Sequence[str]]) -> None:
    """Rows of cells to stdout, columns aligned: of two columns both left, of more all but the first right."""
    cells = [list(row) for row in rows]
    widths = [max((len(row[i]) for row in cells if i < len(row)), default=0) for i in range(max(map(len, cells)))]
    for row in cells:
        rest = (c.rjust(w) if len(widths) > 2 else c for c, w in zip(row[1:], widths[1:], strict=False))
        line("  ".join([row[0].ljust(widths[0]), *rest]).rstrip())


def note(message: str) -> None:
    """A line that informs, to stderr."""
    _err(_paint(_DIM, clean(message)))


def warn(message: str) -> None:
    """A warning, to stderr."""
    _err(_paint(_YELLOW, "warning: ") + clean(message))


def error(message: str, hint: str | None = None) -> None:
    """What went wrong and what to do next, to stderr."""
    _err(_paint(_RED, "error: ") + clean(message))
    if hint:
        _err("  " + clean(hint))


def usage(content: str) -> None:
    """Help that goes with a usage error, to stderr."""
    _err(content)


def abandon_stdout() -> None:
    """After the reader of a pipe went away: nothing that is still buffered may raise again at exit."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    except (OSError, ValueError, AttributeError):  # not a real file (a test's), or closed already
        pass


def clean(message: str) -> str:
    """A message on one line: names out of a stranger's files must not steer the terminal."""
    return "".join(c if c.isprintable() or c == " " else c.encode("unicode_escape").decode() for c in message)


def _colour(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _paint(colour: str, content: str) -> str:
    return f"{colour}{content}{_PLAIN}" if sys.stderr is not None and _colour(sys.stderr) else content


def _err(content: str) -> None:
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(content + "\n")
        sys.stderr.flush()
    except OSError:  # nobody is left to tell
        pass
