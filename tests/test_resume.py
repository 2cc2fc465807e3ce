"""Killed at any moment, or out of disk: the same command goes on and makes the same bytes."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from families import make_checkpoint, make_tokenizer

from twobit.cli.main import main
from twobit.cli.progress import Bars
from twobit.format import writer
from twobit.format.writer import staging_path
from twobit.quant.pipeline import Options, quantize

DEMO = Path(__file__).resolve().parent.parent / "build" / "demo" / "smollm2"
TOKENS = 192

FORKED = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch, tokenizers
from twobit.format.writer import staging_path
from twobit.quant import decoder, pipeline, rounding, source

def begin(out):
    pid = os.fork()
    if pid == 0:  # no thread has run yet: it is safe to fork
        pipeline.quantize(Path(sys.argv[1]), out, pipeline.Options(calib_tokens=int(sys.argv[3]), threads=2))
        os._exit(0)
    return pid

plain, out = Path(sys.argv[2]) / "plain", Path(sys.argv[2]) / "killed"
started = time.monotonic()
assert os.waitpid(begin(plain), 0)[1] == 0
whole, rng, left = time.monotonic() - started, random.Random(5), []
for attempt in range(40):
    if len([parts for parts in left if parts]) == 3:
        break
    pid = begin(out)
    time.sleep(rng.uniform(0.2, 0.9) * whole)
    os.kill(pid, signal.SIGKILL)
    if os.waitpid(pid, 0)[1] == 0 or out.exists():  # too late: once more from the beginning
        os.rename(out, out.with_name(f"finished{attempt}"))
    else:
        left.append(len(list(staging_path(out).glob("work/*.json"))))
assert os.waitpid(begin(out), 0)[1] == 0
print(json.dumps(left))
"""


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("resume") / "model"
    return make_tokenizer(make_checkpoint("gemma3_text", path, dtype=torch.bfloat16))


def test_killed_at_random_moments(source: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORKED, str(source), str(tmp_path), str(TOKENS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    left = json.loads(done.stdout)
    assert len([parts for parts in left if parts]) == 3, left  # three of the kills found finished parts
    results = [content(path) for path in tmp_path.iterdir() if path.is_dir()]
    assert len(results) >= 2
    assert all(result == results[0] for result in results)


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.skipif(not DEMO.exists(), reason=f"{DEMO} is not there: run `make demo` first")
def test_the_demo_model_killed_ten_times(tmp_path: Path) -> None:
    """kill -9 from outside: twice while the command starts, then while it works and while it writes."""
    options = ["--calib-tokens", "2048"]

    def begin(out: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "twobit", "quantize", str(DEMO), "-o", str(out), *options]
        with open(tmp_path / "told", "wb") as told:
            return subprocess.Popen(command, stderr=told, stdout=told)

    def wait_for_work(process: subprocess.Popen[bytes]) -> None:
        while process.poll() is None and b"calibration: " not in (tmp_path / "told").read_bytes():
            time.sleep(0.05)

    plain, out, rng = tmp_path / "plain", tmp_path / "killed", random.Random(7)
    first = begin(plain)
    wait_for_work(first)
    started = time.monotonic()
    assert first.wait() == 0
    whole = time.monotonic() - started
    kills = 0
    while kills < 10:
        process = begin(out)
        if kills < 2:
            time.sleep(rng.uniform(0.1, 3))
        else:
            wait_for_work(process)
            time.sleep(rng.uniform(0.02, 0.2) * whole)
        process.send_signal(signal.SIGKILL)
        if process.wait() == 0:
            break
        kills += 1
        assert not out.exists()
    assert kills >= 6, kills
    if not out.exists():
        assert begin(out).wait() == 0
    assert content(out) == content(plain)
    assert not staging_path(out).exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 80 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("no right to mount a file system; the injected failure below it is tested")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def stop_and_go_on(
    source: Path,
    out: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    fill: Callable[[], object],
    free: Callable[[], object],
) -> None:
    """The disk fills up after the first layer, and has room again for the second try."""
    line = Bars.line

    def filling(bars: Bars, text: str) -> None:
        line(bars, text)
        if text.startswith("layer 1/"):
            fill()

    arguments = ["quantize", str(source), "-o", str(out), "--calib-tokens", str(TOKENS)]
    monkeypatch.setattr(Bars, "line", filling)
    assert main(arguments) == 1
    told = capsys.readouterr()
    assert "error: disk full: cannot write " in told.err
    assert "free some space and run the same command again: finished layers are kept" in told.err
    assert told.out == ""
    assert not out.exists()
    free()
    monkeypatch.setattr(Bars, "line", line)
    assert main(arguments) == 0
    assert "parts are done" in capsys.readouterr().err
    quantize(source, out.with_name("plain"), Options(calib_tokens=TOKENS, threads=2))
    assert content(out) == content(out.with_name("plain"))


def test_a_disk_that_is_really_full(
    source: Path, small_disk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ballast = small_disk / "ballast"

    def fill() -> None:
        with open(ballast, "wb") as file, pytest.raises(OSError, match="No space left"):
            while True:
                file.write(bytes(1 << 16))
                file.flush()

    stop_and_go_on(source, small_disk / "out", capsys, monkeypatch, fill, ballast.unlink)


def test_a_disk_that_fails_to_write(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    full, sync = [False], os.fsync

    def fsync(descriptor: int) -> None:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(writer.os, "fsync", fsync)
    stop_and_go_on(
        source, tmp_path / "out", capsys, monkeypatch, lambda: full.insert(0, True), lambda: full.insert(0, False)
    )


def test_no_room_for_the_hidden_states(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], small_disk: Path
) -> None:
    """Told before any work, and for the folder that lacks the space."""
    arguments = ["quantize", str(source), "-o", str(tmp_path / "out"), "--calib-tokens", "200000"]
    assert main([*arguments, "--spill-dir", str(small_disk)]) == 1
    told = capsys.readouterr().err
    assert f"disk full: writing {tmp_path / 'out'} takes 0.93 GB in {small_disk}, 0.08 GB are free" in told
    assert "--spill-dir" in told
    assert not staging_path(tmp_path / "out").exists() and list(small_disk.iterdir()) == []
