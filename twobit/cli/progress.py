"""Progress of long work, on stderr."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from twobit.cli import output
from twobit.progress import Progress

if TYPE_CHECKING:
    from tqdm import tqdm


class Bars(Progress):
    """A bar per stage on stderr where that is a terminal, and lines above it."""

    def __init__(self, quiet: bool, unit: str = "") -> None:
        self._quiet = quiet
        self._unit = unit
        self._bar: tqdm[Any] | None = None
        self._shown = not quiet and sys.stderr is not None and sys.stderr.isatty()

    def stage(self, name: str, total: int) -> None:
        self.close()
        if self._shown:
            from tqdm import tqdm

            form = "{desc} {percentage:3.0f}% {bar} {elapsed}, {remaining} left" + (
                ", {rate_fmt}" if self._unit else ""
            )
            scale = {"unit": self._unit, "unit_scale": True} if self._unit else {}
            self._bar = tqdm(total=total, desc=name, file=sys.stderr, leave=False, bar_format=form, **scale)

    def advance(self, steps: int) -> None:
        if self._bar is not None:
            self._bar.update(steps)

    def line(self, text: str) -> None:
        if not self._quiet:
            self._above(output.note, text)

    def warning(self, text: str) -> None:
        self._above(output.warn, text)

    def _above(self, show: Any, text: str) -> None:
        if self._bar is not None:
            self._bar.clear()
        show(text)
        if self._bar is not None:
            self._bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def quiet_libraries(quiet: bool) -> None:
    """huggingface_hub draws bars of its own for transfers: not with --json, nor where stderr is no terminal."""
    if quiet or sys.stderr is None or not sys.stderr.isatty():
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
