"""The VNNI levels: compiled always, run where the processor has them, and everywhere with VNNI emulated."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import native
import pytest

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.skipif(native.platform.machine() not in ("x86_64", "AMD64"), reason="not an x86 processor"),
]

FLAGS = {
    "avxvnni": [*native.AVX2, "-mavxvnni"],
    "avx512vnni": [*native.AVX512, "-mavx512vnni"],
}


def compile_all(folder: Path, sources: dict[str, list[str]]) -> list[Path]:
    """Objects of sources of csrc/ with their flags."""

    def one(name: str, flags: list[str]) -> Path:
        out = folder / f"{name}.o"
        native.compile_c("cc", out, [native.CSRC / name], ["-O1", *flags, "-c"])
        return out

    with ThreadPoolExecutor() as pool:
        return list(pool.map(one, sources, sources.values()))


def check(program: Path, level: str | None) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TWOBIT_CPU"} | ({"TWOBIT_CPU": level} if level else {})
    return subprocess.run([program, "check"], env=environment, capture_output=True, text=True, timeout=120)


def test_the_bits_of_generic_with_vnni_emulated(tmp_path: Path) -> None:
    sources = {f"kernels_{level}.c": [*flags, "-DTB_VNNI_EMULATED"] for level, flags in native.X86.items()}
    sources |= {"kernels_generic.c": [], "cpu.c": [], "os.c": []}
    objects = compile_all(tmp_path, sources | {"bench_kernels.c": []})
    native.compile_c("cc", tmp_path / "bench", objects, [])
    done = check(tmp_path / "bench", None)
    if "avx2" not in done.stdout:
        pytest.skip("this processor has no AVX2")
    assert done.returncode == 0 and "avx2 generic, equal bits" in done.stdout, done.stderr


def test_the_levels_compile_and_have_the_bits_of_generic_where_they_run(tmp_path: Path) -> None:
    sources = {f"{part}_{level}.c": flags for part in ("kernels", "probe") for level, flags in FLAGS.items()}
    plain = {"kernels_generic.c": [], "bench_kernels.c": [], "cpu.c": ["-DTB_HAS_VNNI"], "os.c": []}
    objects = compile_all(tmp_path, sources | {f"kernels_{level}.c": native.X86[level] for level in native.X86} | plain)
    objects = [path for path in objects if not path.name.startswith("probe")]
    native.compile_c("cc", tmp_path / "bench", objects, [])
    absent = []
    for level in FLAGS:
        done = check(tmp_path / "bench", level)
        assert done.returncode == 0, done.stderr
        if level not in done.stdout:
            absent.append(level)
    if absent:
        pytest.skip(f"compiled, not executed: this processor has no {' and no '.join(absent)}")
