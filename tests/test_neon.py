"""The AArch64 runtime: cross-compiled without warnings and run under qemu, bit for bit as generic and this machine.

Needs Debian's gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user; where they are missing, the tests say so.
`make test-neon` runs them alone. qemu shows that results are right, and nothing about speed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import native
import pytest

CROSS, QEMU = "aarch64-linux-gnu-gcc", "qemu-aarch64"
PROGRAMS = Path(__file__).parent / "neon"
DOT = ["-march=armv8.2-a+dotprod"]
KERNELS = ["kernels_generic.c", "kernels_neon.c", "cpu.c", "os.c"]
OPS = ["ops.c", "ops_generic.c", "ops_neon.c", "scalar.c", "sampler.c"]
ROUNDING = ["rounding.c", "rounding_neon.c"]
ENGINE = [
    "pool.c",
    "model.c",
    "session.c",
    "forward.c",
    "guard.c",
    "speculate.c",
    "overlap.c",
    "belief.c",
    "lookup.c",
    "probe.c",
    "probe_neon.c",
]
RUNTIME = [*KERNELS, *OPS, *ENGINE, *native.GPU, native.gpu_source()]
X86 = {f"{part}_{level}.c": flags for level, flags in native.X86.items() for part in ("kernels", "probe")}
X86["ops_avx2.c"] = native.AVX2
X86["ops_avx512.c"] = native.AVX512

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

if not (shutil.which(CROSS) and shutil.which(QEMU)):
    pytest.skip(
        f"the NEON code was neither compiled nor executed: {CROSS} and {QEMU} are not both installed "
        "(Debian: gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user)",
        allow_module_level=True,
    )


def compile_all(compiler: str, folder: Path, sources: list[str], flags: list[str]) -> list[Path]:
    """Objects of these sources of csrc/, each with the flags of its level."""
    folder.mkdir(exist_ok=True)
    special = {"kernels_neon.c": DOT, "probe_neon.c": DOT, **X86}

    def one(name: str) -> Path:
        out = folder / f"{name.replace('/', '_')}.o"
        native.compile_c(compiler, out, [native.CSRC / name], [*flags, *special.get(name, []), "-c"])
        return out

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(one, sources))


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The whole runtime for AArch64, with every warning an error; hardly optimized, to be quick."""
    folder = tmp_path_factory.mktemp("aarch64")
    sources = [*RUNTIME, *ROUNDING, "bench_kernels.c"]
    return dict(zip(sources, compile_all(CROSS, folder, sources, ["-O1"]), strict=True))


def link(objects: dict[str, Path], output: Path, names: list[str], *more: Path) -> Path:
    native.compile_c(CROSS, output, [*more, *(objects[name] for name in names)], ["-static"])
    return output


def emulate(program: Path, *arguments: str, cpu: str = "max", level: str | None = None) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "TWOBIT_CPU"} | ({"TWOBIT_CPU": level} if level else {})
    command = [QEMU, "-cpu", cpu, str(program), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_level_needs_the_dot_product(objects: dict[str, Path], tmp_path: Path) -> None:
    program = link(objects, tmp_path / "level", KERNELS, PROGRAMS / "level.c")
    assert emulate(program) == "neon|\n"
    assert emulate(program, level="generic") == "generic|\n"
    assert emulate(program, cpu="cortex-a57") == "generic|\n"
    for cpu, level in (("cortex-a57", "neon"), ("max", "avx2")):
        out = emulate(program, cpu=cpu, level=level)
        assert out.startswith("-|") and f"TWOBIT_CPU={level}: not available" in out
    assert "unknown level" in emulate(program, level="neon2")


def test_matrix_kernels_have_the_bits_of_generic(objects: dict[str, Path], tmp_path: Path) -> None:
    program = link(objects, tmp_path / "bench", ["bench_kernels.c", *KERNELS])
    assert "levels neon generic, equal bits" in emulate(program, "check")


def test_operations_and_sampler_have_the_bits_of_generic(objects: dict[str, Path], tmp_path: Path) -> None:
    assert emulate(link(objects, tmp_path / "operations", OPS, PROGRAMS / "operations.c")) == "ok\n"


def test_rounding_gives_the_bytes_of_generic(objects: dict[str, Path], tmp_path: Path) -> None:
    assert emulate(link(objects, tmp_path / "round", ROUNDING, PROGRAMS / "round.c")) == "ok\n"


def test_a_model_has_the_same_bits_here_and_on_aarch64(objects: dict[str, Path], tmp_path: Path) -> None:
    program = link(objects, tmp_path / "model", RUNTIME, PROGRAMS / "model.c")
    results = [emulate(program, level=level).split() for level in ("generic", "neon")]
    if native.platform.machine() in ("x86_64", "AMD64"):
        sources = [name for name in RUNTIME if "neon" not in name] + [*X86]
        here = compile_all("cc", tmp_path / "here", sources, ["-O1"])
        native.compile_c("cc", tmp_path / "here" / "model", [PROGRAMS / "model.c", *here], [])
        done = subprocess.run([tmp_path / "here" / "model"], capture_output=True, text=True, check=True)
        results.append(done.stdout.split())
    assert [result[0] for result in results[:2]] == ["generic", "neon"]
    assert all(result[1:] == results[0][1:] for result in results), results
