"""The CUDA driver code without CUDA: stand-ins for libcuda and NVRTC, which the loader opens by its usual way.

The stand-in of libcuda runs the plain-C kernels, as late as CUDA may run them: see fake_cuda/libcuda.c.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from packed import packed_model

HERE = Path(__file__).parent / "fake_cuda"
CSRC = HERE.parent.parent / "csrc"
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the stand-ins are built for Linux")

_folder = tempfile.TemporaryDirectory(prefix="twobit-cuda-")


@functools.cache
def libraries(kind: str = "") -> Path:
    """A folder with libcuda.so.1, and libnvrtc.so unless "alone"; "old": a driver that lacks a function."""
    out = Path(_folder.name) / (kind or "whole")
    out.mkdir()
    flags = ["-std=c11", "-O1", "-w", "-fPIC", "-shared", "-ffp-contract=off", f"-I{CSRC}"]
    cuda = [*flags, "-o", str(out / "libcuda.so.1"), str(HERE / "libcuda.c"), str(CSRC / "scalar.c"), "-lm"]
    subprocess.run(["cc", *cuda, *(["-DWITHOUT_ERROR_NAMES"] if kind == "old" else [])], check=True)
    if kind != "alone":
        subprocess.run(["cc", *flags, "-o", str(out / "libnvrtc.so"), str(HERE / "libnvrtc.c")], check=True)
    return out


def run(case: str, fake: str = "", *, kind: str = "", nvrtc: str = "", cache: Path | None = None) -> str:
    """What a case prints; the test fails where the case does."""
    folder = Path(_folder.name) / "cache"
    environment = os.environ | {
        "LD_LIBRARY_PATH": "" if kind == "absent" else str(libraries(kind)),
        "FAKE_LIBRARIES": "" if kind == "absent" else "1",
        "FAKE_CUDA": fake,
        "FAKE_NVRTC": nvrtc,
        "XDG_CACHE_HOME": str(cache or folder),
        "PYTHONPATH": str(HERE.parent),
    }
    command = [sys.executable, str(HERE / "cases.py"), case, str(packed_model("llama"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def test_the_device_opens_runs_a_kernel_and_closes() -> None:
    assert run("opens") == ""


@pytest.mark.parametrize("when", ["lazy", "eager"])
def test_the_driver_computes_what_plain_c_computes(when: str) -> None:
    """Also where every copy and kernel runs as late as a wait allows: no wait is missing."""
    run("bits", when)


def test_a_chain_of_draft_passes_is_waited_for_once() -> None:
    run("waits")


def test_a_lost_device_is_an_error_and_never_other_text() -> None:
    run("lost")


def test_memory_that_is_not_there() -> None:
    run("memory")


def test_what_is_not_finite_is_named() -> None:
    run("finite")


@pytest.mark.parametrize(
    ("fake", "kind", "said"),
    [
        ("", "absent", "absent: no CUDA driver is installed (no usable libcuda.so.1)"),
        ("", "old", "absent: no CUDA driver is installed (no usable libcuda.so.1)"),
        ("devices=0", "", "absent: CUDA finds no device (CUDA error 0)"),
        ("init=100", "", "absent: CUDA finds no device (CUDA error 100)"),
        ("major=7,minor=0", "", "unusable: Fake GPU: its compute capability is 7.0, and 7.5 is the least"),
        ("major=7,minor=5", "", "used"),
        ("old", "", "used"),  # NVRTC's machine code needs no PTX
        ("", "alone", "used"),  # no NVRTC: the PTX
    ],
)
def test_what_is_there_and_what_it_can(fake: str, kind: str, said: str) -> None:
    assert run("refuses", fake, kind=kind) == said


def test_kernels_come_from_nvrtc_the_cache_or_the_package(tmp_path: Path) -> None:
    old = "unusable: Fake GPU: its driver takes neither compiled kernels nor the PTX of the package (CUDA error 222)"
    assert run("refuses", "old", nvrtc="refuses", cache=tmp_path) == old
    assert run("refuses", nvrtc="refuses", cache=tmp_path) == "used"
    assert run("refuses", "old", cache=tmp_path) == "used"
    assert run("refuses", "old", nvrtc="refuses", cache=tmp_path) == "used", "the cache is not read"
    other = run("refuses", "old,minor=9", nvrtc="refuses", cache=tmp_path)
    assert other == old, "machine code of another kind of device"
