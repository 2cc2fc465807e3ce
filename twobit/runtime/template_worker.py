"""Renders a model's chat template in a process of its own: `python -I -S template_worker.py`, JSON lines in and out.

A chat template is a program that came with the model. It runs in Jinja's immutable sandbox, as in transformers; but
a sandbox bounds neither time nor memory (`{{ "a" * 10**10 }}`, `"%9999999999d" % 1`, nested loops), and code inside
one C call cannot be stopped from Python. Hence the process: it limits its own address space and its output, and the
parent kills it when it takes too long. It sees none of the parent's environment but time zone and locale.

First line in: {"path": sys.path}; second: {"template": str, "memory": bytes, "output": characters}. Then, for every
{"messages": [...], "add_generation_prompt": bool, "variables": {...}}, one line out: {"text": str} or
{"error": str, "kind": "refused" | "syntax" | "forbidden" | "limit" | "failed"}.
"""

from __future__ import annotations

import json
import signal
import sys
from datetime import datetime
from typing import Any


def environment() -> Any:
    """The environment of transformers' `apply_chat_template`: same extensions, globals and filters."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox
    import jinja2.utils

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks what the assistant wrote, for training; here it only keeps its body."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller: Any) -> Any:
            return caller()

    class Dict:
        def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
            return dict(*args, **kwargs)

        def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args, **kwargs)

    class Namespace(jinja2.utils.Namespace):
        def __init__(*args: Any, **kwargs: Any) -> None:  # no named self, so that namespace(self=...) works
            attributes = dict(*args[1:], **kwargs)
            for name in attributes:
                Namespace._check(name)
            jinja2.utils.Namespace.__init__(args[0], attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            Namespace._check(name)
            super().__setitem__(name, value)

        @staticmethod
        def _check(name: Any) -> None:
            if isinstance(name, str) and name.startswith("_"):
                raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r}")

    class Refused(jinja2.exceptions.TemplateError):
        """The template's own raise_exception."""

    def raise_exception(message: str) -> None:
        raise Refused(str(message))

    def tojson(
        x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    env.globals["dict"] = Dict()
    env.globals["namespace"] = Namespace
    return env


def render(template: Any, request: dict[str, Any], limit: int) -> dict[str, str]:
    """One request, as the reply to send."""
    pieces, size = [], 0
    variables = {"tools": None, "documents": None, **request["variables"]}
    stream = template.generate(
        messages=request["messages"], add_generation_prompt=request["add_generation_prompt"], **variables
    )
    for piece in stream:
        size += len(piece)
        if size > limit:
            return {"kind": "limit", "error": f"writes more than {limit} characters"}
        pieces.append(piece)
    return {"text": "".join(pieces)}


def explain(error: BaseException) -> dict[str, str]:
    """An exception of the template as a reply."""
    import jinja2.exceptions as jinja

    if type(error).__name__ == "Refused":
        return {"kind": "refused", "error": str(error)}
    if isinstance(error, jinja.TemplateSyntaxError):
        return {"kind": "syntax", "error": f"line {error.lineno}: {error.message}"}
    if isinstance(error, jinja.SecurityError):
        return {"kind": "forbidden", "error": str(error)}
    if isinstance(error, MemoryError | OverflowError | RecursionError):
        return {"kind": "limit", "error": str(error) or "needs too much memory"}
    return {"kind": "failed", "error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Serve requests until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole foreground group; the parent decides
    sys.path[:] = json.loads(sys.stdin.buffer.readline())["path"]
    ready = environment()  # jinja2's import takes as long as a small model's; it is done before the template comes
    setup = json.loads(sys.stdin.buffer.readline() or b"null")
    if setup is None:  # it was not needed
        return
    try:
        import resource
    except ImportError:  # no such limits on this system: time and output are limited all the same
        pass
    else:
        resource.setrlimit(resource.RLIMIT_AS, (setup["memory"], setup["memory"]))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    template, failure = None, None
    try:
        template = ready.from_string(setup["template"])
    except Exception as error:
        failure = explain(error)
    for line in sys.stdin.buffer:
        reply = failure
        if reply is None:
            try:
                reply = render(template, json.loads(line), setup["output"])
            except Exception as error:
                reply = explain(error)
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
