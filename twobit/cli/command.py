"""A command from a function: typer makes options of its parameters, `Annotated[type, Argument(...)]` or
`Annotated[type, Option(...)]`; help has one style: what is left out is [in brackets] at the end of an option's help.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any, get_args, get_type_hints

import typer
from typer import Argument, Option

from twobit.errors import impossible

__all__ = ["Argument", "Misuse", "Option", "help_text", "options", "run"]


class Misuse(Exception):
    """The command line makes no sense; the message says why."""


def _command(function: Callable[..., Any], name: str) -> Any:
    made = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,  # plain help: quick to show, the same in a terminal and in documents
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    made.command(name, help=function.__doc__)(function)
    command: Any = typer.main.get_command(made)
    for parameter in command.params:
        default, text = parameter.default, getattr(parameter, "help", None)
        if parameter.param_type_name == "option" and text is not None:
            parameter.show_default = False
            shown = default is not None and default is not False and default != "" and not callable(default)
            if shown and not text.endswith("]"):
                parameter.help = f"{text} [{default:g}]" if isinstance(default, float) else f"{text} [{default}]"
    return command


def run(function: Callable[..., Any], prog: str, args: Sequence[str]) -> Any:
    """What the function returns, called with a command line; 0 where that asks for help. Raises Misuse."""
    command = _command(function, prog.split()[-1])
    try:
        context = command.make_context(prog, list(args))
    except typer.Exit as shown:
        return shown.exit_code
    except Exception as error:
        if not hasattr(error, "format_message"):  # only typer's own errors have it
            raise
        raise Misuse(_no_number(function, error, args) or error.format_message().rstrip(".")) from None
    with context:
        return command.invoke(context)


def _no_number(function: Callable[..., Any], error: Exception, args: Sequence[str]) -> str | None:
    """What to say where the value of an option is no number: typer's words are about parsing, and leave the value out.
    None for any other error."""
    parameter = getattr(error, "param", None)
    if parameter is None or type(error).__name__ != "BadParameter" or parameter.param_type_name != "option":
        return None
    kind = get_type_hints(function).get(parameter.name)
    must = {int: "a whole number", float: "a number"}.get(next(iter(set(get_args(kind)) - {NoneType}), kind))  # type: ignore[arg-type]
    said = None
    for arg, after in zip(args, [*args[1:], None], strict=True):
        for name in parameter.opts:
            if arg == name and after is not None:
                said = (name, after)
            elif arg.startswith(f"{name}=") or (len(name) == 2 and arg.startswith(name) and arg != name):
                said = (name, arg[len(name) :].removeprefix("="))
    return None if said is None or must is None else str(impossible(*said, must))


def help_text(function: Callable[..., Any], prog: str, width: int) -> str:
    """What `--help` shows on a terminal of `width` columns."""
    command = _command(function, prog.split()[-1])
    context = command.make_context(prog, [], resilient_parsing=True, terminal_width=width, max_content_width=width)
    with context:
        return str(command.get_help(context)).strip()


def options(function: Callable[..., Any]) -> list[tuple[str, str]]:
    """(spelling, help) of every option of a command's function."""
    found = []
    for parameter in _command(function, "command").params:
        if parameter.param_type_name == "option":
            text = str(getattr(parameter, "help", None) or "")
            found += [(name, text) for name in (*parameter.opts, *parameter.secondary_opts)]
    return found
