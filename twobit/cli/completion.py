"""`twobit completion`: completion of commands and options for shells."""

from __future__ import annotations

from typing import Annotated

from twobit.cli import output
from twobit.cli.command import Argument, options
from twobit.errors import UsageError, shown

BASH = """\
# twobit completion bash: eval "$(twobit completion bash)" in ~/.bashrc
_twobit() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" words
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    elif [[ "$word" == -* ]]; then
        case "${{COMP_WORDS[1]}}" in
{cases}
        esac
    fi
    [ -n "$words" ] && COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -o bashdefault -F _twobit twobit
"""
BASH_CASE = '            {command}) words="{options}" ;;'

ZSH = """\
#compdef twobit
# twobit completion zsh >"${{fpath[1]}}/_twobit"
_twobit() {{
    local -a choices
    if (( CURRENT == 2 )); then
        choices=(
{commands}
        )
        _describe command choices
    elif [[ "$PREFIX" == -* ]]; then
        case "${{words[2]}}" in
{cases}
        esac
        _describe option choices
    else
        _files
    fi
}}
compdef _twobit twobit
"""

FISH = """\
# twobit completion fish >~/.config/fish/completions/twobit.fish
complete -c twobit -n __fish_use_subcommand -a "{commands}" -f
{options}
"""


def completion(
    shell: Annotated[str, Argument(metavar="bash|zsh|fish", help="The shell")],
) -> int:
    """Print a script that lets a shell complete commands and options.

    \b
    eval "$(twobit completion bash)"
    twobit completion zsh >"${fpath[1]}/_twobit"
    twobit completion fish >~/.config/fish/completions/twobit.fish
    """
    if shell not in ("bash", "zsh", "fish"):
        raise UsageError(f"there is no completion for {shown(shell)}", "shells: bash, zsh, fish")
    output.text(script(shell))
    return 0


def options_of(command: str) -> list[tuple[str, str]]:
    """(option, first line of its help) of a command, every spelling of its own."""
    from twobit.cli.main import function_of

    found = [("--help", "Show this")]
    return sorted({*found, *options(function_of(command))})


def script(shell: str) -> str:
    """The completion script of a shell."""
    from twobit.cli.main import COMMANDS

    table = {command: options_of(command) for command in COMMANDS}
    if shell == "bash":
        cases = "\n".join(
            BASH_CASE.format(command=command, options=" ".join(name for name, _ in found))
            for command, found in table.items()
        )
        return BASH.format(commands=" ".join(table), cases=cases)
    if shell == "zsh":
        commands = "\n".join(f"        {_quote(f'{name}:{_colon(what)}')}" for name, what in COMMANDS.items())
        cases = "\n".join(
            f"        {command}) choices=({' '.join(_quote(f'{n}:{_colon(h)}') for n, h in found)}) ;;"
            for command, found in table.items()
        )
        return ZSH.format(commands=commands, cases=cases)
    lines = []
    for command, found in table.items():
        for name, what in found:
            kind = f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
            lines.append(f'complete -c twobit -n "__fish_seen_subcommand_from {command}" {kind} -d {_quote(what)}')
    return FISH.format(commands=" ".join(table), options="\n".join(lines))


def _colon(text: str) -> str:
    return text.replace(":", "\\:")


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
