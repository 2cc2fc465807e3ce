/* probe.c - measurements for `twobit bench`: how fast memory reads, how fast the level multiplies, and what the kernels take.
 *
 * All of them run on the same threads and are timed the same way, so they may be compared. Who calls repeats, alternates and
 * takes medians; a call also says whether a thread lost its processor meanwhile, which makes its time worthless. */
#include "probe.h"
#include "engine.h"
#include "os.h"

#include <stdlib.h>
#include <string.h>

volatile uint64_t tb_probe_sink;

struct tb_probe {
    const tb_kernels *k;
    const struct loops *how;
    tb_pool *pool;
    int32_t threads;
    long *switches;             /* [threads] involuntary context switches so far */
    int32_t disturbed;
    void *memory;               /* of tb_probe_matmul, kept from call to call */
    size_t memory_n;
    /* the section that runs */
    const uint8_t *at;
    size_t bytes;
    const tb_matrix *w;
    tb_act act;
    float *y;
    char *scratch;
    size_t scratch_n;
    int32_t op, streams, rounds, step;
    int64_t macs;               /* of thread 0 */
};

int64_t tb_multiply_generic(int32_t op, int32_t n)
{
    enum { N = 128 };
    static const int16_t q[N] = { 3, 1, 2 };
    int16_t x[N];
    uint32_t dot = 0;
    (void)op;
    for (int i = 0; i < N; i++)
        x[i] = (int16_t)(i + n);
    for (int32_t k = 0; k < n; k++) {
        __asm__ volatile("" : : "r"(x) : "memory");
        for (int i = 0; i < N; i++)
            dot += (uint32_t)(q[i] * x[i]);
    }
    tb_probe_sink = dot;
    return (int64_t)N * n;
}

static inline __attribute__((always_inline)) uint64_t read_streams(const uint8_t *p, size_t n, const int streams)
{
    const size_t part = n / (size_t)streams / 64 * 64;
    uint64_t sum = 0;
    for (size_t i = 0; i < part; i += 64)
        for (int s = 0; s < streams; s++) {
            const uint8_t *line = p + (size_t)s * part + i;
            uint64_t at[8];
            __builtin_prefetch(line + 1024);
            memcpy(at, line, sizeof at);
            sum += (at[0] ^ at[1]) + (at[2] ^ at[3]) + (at[4] ^ at[5]) + (at[6] ^ at[7]);
        }
    return sum;
}

static uint64_t read_plain(const uint8_t *p, size_t n, int32_t streams)
{
    return streams == 1 ? read_streams(p, n, 1) : streams == 2 ? read_streams(p, n, 2) : read_streams(p, n, 4);
}

static void count_part(void *arg, int ith, int nth)
{
    tb_probe *p = arg;
    (void)nth;
    p->switches[ith] = tb_switches();
}

/* Runs a section `repeats` times; seconds. */
static double timed(tb_probe *p, tb_task fn, int32_t repeats)
{
    tb_parallel_for(p->pool, count_part, p);
    long before = 0, after = 0;
    for (int i = 0; i < p->threads; i++)
        before += p->switches[i];
    const double start = tb_clock();
    for (int32_t i = 0; i < repeats; i++) {
        tb_parallel_for(p->pool, fn, p);
        if (i + 1 < repeats && p->w)
            p->w++;
    }
    const double seconds = tb_clock() - start;
    tb_parallel_for(p->pool, count_part, p);
    for (int i = 0; i < p->threads; i++)
        after += p->switches[i];
    p->disturbed = before != after;
    return seconds;
}

/* The inner loops of each level. */
static const struct loops {
    const char *level;
    int64_t (*multiply)(int32_t op, int32_t n);
    uint64_t (*read)(const uint8_t *p, size_t n, int32_t streams);
} of_levels[] = {
#if defined(__x86_64__) || defined(_M_X64)
    { "avx2", tb_multiply_avx2, tb_read_avx2 },
    { "avx512", tb_multiply_avx512, tb_read_avx512 },
#ifdef TB_HAS_VNNI
    { "avxvnni", tb_multiply_avxvnni, tb_read_avxvnni },
    { "avx512vnni", tb_multiply_avx512vnni, tb_read_avx512vnni },
#endif
#elif defined(__aarch64__)
    { "neon", tb_multiply_neon, read_plain },
#endif
    { "generic", tb_multiply_generic, read_plain },
};

tb_probe *tb_probe_new(int32_t threads, char *err, size_t n)
{
    const tb_kernels *k = tb_kernels_get();
    if (!k || threads < 1) {
        tb_fail(err, n, TB_EINVAL, "%s", k ? "at least one thread is needed" : tb_cpu_error());
        return NULL;
    }
    tb_probe *p = tb_alloc(sizeof *p);
    if (p) {
        p->k = k;
        p->threads = threads;
        p->pool = tb_pool_new(threads, tb_cpu_threads());
        p->switches = tb_alloc((size_t)threads * sizeof *p->switches);
        p->how = of_levels;
        while (strcmp(k->name, p->how->level) && strcmp("generic", p->how->level))
            p->how++;
    }
    if (!p || !p->pool || !p->switches) {
        tb_probe_free(p);
        tb_fail(err, n, TB_ENOMEM, "out of memory or threads");
        return NULL;
    }
    return p;
}

