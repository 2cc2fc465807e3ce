"""Conversations: only the new turn is evaluated, commands, and the terminal itself through a pseudo-terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fake_runtime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packed import packed_model
from test_chat_template import CHATML
from tiny_tokenizers import byte_level, folder

from twobit.cli.main import main
from twobit.errors import UsageError
from twobit.runtime.conversation import Conversation, Thoughts, continued
from twobit.runtime.generate import Result
from twobit.runtime.model import Model
from twobit.runtime.sampling import Sampling
from twobit.runtime.session import Session, StepOptions
from twobit.runtime.tokenizer import Tokenizer

ANSWER = "Hello there, the answer is 42 😸 日本."


def conversation(**kwargs: Any) -> Conversation:
    path = packed_model("llama")
    model = Model.open(path)
    tokenizer = Tokenizer.load(path, config=model.config, rows=model.vocab)
    step = StepOptions(eos=tokenizer.eos_ids)
    return Conversation(Session(model, 512, 1), tokenizer, Sampling(), step, max_tokens=12, **kwargs)


def say(talk: Conversation, text: str) -> Result:
    *_, last = talk.reply(text)
    assert isinstance(last, Result)
    return last


# -- what is evaluated --


def test_only_the_new_turn_is_evaluated() -> None:
    talk = conversation(system="Be brief.")
    first = say(talk, "hello")
    second = say(talk, "and again")
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    held = len(first.prompt_ids) + len(first.token_ids) - 1
    assert second.prefill_tokens <= len(second.prompt_ids) - held
    assert [m["role"] for m in talk.messages] == ["system", "user", "assistant", "user", "assistant"]


def test_answers_equal_those_of_a_fresh_session() -> None:
    talk = conversation()
    for text in ("hello", "what?", "42"):
        last = say(talk, text)
    fresh = conversation().session
    fresh.sync(last.prompt_ids[:-1])
    history = list(last.prompt_ids)
    while len(history) < len(last.prompt_ids) + 12:
        left = len(last.prompt_ids) + 12 - len(history)
        history += fresh.step(history, Sampling(), StepOptions(draft_max=0, budget=left, eos=talk.step.eos)).tokens
        if history[-1] in talk.step.eos:
            break
    assert history[len(last.prompt_ids) :] == last.token_ids


def test_a_template_is_followed_to_the_letter() -> None:
    """The prompt spells what the template makes of the messages, whatever tokens the answer came in."""
    talk = conversation(system="x")
    for text in ("hello", "<|im_end|> again", "日本"):
        last = say(talk, text)
        spelled = talk.tokenizer.spell(last.prompt_ids)
        before = talk.messages[:-1]
        assert spelled == talk.tokenizer.spell(talk.tokenizer.chat_ids(before))


def test_own_tokens_are_kept_where_they_spell_the_same() -> None:
    tokenizer = Tokenizer(byte_level())
    new = tokenizer.encode("hello there friend")
    old = [i for c in "hello there" for i in tokenizer.encode(c)]
    assert old != new[: len(old)]
    made = continued(tokenizer, old, new)
    assert made[: len(old)] == old and tokenizer.spell(made) == "hello there friend"
    assert continued(tokenizer, [], new) == new
    assert continued(tokenizer, tokenizer.encode("hullo"), new) == new
    assert continued(tokenizer, tokenizer.encode("hello there friend and more"), new) == new


def test_a_failed_turn_changes_nothing() -> None:
    talk = conversation()
    say(talk, "hello")
    before = list(talk.messages)
    with pytest.raises(UsageError, match="context holds 512"):
        say(talk, "x " * 2000)
    assert talk.messages == before
    assert say(talk, "go on").token_ids


def test_save_and_load(tmp_path: Path) -> None:
    talk, file = conversation(system="s"), tmp_path / "c.json"
    say(talk, "hello")
    talk.save(file)
    expected = say(talk, "next")
    again = conversation()
    assert again.load(file)
    assert again.system == "s"
    got = say(again, "next")
    assert (got.token_ids, got.prompt_ids) == (expected.token_ids, expected.prompt_ids)
    assert got.prefill_tokens == expected.prefill_tokens < len(got.prompt_ids) - 10
    (tmp_path / "c.json.cache").unlink()
    cold = conversation()
    assert not cold.load(file)
    assert say(cold, "next").finish_reason
    for text in ("", "[]", '{"messages": []}', '{"twobit_conversation": 1, "messages": [{"role": "tool"}]}', "\xff"):
        file.write_text(text, encoding="latin-1")
        with pytest.raises(UsageError, match="not a saved conversation"):
            cold.load(file)


# -- reasoning --


@given(st.lists(st.sampled_from(["a", "<", "<think>", "</think>", "</", "think>", "b\n", "<thin"]), max_size=12))
def test_thoughts_in_any_pieces(parts: list[str]) -> None:
    text = "".join(parts)
    thoughts, pieces = Thoughts(), Thoughts()
    whole = thoughts.push(text, True)
    split = [x for c in text for x in pieces.push(c)] + pieces.push("", True)
    assert "".join(p for p, _ in split) == text == "".join(p for p, _ in whole)

    def inside(found: list[tuple[str, bool]]) -> str:
        return "".join(p for p, i in found if i)

    assert inside(split) == inside(whole)


def test_thoughts() -> None:
    assert Thoughts().push("a<think>b</think>c", True) == [("a", False), ("<think>b</think>", True), ("c", False)]
    assert Thoughts().push("no </think> here", True) == [("no </think> here", False)]


# -- commands, on pipes --


def pipe(*args: str, text: str, answer: str = ANSWER, model: Path, **environment: str) -> tuple[str, str, int]:
    script = Path(fake_runtime.__file__)
    command = [sys.executable, str(script), json.dumps(answer), "fast", "chat", str(model), *args]
    env = {**os.environ, "PYTHONPATH": str(script.parent.parent), **environment}
    done = subprocess.run(command, input=text.encode(), capture_output=True, env=env, timeout=120)
    return done.stdout.decode(), done.stderr.decode(), done.returncode


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat model's folder, without weights."""
    path = tmp_path_factory.mktemp("chat")
    return folder(path, byte_level(), settings={"eos_token": "<|im_end|>"}, jinja=CHATML)


