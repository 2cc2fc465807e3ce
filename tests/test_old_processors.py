"""Processors without AVX2 (class D21), emulated: the program starts, runs the plain kernels, and says the same.

qemu-x86_64 ends a program at the first instruction that the named processor does not have.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packed import packed_model

QEMU = "qemu-x86_64"
PROGRAM = """
import sys, importlib.machinery, importlib.util
sys.path[:] = {path!r}
loader = importlib.machinery.ExtensionFileLoader("twobit.runtime._twobit", {extension!r})
module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
sys.modules[loader.name] = module
loader.exec_module(module)
from twobit.cli.main import main
sys.exit(main(["run", {model!r}, "hello there", "--raw", "-n", "6", "-t", "1", "--json"]))
"""

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which(QEMU) is None,
    reason=f"older processors were not emulated: {QEMU} is not installed (Debian: qemu-user), or this is no x86-64",
)


def run(*emulator: str) -> dict[str, object]:
    from twobit.runtime import _twobit  # type: ignore[attr-defined]

    program = PROGRAM.format(
        path=[p for p in sys.path if p], extension=_twobit.__file__, model=str(packed_model("llama"))
    )
    python = str(Path(sys.executable).resolve())
    # numpy's OpenBLAS takes kernels by family and model, and on some hosts wrong ones for an emulated processor
    environment = os.environ | {"OPENBLAS_CORETYPE": "Nehalem"}
    done = subprocess.run(
        [*emulator, python, "-c", program], capture_output=True, text=True, timeout=280, env=environment
    )
    assert done.returncode == 0, (emulator, done.returncode, done.stderr[-2000:])
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("processor", "level"), [("Nehalem", "generic"), ("SandyBridge", "generic")])
def test_without_avx2(processor: str, level: str) -> None:
    here, there = run(), run(QEMU, "-cpu", processor)
    assert there["kernel"] == level
    assert there["token_ids"] == here["token_ids"] and there["text"] == here["text"]
