"""Builds parts of csrc/ into a shared library of their own and opens it with cffi (ABI mode).

So the tests of these parts need a C compiler only, not the installed extension, and can reach what the extension does not export.
"""

from __future__ import annotations

import functools
import platform
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import cffi

CSRC = Path(__file__).parent.parent / "csrc"
FLAGS = "-std=c11 -O3 -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror -ffp-contract=off -fPIC".split()
AVX2 = "-mavx2 -mfma -mf16c".split()

# Stands in for the kernels' choice of a level, and says which levels this processor runs.
SHIM = """
#include "kernels.h"
#include "ops.h"
static tb_kernels chosen = {"generic", 0, 0};
const tb_kernels *tb_kernels_get(void) { return &chosen; }
const char *tb_cpu_error(void) { return "no level"; }
void choose(const char *level);
void choose(const char *level) { chosen.name = level[0] == 'g' ? "generic" : "avx2"; }
int has_avx2(void);
int has_avx2(void)
{
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
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
void map(float (*f)(float), float *out, const float *x, int32_t n);
"""


def declarations(header: str) -> str:
    """What cffi can read of a header: no preprocessor lines, no tables, and only the part between cdef marks if there are any."""
    text = (CSRC / header).read_text()
    if "/* cdef-begin */" in text:
        text = text.split("/* cdef-begin */")[1].split("/* cdef-end */")[0]
    return re.sub(r"^(\s*#|extern).*$", "", text, flags=re.MULTILINE)


def compile_c(compiler: str, output: Path, sources: list[Path], flags: list[str]) -> None:
    command = [compiler, *FLAGS, f"-I{CSRC}", *flags, "-o", str(output), *map(str, sources), "-lm", "-pthread"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@functools.cache
def library() -> tuple[Any, Any]:
    """(ffi, lib) over ops, scalar functions and the sampler."""
    folder = Path(tempfile.mkdtemp(prefix="twobit-native-"))
    (folder / "shim.c").write_text(SHIM)
    compile_c("cc", folder / "avx2.o", [CSRC / "ops_avx2.c"], ["-c", *AVX2] if has_x86() else ["-c"])
    plain = [CSRC / name for name in ("ops.c", "ops_generic.c", "scalar.c", "sampler.c")]
    compile_c("cc", folder / "native.so", [folder / "shim.c", *plain, folder / "avx2.o"], ["-shared"])
    ffi = cffi.FFI()
    ffi.cdef(declarations("tb.h") + declarations("ops.h") + declarations("sampler.h") + DECLARATIONS)
    return ffi, ffi.dlopen(str(folder / "native.so"))


def has_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


def levels() -> list[str]:
    """The levels this processor runs."""
    return ["generic", "avx2"] if library()[1].has_avx2() else ["generic"]


def table(level: str) -> Any:
    """The operations of a level, which is also what the sampler uses from then on."""
    library()[1].choose(level.encode())
    return library()[1].tb_ops_get()


def pointer(array: Any, kind: str = "float *") -> Any:
    """A C pointer to a contiguous numpy array."""
    assert array.flags.c_contiguous
    return library()[0].cast(kind, array.ctypes.data)
