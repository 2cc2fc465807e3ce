"""A command from a function: its parameters are `Annotated[type, Argument(...)]` or `Annotated[type, Option(...)]`.

The defaults are the function's own, argparse parses, and help has one style: what is left out is [in brackets] at the
end of an option's help. Types are str, int, float, bool (a flag), each with or without `| None`, and `list[str] | None`
(may repeat).
"""

from __future__ import annotations

import argparse
import inspect
import shutil
import textwrap
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn, get_args, get_origin, get_type_hints

_WIDEST = 100  # columns of help
_NAMES = 30  # columns that names of options take at most, before their help moves to the next line


class Argument:
    """A positional argument."""

    def __init__(self, *, metavar: str, help: str) -> None:
        self.names: tuple[str, ...] = ()
        self.metavar: str | None = metavar
        self.help = help


class Option:
    """An option; metavar None: a flag."""

    def __init__(self, *names: str, help: str, metavar: str | None = None) -> None:
        self.names = names
        self.metavar = metavar
        self.help = help


class Misuse(Exception):
    """The command line makes no sense; the message says why."""


class Parameter:
    """One parameter of a command's function."""

    def __init__(self, name: str, annotation: Any, default: Any) -> None:
        kind, self.given = get_args(annotation)[:2]
        assert get_origin(annotation) is Annotated and isinstance(self.given, Argument | Option), name
        kinds = [k for k in get_args(kind) or (kind,) if k is not type(None)]
        if get_origin(kind) is list:
            kinds = [kind]
        self.name, self.default = name, default
        self.many = get_origin(kinds[0]) is list
        self.type: Callable[[str], Any] = str if self.many else kinds[0]
        self.required = default is inspect.Parameter.empty

    @property
    def names(self) -> tuple[str, ...]:
        """The option's spellings; none for an argument."""
        return self.given.names

    @property
    def help(self) -> str:
        """Its help, with the default where the help does not end in one."""
        text, default = self.given.help, self.default
        if self.required:
            return f"{text} [required]" if self.names else text
        if default is None or default is False or default == "" or text.endswith("]"):
            return text
        return f"{text} [{default:g}]" if isinstance(default, float) else f"{text} [{default}]"

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        if not self.names:
            parser.add_argument(self.name, metavar=self.given.metavar, type=self.type)
        elif self.type is bool:
            parser.add_argument(*self.names, dest=self.name, action="store_true")
        else:
            parser.add_argument(
                *self.names,
                dest=self.name,
                metavar=self.given.metavar,
                type=self.type,
                required=self.required,
                default=None if self.required else self.default,
                action="append" if self.many else "store",
            )


def parameters(function: Callable[..., Any]) -> list[Parameter]:
    """The parameters of a command's function, in its order."""
    hints = get_type_hints(function, include_extras=True)
    return [Parameter(p.name, hints[p.name], p.default) for p in inspect.signature(function).parameters.values()]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Misuse(message)


def parse(function: Callable[..., Any], prog: str, args: Sequence[str]) -> dict[str, Any] | None:
    """The function's arguments from a command line; None where it asks for help. Raises Misuse."""
    parser = _Parser(prog, add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true", dest="help ")
    found = parameters(function)
    for parameter in found:
        parameter.add_to(parser)
    before = list(args)[: list(args).index("--")] if "--" in args else args
    if "-h" in before or "--help" in before:  # whatever else is missing
        return None
    return {p.name: value for p, value in _values(parser, found, args)}


def _values(parser: _Parser, found: list[Parameter], args: Sequence[str]) -> list[tuple[Parameter, Any]]:
    parsed = vars(parser.parse_args(list(args)))
    return [(p, parsed[p.name]) for p in found]


def help_text(function: Callable[..., Any], prog: str, width: int | None = None) -> str:
    """What `--help` shows. width: columns, the terminal's if not given."""
    width = min(_WIDEST, width or shutil.get_terminal_size().columns)
    found = parameters(function)
    arguments = [(str(p.given.metavar), p.help) for p in found if not p.names]
    options = [(_spelling(p), p.help) for p in found if p.names] + [("-h, --help", "Show this")]
    lines = [f"Usage: {prog} [OPTIONS]" + "".join(f" {name}" for name, _ in arguments), ""]
    for paragraph in inspect.getdoc(function).split("\n\n") if function.__doc__ else []:  # type: ignore[union-attr]
        if paragraph.startswith("\b"):  # examples: as they are
            lines += [f"  {line}" for line in paragraph.split("\n")[1:]]
        else:
            lines += textwrap.wrap(paragraph, width - 2, initial_indent="  ", subsequent_indent="  ")
        lines.append("")
    for title, rows in (("Arguments:", arguments), ("Options:", options)):
        if rows:
            lines += [title, *_columns(rows, width), ""]
    return "\n".join(lines).rstrip()


def _spelling(parameter: Parameter) -> str:
    short_first = sorted(parameter.names, key=lambda name: name.startswith("--"))
    return ", ".join(short_first) + (f" {parameter.given.metavar}" if parameter.given.metavar else "")


def _columns(rows: Sequence[tuple[str, str]], width: int) -> list[str]:
    column = min(_NAMES, max(len(name) for name, _ in rows)) + 4
    lines = []
    for name, text in rows:
        wrapped = textwrap.wrap(text, max(20, width - column)) or [""]
        if len(name) + 4 > column:
            lines.append(f"  {name}")
        else:
            lines.append(f"  {name}".ljust(column) + wrapped.pop(0))
        lines += [" " * column + line for line in wrapped]
    return [line.rstrip() for line in lines]