void tb_probe_free(tb_probe *p)
{
    if (!p)
        return;
    tb_pool_free(p->pool);
    tb_free(p->switches);
    tb_free(p->memory);
    tb_free(p);
}

int32_t tb_probe_disturbed(const tb_probe *p) { return p->disturbed; }

/* ---- reading ---- */

static void read_part(void *arg, int ith, int nth)
{
    tb_probe *p = arg;
    const size_t part = p->bytes / (size_t)nth;
    const uint8_t *at = p->at + (size_t)ith * part;
    tb_probe_sink = p->how->read(at, part, p->streams);
}

double tb_probe_read(tb_probe *p, const uint8_t *memory, size_t bytes, int32_t streams)
{
    p->at = memory;
    p->w = NULL;
    p->bytes = bytes;
    p->streams = streams;
    return timed(p, read_part, 1);
}

/* ---- parallel sections ---- */

static void empty_part(void *arg, int ith, int nth)
{
    (void)arg;
    (void)ith;
    (void)nth;
}

double tb_probe_section(tb_probe *p)
{
    enum { N = 500 };
    p->w = NULL;
    return timed(p, empty_part, N) / N;
}

/* ---- multiplying ---- */

static void multiply_part(void *arg, int ith, int nth)
{
    tb_probe *p = arg;
    const int64_t macs = p->how->multiply(p->op, p->rounds);
    (void)nth;
    if (ith == 0)
        p->macs = macs;
}

double tb_probe_multiply(tb_probe *p, int32_t op)
{
    p->op = op;
    /* The shorter runs before the last warm up: cores take up to half a millisecond to get ready for wide vectors. */
    for (p->rounds = 1000;; p->rounds *= 2) {
        const double seconds = timed(p, multiply_part, 1);
        if (seconds > 1e-3 || p->rounds > 1 << 26)
            return (double)p->macs * p->threads / seconds;
    }
}

/* ---- the kernels ---- */

static void matmul_part(void *arg, int ith, int nth)
{
    tb_probe *p = arg;
    const int32_t blocks = (p->w->rows + 15) / 16, step = p->step;
    (void)nth;
    for (int32_t c; (c = tb_pool_next(p->pool, (blocks + step - 1) / step)) >= 0;)
        p->k->matmul(p->w, p->op, &p->act, p->y, p->w->rows, c * step, c * step + step < blocks ? c * step + step : blocks,
                     p->scratch + (size_t)ith * p->scratch_n);
}

int tb_probe_matmul(tb_probe *p, const tb_matrix *w, int32_t n, int32_t op, int32_t m, double *seconds, char *err, size_t err_n)
{
    const int32_t kind = tb_act_kind(w, op), blocks = (w->rows + 15) / 16;
    const size_t act_n = tb_act_bytes(kind, m, w->cols), x_n = ((size_t)m * (size_t)w->cols * sizeof(float) + 63) / 64 * 64;
    const size_t y_n = ((size_t)m * (size_t)w->rows * sizeof(float) + 63) / 64 * 64;
    p->scratch_n = tb_kernel_scratch_bytes(w->cols);
    const size_t all = act_n + x_n + y_n + (size_t)p->threads * p->scratch_n;
    if (all > p->memory_n) {
        tb_free(p->memory);
        p->memory = tb_alloc(all);
        p->memory_n = p->memory ? all : 0;
        if (!p->memory)
            return tb_fail(err, err_n, TB_ENOMEM, "out of memory");
    }
    float *x = (float *)(void *)((char *)p->memory + act_n);
    p->y = (float *)(void *)((char *)x + x_n);
    p->scratch = (char *)p->y + y_n;
    p->op = op;
    p->w = w;
    /* as the forward pass cuts its rows */
    p->step = tb_step(blocks, p->threads);
    if (p->threads == 1)
        p->step = m == 1 ? blocks : 16;
    uint32_t state = 1;
    for (size_t i = 0; i < (size_t)m * (size_t)w->cols; i++)
        x[i] = (float)((state = state * 1664525u + 1013904223u) >> 8) * 0x1p-23f - 1.0f;
    memset(p->y, 0, y_n);    /* no page is touched first while the clock runs */
    tb_act_layout(&p->act, kind, m, w->cols, p->memory);
    if (p->k->quantize(&p->act, x, w->cols, 0, m))
        return tb_fail(err, err_n, TB_ENONFINITE, "an input is not finite");
    *seconds = timed(p, matmul_part, n);
    return TB_OK;
}