def test_lines_of_a_pipe_are_turns(model: Path, tmp_path: Path) -> None:
    text = f"""hello

/help
/system Be brief.
/set temp 0.5
/set temp nan
/set color red
/bogus
/stats
//not a command
/load {tmp_path}/none
/clear
/exit
never said
"""
    out, err, code = pipe(text=text, model=model)
    assert (out, code) == (f"{ANSWER}\n{ANSWER}\n", 0)
    for said in (
        *("/system [TEXT]", "system message: Be brief.", "temp            0.5", "--temp nan is not possible"),
        *(
            "there is no setting color",
            "there is no command /bogus",
            "tokens/s",
            "none: No such file",
            "a new conversation",
        ),
    ):
        assert said in err, said
    assert "Traceback" not in err


def test_options_are_checked(model: Path, capfd: Any) -> None:
    for args in (["--temp", "-1"], ["-n", "-2"], ["--ctx", "0"], ["--device", "gpu"], ["-t", "0"]):
        assert main(["chat", str(model), *args]) == 2
    base = folder(model.parent / "base", byte_level(), settings={"eos_token": "<|endoftext|>"})
    assert pipe(text="hi\n", model=base)[2] == 1


def test_input_that_is_no_text(model: Path) -> None:
    script = Path(fake_runtime.__file__)
    command = [sys.executable, str(script), '"x"', "fast", "chat", str(model)]
    done = subprocess.run(command, input=b"a\xff\n", capture_output=True, timeout=60)
    assert done.returncode == 2 and b"not UTF-8" in done.stderr
    closed = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, preexec_fn=lambda: os.close(0)
    )
    assert closed.returncode == 2 and b"standard input is closed" in closed.stderr


