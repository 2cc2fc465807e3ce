"""A model's chat template: messages in, prompt text out, equal to transformers' `apply_chat_template`.

The template is a program written by whoever made the model, so it is rendered by `template_worker` in a process of its
own, inside Jinja's immutable sandbox, with limits on template size, output, memory and time; the process is killed
when the time is over. Nothing else of the model's folder is ever run.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from twobit.errors import TemplateStopped, TokenizerError

TEMPLATE_FILE = "chat_template.jinja"
EXTRA_TEMPLATES = "additional_chat_templates"
MAX_TEMPLATE = 1 << 20  # characters; the largest published ones have tens of thousands
MAX_OUTPUT = 32 << 20  # characters
MAX_MEMORY = 1 << 30  # bytes of address space
MAX_SECONDS = 10.0  # per rendering, wall clock

Message = Mapping[str, Any]
_REASONING = (
    "reasoning_content",
    "thinking",
    "reasoning",
)  # names a message's reasoning goes by, the standard one first
_ENVIRONMENT = ("TZ", "LANG", "LC_ALL", "LC_TIME", "SYSTEMROOT", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")


def find_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """The template text of a model folder, None where it has none (a base model).

    `chat_template.jinja` comes before `chat_template` in tokenizer_config.json, which is a string or a list of named
    templates; of several, "default" counts. Raises TokenizerError where there are several and no default.
    """
    named: dict[str, str] = {}
    where = folder / TEMPLATE_FILE
    files = [("default", where), *((p.stem, p) for p in sorted((folder / EXTRA_TEMPLATES).glob("*.jinja")))]
    for name, path in files:
        if path.is_file():
            try:
                named[name] = path.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise TokenizerError(f"{path}: not UTF-8 at byte {error.start}") from error
    if not named:
        where = folder / "tokenizer_config.json"
        entry = tokenizer_config.get("chat_template")
        if isinstance(entry, str):
            named["default"] = entry
        elif isinstance(entry, Mapping):
            named = {str(k): v for k, v in entry.items() if isinstance(v, str)}
        elif isinstance(entry, list):
            for item in entry:
                if not (
                    isinstance(item, Mapping)
                    and isinstance(item.get("name"), str)
                    and isinstance(item.get("template"), str)
                ):
                    raise TokenizerError(f"{where}: chat_template is a list, but not of names and templates")
                named[item["name"]] = item["template"]
        elif entry is not None:
            raise TokenizerError(f"{where}: chat_template is neither text nor a list of templates")
    if not named:
        return None
    if "default" not in named:
        raise TokenizerError(f"{where}: several chat templates ({', '.join(sorted(named))}) and none called default")
    text = named["default"]
    if len(text) > MAX_TEMPLATE:
        raise TokenizerError(f"{where}: the chat template has {len(text)} characters, more than {MAX_TEMPLATE}")
    return text


class ChatTemplate:
    """Renders one template. `variables` are what it sees beside the messages (bos_token, eos_token, ...).

    The worker process starts on construction, so that its start overlaps with loading the model, and stays for further
    renderings until `close` or the end of this object. Threads may share one.
    """

    def __init__(self, text: str, variables: Mapping[str, str] | None = None, *, seconds: float = MAX_SECONDS) -> None:
        self.text = text
        self._variables = dict(variables or {})
        self._seconds = seconds
        self._lock = threading.Lock()  # one question at a time: answers come in order over one pipe
        self._close: weakref.finalize[..., Any] | None = None
        self._start()

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The prompt text. Raises TokenizerError: with the template's own words where it refuses the messages."""
        request = {
            "messages": [_prepare(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "variables": self._variables,
        }
        with self._lock:
            reply = self._ask(json.dumps(request).encode() + b"\n")
        if "text" in reply:
            return str(reply["text"])
        kind, error = reply.get("kind"), str(reply.get("error"))
        if kind == "refused":
            raise TokenizerError(error, "this comes from the model's chat template; --raw goes without it")
        if kind in ("limit", "stopped"):
            stopped = TemplateStopped if kind == "stopped" else TokenizerError
            raise stopped(f"the model's chat template was stopped: {error}", "--raw goes without it")
        if kind == "forbidden":
            raise TokenizerError(
                f"the model's chat template does something that is not allowed: {error}",
                "do not trust this model's files; --raw goes without its template",
            )
        if kind == "syntax":
            raise TokenizerError(f"the model's chat template cannot be read, {error}", "--raw goes without it")
        raise TokenizerError(f"the model's chat template failed: {error}", "--raw goes without it")

    def close(self) -> None:
        """End the worker; a later rendering starts another."""
        if self._close is not None:
            self._close()
            self._close = None

    def _start(self) -> None:
        self._process = _spare.pop() if _spare else _worker()
        self._close = weakref.finalize(self, _end, self._process)
        setup = {
            "template": self.text,
            "memory": MAX_MEMORY,
            "output": MAX_OUTPUT,
        }
        self._fresh = json.dumps(setup).encode() + b"\n"

    def _ask(self, request: bytes) -> dict[str, Any]:
        if self._close is None:
            self._start()
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        expired = threading.Event()

        def stop() -> None:
            expired.set()
            process.kill()

        timer = threading.Timer(self._seconds, stop)
        timer.start()
        try:
            process.stdin.write(self._fresh + request)
            process.stdin.flush()
            self._fresh = b""
            line = process.stdout.readline(16 * MAX_OUTPUT)
            reply = json.loads(line)
        except (OSError, ValueError):  # it died, or was killed
            self.close()
            if expired.is_set():
                return {"kind": "stopped", "error": f"it took longer than {self._seconds:g} s"}
            return {"kind": "stopped", "error": "its process died"}
        except BaseException:  # Ctrl-C: an answer that nobody read must not be taken for the next one
            self.close()
            raise
        finally:
            timer.cancel()
        return reply if isinstance(reply, dict) else {"kind": "failed", "error": "no answer"}


_spare: list[subprocess.Popen[bytes]] = []  # started ahead, for the next template


def start_ahead() -> None:
    """Start a worker now, so that it is ready when a template is there; ends with this process if it is not used."""
    if not _spare:
        _spare.append(_worker())
        atexit.register(_end_spare)


def _end_spare() -> None:
    while _spare:
        _end(_spare.pop())


def _worker() -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(__file__).with_name("template_worker.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
    )
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps({"path": [p for p in sys.path if p]}).encode() + b"\n")
        process.stdin.flush()
    except OSError:  # it died: the first rendering will say so
        pass
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        try:
            if pipe is not None:
                pipe.close()
        except OSError:  # what was still buffered for a dead process
            pass


def _prepare(message: Message) -> dict[str, Any]:
    """As transformers does: keys without a value are left out, a message's reasoning goes by every known name."""
    out = {key: value for key, value in message.items() if value is not None}
    reasoning = next((out[key] for key in _REASONING if key in out), None)
    return out if reasoning is None else {"thinking": reasoning, **out, "reasoning_content": reasoning}
