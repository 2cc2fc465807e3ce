"""`twobit COMMAND ...`: a dispatcher that imports a command only when it is called."""

from __future__ import annotations

import sys
from collections.abc import Sequence

TYPE_CHECKING = False  # typing itself would cost a good part of the start-up
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# Command -> what the list of commands says. Its module twobit.cli.<command> holds a function of that name, which
# typer makes into arguments and options; what it returns is the exit code, None being 0.
COMMANDS = {
    "quantize": "Split a Hugging Face checkpoint into a 2-bit draft and its residual",
    "run": "Continue a prompt, or answer it, with lossless drafting",
    "chat": "Talk with a model in the terminal",
    "info": "Show what a twobit model holds",
    "plan": "Predict where a model would lie on given hardware, and how fast it would be",
    "push": "Upload a model to the Hugging Face Hub",
    "bench": "Measure speeds, and how near the kernels come to the roofline",
    "eval": "Measure a model against the checkpoint it was made from",
    "completion": "Print a script that completes commands and options",
}

HELP = """\
Usage: twobit COMMAND [OPTIONS] ...

Bit-sliced language models: 2 bits draft, 2 bits + residual verify, one lossless answer.

Commands:
{commands}

Options:
  --version  Show the version
  --help     Show this; `twobit COMMAND --help` shows a command's options

Text goes to stdout, everything else to stderr. Exit codes: 0 done, 1 failed, 2 usage, 130 interrupted."""


def help_text() -> str:
    """What `twobit --help` shows."""
    width = max(map(len, COMMANDS))
    return HELP.format(commands="\n".join(f"  {name.ljust(width)}  {what}" for name, what in COMMANDS.items()))


# What people type who know other programs, and how it is said here.
HABITS = {
    ("-m", "--model", "-hf", "-hfr"): "the model is an argument: twobit {command} MODEL ...",
    ("-p", "--prompt"): 'the prompt is an argument: twobit run MODEL "prompt"',
    ("-f", "--file"): "a prompt from a file is read from standard input: twobit run MODEL - <FILE",
    ("-c", "--ctx-size", "--context"): "the context is --ctx N",
    ("--temperature",): "the temperature is --temp T",
    ("--n-predict", "--predict", "--max-tokens", "--max-new-tokens"): "the most new tokens are -n N",
    (
        "-ngl",
        "--n-gpu-layers",
        "--gpu-layers",
    ): "--vram says how much of the GPU to use, --gpu-residual-layers how many layers lie there in full",
    ("-i", "--interactive", "-cnv", "--conversation"): "a conversation is twobit chat MODEL",
    ("-sys", "--system-prompt"): "the system message is -s TEXT",
    ("-md", "--model-draft", "--draft"): "the model drafts for itself: nothing to name; --no-draft goes without",
}


def habit(command: str, args: Sequence[str], message: str = "") -> str | None:
    """A hint for a command line that was meant for another program, or lacks its prompt."""
    if "extra argument" in message and command in ("run", "chat"):
        one = "a prompt of several words needs quotes" if command == "run" else "a single prompt is for run"
        return f'{one}: twobit run MODEL "prompt"'
    for names, hint in HABITS.items():
        if any(arg.split("=")[0] in names for arg in args):
            return hint.format(command=command)
    if command == "run" and len([a for a in args if not a.startswith("-")]) == 1:
        return 'give a prompt: twobit run MODEL "prompt"; - reads standard input; twobit chat MODEL talks'
    return None


def function_of(command: str) -> Callable[..., Any]:
    """The function that a command runs."""
    from importlib import import_module

    found: Callable[..., Any] = getattr(import_module(f"twobit.cli.{command}"), command)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code."""
    from twobit.cli import output

    output.prepare()
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(args)
    except BaseException as error:
        if isinstance(error, SystemExit | GeneratorExit):
            raise
        from twobit.cli import errors

        return errors.report(error)


def _dispatch(args: list[str]) -> int:
    from twobit.cli import output

    if not args:
        output.usage(help_text())
        return 2
    first, rest = args[0], args[1:]
    if first in ("-h", "--help", "help"):
        output.line(help_text())
        return 0
    if first in ("-V", "--version"):
        from twobit import __version__

        output.line(f"twobit {__version__}")
        return 0
    if first not in COMMANDS:
        from difflib import get_close_matches

        from twobit.errors import UsageError, shown

        close = get_close_matches(first, COMMANDS, 1)
        what = "option" if first.startswith("-") else "command"
        raise UsageError(
            f"there is no {what} {shown(first)}",
            f"did you mean `twobit {close[0]}`?" if close else f"commands: {', '.join(COMMANDS)}; see twobit --help",
        )
    return _run(first, rest)


def _run(command: str, args: list[str]) -> int:
    from twobit.cli import output
    from twobit.cli.command import Misuse, run

    prog = f"twobit {command}"
    try:
        code = run(function_of(command), prog, args)
    except Misuse as error:
        output.error(str(error), habit(command, args, str(error)) or f"see `{prog} --help`")
        return 2
    return code if isinstance(code, int) else 0
