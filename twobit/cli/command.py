"""A command from a function: typer makes options of its parameters, `Annotated[type, Argument(...)]` or
`Annotated[type, Option(...)]`; help has one style: what is left out is [in brackets] at the end of an option's help.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args, get_type_hints

import typer
import typer.core
from typer import Argument, Option

from twobit.errors import impossible

__all__ = ["Argument", "Misuse", "Option", "help_text", "options", "run"]

_KINDS: dict[type, str] = {int: "a whole number", float: "a number"}


class Misuse(Exception):
    """The command line makes no sense; the message says why."""


class _Command(typer.core.TyperCommand):
    def get_help_option(self, ctx: Any) -> Any:
        option: Any = super().get_help_option(ctx)
        if option is not None and not isinstance(option.process_value, partial):
            option.process_value = partial(_value, option, bool, option.process_value)
        return option


def _command(function: Callable[..., Any], name: str) -> Any:
    made = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,  # plain help: quick to show, the same in a terminal and in documents
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    made.command(name, cls=_Command, help=function.__doc__)(function)
    command: Any = typer.main.get_command(made)
    kinds = get_type_hints(function)
    for parameter in command.params:
        parameter.process_value = partial(_value, parameter, kinds[parameter.name], parameter.process_value)
        default, text = parameter.default, getattr(parameter, "help", None)
        if parameter.param_type_name == "option" and text is not None:
            parameter.show_default = False
            shown = default is not None and default is not False and default != "" and not callable(default)
            if shown and not text.endswith("]"):
                parameter.help = f"{text} [{default:g}]" if isinstance(default, float) else f"{text} [{default}]"
    return command


def _value(parameter: Any, kind: Any, process: Callable[..., Any], context: Any, value: Any) -> Any:
    """What a command's function gets for a parameter of type `kind`, from what the command line says: text, or several.

    typer's own way loads pydantic, a third of the time that a run takes to start; only what is missing goes it.
    """
    if value is None or value == () or value == []:
        return process(context, value) if parameter.required else None
    convert = next((c for c in (int, float) if kind is c or c in get_args(kind)), None)
    if value is True:
        return process(context, value)  # --help shows it
    if convert is None or not isinstance(value, str):
        return list(value) if isinstance(value, tuple) else value
    try:
        if value.isascii() and "_" not in value:
            return convert(value)
    except ValueError:
        pass
    raise Misuse(str(impossible(parameter.opts[0], value, _KINDS[convert])))


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
        raise Misuse(error.format_message().rstrip(".")) from None
    with context:
        return command.invoke(context)


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
