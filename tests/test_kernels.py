"""The matrix kernels: against double precision, and bit for bit between levels, batch sizes and row ranges."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cffi
import native
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twobit.format import layout

F32 = np.float32
GUARD = 16
DRAFT, VERIFY, RESIDUAL = OPS = 0, 1, 2
PLAIN = ["bench_kernels.c", "kernels_generic.c", "kernels_neon.c", "cpu.c", "os.c"]
FORMATS = [(b, r, kind.wide) for (b, r), kind in layout.KINDS.items()]


def build(folder: Path, output: Path, linked: list[str], flags: list[str], sources: list[str]) -> None:
    """The sources, and the x86 levels, which alone are compiled for theirs; hardly optimized, to be quick."""
    quick = [*flags, "-O0" if flags else "-O1", "-c"]
    objects = [folder / f"{name}.o" for name in sources]
    with ThreadPoolExecutor() as pool:
        jobs = [
            pool.submit(native.compile_c, "cc", out, [native.CSRC / name], [*quick, *of_level(name)])
            for out, name in zip(objects, sources, strict=True)
        ]
        for level, its in native.X86.items() if x86() else ():
            objects.append(folder / f"{level}.o")
            source = [native.CSRC / f"kernels_{level}.c"]
            # these checks multiply the time the compiler takes, and look at pointers that intrinsics take anyway
            less = ["-fno-sanitize=pointer-overflow,alignment,null"] if flags else []
            jobs.append(pool.submit(native.compile_c, "cc", objects[-1], source, [*quick, *its, *less]))
        for job in jobs:
            job.result()
    native.compile_c("cc", output, objects, [*flags, *linked])


def of_level(source: str) -> list[str]:
    """The flags that a level's unit needs on this machine."""
    return ["-march=armv8.2-a+dotprod"] if source == "kernels_neon.c" and not x86() else []


def x86() -> bool:
    return native.platform.machine() in ("x86_64", "AMD64")


@functools.cache
def shared() -> tuple[Path, Any]:
    """(the library of the kernels and the choice of a level, the folder that goes when this process ends)."""
    folder = tempfile.TemporaryDirectory()
    output = Path(folder.name) / "kernels.so"
    build(output.parent, output, ["-shared"], [], PLAIN[1:])
    return output, folder


@functools.cache
def library() -> tuple[Any, Any]:
    """(ffi, lib) over that library."""
    ffi = cffi.FFI()
    tables = "extern tb_kernels tb_kernels_generic;"
    ffi.cdef(native.declarations("tb.h") + native.declarations("kernels.h") + tables)
    return ffi, ffi.dlopen(str(shared()[0]))


@functools.cache
def levels() -> list[Any]:
    """The tables of all levels this processor runs, generic first."""
    ffi, lib = library()
    found = list(iter(map(lib.tb_kernels_at, itertools.count()).__next__, ffi.NULL))
    assert found[-1] == ffi.addressof(lib, "tb_kernels_generic")
    return found[::-1]


@dataclass
class Packed:
    """A tb_matrix over numpy planes, and its integers."""

    c: Any
    q: tuple[np.ndarray, np.ndarray, np.ndarray]
    u: np.ndarray
    bias: np.ndarray | None
    wide: bool
    keep: list[Any]

    @property
    def shape(self) -> tuple[int, int]:
        return self.q[0].shape


