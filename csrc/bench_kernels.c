/* bench_kernels.c - checks and times the matrix kernels on their own.
 *
 *   bench_kernels check                               every level against double, bit equality over m, tiles and levels
 *   bench_kernels time [ROWS COLS [b R GROUP]]        one matrix of every m, op and thread count, interleaved, medians
 *
 * One command builds it on x86 (the levels need flags of their own, tests/test_kernels.py has them for each):
 *   for l in avx2 avx512; do cc -O3 -std=c11 -mavx2 -mfma -mf16c $([ $l = avx512 ] && echo -mavx512f -mavx512bw -mavx512vl) \
 *     -c csrc/kernels_$l.c -o build/$l.o; done; cc -O3 -std=c11 csrc/{bench_kernels,kernels_generic,cpu,os}.c build/avx{2,512}.o \
 *     -o build/bench_kernels -lm -pthread
 *
 * Matrices lie in rotation over more memory than the caches hold. The bandwidth probe reads the same memory, with the
 * best of 1, 2 and 4 prefetched streams. A sample is about a
 * millisecond of wall-clock time (of as many rows as fit), and counts only if no thread lost its processor meanwhile,
 * so that figures mean something on a busy machine too. */
#define _GNU_SOURCE
#include "kernels.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#define PAUSE() _mm_pause()
#else
#define PAUSE() ((void)0)
#endif

static uint64_t state = 1;

static uint32_t any(uint32_t n)    /* 0 .. n - 1 */
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(((state >> 32) * n) >> 32);
}

static float gaussian(void)
{
    float s = 0;
    for (int i = 0; i < 12; i++)
        s += (float)any(1 << 20) * 0x1p-20f;
    return s - 6;
}

