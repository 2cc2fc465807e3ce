"""The PTX in the package: made of the kernels as they are, and compiled for each kind of GPU without spilling."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "gpu_kernels.py"


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_kernels", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_ptx_is_of_these_kernels() -> None:
    of = script()
    text = of.PTX.read_text()
    assert text.startswith(
        f"// twobit kernels, made by scripts/gpu_kernels.py; source {of.fingerprint(of.source())}\n"
    ), "run scripts/gpu_kernels.py"
    from twobit.runtime.device import PTX

    assert PTX.samefile(of.PTX)


@pytest.mark.full
def test_nvcc_makes_the_same_ptx_and_nothing_spills() -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not installed")
    of = script()
    assert of.make_ptx() == of.PTX.read_text(), "run scripts/gpu_kernels.py (another nvcc may write other text)"
    for target in of.TARGETS:
        spilled = {name: taken[2] for name, taken in of.resources(of.PTX.read_text(), target).items() if taken[2]}
        assert not spilled, target