def aligned(a: np.ndarray) -> np.ndarray:
    """A copy that starts at 64 bytes."""
    raw = np.empty(a.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    out = raw[start : start + a.nbytes].view(a.dtype).reshape(a.shape)
    out[...] = a
    return out


def random_matrix(rng: np.random.Generator, rows: int, cols: int, b: int, r: int, group: int, wide: bool) -> Packed:
    """Random integers that reach the ends of their ranges; the row bound of FORMAT.md holds with equality at times."""
    top, half, limit = (1 << b) - 1, 1 << (r - 1), layout.Q_WIDE if wide else layout.Q_NARROW
    units, groups = layout.ceil_div(cols, 16), layout.ceil_div(cols, group)

    def extremes(low: int, high: int, *shape: int) -> np.ndarray:
        plain = rng.integers(low, high, shape, endpoint=True)
        return np.where(rng.random(shape) < 0.5, plain, np.where(rng.random(shape) < 0.5, low, high))

    left = limit - 15 * half
    shift = layout.KINDS[b, r].shift
    a = np.minimum(extremes(0, left // (15 * top), rows) >> shift, 17) << shift
    room = np.minimum((left - 15 * top * a) // 8, 127)
    matrix = layout.Matrix(
        draft_bits=b,
        residual_bits=r,
        residual_group=group,
        codes=extremes(0, top, rows, cols).astype(np.uint8),
        s=extremes(0, 15, rows, units).astype(np.uint8),
        m=extremes(-8, 7, rows, units).astype(np.int8),
        row_scale=(1e-4 * rng.random(rows)).astype(F32),
        row_a=a.astype(np.uint8),
        row_b=(room * rng.choice([-1, 1, 0.3], rows)).astype(np.int8),
        residual=extremes(-half, half - 1, rows, cols).astype(np.int16),
        f=extremes(0, 15, rows, groups).astype(np.uint8),
    )
    layout.check_rows("test", matrix.row_scale, matrix.row_a, matrix.row_b, b, r, wide)
    ffi, _ = library()
    planes = {name: aligned(plane) for name, plane in layout.pack(matrix).items()}
    bias = rng.standard_normal(rows).astype(F32) if rng.random() < 0.5 else None
    c = ffi.new("tb_matrix *")
    c.rows, c.cols, c.draft_bits, c.residual_bits, c.residual_group, c.wide = rows, cols, b, r, group, wide
    for name, plane in planes.items():
        kind = {"row_scale": "float *", "row_b": "int8_t *"}.get(name, "uint8_t *")
        setattr(c, name, ffi.cast(kind, plane.ctypes.data))
    c.bias = ffi.NULL if bias is None else ffi.cast("float *", bias.ctypes.data)
    draft, full = layout.lattice(matrix)
    return Packed(c, (draft, full, full - draft), matrix.row_scale, bias, wide, [planes, bias])


def activations(table: Any, w: Packed, op: int, x: np.ndarray) -> tuple[Any, list[Any], int]:
    """(tb_act, what it points to, status of quantize) of tokens x[m, cols], rounded in two parts."""
    ffi, lib = library()
    m, cols = x.shape
    kind = lib.tb_act_kind(w.c, op)
    memory = aligned(np.full(lib.tb_act_bytes(kind, m, cols), 0xAA, np.uint8))
    act = ffi.new("tb_act *")
    lib.tb_act_layout(act, kind, m, cols, ffi.cast("void *", memory.ctypes.data))
    data = ffi.cast("float *", x.ctypes.data)
    status = table.quantize(act, data, cols, 0, m // 2) | table.quantize(act, data, cols, m // 2, m)
    return act, [memory, x], status


def product(table: Any, w: Packed, op: int, x: np.ndarray, blocks: tuple[int, int] | None = None) -> np.ndarray:
    """y[m, rows] of the row blocks; everything else stays NaN, which is checked behind the end of every token."""
    ffi, lib = library()
    rows, cols = w.shape
    act, keep, status = activations(table, w, op, x)
    assert status == 0
    y = np.full((x.shape[0], rows + GUARD), np.nan, F32)
    scratch = aligned(np.full(lib.tb_kernel_scratch_bytes(cols), 0xFF, np.uint8))
    first, last = blocks or (0, layout.ceil_div(rows, 16))
    out, stride = ffi.cast("float *", y.ctypes.data), rows + GUARD
    table.matmul(w.c, op, act, out, stride, first, last, ffi.cast("void *", scratch.ctypes.data))
    assert np.isnan(y[:, rows:]).all() and keep
    return y[:, :rows].copy()


def reference(w: Packed, op: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(y, bound of its error) in double from the integers, with activations rounded as FORMAT.md says."""
    limit, group = (127, 128) if op == DRAFT else (4095, 64) if w.wide else (8191, 128)
    cols = x.shape[1]
    groups = layout.ceil_div(cols, group)
    padded = np.zeros((x.shape[0], groups * group), F32)
    padded[:, :cols] = x
    v = padded.reshape(-1, groups, group)
    amax = np.abs(v).max(axis=2)
    zero = amax < F32(1e-30)
    by = F32(limit) / np.where(zero, F32(1), amax)
    codes = np.where(zero[..., None], 0, np.clip(np.rint(v * by[..., None]), -limit, limit)).astype(np.float64)
    scale = np.where(zero, F32(0), amax / F32(limit)).astype(np.float64)
    rounded = (codes * scale[..., None]).reshape(x.shape[0], -1)[:, :cols]
    q, u = w.q[op].astype(np.float64), w.u.astype(np.float64)
    y, size = rounded @ q.T * u, np.abs(rounded) @ np.abs(q).T * u
    bias = 0 if w.bias is None else w.bias.astype(np.float64)
    # one rounding per group, one for U, one for the bias; an exact dot rounds once more when it becomes a float
    return y + bias, (2 * groups + 3) * 2.0**-24 * (size + np.abs(bias)) + 1e-37


def tokens(rng: np.random.Generator, m: int, cols: int) -> np.ndarray:
    """Activations with outliers, and groups of zeros, of tiny and of huge numbers."""
    x = rng.standard_normal((m, cols)) * np.where(rng.random((m, cols)) < 0.02, 8, 1)
    sizes = [0, 1e-31, 1e-29, 1e-3, 1, 1e20]
    scales = rng.choice(sizes, (m, layout.ceil_div(cols, 32)), p=[0.1, 0.1, 0.1, 0.2, 0.4, 0.1])
    return np.ascontiguousarray(x * np.repeat(scales, 32, axis=1)[:, :cols], dtype=F32)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.tobytes() == b.tobytes()


@pytest.mark.parametrize(("b", "r", "wide"), FORMATS)
@pytest.mark.parametrize("group", layout.RESIDUAL_GROUPS)
def test_every_format_has_the_reference_result_and_bits_that_depend_on_nothing(
    b: int, r: int, wide: bool, group: int
) -> None:
    rng = np.random.default_rng(1000 * b + 10 * r + wide + group)
    for rows, cols, m in ((37, 211, 7), (16, 64, 1), (50, 400, 4)):
        check(rng, random_matrix(rng, rows, cols, b, r, group, wide), tokens(rng, m, cols))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(1, 90), st.integers(1, 420), st.integers(1, 19), st.sampled_from(FORMATS), st.sampled_from((16, 32)),
    st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_any_shape(rows: int, cols: int, m: int, kind: tuple[int, int, bool], group: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    check(rng, random_matrix(rng, rows, cols, kind[0], kind[1], group, kind[2]), tokens(rng, m, cols))


def check(rng: np.random.Generator, w: Packed, x: np.ndarray) -> None:
    """All ops and all levels: within the rounding of the reference; the same bits for any tokens and row blocks."""
    m, blocks = x.shape[0], layout.ceil_div(w.shape[0], 16)
    for op in OPS:
        y, bound = reference(w, op, x)
        whole = product(levels()[0], w, op, x)
        assert (np.abs(whole - y) <= bound).all()
        first = int(rng.integers(blocks))
        last = int(rng.integers(first, blocks)) + 1
        t = int(rng.integers(m))
        n = int(rng.integers(t, m)) + 1
        for table in levels():
            assert same(product(table, w, op, x), whole)
            for start, stop in ((t, t + 1), (t, n)):
                part = product(table, w, op, x[start:stop], (first, last))
                inside = slice(16 * first, 16 * last)
                assert same(part[:, inside], whole[start:stop, inside])
                part[:, inside] = np.nan
                assert np.isnan(part).all()


def test_more_tokens_than_one_chunk() -> None:
    rng = np.random.default_rng(5)
    w = random_matrix(rng, 35, 144, 2, 6, 16, False)
    x = tokens(rng, 261, 144)
    for op in OPS:
        whole = product(levels()[0], w, op, x)
        assert all(same(product(table, w, op, x), whole) for table in levels())
        assert same(product(levels()[-1], w, op, x[260:]), whole[260:])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 5, 127, 128, 199])
def test_a_value_that_is_not_finite_is_refused(bad: float, at: int) -> None:
    rng = np.random.default_rng(2)
    w = random_matrix(rng, 16, 200, 2, 6, 16, False)
    x = np.ones((3, 200), F32)
    x[2, at] = bad
    for table in levels():
        for op in OPS:
            assert activations(table, w, op, x)[2] == -1
            assert activations(table, w, op, x[:2])[2] == 0


def test_activations_round_to_even() -> None:
    ffi, _ = library()
    rng = np.random.default_rng(3)
    w = random_matrix(rng, 16, 16, 2, 6, 16, False)
    x = np.array([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, 0, 0, 0, 0, 0, 0, 0, -127]], F32)
    act, keep, _ = activations(levels()[0], w, DRAFT, x)
    codes = np.frombuffer(ffi.buffer(act.data, 32), np.int16)
    assert codes.tolist() == [127, 0, 2, 2, 0, -2, -2, 126, 0, 0, 0, 0, 0, 0, 0, -127] and keep


@pytest.mark.parametrize(("b", "r", "wide"), FORMATS)
def test_a_row_as_floats(b: int, r: int, wide: bool) -> None:
    ffi, lib = library()
    rng = np.random.default_rng(4)
    w = random_matrix(rng, 21, 77, b, r, 32 if wide else 16, wide)
    out = np.full(77 + GUARD, np.nan, F32)
    for full in (0, 1):
        for row in (0, 7, 20):
            assert lib.tb_matrix_row(w.c, full, row, ffi.cast("float *", out.ctypes.data)) == 0
            assert same(out[:77], w.q[full][row].astype(F32) * w.u[row]) and np.isnan(out[77:]).all()
    assert lib.tb_matrix_row(w.c, 1, 21, ffi.NULL) != 0 and lib.tb_matrix_row(w.c, 1, -1, ffi.NULL) != 0


LEVEL = """
import cffi, os, sys
ffi = cffi.FFI()
ffi.cdef("const char *tb_cpu_level(void); const char *tb_cpu_error(void); int tb_cpu_threads(void);")
if sys.argv[2:]:
    os.sched_setaffinity(0, {int(sys.argv[2])})
lib = ffi.dlopen(sys.argv[1])
level, error = lib.tb_cpu_level(), lib.tb_cpu_error()
print(ffi.string(level).decode() if level else "-", lib.tb_cpu_threads(), ffi.string(error).decode(), sep="|")
"""


def choice(cap: str | None, *cpu: str) -> list[str]:
    """[level, threads, error] as a process with this TWOBIT_CPU sees them."""
    environment = {k: v for k, v in os.environ.items() if k != "TWOBIT_CPU"}
    if cap is not None:
        environment["TWOBIT_CPU"] = cap
    command = [sys.executable, "-c", LEVEL, str(shared()[0]), *cpu]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip().split("|")


def test_the_level_is_capped_by_the_environment_and_never_silently() -> None:
    best = library()[0].string(levels()[-1].name).decode()
    assert choice(None)[0] == best and choice("")[0] == best
    assert choice("generic")[::2] == ["generic", ""]
    level, _, error = choice("avx1024")
    assert level == "-" and "TWOBIT_CPU=avx1024" in error and "avx2" in error
    runs = [library()[0].string(table.name).decode() for table in levels()]
    for name in ("avx2", "avx512", "neon"):
        level, _, error = choice(name)
        assert (level, error == "") == ((name, True) if name in runs else ("-", False))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity masks on this system")
def test_threads_follow_the_affinity_mask() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    assert choice(None, str(cpus[-1]))[1] == "1"
    assert 1 <= int(choice(None)[1]) <= len(cpus)


def test_the_benchmark_program_checks_clean_under_sanitizers(tmp_path: Path) -> None:
    flags = native.sanitizer(tmp_path, "address,undefined")
    build(tmp_path, tmp_path / "bench", [], flags, PLAIN)
    done = subprocess.run([tmp_path / "bench", "check"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "equal bits" in done.stdout, done.stderr
