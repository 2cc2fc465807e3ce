"""`twobit chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from twobit.cli import options, output
from twobit.cli.command import Option
from twobit.errors import TwobitError, UsageError, impossible

if TYPE_CHECKING:
    from twobit.runtime.conversation import Conversation

HELP = (
    ("/help", "this list"),
    ("/system [TEXT]", "show the system message, or replace it (- for none)"),
    ("/set [NAME VALUE]", "show the settings, or change one: temp, top-k, top-p, min-p, repeat-penalty, seed, n"),
    ("/clear", "forget the conversation, not the system message"),
    ("/save FILE", "write the conversation to a file, and what was evaluated to FILE.cache"),
    ("/load FILE", "go on with a saved conversation"),
    ("/stats", "speed of the last answer, and how full the context is"),
    ("/exit", "leave; so does Ctrl-D"),
)
KEYS = "Enter sends, Alt-Enter begins a new line, Ctrl-C stops an answer; a line that begins with // is said with one /"


def chat(
    model: options.ModelName,
    system: options.SystemMessage = None,
    n: Annotated[int | None, Option("-n", metavar="N", help="Most tokens of an answer [all the context holds]")] = None,
    ctx: Annotated[int | None, Option("--ctx", metavar="N", help="Context in tokens [8192]")] = None,
    temp: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repeat_penalty: Annotated[
        float | None,
        Option("--repeat-penalty", metavar="R", help="Divide recent tokens' logits by R [1: none]"),
    ] = None,
    seed: Annotated[
        int | None, Option("--seed", metavar="N", help="Same seed, same text; another, another [0]")
    ] = None,
    no_draft: Annotated[bool, Option("--no-draft", help="Decode without drafting: the same text")] = False,
    device: options.Device = "auto",
    vram: options.Vram = None,
    gpu_residual_layers: options.GpuResidualLayers = "auto",
    threads: options.Threads = None,
    mlock: options.Mlock = False,
) -> int:
    """Talk with a model. What was said before is not evaluated again.

    Enter sends, Alt-Enter begins a new line; Ctrl-C stops an answer, Ctrl-D leaves; /help lists the commands. Answers
    go to stdout, everything else to stderr. Where standard input is no terminal, every line of it is a turn.

    \b
    twobit chat ./model
    twobit chat ./model -s "Answer in one sentence." --temp 0.7 --top-p 0.9
    printf 'Hello\\nAnd in French?\\n' | twobit chat ./model
    """
    settings = Settings(
        {
            "temp": temp,
            "top-k": top_k,
            "top-p": top_p,
            "min-p": min_p,
            "repeat-penalty": repeat_penalty,
            "seed": seed,
            "n": n,
        }
    )
    asked = options.where(device, vram, gpu_residual_layers, threads, mlock)
    if ctx is not None:
        options.integer("--ctx", ctx, 1)
    if system is not None:
        options.unicode_text("-s", system)
    folder = options.model_folder(model)

    from twobit.runtime.conversation import Conversation
    from twobit.runtime.model import Model
    from twobit.runtime.session import StepOptions
    from twobit.runtime.tokenizer import Tokenizer

    opened = Model.open(folder)
    tokenizer = Tokenizer.load(folder, config=opened.config, rows=opened.vocab)
    if tokenizer.template is None:
        raise TwobitError("this model has no chat template (a base model?)", "twobit run MODEL --raw continues a text")
    step = StepOptions(eos=tokenizer.eos_ids)
    limit = options.context(ctx, opened.architecture.max_context, 0, None)
    talk = Conversation(
        options.session(opened, asked, limit)[0],
        tokenizer,
        settings.sampling(),
        replace(step, draft_max=0) if no_draft else step,
        system=system,
        max_tokens=n,
    )
    try:
        Chat(talk, settings).run(_lines())
    finally:
        tokenizer.close()
    return 0


class Settings:
    """What /set shows and changes: the same names and checks as the options."""

    KINDS: dict[str, Callable[[str], Any]] = {  # noqa: RUF012 - a constant
        "temp": float,
        "top-k": int,
        "top-p": float,
        "min-p": float,
        "repeat-penalty": float,
        "seed": int,
        "n": int,
    }

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.sampling()

    def sampling(self) -> Any:
        """The sampler's parameters; UsageError where a value makes no sense."""
        v = self.values
        if v["n"] is not None:
            options.integer("-n", v["n"], 0)
        return options.sampling(
            temp=v["temp"],
            top_k=v["top-k"],
            top_p=v["top-p"],
            min_p=v["min-p"],
            repeat_penalty=1.0 if v["repeat-penalty"] is None else v["repeat-penalty"],
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repeat_last_n=64,
            seed=v["seed"] or 0,
            bias=(),
        )

    def change(self, name: str, text: str) -> None:
        """Set one; "-" is the default. UsageError leaves all as it was."""
        name = name.lstrip("-").replace("_", "-")
        if name not in self.KINDS:
            raise UsageError(f"there is no setting {name}", f"settings: {', '.join(self.KINDS)}")
        try:
            value = None if text == "-" else self.KINDS[name](text)
        except ValueError:
            raise impossible(name, text, "a number, or - for the default") from None
        before, self.values = self.values, self.values | {name: value}
        try:
            self.sampling()
        except UsageError:
            self.values = before
            raise


