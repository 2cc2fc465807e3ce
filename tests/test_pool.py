"""The thread pool, by a C program that is also run under AddressSanitizer and ThreadSanitizer."""

from __future__ import annotations

import shutil
from pathlib import Path

import native
import pytest

SOURCES = [native.CSRC / "pool.c", native.CSRC / "os.c"]

PROGRAM = r"""
#define _POSIX_C_SOURCE 200809L
#include "pool.h"
#include "os.h"
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(x) do { if (!(x)) { fprintf(stderr, "line %d: %s\n", __LINE__, #x); exit(1); } } while (0)

enum { CHUNKS = 97 };
typedef struct job { tb_pool *pool; int nth, parts[64], chunks[CHUNKS]; atomic_int all; } job;

static void run(void *arg, int ith, int nth)
{
    job *j = arg;
    CHECK(nth == j->nth);
    j->parts[ith]++;
    for (int32_t c; (c = tb_pool_next(j->pool, CHUNKS)) >= 0;) j->chunks[c]++;
    CHECK(tb_pool_next(j->pool, CHUNKS) == -1);
    atomic_fetch_add(&j->all, 1);
}

static void rest(int64_t ns)
{
    struct timespec t = {0, ns};
    nanosleep(&t, NULL);
}

static double cpu(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Every part and every chunk once per section, what the parts wrote is visible after it; pauses let workers sleep. */
static void sections(int threads, int cores, int n)
{
    job j;
    memset(&j, 0, sizeof j);
    j.pool = tb_pool_new(threads, cores);
    j.nth = threads;
    CHECK(j.pool && tb_pool_threads(j.pool) == threads);
    for (int i = 1; i <= n; i++) {
        tb_parallel_for(j.pool, run, &j);
        CHECK(atomic_load(&j.all) == i * threads);
        for (int k = 0; k < threads; k++) CHECK(j.parts[k] == i);
        for (int k = 0; k < CHUNKS; k++) CHECK(j.chunks[k] == i);
        if (i % 50 == 0) rest(200000);
    }
    tb_pool_free(j.pool);
}

static void idle(void)
{
    job j;
    memset(&j, 0, sizeof j);
    j.pool = tb_pool_new(4, 4);
    j.nth = 4;
    tb_parallel_for(j.pool, run, &j);
    rest(100000000);
    double before = cpu();
    rest(300000000);
    CHECK(cpu() - before < 0.02);
    tb_parallel_for(j.pool, run, &j);
    CHECK(atomic_load(&j.all) == 8);
    tb_pool_free(j.pool);
}

/* The main thread waits long for a part that sleeps. */
static void lag(void *arg, int ith, int nth)
{
    (void)nth;
    if (ith) rest(5000000);
    atomic_fetch_add((atomic_int *)arg, 1);
}

static void late(void)
{
    atomic_int done = 0;
    tb_pool *p = tb_pool_new(3, 3);
    for (int i = 1; i <= 5; i++) {
        tb_parallel_for(p, lag, &done);
        CHECK(atomic_load(&done) == 3 * i);
    }
    tb_pool_free(p);
}

static void forks(void)
{
    job j;
    memset(&j, 0, sizeof j);
    j.pool = tb_pool_new(3, 2);
    j.nth = 3;
    tb_parallel_for(j.pool, run, &j);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        tb_parallel_for(j.pool, run, &j);
        int ok = atomic_load(&j.all) == 6 && j.parts[2] == 2 && j.chunks[CHUNKS - 1] == 2;
        tb_pool_free(j.pool);
        sections(2, 2, 20);
        _exit(ok ? 0 : 1);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    tb_parallel_for(j.pool, run, &j);
    CHECK(atomic_load(&j.all) == 6);
    tb_pool_free(j.pool);
}

int main(int argc, char **argv)
{
    int n = argc > 1 ? atoi(argv[1]) : 300;
    CHECK(tb_pool_new(0, 2) == NULL);
    tb_pool_free(NULL);
    sections(1, 2, n);
    sections(2, 2, n);
    sections(2, 1, n);
    sections(17, 2, n / 4);
    for (int i = 0; i < 20; i++) tb_pool_free(tb_pool_new(1 + i % 5, 2));
    late();
    idle();
    if (argc < 3) forks();
    puts("ok");
    return 0;
}
"""


def build(folder: Path, compiler: str, flags: list[str]) -> Path:
    source = folder / "pool_test.c"
    source.write_text(PROGRAM)
    native.compile_c(compiler, folder / "pool_test", [source, *SOURCES], flags)
    return folder / "pool_test"


@pytest.mark.parametrize("compiler", [name for name in ("cc", "clang") if shutil.which(name)])
def test_sections_idle_forks(tmp_path: Path, compiler: str) -> None:
    native.run(build(tmp_path, compiler, []), "1000")


def test_no_leaks_or_bad_accesses(tmp_path: Path) -> None:
    native.run(build(tmp_path, "cc", native.sanitizer(tmp_path, "address,undefined")))


def test_no_data_races(tmp_path: Path) -> None:
    # Without the fork: ThreadSanitizer does not follow a child that starts threads.
    native.run(build(tmp_path, "cc", native.sanitizer(tmp_path, "thread")), "100", "no-fork")
