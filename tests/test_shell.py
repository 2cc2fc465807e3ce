"""What a shell sees: completion, the page of commands, hints for other programs' options, start-up, pipes."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from packed import packed_model

from twobit.cli import command as commands
from twobit.cli.main import COMMANDS, function_of, main

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "build" / "demo" / "smollm2-2bit"


def test_the_page_of_commands_is_current() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import cli_docs
    finally:
        sys.path.pop(0)
    assert cli_docs.FILE.read_text(encoding="utf-8") == cli_docs.render(), "run `make cli-docs`"


def test_documents_name_things_that_are_there() -> None:
    """Commands and links of the documents: every `twobit COMMAND` with its options, and every file that is linked."""
    import re

    options = {c: {name for name, _ in commands.options(function_of(c))} for c in COMMANDS}
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
        if page.name == "cli.md":
            continue
        code = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL))
        assert "twobit " in code or page.name not in ("README.md", "tutorial.md")
        for command, rest in re.findall(r"^(?:HF_\w+=\d )?twobit (\w+)([^\n#]*)", code, re.MULTILINE):
            assert command in COMMANDS, f"{page.name}: {command}"
            used = set(re.findall(r"(?<=\s)--?[a-z][\w-]*", rest))
            assert used <= options[command], f"{page.name}: twobit {command} {used - options[command]}"


def test_every_help_has_an_example_and_one_style_of_defaults(capsys: Any) -> None:
    for name in COMMANDS:
        assert main([name, "--help"]) == 0
        text = capsys.readouterr().out
        assert f"twobit {name} " in text.partition("Arguments:")[0].partition("\n\n")[2]
        assert "[default" not in text


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str, capsys: Any) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in COMMANDS) and "draft-only" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)
    assert main(["completion", "tcsh"]) == 2


@pytest.mark.skipif(not shutil.which("bash"), reason="no bash here")
def test_bash_completes(capsys: Any) -> None:
    main(["completion", "bash"])
    script = capsys.readouterr().out

    def complete(*words: str) -> list[str]:
        line = " ".join(f"'{word}'" for word in words)
        code = f'{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _twobit; echo "${{COMPREPLY[@]}}"'
        return subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True).stdout.split()

    assert complete("twobit", "qu") == ["quantize"]
    assert complete("twobit", "run", "model", "--te") == ["--temp"]
    assert complete("twobit", "run", "mod") == []


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["run", "-m", "model.gguf", "-p", "hi"], "the model is an argument"),
        (["run", "model", "-p", "hi"], "the prompt is an argument"),
        (["run", "model", "hi", "-ngl", "99"], "--gpu-residual-layers"),
        (["run", "model", "hi", "--temperature", "0.5"], "--temp T"),
        (["run", "model", "hi", "--n-predict=5"], "-n N"),
        (["run", "model", "-cnv"], "twobit chat"),
        (["run", "model"], 'twobit run MODEL "prompt"'),
        (["run", "model", "hi", "--bogus"], "twobit run --help"),
    ],
)
def test_habits_of_other_programs(args: list[str], hint: str, capsys: Any) -> None:
    assert main(args) == 2
    assert hint in capsys.readouterr().err


def test_info_cuts_nothing(capsys: Any) -> None:
    import json

    model = packed_model("llama")
    assert main(["info", str(model)]) == 0
    out = capsys.readouterr().out
    recipe = json.loads((model / "config.json").read_text())["quantization_config"]["recipe"]
    assert "..." not in out
    for of in recipe["errors"]:
        assert of in out


# -- start-up --


def seconds(*command: str, until_text: bool = False, state: Path | None = None) -> float:
    """Wall time of a command, or until its first byte on stdout; modules stay compiled, as where it is installed."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    if state is not None:
        environment |= {"TWOBIT_HOME": str(state), "PYTHONPYCACHEPREFIX": str(state / "compiled")}
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
        assert process.stdout is not None
        process.stdout.read(1) if until_text else process.stdout.read()
        taken = time.perf_counter() - start
        process.stdout.read()
    assert process.returncode == 0
    return taken


def test_help_is_quick(tmp_path: Path) -> None:
    """The bound is generous, for a busy machine; `pytest -s` prints the figure."""
    taken = statistics.median(seconds(sys.executable, "-m", "twobit", "--help", state=tmp_path) for _ in range(5))
    print(f"twobit --help: {taken * 1e3:.0f} ms")
    assert taken < 2


@pytest.mark.full
@pytest.mark.skipif(not DEMO.exists(), reason=f"{DEMO} is not there: run `make demo` first")
def test_the_first_token_comes_quickly(tmp_path: Path) -> None:
    """From the start of the process to the first text of the demo model, files in the page cache, not the first run."""
    command = [sys.executable, "-m", "twobit", "run", str(DEMO), "Why is the sky blue?", "-n", "8"]
    times = [seconds(*command, until_text=True, state=tmp_path) for _ in range(6)]
    print(
        f"twobit run, first token: {statistics.median(times[1:]) * 1e3:.0f} ms; the first run {times[0] * 1e3:.0f} ms"
    )
    assert min(times) < 6


def test_running_imports_neither_torch_nor_the_hub() -> None:
    code = (
        "import sys; from twobit.cli.main import main;"
        f"code = main(['run', {str(packed_model('llama'))!r}, 'hi', '--raw', '-n', '2']);"
        "heavy = {'torch', 'transformers', 'huggingface_hub', 'prompt_toolkit', 'rich', 'yaml', 'jinja2'};"
        "heavy &= set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# -- pipes, on the real program --


def shell(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-o", "pipefail", "-c", script], capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(not shutil.which("bash"), reason="no bash here")
def test_pipes_and_redirections(tmp_path: Path) -> None:
    model = packed_model("llama")
    run = f"{sys.executable} -m twobit run {model} hello --raw -n 40"
    full = shell(f"{run} 2>/dev/null")
    assert full.returncode == 0 and full.stderr == "" and full.stdout
    head = shell(f"{run} | head -c 10")
    assert head.returncode == 0 and head.stdout.encode()[:10] == full.stdout.encode()[:10]
    assert "Traceback" not in head.stderr and "error" not in head.stderr
    file = tmp_path / "out"
    shell(f"{run} >{file} 2>{tmp_path / 'err'}")
    assert file.read_text(encoding="utf-8") == full.stdout
    closed = shell(f"{sys.executable} -m twobit run {model} - --raw <&-")
    assert closed.returncode == 2 and "standard input is closed" in closed.stderr
    assert shell(f"{run} 2>&-").stdout == full.stdout


def test_threads_may_share_a_chat_template() -> None:
    from twobit.runtime.chat_template import ChatTemplate

    template = ChatTemplate("{{ messages[0].content }}")
    with ThreadPoolExecutor(4) as pool:
        texts = [str(i) for i in range(40)]
        assert list(pool.map(lambda t: template.render([{"role": "user", "content": t}]), texts)) == texts
    template.close()
