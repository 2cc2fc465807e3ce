"""Builds parts of csrc/ into a shared library of their own and opens it with cffi.

So the tests of these parts need a C compiler only, not the installed extension, and reach what the extension hides.
"""

from __future__ import annotations

import functools
import platform
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cffi
import pytest

CSRC = Path(__file__).parent.parent / "csrc"
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Werror"]
FLAGS = ["-std=c11", "-O3", *WARNINGS, "-ffp-contract=off", "-fPIC"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl"]
GPU_FILES = ("device", "plain", "opencl", "cuda", "hybrid", "hybrid_draft", "hybrid_session", "upload")
GPU = [f"gpu/{name}.c" for name in GPU_FILES]
X86 = {"avx2": AVX2, "avx512": AVX512}  # flags of the levels that every compiler knows

# Stands in for the kernels' choice of a level, and says which levels this processor runs.
SHIM = """
#include "kernels.h"
#include "ops.h"
#include <stdio.h>
static tb_kernels chosen = {"generic", 0, 0};
const tb_kernels *tb_kernels_get(void) { return &chosen; }
const char *tb_cpu_error(void) { return "no level"; }
void choose(const char *level);
void choose(const char *level)
{
    static char name[16];
    snprintf(name, sizeof name, "%s", level);
    chosen.name = name;
}
int has_avx2(void);
int has_avx2(void)
{
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
    return 0;
#endif
}
int has_avx512(void);
int has_avx512(void)
{
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
#else
    return 0;
#endif
}
void map(float (*f)(float), float *out, const float *x, int32_t n);
void map(float (*f)(float), float *out, const float *x, int32_t n) { for (int32_t i = 0; i < n; i++) out[i] = f(x[i]); }
"""
DECLARATIONS = """
void choose(const char *level);
int has_avx2(void);
int has_avx512(void);
void map(float (*f)(float), float *out, const float *x, int32_t n);
"""


def declarations(header: str) -> str:
    """What cffi can read of a header: only the part between cdef marks, else all but preprocessor lines and tables."""
    text = (CSRC / header).read_text()
    if "/* cdef-begin */" in text:
        text = text.split("/* cdef-begin */")[1].split("/* cdef-end */")[0]
    return re.sub(r"^(\s*#|extern).*$", "", text, flags=re.MULTILINE)


def compile_c(compiler: str, output: Path, sources: list[Path], flags: list[str]) -> None:
    command = [compiler, *FLAGS, f"-I{CSRC}", *flags, "-o", str(output), *map(str, sources), "-lm", "-pthread"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@functools.cache
def gpu_source() -> str:
    """The path of the C file that holds the kernels' text, made as the build makes it."""
    path = Path(_generated.name) / "gpu_source.c"
    subprocess.run([sys.executable, str(CSRC / "gpu" / "expand.py"), str(path)], check=True)
    return str(path)


_generated = tempfile.TemporaryDirectory(prefix="twobit-source-")


def sanitizer(folder: Path, names: str) -> list[str]:
    """Flags for these sanitizers; skips the test where the compiler lacks their runtime."""
    flags = ["-g", f"-fsanitize={names}", "-fno-sanitize-recover"]
    (folder / "empty.c").write_text("int main(void) { return 0; }\n")
    command = ["cc", *flags, str(folder / "empty.c"), "-o", str(folder / "empty")]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip(f"cc has no runtime for -fsanitize={names}")
    return flags


def run(program: Path, *arguments: str) -> None:
    """Runs a test program that prints ok."""
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def compile_ops(folder: Path, output: Path, sources: list[Path], flags: list[str], linked: list[str]) -> None:
    """Operations, scalar functions and sampler with the stand-in for the kernels and the given sources."""
    (folder / "shim.c").write_text(SHIM)
    plain = [CSRC / name for name in ("ops.c", "ops_neon.c", "scalar.c", "sampler.c")]
    x86 = platform.machine() in ("x86_64", "AMD64")
    flags_of = {"generic": [], "avx2": AVX2 * x86, "avx512": AVX512 * x86}
    objects = [folder / f"{level}.o" for level in flags_of]
    with ThreadPoolExecutor() as pool:
        parts = [
            pool.submit(compile_c, "cc", path, [CSRC / f"ops_{level}.c"], ["-c", *flags, *more])
            for path, (level, more) in zip(objects, flags_of.items(), strict=True)
        ]
        for part in parts:
            part.result()
    compile_c("cc", output, [folder / "shim.c", *sources, *plain, *objects], [*flags, *linked])


@functools.cache
def library() -> tuple[Any, Any]:
    """(ffi, lib) over operations, scalar functions and the sampler."""
    ffi = cffi.FFI()
    ffi.cdef(declarations("tb.h") + declarations("ops.h") + declarations("sampler.h") + DECLARATIONS)
    with tempfile.TemporaryDirectory() as name:
        compile_ops(Path(name), Path(name) / "native.so", [], [], ["-shared"])
        return ffi, ffi.dlopen(f"{name}/native.so")


def levels() -> list[str]:
    """The levels this processor runs."""
    lib = library()[1]
    return ["generic"] + ["avx2"] * lib.has_avx2() + ["avx512"] * lib.has_avx512()


def table(level: str) -> Any:
    """The operations of a level, which is also what the sampler uses from then on."""
    library()[1].choose(level.encode())
    return library()[1].tb_ops_get()


def pointer(array: Any, kind: str = "float *") -> Any:
    """A C pointer to a contiguous numpy array."""
    assert array.flags.c_contiguous
    return library()[0].cast(kind, array.ctypes.data)