# -- the terminal --


class Terminal:
    """A command in a pseudo-terminal."""

    def __init__(self, *args: str, home: Path, answer: str = ANSWER, speed: str = "fast", **environment: str) -> None:
        script = Path(fake_runtime.__file__)
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where the tests run in a shell's background
            os.environ |= {
                "PYTHONPATH": str(script.parent.parent),
                "TERM": "xterm",
                "TWOBIT_HOME": str(home),
                **environment,
            }
            os.environ.pop("NO_COLOR", None) if "NO_COLOR" not in environment else None
            os.execv(sys.executable, [sys.executable, str(script), json.dumps(answer), speed, *args])
        self.seen = ""

    def expect(self, text: str, seconds: float = 30) -> str:
        """What came until `text` did, terminal codes left out."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            ready, _, _ = select.select([self.fd], [], [], max(0, end - time.monotonic()))
            assert ready, f"{text!r} did not come; so far: {self.seen!r}"
            try:
                data = os.read(self.fd, 65536)
            except OSError:
                data = b""
            assert data, f"the program ended; so far: {self.seen!r}"
            if b"\x1b[6n" in data:  # asks where the cursor is
                os.write(self.fd, b"\x1b[1;1R")
            self.seen += re.sub(r"\x1b\[(?!2m|0m)[0-9;?]*[A-Za-z]|\x1b[=>]|\r", "", data.decode("utf-8", "replace"))
        before, _, self.seen = self.seen.partition(text)
        return before

    def send(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def wait(self) -> int:
        while True:
            try:
                if not os.read(self.fd, 65536):
                    break
            except OSError:
                break
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.fd)
        return code


def test_a_conversation_in_a_terminal(model: Path, tmp_path: Path) -> None:
    terminal = Terminal("chat", str(model), home=tmp_path)
    terminal.expect("Ctrl-D leaves")
    terminal.expect(">")
    terminal.send("hello\r")
    terminal.expect(ANSWER)
    terminal.expect(">")
    terminal.send("two\x1b\rlines\r")  # Alt-Enter between them
    terminal.expect(ANSWER)
    terminal.expect(">")
    terminal.send("\x03")  # Ctrl-C at the prompt
    terminal.expect("Ctrl-D leaves")
    terminal.send("/stats\r")
    terminal.expect("tokens/s")
    terminal.expect(">")  # Ctrl-D is a key of the prompt, not of the terminal between two of them
    terminal.send("\x04")
    assert terminal.wait() == 0
    history = (tmp_path / "chat_history").read_text()
    assert "+hello" in history and "+two\n+lines" in history
    again = Terminal("chat", str(model), home=tmp_path)
    again.expect(">")
    again.send("\x1b[A")  # up
    again.expect("/stats")
    again.send("\x03")
    again.expect("Ctrl-D leaves")
    again.expect(">")
    again.send("\x04")
    assert again.wait() == 0


def test_ctrl_c_stops_the_answer_only(model: Path, tmp_path: Path) -> None:
    terminal = Terminal("chat", str(model), home=tmp_path, speed="slow")
    terminal.expect(">")
    terminal.send("hello\r")
    terminal.expect("Hel")
    time.sleep(0.3)
    os.kill(terminal.pid, signal.SIGINT)
    terminal.expect("(interrupted)")
    terminal.expect(">")
    terminal.send("/exit\r")
    assert terminal.wait() == 0


def test_reasoning_is_dimmed(model: Path, tmp_path: Path) -> None:
    for environment, dimmed in (({}, True), ({"NO_COLOR": "1"}, False)):
        terminal = Terminal("chat", str(model), home=tmp_path, answer="<think>hm</think>yes", **environment)
        terminal.expect(">")
        terminal.send("hello\r")
        shown = terminal.expect("yes")
        assert ("\x1b[2m" in shown) == dimmed
        assert "<think>hm</think>" in re.sub(r"\x1b\[\dm", "", shown)
        terminal.expect(">")
        terminal.send("\x04")
        assert terminal.wait() == 0
