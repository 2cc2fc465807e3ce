"""A shard that is cut short while a model is open (class D23): an error that says so, never SIGBUS.

Whichever thread meets the missing part: two tests make sure that it is a worker of the pool.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import native
import pytest
from packed import packed_model

PROGRAM = """
import os, sys
from pathlib import Path
from twobit.errors import RuntimeFailure
from twobit.runtime.model import Model
from twobit.runtime.session import Session

folder, part, kept = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
model, other = Model.open(folder), Model.open(Path(sys.argv[4]))
tokens, threads = [5, 6, 7], int(sys.argv[5])
session = Session(model, 64, threads)
session.eval(tokens)
for file in folder.glob(f"twobit-{part}-*"):
    os.truncate(file, int(file.stat().st_size * kept))
try:
    session.rewind(0)
    session.eval(tokens)
except RuntimeFailure as error:
    print(error)
"""


# A matrix of rows of a page each, mapped from a file that is cut after the first; the caller reads the first row, a
# worker the others. What is gone reads as zeros, and the results are known to be worth nothing.
ROWS = r"""
#define _GNU_SOURCE
#include "guard.h"
#include "pool.h"
#include "tb.h"
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define CHECK(x) do { if (!(x)) { fprintf(stderr, "line %d: %s\n", __LINE__, #x); exit(1); } } while (0)

enum { ROWS = 8 };
typedef struct rows { const volatile unsigned char *m; size_t page; atomic_int worker_done; unsigned sums[ROWS]; } rows;

static void sum(rows *r, int row)
{
    r->sums[row] = 0;
    for (size_t i = 0; i < r->page; i++) r->sums[row] += r->m[(size_t)row * r->page + i];
}

static void part(void *arg, int ith, int nth)
{
    rows *r = arg;
    if (ith == 0) {
        sum(r, 0);
        while (!atomic_load(&r->worker_done)) {}
    }
    if (ith != nth - 1) return;
    for (int row = 1; row < ROWS; row++) sum(r, row);
    atomic_store(&r->worker_done, 1);
}

int main(int argc, char **argv)
{
    CHECK(argc == 3);
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), bytes = ROWS * page;
    FILE *f = fopen(argv[1], "w+");
    unsigned char *ones = malloc(bytes);
    CHECK(f && ones);
    memset(ones, 1, bytes);
    CHECK(fwrite(ones, 1, bytes, f) == bytes && fflush(f) == 0);
    void *m = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fileno(f), 0);
    CHECK(m != MAP_FAILED && tb_guard(m, bytes) == 0);
    tb_pool *pool = tb_pool_new(atoi(argv[2]), 2);
    rows r = {.m = m, .page = page};
    CHECK(pool);
    tb_parallel_for(pool, part, &r);
    for (int i = 0; i < ROWS; i++) CHECK(r.sums[i] == page);
    CHECK(!tb_guard_broken());
    CHECK(ftruncate(fileno(f), (off_t)page) == 0);
    atomic_store(&r.worker_done, 0);
    tb_parallel_for(pool, part, &r);
    CHECK(r.sums[0] == page);
    for (int i = 1; i < ROWS; i++) CHECK(r.sums[i] == 0);
    CHECK(tb_guard_broken());
    tb_unguard(m);
    tb_pool_free(pool);
    free(ones);
    fclose(f);
    puts("ok");
    return 0;
}
"""

cannot_cut = pytest.mark.skipif(os.name == "nt", reason="Windows refuses to cut a file that is mapped")


def cut(folder: Path, variant: str, part: str, kept: float, threads: int) -> None:
    """Runs PROGRAM on a copy of a model in `folder`, and checks that it ends with the error."""
    model = shutil.copytree(packed_model(variant), folder / "model")
    command = [sys.executable, "-c", PROGRAM, str(model), part, str(kept), str(packed_model("llama")), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert "became shorter" in done.stdout


@cannot_cut
@pytest.mark.parametrize(("part", "kept"), [("residual", 0.0), ("draft", 0.0), ("residual", 0.5)])
def test_a_shard_that_is_cut_while_open(part: str, kept: float, tmp_path: Path) -> None:
    cut(tmp_path, "qwen2", part, kept, 2)


@cannot_cut
@pytest.mark.parametrize(("variant", "part"), [("qwen2", "draft"), ("qwen2-tied", "residual")])
def test_a_worker_meets_the_missing_part_first(variant: str, part: str, tmp_path: Path) -> None:
    """The embedding's rows are read first, each by the thread that has its token: of 3 tokens and 8 threads the caller
    has none. Where the head is the embedding too, they lie in both shards."""
    cut(tmp_path, variant, part, 0.0, 8)


@cannot_cut
@pytest.mark.parametrize("threads", ["2", "5"])
def test_rows_that_only_a_worker_reads(threads: str, tmp_path: Path) -> None:
    (tmp_path / "rows.c").write_text(ROWS)
    sources = [tmp_path / "rows.c", *(native.CSRC / name for name in ("guard.c", "pool.c", "os.c"))]
    native.compile_c("cc", tmp_path / "rows", sources, [])
    native.run(tmp_path / "rows", str(tmp_path / "matrix"), threads)


def test_a_fault_elsewhere_is_not_swallowed(tmp_path: Path) -> None:
    """SIGBUS of a mapping that is none of ours ends the process as before."""
    program = (
        "import mmap, os, sys; from pathlib import Path; from twobit.runtime.model import Model\n"
        "model = Model.open(Path(sys.argv[1]))\n"
        "file = open(sys.argv[2], 'r+b'); memory = mmap.mmap(file.fileno(), 1 << 16); os.truncate(file.fileno(), 0)\n"
        "memory[0]\n"
    )
    (tmp_path / "file").write_bytes(bytes(1 << 16))
    command = [sys.executable, "-c", program, str(packed_model("llama")), str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode < 0