class Chat:
    """Turns lines into answers and commands."""

    def __init__(self, talk: Conversation, settings: Settings) -> None:
        self.talk, self.settings = talk, settings
        self._commands = {name.split()[0]: getattr(self, f"_{name.split()[0][1:]}") for name, _ in HELP}

    def run(self, lines: Iterator[str]) -> None:
        """Until the lines end, or one says /exit."""
        for line in lines:
            text = line.strip()
            if not text:
                continue
            try:
                if text.startswith("/") and not text.startswith("//"):
                    if self._command(text):
                        return
                else:
                    self._say(text[1:] if text.startswith("//") else text)
            except (TwobitError, OSError) as error:
                if isinstance(error, TwobitError) and sys.stdout is None:
                    raise
                what = error if isinstance(error, TwobitError) else f"{error.filename}: {error.strerror}"
                output.error(str(what), getattr(error, "hint", None))

    def _say(self, text: str) -> None:
        from twobit.runtime.conversation import Thoughts
        from twobit.runtime.generate import Result

        options.unicode_text("what you said", text)
        thoughts, shown = Thoughts(), ""
        for event in self.talk.reply(text):
            last = isinstance(event, Result)
            for piece, inside in thoughts.push("" if last else event.text, last):
                output.text(output.dim_text(piece) if inside else piece)
                shown = piece
        output.text("" if shown.endswith("\n") else "\n")
        if self.talk.last is not None and self.talk.last.finish_reason != "eos":
            output.note(f"({self.talk.last.finish_reason})")

    def _command(self, text: str) -> bool:
        name, _, rest = text.partition(" ")
        if name not in self._commands:
            raise UsageError(f"there is no command {name}", f"{' '.join(self._commands)}; // says a /")
        return bool(self._commands[name](rest.strip()))

    def _help(self, rest: str) -> None:
        width = max(len(name) for name, _ in HELP)
        for name, what in HELP:
            output.note(f"{name.ljust(width)}  {what}")
        output.note(KEYS)

    def _system(self, rest: str) -> None:
        if rest:
            self.talk.set_system(None if rest == "-" else rest)
        output.note(f"system message: {self.talk.system or 'none'}")

    def _set(self, rest: str) -> None:
        if rest:
            name, _, value = rest.replace("=", " ").partition(" ")
            self.settings.change(name, value.strip() or "-")
            self.talk.sampling, self.talk.max_tokens = self.settings.sampling(), self.settings.values["n"]
        used, n = self.talk.sampling, self.talk.max_tokens
        shown = {
            "temp": used.temperature,
            "top-k": used.top_k,
            "top-p": used.top_p,
            "min-p": used.min_p,
            "repeat-penalty": used.repeat_penalty,
            "seed": used.seed,
            "n": "all the context holds" if n is None else n,
        }
        for name, one in shown.items():
            output.note(f"{name.ljust(14)}  {one}")

    def _clear(self, rest: str) -> None:
        self.talk.clear()
        output.note("a new conversation")

    def _save(self, rest: str) -> None:
        if not rest:
            raise UsageError("/save needs a file")
        self.talk.save(Path(rest).expanduser())
        output.note(f"saved to {rest}")

    def _load(self, rest: str) -> None:
        if not rest:
            raise UsageError("/load needs a file")
        warm = self.talk.load(Path(rest).expanduser())
        output.note(
            f"{len(self.talk.messages)} messages" + ("" if warm else "; they are evaluated again with the next turn")
        )

    def _stats(self, rest: str) -> None:
        used = f"{self.talk.session.length} of {self.talk.session.max_context} positions in use"
        last = self.talk.last
        if last is None:
            output.note(f"no answer yet; {used}")
            return
        output.note(
            f"{len(last.token_ids)} tokens, {last.decode_tokens_per_s:.1f} tokens/s, "
            f"{last.tokens_per_step:.2f} per step; {last.prefill_tokens} of {len(last.prompt_ids)} prompt tokens "
            f"evaluated; {used}"
        )

    def _exit(self, rest: str) -> bool:
        return True


def _lines() -> Iterator[str]:
    """What the user says: from the terminal with editing and history, else line by line."""
    if sys.stdin is None:
        raise UsageError("standard input is closed", "twobit run MODEL PROMPT answers a single prompt")
    if not (sys.stdin.isatty() and sys.stderr is not None and sys.stderr.isatty()):
        for data in sys.stdin.buffer:
            try:
                yield data.decode("utf-8").removesuffix("\n").removesuffix("\r")
            except UnicodeDecodeError as error:
                raise UsageError(f"standard input is not UTF-8 (byte {error.start} of a line)") from error
        return
    ask = _prompt()
    output.note("/help lists the commands, Ctrl-D leaves")
    while True:
        try:
            yield ask()
        except EOFError:
            return
        except KeyboardInterrupt:
            output.note("Ctrl-D leaves")


def _prompt() -> Callable[[], str]:
    """Asks for one message: editing, history in twobit's folder for state, several lines by Alt-Enter or paste."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output

    from twobit.state import state_folder

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: Any) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    history: History = InMemoryHistory()
    try:
        state_folder().mkdir(parents=True, exist_ok=True)
        file = state_folder() / "chat_history"
        file.touch(mode=0o600)
        history = FileHistory(str(file))
    except OSError:  # a home that cannot be written: history lasts as long as the chat
        pass
    session: PromptSession[str] = PromptSession(
        "> ",
        multiline=True,
        prompt_continuation="  ",
        key_bindings=keys,
        history=history,
        enable_history_search=True,
        output=create_output(stdout=sys.stderr),
    )
    return session.prompt
