"""The command line: what goes where, exit codes, and options that make no sense. No weights are needed."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_runtime
import pytest
from test_chat_template import CHATML, GEMMA
from tiny_tokenizers import byte_level, folder

import twobit
from twobit.cli import errors, options, output
from twobit.cli.main import COMMANDS, main
from twobit.errors import CheckpointError, TwobitError, UsageError
from twobit.runtime.lib import default_threads
from twobit.runtime.tokenizer import Tokenizer

ANSWER = "Hello there, the answer is 42 😸 日本."
FAKE = ("twobit.runtime.model", "twobit.runtime.session", "twobit.runtime.sampling")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat model's folder, without weights."""
    path = tmp_path_factory.mktemp("with space Željko")
    return folder(path, byte_level(), settings={"eos_token": "<|im_end|>"}, jinja=CHATML)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model's folder: no template, no BOS."""
    return folder(tmp_path_factory.mktemp("base"), byte_level(), settings={"eos_token": "<|endoftext|>"})


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The stand-in for the C runtime; gets an entry per session."""
    for name in FAKE:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    return fake_runtime.install(ANSWER)


def child(*args: str | Path, answer: str = ANSWER, speed: str = "fast", **kwargs: Any) -> subprocess.Popen[bytes]:
    """The command line in a process of its own, on the stand-in."""
    script = Path(fake_runtime.__file__)
    environment = {**os.environ, "PYTHONPATH": str(script.parent.parent), **kwargs.pop("env", {})}
    command = [sys.executable, str(script), json.dumps(answer), speed, *map(str, args)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **kwargs}
    return subprocess.Popen(command, env=environment, **streams)


# -- the dispatcher --


def test_help_version_and_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"twobit {twobit.__version__}\n"
    assert main([]) == 2
    assert main(["rum"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "did you mean `twobit run`" in captured.err
    assert main(["--verbose"]) == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert "--json" in capsys.readouterr().out or command in ("chat", "completion")


def test_usage_errors_of_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    for args in (["run"], ["run", "m"], ["run", "m", "p", "--bogus"], ["run", "m", "p", "-n", "x"], ["info"]):
        assert main(args) == 2, args
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.startswith("error: ")
        assert "--help" in captured.err or "twobit run MODEL" in captured.err


def test_nothing_heavy_is_imported_for_help() -> None:
    code = (
        "import sys; from twobit.cli.main import main; code = main(['--help']);"
        "heavy = {'torch', 'numpy', 'typer', 'tokenizers', 'jinja2', 'rich', 'huggingface_hub'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_do_not_import_torch(command: str) -> None:
    code = (
        f"import sys; from twobit.cli.main import main; code = main([{command!r}, '--help']);"
        "sys.exit('torch' if 'torch' in sys.modules else code)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# -- run --


def test_text_alone_on_stdout(model: Path, runtime: list[dict[str, Any]], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(model), "What is the answer?"]) == 0
    captured = capfd.readouterr()
    assert captured.out == ANSWER
    assert "tokens/s" in captured.err and "per step" in captured.err
    tokenizer = Tokenizer.load(model)
    assert runtime[0]["prompt"] == tokenizer.chat_ids([{"role": "user", "content": "What is the answer?"}])
    assert runtime[0]["options"].eos == tokenizer.eos_ids
    assert runtime[0]["options"].draft_max == fake_runtime.FakeOptions().draft_max
    tokenizer.close()


def test_json(model: Path, runtime: list[dict[str, Any]], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(model), "hi", "--json", "--ids", "--seed", "5", "-t", "1"]) == 0
    captured = capfd.readouterr()
    data = json.loads(captured.out)
    assert captured.err == ""
    assert data["text"] == ANSWER
    assert data["finish_reason"] == "eos"
    assert data["token_ids"][-1] in Tokenizer.load(model).eos_ids
    assert data["prompt_token_ids"] == runtime[0]["prompt"]
    assert data["prompt_tokens"] == len(runtime[0]["prompt"])
    assert (data["seed"], data["device"], data["kernel"], data["threads"]) == (5, "cpu", "generic", 1)
    assert set(data["timing"]) >= {
        *("load_s", "prefill_s", "prefill_tokens_per_s", "decode_s", "decode_tokens_per_s", "draft_s", "verify_s"),
    }
    assert set(data["speculation"]) >= {"steps", "drafted", "accepted", "tokens_per_step", "accepted_by_depth"}
    assert sum(data["speculation"]["accepted_by_depth"]) == data["speculation"]["accepted"]
    assert data["peak_ram_bytes"] > 10**6


def test_ids_and_stats(model: Path, runtime: list[dict[str, Any]], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(model), "hi", "--ids", "--stats", "-n", "3"]) == 0
    captured = capfd.readouterr()
    assert "prompt ids: " + " ".join(map(str, runtime[0]["prompt"])) in captured.err
    for word in ("kernels generic", "verify", "accepted", "by depth"):
        assert word in captured.err


def test_log_probabilities(model: Path, runtime: list[dict[str, Any]], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(model), "hi", "--logprobs", "2", "--json", "-n", "4"]) == 0
    data = json.loads(capfd.readouterr().out)
    assert [item["token_id"] for item in data["logprobs"]] == data["token_ids"]
    assert all(item["logprob"] == -0.5 and len(item["top"]) == 2 for item in data["logprobs"])
    assert main(["run", str(model), "hi", "--logprobs", "0", "-n", "4"]) == 0
    assert capfd.readouterr().err.count("-0.500") == 4
    assert main(["run", str(model), "hi", "--json", "-n", "4"]) == 0
    assert "logprobs" not in json.loads(capfd.readouterr().out)
    for wrong in ("-1", "21"):
        assert main(["run", str(model), "hi", "--logprobs", wrong]) == 2
        assert "--logprobs" in capfd.readouterr().err


def test_system_message(model: Path, runtime: list[dict[str, Any]]) -> None:
    assert main(["run", str(model), "hi", "-s", "Be brief.", "--json"]) == 0
    tokenizer = Tokenizer.load(model)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert runtime[0]["prompt"] == tokenizer.chat_ids(messages)
    tokenizer.close()


def test_raw_and_base_models(
    base: Path, model: Path, runtime: list[dict[str, Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(base), "hi there", "--raw"]) == 0
    assert runtime[0]["prompt"] == Tokenizer.load(base).encode_prompt("hi there")
    assert main(["run", str(base), "hi there"]) == 1
    error = capfd.readouterr().err
    assert "no chat template" in error and "--raw" in error
    assert main(["run", str(model), "hi", "--raw", "-s", "x"]) == 2


def test_empty_prompts(base: Path, tmp_path: Path, runtime: list[dict[str, Any]], capfd: Any) -> None:
    assert main(["run", str(base), "", "--raw"]) == 2
    assert "empty" in capfd.readouterr().err
    with_bos = folder(tmp_path, byte_level(), settings={"bos_token": "<|im_start|>", "eos_token": "<|endoftext|>"})
    assert main(["run", str(with_bos), "", "--raw"]) == 0
    assert capfd.readouterr().out == ANSWER
    assert len(runtime[-1]["prompt"]) == 1


def test_template_refusal_is_shown_verbatim(tmp_path: Path, runtime: list[dict[str, Any]], capfd: Any) -> None:
    jinja = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}x"
    path = folder(tmp_path, byte_level(), settings={"eos_token": "<|im_end|>"}, jinja=jinja)
    assert main(["run", str(path), "hi", "-s", "x"]) == 1
    assert capfd.readouterr().err.startswith("error: System role not supported\n")


class Stdin:
    """Standard input that holds given bytes."""

    def __init__(self, data: bytes) -> None:
        self.buffer = io.BytesIO(data)


@pytest.mark.parametrize(
    ("data", "raw", "text"),
    [
        (b"hi there", False, "hi there"),
        (b"hi there\r\n", False, "hi there"),
        (b"a\n\n", False, "a\n"),
        (b"a\n\n", True, "a\n\n"),
        ("é".encode(), True, "é"),
    ],
)
def test_standard_input(monkeypatch: pytest.MonkeyPatch, data: bytes, raw: bool, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(data))
    assert options.prompt_text("-", raw=raw) == text


def test_standard_input_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(b"ab\xff"))
    with pytest.raises(UsageError, match="byte 2"):
        options.prompt_text("-", raw=True)
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UsageError, match="closed"):
        options.prompt_text("-", raw=True)
    with pytest.raises(UsageError, match="UTF-8"):
        options.prompt_text("a\udcff", raw=True)


@pytest.mark.parametrize("route", ["argument", "stdin"])
def test_prompt_longer_than_the_context(
    base: Path, runtime: list[dict[str, Any]], capfd: Any, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    text = "x" * 100
    monkeypatch.setattr(sys, "stdin", Stdin(text.encode()))
    n = len(Tokenizer.load(base).encode_prompt(text))
    assert main(["run", str(base), text if route == "argument" else "-", "--raw", "--ctx", "32"]) == 2
    assert f"the prompt has {n} tokens, but the context holds 32" in capfd.readouterr().err
    assert main(["run", str(base), text, "--raw", "--ctx", str(n), "--json"]) == 0
    data = json.loads(capfd.readouterr().out)
    assert (data["token_ids"], data["finish_reason"]) == ([], "length")


# -- sampling options --

GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], {**GREEDY, "seed": 0, "repeat_penalty": 1.0, "repeat_last_n": 64, "logit_bias": {}}),
        (["--temp", "0"], GREEDY),
        (["--temp", "0", "--top-k", "5"], {**GREEDY, "top_k": 5}),
        (["--temp", "1e-6"], {"temperature": 1e-6}),
        (["--top-k", "50", "--seed", "3"], {"temperature": 1.0, "top_k": 50, "seed": 3}),
        (["--top-p", "0.9"], {"temperature": 1.0, "top_p": 0.9}),
        (["--min-p", "0.1"], {"temperature": 1.0, "min_p": 0.1}),
        (["--seed", str(2**64 - 1)], {"seed": 2**64 - 1, "temperature": 0.0}),
        (["--top-k", "1000000000000"], {"top_k": 2**31 - 1}),
        (["--top-k", "1", "--top-p", "0.8"], {"top_k": 1, "top_p": 0.8}),
        (["--logit-bias", "5=-1.5", "--logit-bias", "7=2"], {"logit_bias": {5: -1.5, 7: 2.0}}),
        (["--repeat-last-n", "-1", "--presence-penalty", "-0.5"], {"repeat_last_n": -1, "presence_penalty": -0.5}),
    ],
)
def test_sampling(model: Path, runtime: list[dict[str, Any]], args: list[str], expected: dict[str, Any]) -> None:
    assert main(["run", str(model), "hi", "--json", *args]) == 0
    sampling = runtime[0]["sampling"]
    assert {name: getattr(sampling, name) for name in expected} == expected


@pytest.mark.parametrize(
    "args",
    [
        *(["--temp", v] for v in ("nan", "-1", "inf", "1e30")),
        *(["--top-p", v] for v in ("nan", "0", "1.5", "-0.1")),
        *(["--min-p", v] for v in ("nan", "1.1", "-1")),
        *(["--seed", v] for v in ("-1", str(2**64))),
        *(["--repeat-penalty", v] for v in ("0", "nan", "inf", "-1", "1e-30")),
        *(["--presence-penalty", v] for v in ("nan", "inf")),
        *(["--frequency-penalty", v] for v in ("nan", "-inf")),
        *(["--logit-bias", v] for v in ("5", "x=1", "5=nan", "5=inf", "-1=2", "600=1", "=", "99999999999=1")),
        *(["-t", v] for v in ("0", "-1", "100000")),
        *(["-n", v] for v in ("-1", "1.5")),
        *(["--ctx", v] for v in ("0", "-5", "4097")),
        *(["--draft-max", v] for v in ("-1", "64")),
        *(["--device", v] for v in ("gpu", "")),
        ["--device", "cpu", "--vram", "1GB"],
        ["--vram", "much"],
        ["--gpu-residual-layers", "-1"],
        ["--top-k", "-1"],
        ["--repeat-last-n", "-2"],
        ["--stop", ""],
        ["--no-draft", "--draft-only"],
        ["--no-draft", "--draft-max", "4"],
    ],
    ids=" ".join,
)
def test_values_that_make_no_sense(
    model: Path, runtime: list[dict[str, Any]], capfd: pytest.CaptureFixture[str], args: list[str]
) -> None:
    assert main(["run", str(model), "hi", *args]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and args[0] in captured.err


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--no-draft"], {"draft_max": 0}),
        (["--draft-max", "4"], {"draft_max": 4, "draft_only": False}),
        (["--draft-max", "0"], {"draft_max": 0}),
        (["--draft-only"], {"draft_only": True}),
        (["-n", "5"], {}),
    ],
)
def test_step_options(model: Path, runtime: list[dict[str, Any]], args: list[str], expected: dict[str, Any]) -> None:
    assert main(["run", str(model), "hi", "--json", "-t", "64", *args]) == 0
    assert {name: getattr(runtime[0]["options"], name) for name in expected} == expected
    assert runtime[0]["threads"] == default_threads()
    if "-n" in args:
        assert runtime[0]["session"].budgets[0] == 5


@pytest.mark.parametrize(
    ("asked", "longest", "prompt", "new", "expected"),
    [
        (None, 10**6, 10, 8, 8192),
        (None, 2048, 10, 8, 2048),
        (None, 10**6, 20_000, None, 21_024),
        (None, 10**6, 20_000, 50_000, 70_000),
        (None, 16_000, 20_000, 5, 16_000),
        (64, 10**6, 10, 8, 64),
    ],
)
def test_context(asked: int | None, longest: int, prompt: int, new: int | None, expected: int) -> None:
    assert options.context(asked, longest, prompt, new) == expected


def test_stop_strings(model: Path, runtime: list[dict[str, Any]], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(model), "hi", "--stop", " answer", "--stop", "zzz"]) == 0
    captured = capfd.readouterr()
    assert captured.out == "Hello there, the"
    assert "; stop" in captured.err


# -- models and the Hub --


def test_models_that_are_not_there(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    for name, message in [
        (str(tmp_path / "none"), "no such folder"),
        ("./none", "no such folder"),
        ("none", "no such folder"),
        (str(file), "is a file"),
    ]:
        assert main(["info", name]) == 2
        assert message in capfd.readouterr().err
    assert main(["info", str(tmp_path)]) == 1
    assert str(tmp_path) in capfd.readouterr().err


def test_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from twobit import hub

    asked = []

    def download(repo: str, revision: str | None, **rest: Any) -> Path:
        asked.append((repo, revision))
        return tmp_path

    monkeypatch.setattr(hub, "download", download)
    monkeypatch.chdir(tmp_path)
    assert options.model_folder("user/model") == tmp_path
    assert options.model_folder("user/model@v1.0") == tmp_path
    assert asked == [("user/model", None), ("user/model", "v1.0")]
    (tmp_path / "user" / "model").mkdir(parents=True)
    assert options.model_folder("user/model") == Path("user/model")
    with pytest.raises(UsageError, match="no such folder"):
        options.model_folder("user/modle")
    assert len(asked) == 2


def test_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import huggingface_hub

    def offline(*args: Any, **kwargs: Any) -> str:
        raise ConnectionError("no route to host\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    monkeypatch.chdir(tmp_path)
    assert main(["info", "user/model"]) == 1
    error = capfd.readouterr().err
    assert "user/model is no local folder, and it cannot be downloaded: no route to host" in error
    assert "offline" in error and "more" not in error


# -- errors --


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (CheckpointError("shard 2 is missing", "download it"), 1, "error: shard 2 is missing\n  download it\n"),
        (UsageError("no"), 2, "error: no\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (output.ReaderGone(), 0, ""),
        (FileNotFoundError(2, "No such file or directory", "/x/y"), 1, "error: /x/y: No such file or directory\n"),
        (OSError(28, "No space left on device"), 1, "error: No space left on device\n"),
        (TwobitError("a\x1b[2Jb\nc"), 1, "error: a\\x1b[2Jb\\nc\n"),
    ],
)
def test_table_of_errors(error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert errors.report(error) == code
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", message)


def test_missing_extra(model: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from twobit.cli.main import main;"
        f"sys.exit(main(['quantize', {str(model)!r}, '-o', {str(tmp_path / 'out')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == ('error: the Python package torch is not installed\n  pip install "twobit[quantize]"\n')


def test_bugs_are_told_as_such(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*args: object) -> int:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("twobit.cli.main._run", fail)
    assert main(["info", "x"]) == 1
    error = capsys.readouterr().err
    assert "unexpected ZeroDivisionError: oops" in error and "Traceback" not in error
    monkeypatch.setenv("TWOBIT_DEBUG", "1")
    main(["info", "x"])
    assert "Traceback" in capsys.readouterr().err


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_colour_on_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(stream: io.StringIO) -> str:
        monkeypatch.setattr(sys, "stderr", stream)
        output.error("x")
        return stream.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "\033[31m" in shown(Terminal())
    assert shown(io.StringIO()) == "error: x\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown(Terminal()) == "error: x\n"


def test_line_end_on_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, written, expected in [(Terminal(), "a", "\n"), (Terminal(), "a\n", ""), (io.StringIO(), "a", "")]:
        monkeypatch.setattr(sys, "stdout", stream)
        output.end_text(written)
        assert stream.getvalue() == expected


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    output.table([("name", "n", "bytes"), ("a longer name", "10", "5"), ("c", "5", "1,000")])
    assert capsys.readouterr().out == ("name            n  bytes\na longer name  10      5\nc               5  1,000\n")
    output.table([("family", "llama"), ("a", "b"), ("title", "")])
    assert capsys.readouterr().out == "family  llama\na       b\ntitle\n"


# -- a real model, tiny --


@pytest.fixture(scope="module")
def packed() -> Path:
    """A twobit model of a tiny random checkpoint."""
    from packed import packed_model

    return packed_model("llama")


def test_info(packed: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(packed), "--check", "--json"]) == 0
    data = json.loads(capfd.readouterr().out)
    config = json.loads((packed / "config.json").read_text())["quantization_config"]
    assert data["build_id"] == config["build_id"] and data["recipe"] == config["recipe"]
    assert (data["format_version"], data["family"], data["checked"]) == (1, "llama", True)
    assert data["draft_bytes"] + data["residual_bytes"] == sum(group["bytes"] for group in data["tensors"])
    assert set(data["files"]) == {path.name for path in packed.glob("*.safetensors")}
    layers = {group["name"]: group for group in data["tensors"]}
    assert layers["model.layers.*.mlp.down_proj"]["count"] == 3
    assert layers["model.layers.*.mlp.down_proj"]["bits"] == "2+6 narrow"

    assert main(["info", str(packed)]) == 0
    out = capfd.readouterr().out
    for text in (config["build_id"], "bits per weight", "2+6 narrow", "recipe", *data["files"]):
        assert text in out


def test_info_finds_damage(packed: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    copy = shutil.copytree(packed, tmp_path / "copy")
    (shard,) = copy.glob("twobit-residual-*")
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)
    assert main(["info", str(copy), "--check"]) == 1
    captured = capfd.readouterr()
    assert captured.out == "" and "checksum" in captured.err


def test_run_with_and_without_drafting(packed: Path, capfd: pytest.CaptureFixture[str]) -> None:
    outcomes = []
    for args in ([], ["--no-draft"], ["--draft-max", "3", "-t", "2"]):
        assert main(["run", str(packed), "hello there", "--raw", "-n", "40", "--json", "--top-k", "20", *args]) == 0
        data = json.loads(capfd.readouterr().out)
        outcomes.append((data["text"], data["token_ids"], data["finish_reason"]))
        assert data["speculation"]["drafted"] == 0 or "--no-draft" not in args
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert len(outcomes[0][1]) == 40


def test_seeds_differ(packed: Path, capfd: pytest.CaptureFixture[str]) -> None:
    texts = set()
    for seed in ("1", "2"):
        assert main(["run", str(packed), "hello", "--raw", "-n", "20", "--top-k", "50", "--seed", seed]) == 0
        texts.add(capfd.readouterr().out)
    assert len(texts) == 2


# -- a process of its own --


def test_piped_text_is_exact(model: Path) -> None:
    process = child("run", model, "-", stdin=subprocess.PIPE, env={"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0"})
    out, err = process.communicate("日本?".encode(), timeout=60)
    assert (out.decode(), process.returncode) == (ANSWER, 0)
    assert b"tokens/s" in err


def test_reader_that_goes_away(model: Path) -> None:
    process = child("run", model, "hi", answer="hello there " * 3000)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(5) == b"hello"
    process.stdout.close()
    error = process.stderr.read()
    assert process.wait(timeout=60) == 0
    assert b"error" not in error and b"Traceback" not in error and b"Exception" not in error
    process.stderr.close()


def test_closed_and_full_streams(model: Path) -> None:
    closed = child("run", model, "-", stdin=subprocess.DEVNULL, preexec_fn=lambda: os.close(0))
    assert b"standard input is closed" in closed.communicate(timeout=60)[1]
    assert closed.returncode == 2
    with open("/dev/full", "wb") as full:
        process = child("run", model, "hi", stdout=full)
        error = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert b"error: stdout cannot be written: No space left on device" in error and b"Traceback" not in error


def test_ctrl_c_inside_a_step(model: Path) -> None:
    process = child("run", model, "hi", speed="slow", start_new_session=True)
    assert process.stdout is not None
    first = process.stdout.read(3)
    time.sleep(0.3)  # until it waits inside the next step
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert ANSWER.startswith((first + out).decode())
    assert b"interrupted" in err and b"Traceback" not in err


@pytest.fixture(scope="module", autouse=True)
def _no_hub() -> Iterator[None]:
    """Nothing here may reach for the network."""
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    yield
    os.environ.pop("HF_HUB_OFFLINE")
    if before is not None:
        os.environ["HF_HUB_OFFLINE"] = before


def test_gemma_like_template_end_to_end(tmp_path: Path, runtime: list[dict[str, Any]], capfd: Any) -> None:
    """BOS in the template: once, however the tokenizer is set."""
    special = ("<pad>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
    settings = {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": True}
    path = folder(tmp_path, byte_level(special), settings=settings, jinja=GEMMA)
    assert main(["run", str(path), "hi <bos>", "--json"]) == 0
    assert runtime[0]["prompt"].count(1) == 1
    assert runtime[0]["options"].eos == {2, 4}


@pytest.mark.parametrize("command", ["run", "quantize"])
def test_an_interrupt_anywhere_in_a_command_is_said(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also before the work has begun."""

    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("twobit.cli.options.threads", interrupted)
    args = ["m", "hi"] if command == "run" else ["src", "-o", "out"]
    assert main([command, *args]) == 130
    assert "interrupted" in capsys.readouterr().err
