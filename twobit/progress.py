"""What long work tells while it runs. The command line shows it; the work itself never prints."""

from __future__ import annotations


class Progress:
    """Told by the work; this one keeps silent."""

    def stage(self, name: str, total: int) -> None:
        """A stage of `total` steps begins; the stage before it is over."""

    def advance(self, steps: int) -> None:
        """Steps of the current stage are done. May come from any thread."""

    def line(self, text: str) -> None:
        """Something to keep on the screen."""

    def warning(self, text: str) -> None:
        """Something that the user should look at."""
