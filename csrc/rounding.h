/* rounding.h - the quantizer's inner loops: weights to codes on the integer lattice, row by row.
 *
 * Every row is rounded on its own, in a fixed order of operations, so any split over threads gives the same bytes.
 * Declared here for cffi too (between the marks). */
#ifndef TB_ROUNDING_H
#define TB_ROUNDING_H
#include <stddef.h>
#include <stdint.h>

/* cdef-begin */
/* One matrix to round. The Hessian H of its inputs comes as H = F diag(d) F^T, F unit upper triangular:
 * then e H e^T = sum_j d_j (e_j + sum_{i<j} e_i F_ij)^2, and the sum inside is the error fed back to column j.
 * `padded` is cols rounded up to 32; padding has d = 0 and F = 0. */
typedef struct tb_rounding {
    int32_t rows, cols, padded;
    int32_t draft_bits, residual_bits, residual_group;  /* 2..4; 4, 6 or 8; 16 or 32 */
    int32_t range;             /* Q: the most |q| may be */
    int32_t steps;             /* 1: the draft, 2: the residual of a draft that codes, s, m, row_* hold already */
    const float *weight;       /* [rows, cols] */
    const float *factor;       /* F [padded, stride], diagonal not read; NULL: the identity */
    int64_t stride;
    const float *energy;       /* d [padded] */
    const float *hessian;      /* H / hessian_scale without damping [padded, hessian_stride]; NULL: codes are not refined */
    int64_t hessian_stride;
    float hessian_scale, damping;
    const float *local;        /* with hessian: F [padded / 16, 16, 16] and d [padded] of the 16 x 16 blocks of H */
    const float *local_energy;
    uint8_t *codes;            /* out, in for steps = 2: c [rows, cols] */
    uint8_t *s;                /* as codes [rows, ceil(cols / 16)] */
    int8_t *m;                 /* as codes [rows, ceil(cols / 16)] */
    float *row_scale;          /* U [rows]; the residual divides U and multiplies A and B by a whole number */
    uint8_t *row_a;            /* A [rows] */
    int8_t *row_b;             /* B [rows] */
    int16_t *residual;         /* out: r [rows, cols] */
    uint8_t *f;                /* out [rows, ceil(cols / residual_group)] */
    double *errors;            /* out [rows, 3]: e H e^T of the draft, of the full weights, and w H w^T */
} tb_rounding;

/* Rounds rows [first, last). level 0: portable code, 1: AVX2 or NEON, 2: the best the processor has
 * (the same bytes). 0, or -1: no memory. */
int tb_round_rows(const tb_rounding *r, int32_t first, int32_t last, int32_t level);
/* cdef-end */

int tb_round_rows_generic(const tb_rounding *r, int32_t first, int32_t last);
int tb_round_rows_avx2(const tb_rounding *r, int32_t first, int32_t last);
int tb_round_rows_avx512(const tb_rounding *r, int32_t first, int32_t last);
int tb_round_rows_neon(const tb_rounding *r, int32_t first, int32_t last);
#endif