static void *take(size_t n)
{
    void *p = aligned_alloc(64, n ? (n + 63) / 64 * 64 : 64);    /* no slack: planes end where the format says */
    if (!p) {
        fprintf(stderr, "out of memory\n");
        exit(1);
    }
    return p;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- a random matrix and its planes ---- */

typedef struct planes { size_t draft_codes, draft_scales, residual_codes, residual_scales; } planes;

static planes plane_sizes(const tb_matrix *w)
{
    const size_t blocks = (size_t)(w->rows + 15) / 16, units = (size_t)(w->cols + 15) / 16, quads = (units + 3) / 4;
    return (planes){ 32 * (size_t)w->draft_bits * blocks * units, 64 * blocks * quads,
                     32 * (size_t)w->residual_bits * blocks * units, (w->residual_group == 32 ? 16u : 32u) * blocks * quads };
}

/* Value v of row i, column k of a unit into the unit at p: the layout of FORMAT.md, written the other way round. */
static void put(int bits, uint8_t *p, int i, int k, uint32_t v)
{
    const int j = k / 4, b = k % 4, at = 4 * i + b;
    if (bits == 2 || bits == 3)
        p[at] = (uint8_t)(p[at] | (v & 3) << 2 * j);
    if (bits == 3 && v & 4)
        p[64 + 2 * i + k / 8] = (uint8_t)(p[64 + 2 * i + k / 8] | 1u << k % 8);
    if (bits == 4)
        p[64 * (j / 2) + at] = (uint8_t)(p[64 * (j / 2) + at] | v << 4 * (j % 2));
    if (bits == 6 && j < 3)
        p[64 * j + at] = (uint8_t)(p[64 * j + at] | v);
    if (bits == 6 && j == 3)
        for (int l = 0; l < 3; l++)
            p[64 * l + at] = (uint8_t)(p[64 * l + at] | (v >> 2 * l & 3) << 6);
    if (bits == 8)
        p[64 * j + at] = (uint8_t)v;
}

/* Fills w with random lattice integers at the ends and inside of their ranges; q2, q [rows, cols]: the integers. */
static void random_matrix(tb_matrix *w, int32_t rows, int32_t cols, int b, int r, int group, int wide, int with_bias, int32_t *q2, int32_t *q)
{
    const int32_t blocks = (rows + 15) / 16, units = (cols + 15) / 16, quads = (units + 3) / 4, range = wide ? 8191 : 2047;
    const int32_t top = (1 << b) - 1, left = range - 15 * (1 << (r - 1));
    *w = (tb_matrix){ .rows = rows, .cols = cols, .draft_bits = b, .residual_bits = r, .residual_group = group, .wide = wide };
    const planes n = plane_sizes(w);
    uint8_t *codes = take(n.draft_codes), *scales = take(n.draft_scales), *fine = take(n.residual_codes), *factors = take(n.residual_scales);
    uint8_t *a = take((size_t)blocks * 16);
    int8_t *centre = take((size_t)blocks * 16);
    float *u = take((size_t)blocks * 64), *bias = with_bias ? take((size_t)rows * 4) : NULL;
    memset(codes, 0, n.draft_codes);
    memset(scales, 0, n.draft_scales);
    memset(fine, 0, n.residual_codes);
    memset(factors, 0, n.residual_scales);
    memset(a, 0, (size_t)blocks * 16);
    memset(centre, 0, (size_t)blocks * 16);
    memset(u, 0, (size_t)blocks * 64);
    for (int32_t i = 0; i < rows; i++) {
        const int32_t room = any(4) ? left * 3 / 4 : left;
        const int32_t ai = (int32_t)any(8) ? room / (15 * top) : (int32_t)any((uint32_t)(room / (15 * top) + 1));
        int32_t bi = (left - 15 * top * ai) / 8;
        bi = bi > 127 ? 127 : bi;
        const int h = b == 2 ? (wide ? 3 : 1) : b == 3 ? (wide ? 2 : 0) : wide;    /* FORMAT.md: A = 2^h a, a <= 17 */
        a[i] = (uint8_t)((ai >> h > 17 ? 17 : ai >> h) << h);
        centre[i] = (int8_t)((int32_t)any((uint32_t)(2 * bi + 1)) - bi);
        u[i] = 1e-5f * (1 + (float)any(1000) * 1e-3f);
        if (bias)
            bias[i] = gaussian();
        int32_t f = 0, s = 0, m = 0;
        for (int32_t k = 0; k < cols; k++) {
            const size_t unit = (size_t)(i / 16) * (size_t)units + (size_t)(k / 16), quad = (size_t)(i / 16) * (size_t)quads + (size_t)(k / 64);
            const int slot = k / 16 % 4;
            if (k % 16 == 0) {
                s = any(4) ? (int32_t)any(16) : 15;
                m = any(4) ? (int32_t)any(16) - 8 : -8;
                scales[64 * quad + (size_t)(4 * (i % 16) + slot)] = (uint8_t)(s | (m + 8) << 4);
            }
            if (k % group == 0) {
                f = any(4) ? (int32_t)any(16) : 15;
                uint8_t *at = group == 32 ? factors + 16 * quad + i % 16 : factors + 32 * quad + 2 * (i % 16) + slot / 2;
                *at = (uint8_t)(*at | f << 4 * (group == 32 ? slot / 2 : slot % 2));
            }
            const uint32_t c = any(4) ? any((uint32_t)top + 1) : any(2) * (uint32_t)top;
            const uint32_t v = any(4) ? any(1u << r) : any(2) * ((1u << r) - 1);
            put(b, codes + 32 * (size_t)b * unit, i % 16, k % 16, c);
            put(r, fine + 32 * (size_t)r * unit, i % 16, k % 16, v);
            q2[(size_t)i * (size_t)cols + (size_t)k] = a[i] * s * (2 * (int32_t)c - top) + centre[i] * m;
            q[(size_t)i * (size_t)cols + (size_t)k] = q2[(size_t)i * (size_t)cols + (size_t)k] + f * ((int32_t)v - (1 << (r - 1)));
        }
    }
    w->draft_codes = codes;
    w->draft_scales = scales;
    w->residual_codes = fine;
    w->residual_scales = factors;
    w->row_a = a;
    w->row_b = centre;
    w->row_scale = u;
    w->bias = bias;
}

static void free_matrix(tb_matrix *w)
{
    free((void *)(uintptr_t)w->draft_codes);
    free((void *)(uintptr_t)w->draft_scales);
    free((void *)(uintptr_t)w->residual_codes);
    free((void *)(uintptr_t)w->residual_scales);
    free((void *)(uintptr_t)w->row_a);
    free((void *)(uintptr_t)w->row_b);
    free((void *)(uintptr_t)w->row_scale);
    free((void *)(uintptr_t)w->bias);
}

/* ---- check ---- */

/* y[m, rows] in blocks [b0, b1), into memory full of NaN with a guard behind it. */
static float *product(const tb_kernels *k, const tb_matrix *w, int op, const float *x, int m, int32_t b0, int32_t b1)
{
    const int32_t kind = tb_act_kind(w, op);
    const size_t n = (size_t)m * (size_t)w->rows;
    tb_act a;
    void *memory = take(tb_act_bytes(kind, m, w->cols)), *scratch = take(tb_kernel_scratch_bytes(w->cols));
    float *y = take((n + 16) * sizeof *y);
    memset(y, 0xff, (n + 16) * sizeof *y);
    tb_act_layout(&a, kind, m, w->cols, memory);
    if (k->quantize(&a, x, w->cols, 0, m / 2) || k->quantize(&a, x, w->cols, m / 2, m)) {
        fprintf(stderr, "%s: finite activations refused\n", k->name);
        exit(1);
    }
    tb_matrix part = *w;
    if (op == TB_RESIDUAL) {    /* the draft part may be elsewhere */
        part.draft_codes = part.draft_scales = part.row_a = NULL;
        part.row_b = NULL;
    }
    k->matmul(&part, op, &a, y, w->rows, b0, b1, scratch);
    for (size_t i = n; i < n + 16; i++)
        if (!isnan(y[i])) {
            fprintf(stderr, "%s: wrote past the end\n", k->name);
            exit(1);
        }
    free(memory);
    free(scratch);
    return y;
}

static double check_one(int32_t rows, int32_t cols, int b, int r, int group, int wide, int m)
{
    const size_t size = (size_t)rows * (size_t)cols;
    int32_t *q[3] = { take(size * 4), take(size * 4), take(size * 4) };
    float *x = take((size_t)m * (size_t)cols * 4), *row = take((size_t)cols * 4);
    tb_matrix w;
    double worst = 0;
    random_matrix(&w, rows, cols, b, r, group, wide, (int)any(2), q[0], q[1]);
    for (size_t i = 0; i < size; i++)
        q[2][i] = q[1][i] - q[0][i];
    for (size_t i = 0; i < (size_t)m * (size_t)cols; i++)
        x[i] = gaussian() * (any(64) ? 1 : 8);
    if (any(2))
        for (int32_t k = 0; k < cols && k < 128; k++)
            x[k] = any(2) ? 0 : 1e-31f;

    for (int op = 0; op < 3; op++) {
        float *y = product(&tb_kernels_generic, &w, op, x, m, 0, (rows + 15) / 16);
        const double bound = op == TB_DRAFT ? 0.5 / 127 : wide ? 0.5 / 4095 : 0.5 / 8191;
        for (int32_t i = 0; i < rows; i++) {
            if (op != TB_RESIDUAL && tb_matrix_row(&w, op, i, row) != TB_OK)
                exit(1);
            for (int32_t k = 0; op != TB_RESIDUAL && k < cols; k++)
                if (row[k] != (float)q[op][(size_t)i * (size_t)cols + (size_t)k] * w.row_scale[i]) {
                    fprintf(stderr, "tb_matrix_row: row %d column %d of %d+%d\n", i, k, b, r);
                    exit(1);
                }
            for (int t = 0; t < m; t++) {
                double sum = 0, room = 0, size_of = 0;
                for (int32_t k = 0; k < cols; k++) {
                    const int32_t columns = op != TB_DRAFT && wide ? 64 : 128;
                    double amax = 0;
                    const double v = (double)q[op][(size_t)i * (size_t)cols + (size_t)k];
                    for (int32_t g = k / columns * columns; g < cols && g < k / columns * columns + columns && k % columns == 0; g++)
                        amax = fmax(amax, fabs((double)x[(size_t)t * (size_t)cols + (size_t)g]));
                    size_of = k % columns == 0 ? amax : size_of;
                    sum += v * (double)x[(size_t)t * (size_t)cols + (size_t)k];
                    room += fabs(v) * size_of * (bound + 1e-6) + fabs(v) * 1e-30;
                }
                sum *= (double)w.row_scale[i];
                room = room * (double)w.row_scale[i] + (w.bias ? 1e-6 * fabs((double)w.bias[i]) : 0);
                const double error = fabs((double)y[(size_t)t * (size_t)rows + (size_t)i] - sum - (w.bias ? (double)w.bias[i] : 0));
                if (!(error <= room)) {
                    fprintf(stderr, "%dx%d %d+%d/%d op %d: row %d token %d is off by %g, bound %g\n", rows, cols, b, r, group, op, i, t, error, room);
                    exit(1);
                }
                worst = fmax(worst, room > 0 ? error / room : 0);
            }
        }
        const int32_t blocks = (rows + 15) / 16, b0 = (int32_t)any((uint32_t)blocks), b1 = b0 + 1 + (int32_t)any((uint32_t)(blocks - b0));
        for (int l = 0; tb_kernels_at(l); l++) {
            float *all = product(tb_kernels_at(l), &w, op, x, m, 0, blocks);
            const int t0 = (int)any((uint32_t)m), n = any(2) ? 1 : 1 + (int)any((uint32_t)(m - t0));
            float *some = product(tb_kernels_at(l), &w, op, x + (size_t)t0 * (size_t)cols, n, b0, b1);
            int same = !memcmp(all, y, (size_t)m * (size_t)rows * 4);
            for (int t = 0; t < n; t++)
                for (int32_t i = 0; i < rows; i++) {
                    const float *at = some + (size_t)t * (size_t)rows + (size_t)i;
                    if (i < 16 * b0 || i >= 16 * b1)
                        same &= isnan(*at);
                    else
                        same &= !memcmp(at, y + (size_t)(t0 + t) * (size_t)rows + (size_t)i, 4);
                }
            if (!same) {
                fprintf(stderr, "%s, %dx%d %d+%d/%d wide %d op %d m %d (tokens %d + %d, blocks %d..%d): other bits than generic\n",
                        tb_kernels_at(l)->name, rows, cols, b, r, group, wide, op, m, t0, n, b0, b1);
                exit(1);
            }
            free(all);
            free(some);
        }
        free(y);
    }
    free_matrix(&w);
    free(q[0]);
    free(q[1]);
    free(q[2]);
    free(x);
    free(row);
    return worst;
}

static int check(void)
{
    static const int formats[][3] = { { 2, 6, 0 }, { 2, 8, 1 }, { 3, 6, 0 }, { 3, 8, 1 }, { 4, 4, 0 }, { 4, 6, 1 } };
    static const int tokens[] = { 1, 2, 3, 4, 5, 7, 8, 17 };
    double worst = 0;
    int n = 0;
    for (size_t f = 0; f < sizeof formats / sizeof *formats; f++)
        for (int group = 16; group <= 32; group += 16)
            for (size_t t = 0; t < sizeof tokens / sizeof *tokens; t++, n++) {
                const int32_t rows = 1 + (int32_t)any(70), cols = 1 + (int32_t)any(400);
                const int *v = formats[f];
                worst = fmax(worst, check_one(rows, cols, v[0], v[1], group, v[2], tokens[t]));
            }
    worst = fmax(worst, check_one(33, 64, 2, 6, 16, 0, 300));
    printf("%d matrices: levels", n + 1);
    for (int l = 0; tb_kernels_at(l); l++)
        printf(" %s", tb_kernels_at(l)->name);
    printf(", equal bits; largest error %.2f of the rounding bound\n", worst);
    return 0;
}

/* ---- time ---- */

typedef struct job {
    const tb_kernels *kernels;      /* NULL: the probe */
    tb_matrix w;
    int op, m, streams, threads;
    tb_act a;
    float *y;
    const uint8_t *memory;          /* probe: what to read */
    size_t bytes;
    atomic_int next;
} job;

static job current;
static atomic_int generation, finished, quit;
static long switches[2];            /* how often a thread has lost its processor */
static void *scratches[2];
static volatile uint64_t sink;

static uint64_t read_streams(const uint8_t *p, size_t n, int streams)
{
    typedef uint64_t pair __attribute__((vector_size(16)));
    const size_t part = n / (size_t)streams / 64 * 64;
    pair sum = { 0 };
    for (size_t i = 0; i < part; i += 64)
        for (int s = 0; s < streams; s++) {
            const uint8_t *line = p + (size_t)s * part + i;
            pair at[4];
            __builtin_prefetch(line + 1024);
            memcpy(at, line, sizeof at);
            sum ^= (at[0] ^ at[1]) ^ (at[2] ^ at[3]);
        }
    return sum[0] ^ sum[1];
}

static void count_switches(int thread)
{
    struct rusage u;
    if (!getrusage(RUSAGE_THREAD, &u))
        switches[thread] = u.ru_nivcsw;
}

static void work(int thread)
{
    job *j = &current;
    if (!j->kernels) {
        const size_t part = j->bytes / (size_t)j->threads / 64 * 64;
        const uint8_t *p = j->memory + (size_t)thread * part;
        sink = j->streams == 1 ? read_streams(p, part, 1) : j->streams == 2 ? read_streams(p, part, 2) : read_streams(p, part, 4);
        return;
    }
    const int32_t blocks = (j->w.rows + 15) / 16;
    const int32_t chunk = j->threads == 1 ? blocks : tb_step(blocks, j->threads);
    for (;;) {
        const int32_t b = atomic_fetch_add(&j->next, 1) * chunk;
        if (b >= blocks)
            return;
        j->kernels->matmul(&j->w, j->op, &j->a, j->y, j->w.rows, b, b + chunk < blocks ? b + chunk : blocks, scratches[thread]);
    }
}

static void *helper(void *unused)
{
    for (int seen = 0;;) {
        while (atomic_load_explicit(&generation, memory_order_acquire) == seen)
            if (atomic_load(&quit))
                return unused;
            else
                PAUSE();
        seen++;
        work(1);
        count_switches(1);
        atomic_store_explicit(&finished, seen, memory_order_release);
    }
}

static void run_current(void)
{
    atomic_store(&current.next, 0);
    if (current.threads == 1) {
        work(0);
        return;
    }
    const int g = atomic_fetch_add(&generation, 1) + 1;
    work(0);
    while (atomic_load_explicit(&finished, memory_order_acquire) != g)
        PAUSE();
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double quantile(double *v, int n, double q)
{
    qsort(v, (size_t)n, sizeof *v, by_value);
    return v[(int)(q * (n - 1) + 0.5)];
}

enum { ROUNDS = 40, MS = 6 };

static const char *const op_names[] = { "draft", "verify", "residual" };

typedef struct samples { double seconds[ROUNDS]; int n; } samples;

/* Runs the current job over `repeats` copies of its matrix; the time counts if no thread lost its processor. */
static void sample(samples *s, int repeats, void (*next_copy)(void))
{
    count_switches(0);
    const long before[2] = { switches[0], switches[1] };
    const double t = now();
    for (int c = 0; c < repeats; c++) {
        if (next_copy)
            next_copy();
        run_current();
    }
    const double seconds = (now() - t) / repeats;
    count_switches(0);
    if (switches[0] == before[0] && (current.threads == 1 || switches[1] == before[1]))
        s->seconds[s->n++] = seconds;
}

static struct { planes size; const uint8_t *plane[4]; size_t n, at; } copies;

static void next_copy(void)
{
    tb_matrix *w = &current.w;
    copies.at = (copies.at + 1) % copies.n;
    w->draft_codes = copies.plane[0] + copies.at * copies.size.draft_codes;
    w->draft_scales = copies.plane[1] + copies.at * copies.size.draft_scales;
    w->residual_codes = copies.plane[2] + copies.at * copies.size.residual_codes;
    w->residual_scales = copies.plane[3] + copies.at * copies.size.residual_scales;
}

static int timing(int32_t rows, int32_t cols, int b, int r, int group)
{
    static const int ms[MS] = { 1, 2, 4, 8, 16, 64 };
    const tb_kernels *k = tb_kernels_get();
    tb_matrix w = { .rows = rows, .cols = cols, .draft_bits = b, .residual_bits = r, .residual_group = group,
                    .wide = (b == 2 && r == 8) || (b == 3 && r == 8) || (b == 4 && r > 4) };
    const planes n = plane_sizes(&w);
    const size_t draft = n.draft_codes + n.draft_scales, full = draft + n.residual_codes + n.residual_scales;
    const size_t size_of[] = { draft, full, full - draft };
    const size_t count = ((size_t)256 << 20) / draft, padded = (size_t)(rows + 15) / 16 * 16;
    const size_t sizes[] = { count * n.draft_codes, count * n.draft_scales, count * n.residual_codes, count * n.residual_scales };
    uint8_t *all[] = { take(sizes[0]), take(sizes[1]), take(sizes[2]), take(sizes[3]) };
    if (!k) {
        fprintf(stderr, "%s\n", tb_cpu_error());
        return 1;
    }
    for (int p = 0; p < 4; p++) {
        for (size_t i = 0; i < 65536 && i < sizes[p]; i++)
            all[p][i] = (uint8_t)any(256);
        for (size_t i = 65536; i < sizes[p]; i += 65536)
            memcpy(all[p] + i, all[p], sizes[p] - i < 65536 ? sizes[p] - i : 65536);
    }
    copies.size = n;
    copies.n = count;
    for (int p = 0; p < 4; p++)
        copies.plane[p] = all[p];
    uint8_t *a = take(padded);
    int8_t *centre = take(padded);
    float *u = take(padded * 4), *x = take(64 * (size_t)cols * 4), *y = take(64 * (size_t)rows * 4);
    for (size_t i = 0; i < padded; i++) {
        a[i] = w.wide ? 40 : 20;
        centre[i] = (int8_t)((int)any(21) - 10);
        u[i] = 1e-5f;
    }
    for (size_t i = 0; i < 64 * (size_t)cols; i++)
        x[i] = gaussian();
    w.row_a = a;
    w.row_b = centre;
    w.row_scale = u;
    for (int t = 0; t < 2; t++)
        scratches[t] = take(tb_kernel_scratch_bytes(cols));
    printf("%s, %dx%d, %d+%d, group %d: draft %.2f MB (%.3f bits), both %.2f MB (%.3f bits); %zu copies\n", k->name, rows, cols, b, r, group,
           (double)draft * 1e-6, 8 * (double)draft / rows / cols, (double)full * 1e-6, 8 * (double)full / rows / cols, count);

    static samples t_op[2][3][MS], t_probe[2][3];
    static double part[2][3][MS];
    tb_act acts[3][MS];
    pthread_t thread;
    for (int op = 0; op < 3; op++)
        for (int i = 0; i < MS; i++) {
            const int32_t kind = tb_act_kind(&w, op);
            tb_act_layout(&acts[op][i], kind, ms[i], cols, take(tb_act_bytes(kind, ms[i], cols)));
            if (k->quantize(&acts[op][i], x, cols, 0, ms[i]))
                return 1;
        }
    if (pthread_create(&thread, NULL, helper, NULL))
        return 1;
    const size_t piece = (size_t)12 << 20;
    size_t probe_at = 0;
    for (int round = 0; round < ROUNDS; round++) {
        for (int threads = 1; threads <= 2; threads++) {
            current.threads = threads;
            for (int s = 0; s < 3; s++) {
                current.kernels = NULL;
                current.streams = 1 << s;
                current.memory = all[2] + probe_at;
                current.bytes = piece;
                probe_at = probe_at + 2 * piece > sizes[2] ? 0 : probe_at + piece;
                sample(&t_probe[threads - 1][s], 1, NULL);
            }
            for (int op = 0; op < 3; op++)
                for (int i = 0; i < MS; i++) {
                    const double bytes = (double)size_of[op], macs = (double)ms[i] * rows * cols;
                    const double about = fmax(bytes / 14e9, macs / (op ? 60e9 : 120e9)) / threads;
                    double *share = &part[threads - 1][op][i];
                    *share = about > 2e-3 ? ceil((rows + 15) / 16 * 2e-3 / about) * 16 / rows : 1;
                    current.kernels = k;
                    current.op = op;
                    current.m = ms[i];
                    current.a = acts[op][i];
                    current.y = y;
                    current.w = w;
                    current.w.rows = (int32_t)(rows * *share + 0.5);
                    sample(&t_op[threads - 1][op][i], about > 7e-4 ? 1 : (int)(1e-3 / about) + 1, next_copy);
                }
        }
    }
    atomic_store(&quit, 1);
    pthread_join(thread, NULL);

    for (int threads = 1; threads <= 2; threads++) {
        double probe = 0;
        for (int s = 0; s < 3; s++) {
            samples *t = &t_probe[threads - 1][s];
            if (t->n)
                probe = fmax(probe, (double)piece / quantile(t->seconds, t->n, 0.5) * 1e-9);
        }
        printf("\n%d thread%s: probe %.1f GB/s\n", threads, threads > 1 ? "s" : "", probe);
        printf("%-8s %4s %10s %10s %8s %8s %8s %8s %8s\n", "op", "m", "ms", "ms p10", "x m=1", "GB/s", "of probe", "GMAC/s", "samples");
        for (int op = 0; op < 3; op++) {
            double one = 0;
            for (int i = 0; i < MS; i++) {
                samples *t = &t_op[threads - 1][op][i];
                if (!t->n)
                    continue;
                const double by = 1 / part[threads - 1][op][i];
                const double s = by * quantile(t->seconds, t->n, 0.5), best = by * quantile(t->seconds, t->n, 0.1);
                const double gbs = (double)size_of[op] / s * 1e-9;
                one = i ? one : s;
                printf("%-8s %4d %10.4f %10.4f %8.2f %8.1f %7.0f%% %8.1f %8d\n", op_names[op], ms[i], s * 1e3, best * 1e3, s / one, gbs,
                       100 * gbs / probe, (double)ms[i] * rows * cols / s * 1e-9, t->n);
            }
        }
    }
    return 0;
}

int main(int argc, char **argv)
{
    if (argc == 2 && !strcmp(argv[1], "check"))
        return check();
    if (argc >= 2 && !strcmp(argv[1], "time") && (argc == 2 || argc == 4 || argc == 7)) {
        int v[5] = { 4096, 4096, 2, 6, 16 };
        for (int i = 2; i < argc; i++)
            v[i - 2] = atoi(argv[i]);
        if (v[0] > 0 && v[1] > 0 && v[2] >= 2 && v[2] <= 4 && (v[3] == 4 || v[3] == 6 || v[3] == 8) && (v[4] == 16 || v[4] == 32))
            return timing(v[0], v[1], v[2], v[3], v[4]);
    }
    fprintf(stderr, "usage: bench_kernels check | time [ROWS COLS [BITS RESIDUAL_BITS GROUP]]\n");
    return 2;
}
