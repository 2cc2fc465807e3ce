"""A stranger's model through every command: its chat template never runs as code, nor do its files take the machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fake_runtime
import pytest
from hub_stub import serve
from packed import packed_model, source_checkpoint
from tiny_tokenizers import byte_level, folder

from twobit.errors import RuntimeFailure
from twobit.runtime.device import Device
from twobit.runtime.model import Model
from twobit.runtime.session import Session

PAYLOAD = (
    "{{ lipsum.__globals__['os'].system('touch CANARY') }}{{ cycler.__init__.__globals__.os.popen('touch CANARY') }}"
)


def test_a_template_is_run_by_nobody(tmp_path: Path) -> None:
    """quantize and push only copy it, run and chat render it in the sandbox, which refuses."""
    canary = tmp_path / "canary"
    source = shutil.copytree(source_checkpoint("llama"), tmp_path / "source")
    (source / "chat_template.jinja").write_text(PAYLOAD.replace("CANARY", str(canary)))
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("HF_")},
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": "hf_good",
    }

    def twobit(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "twobit", *args]
        return subprocess.run(command, input=stdin, env=environment, capture_output=True, text=True, cwd=tmp_path)

    assert twobit("quantize", "source", "-o", "out", "--calib-tokens", "512", "-t", "1").returncode == 0
    with serve() as hub:
        environment["HF_ENDPOINT"] = hub.url
        pushed = twobit("push", "out", "someone/m")
        assert pushed.returncode == 0, pushed.stderr
        assert "chat_template.jinja" in hub.repos["someone/m"].files
    for done in (twobit("run", "out", "hi"), twobit("chat", "out", stdin="hi\n")):
        assert "not allowed" in done.stderr, done.stderr
    assert twobit("run", "out", "hi", "--raw", "-n", "1").returncode == 0
    assert not canary.exists()


def test_a_long_context_takes_memory_as_it_is_used() -> None:
    session = Session(Model.open(packed_model("llama")), 1_000_000, 1)
    session.eval([5, 6, 7, 8], logits=False)
    assert session.bytes < 50_000_000


def test_half_a_character_waits_and_comes_out_at_the_end(tmp_path: Path) -> None:
    """Through a pipe: what is whole comes at once, half an emoji is held, and flushed when the text ends."""
    tokenizer = byte_level()
    model = folder(tmp_path, tokenizer, settings={"eos_token": "<|im_end|>"})
    answer = "a\N{FOX FACE}"
    assert len(tokenizer.encode(answer).ids) >= 4, "the first step, of three tokens, must not hold all of the emoji"
    script = Path(fake_runtime.__file__)
    command = [sys.executable, str(script), json.dumps(answer), "slow", "run", str(model), "hi", "--raw"]
    env = {**os.environ, "PYTHONPATH": str(script.parent.parent)}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    heard = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731 - ignored in a shell's background
    process = subprocess.Popen(command, env=env, start_new_session=True, preexec_fn=heard, **streams)
    assert process.stdout is not None
    assert os.read(process.stdout.fileno(), 100) == b"a"
    time.sleep(0.3)
    os.set_blocking(process.stdout.fileno(), False)
    with pytest.raises(BlockingIOError):
        os.read(process.stdout.fileno(), 100)
    os.set_blocking(process.stdout.fileno(), True)
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out.decode()) == (130, "\ufffd")


def test_a_device_that_is_not_there_is_an_error(capsys: Any) -> None:
    from twobit.cli.main import main

    assert main(["run", str(packed_model("llama")), "hi", "--raw", "--device", "gpu"]) == 2
    assert "--device gpu is not possible: it must be auto, cpu, opencl or cuda" in capsys.readouterr().err
    try:
        Device("cuda")
    except RuntimeFailure as error:
        assert main(["run", str(packed_model("llama")), "hi", "--raw", "--device", "cuda"]) == 1
        assert str(error) in capsys.readouterr().err
