"""csrc/ without a warning of clang, for every x86 level and for AArch64: macOS and Windows build it with clang."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import native
import pytest

HEADERS = Path("/usr/aarch64-linux-gnu/include")  # Debian: libc6-dev-arm64-cross
LEVELS = {
    "avx2": native.AVX2,
    "avxvnni": [*native.AVX2, "-mavxvnni"],
    "avx512": native.AVX512,
    "avx512vnni": [*native.AVX512, "-mavx512vnni"],
}
DOT = ["-march=armv8.2-a+dotprod"]

pytestmark = pytest.mark.skipif(not shutil.which("clang"), reason="clang is not installed")


def warnings(sources: dict[str, list[str]], flags: list[str]) -> list[str]:
    """What clang says about these sources of csrc/, each with the flags of its level; nothing is generated."""

    def one(name: str) -> str:
        command = ["clang", *native.FLAGS, *flags, *sources[name], f"-I{native.CSRC}", "-fsyntax-only"]
        return subprocess.run([*command, str(native.CSRC / name)], capture_output=True, text=True).stderr

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [said for said in pool.map(one, sources) if said]


def names() -> list[str]:
    return [str(path.relative_to(native.CSRC)) for path in native.CSRC.rglob("*.c")]


@pytest.mark.skipif(
    native.platform.machine() not in ("x86_64", "AMD64"), reason="the headers of this machine are not x86's"
)
def test_x86() -> None:
    sources = {name: LEVELS.get(Path(name).stem.rpartition("_")[2], []) for name in names() if "_neon" not in name}
    assert len([name for name in sources if "avx512vnni" in name]) == 2
    assert warnings(sources, ["-DTB_HAS_VNNI"]) == []
    emulated = {name: flags for name, flags in sources.items() if "vnni" not in name and "kernels_avx" in name}
    assert warnings(emulated, ["-DTB_VNNI_EMULATED"]) == []


@pytest.mark.skipif(not HEADERS.is_dir(), reason="the headers of AArch64 are missing (Debian: libc6-dev-arm64-cross)")
def test_aarch64() -> None:
    sources = {
        name: DOT if name in ("kernels_neon.c", "probe_neon.c") else [] for name in names() if "_avx" not in name
    }
    assert "kernels_neon.c" in sources
    assert warnings(sources, ["--target=aarch64-linux-gnu", "-isystem", str(HEADERS)]) == []
