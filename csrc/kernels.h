/* kernels.h - matrix products on the integer lattice, one table of functions per instruction set.
 *
 * Contract, the same for every level and every m: per token and activation group an exact int32 dot, then one
 * fp32 step  acc = fmaf((float)dot, act_scale, acc)  in group order, and  y = acc * U (+ bias).  So a result
 * depends on neither m, nor the tile, nor the thread, nor the instruction set. */
#ifndef TB_KERNELS_H
#define TB_KERNELS_H
#include "tb.h"

/* How activations are rounded: per token and group of columns, x = rint(v * (L / amax)), scale amax / L. */
enum { TB_ACT8 = 0, TB_ACT16 = 1, TB_ACT16_WIDE = 2 };   /* L, group: 127, 128 | 8191, 128 | 4095, 64 */
/* What a matrix is multiplied as: its draft part, the whole, or what the draft part lacks (whose planes may then be absent). */
enum { TB_DRAFT = 0, TB_VERIFY = 1, TB_RESIDUAL = 2 };

/* Rounded activations of m tokens. `data` is in the order of the level that rounded it: quantize and matmul of one level
 * belong together, and so do the m and the kind they were laid out for. */
typedef struct tb_act {
    int32_t kind, m, cols;
    int32_t group, groups;     /* columns per group; ceil(cols / group) */
    int32_t record;            /* bytes of one token and group in data: 2 * group, and 64 for sums */
    float *scale;              /* [groups, m] */
    uint8_t *data;             /* [groups, m, record] */
} tb_act;

size_t tb_act_bytes(int32_t kind, int32_t m, int32_t cols);                       /* 64-byte multiple */
void tb_act_layout(tb_act *a, int32_t kind, int32_t m, int32_t cols, void *memory); /* memory: 64-byte aligned */
/* kind of activations that op on w takes */
int32_t tb_act_kind(const tb_matrix *w, int32_t op);

typedef struct tb_kernels {
    const char *name;
    /* Rounds tokens [t0, t1) of x[m, cols] (row stride ldx) into a; 0, or -1 if a value is NaN or infinite. */
    int (*quantize)(tb_act *a, const float *x, ptrdiff_t ldx, int32_t t0, int32_t t1);
    /* y[t * ldy + row] for all tokens of a and the rows of row blocks [b0, b1) of 16; `scratch` is per thread. */
    void (*matmul)(const tb_matrix *w, int32_t op, const tb_act *a, float *y, ptrdiff_t ldy, int32_t b0, int32_t b1, void *scratch);
} tb_kernels;

enum { TB_SCRATCH_MIN = 12288 };                    /* bytes of scratch that a level may want whatever the matrix */
size_t tb_kernel_scratch_bytes(int32_t max_cols);   /* per thread, enough for any level; 64-byte aligned memory */

extern const tb_kernels tb_kernels_generic;
#if defined(__x86_64__) || defined(_M_X64)
extern const tb_kernels tb_kernels_avx2;
extern const tb_kernels tb_kernels_avx512;
extern const tb_kernels tb_kernels_avxvnni, tb_kernels_avx512vnni;    /* where the compiler knows these levels: TB_HAS_VNNI */
#endif
#if defined(__aarch64__)
extern const tb_kernels tb_kernels_neon;
#endif

/* Blocks of 16 rows that a thread takes at a time: as many chunks for each thread, four or more, so that none waits long for
 * another, and at most 64 blocks, long enough to stream. */
int32_t tb_step(int32_t blocks, int32_t threads);

/* Level in use: chosen once from the processor and TWOBIT_CPU. NULL: the asked level is unavailable (tb_cpu_error says why). */
const tb_kernels *tb_kernels_get(void);
/* The levels that this machine can run, whatever TWOBIT_CPU says: the i-th best, NULL after "generic". */
const tb_kernels *tb_kernels_at(int i);
#endif
