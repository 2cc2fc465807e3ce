"""Writes docs/cli.md from the help of the commands: `python scripts/cli_docs.py`; a test compares the two."""

from __future__ import annotations

from pathlib import Path

FILE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
WIDTH = 100
INTRODUCTION = """\
# Commands

Written by `python scripts/cli_docs.py` from the commands' own help.

`MODEL` is a local folder, or a Hub id `user/model[@revision]`, which is downloaded into the Hub's cache where it is not
there yet. Text and results go to stdout, everything else to stderr; `--json` prints one object and no progress.

| exit code | |
|---|---|
| 0 | done |
| 1 | failed; the message says what to do next |
| 2 | the command line makes no sense |
| 130 | interrupted by Ctrl-C |
"""


def render() -> str:
    """The whole page."""
    from twobit.cli import command
    from twobit.cli.main import COMMANDS, function_of, help_text

    parts = [INTRODUCTION, f"```text\n{help_text()}\n```\n"]
    for name in COMMANDS:
        text = command.help_text(function_of(name), f"twobit {name}", WIDTH)
        parts.append(f"## twobit {name}\n\n```text\n{text}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    FILE.write_text(render(), encoding="utf-8")
