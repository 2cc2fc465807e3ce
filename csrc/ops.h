/* ops.h - everything of the forward pass that is not a matrix product, one table per instruction set.
 *
 * One body (ops_body.inc) written over a vector of 8 floats; each level instantiates it (AVX-512 with 16 in attention). Sums go to 8 lanes by
 * index mod 8 and are combined in one fixed order, so all levels give the same bits. No libm but sqrtf and fmaf. */
#ifndef TB_OPS_H
#define TB_OPS_H
#include "tb.h"

/* Keys of one kv head: blocks of 8 positions, fp16 [block][head_dim][8]; values: fp16 [position][head_dim]. */
typedef struct tb_attention {
    const uint16_t *keys, *values;
    int32_t head_dim, ring;    /* ring: slots, a multiple of 8; position p lies in slot p mod ring */
    int32_t first, last;       /* visible positions, both included */
    float scale, softcap;
    /* Positions from `tail` (a multiple of 8) on lie here instead, in the same order; NULL: none. For the branches of a tree. */
    const uint16_t *tail_keys, *tail_values;
    int32_t tail;
} tb_attention;

typedef struct tb_ops {
    /* out = x * rsqrt(mean(x^2) + eps) * w; w NULL: 1 */
    void (*rms_norm)(float *out, const float *x, const float *w, int32_t n, float eps);
    void (*add)(float *x, const float *y, int32_t n);
    void (*scale)(float *x, float by, int32_t n);
    void (*rope)(float *head, const float *cos, const float *sin, int32_t dim);   /* cos, sin: [dim / 2] */
    void (*gate)(float *out, const float *gate, const float *up, int32_t n, int32_t activation);  /* act(gate) * up; out may be gate or up */
    void (*store_key)(uint16_t *keys, const float *k, int32_t head_dim, int32_t slot);
    void (*store_value)(uint16_t *values, const float *v, int32_t head_dim, int32_t slot);
    /* n query heads [n, head_dim] sharing a kv head, each independent; scores: [n, last - first + 17] scratch floats */
    void (*attend)(const tb_attention *a, const float *q, float *out, int32_t n, float *scores);
    void (*softcap)(float *x, float cap, int32_t n);
    void (*embedding_row)(float *out, const int8_t *codes, const uint16_t *scales, int32_t n);   /* scales: one per 32 */

    /* For the sampler. Maximum of each 32 of x (out: [ceil(n / 32)]); nonzero if any x is NaN or +inf. */
    int (*block_max)(float *out, const float *x, int32_t n);
    /* Sum of floor(2^40 exp((x - top) / temperature)), x <= top: exact, so its order does not matter. */
    uint64_t (*mass)(const float *x, int32_t n, float top, float temperature);
    void (*exps)(float *out, const float *x, int32_t n);
    /* z[i] + tb_gumbel(seed, position, 32 block + i), i < 32: takes what exceeds *best, lowest token first. */
    void (*gumbel_best)(const float *z, uint64_t seed, int32_t position, int32_t block, float *best, int32_t *token);
} tb_ops;

extern const tb_ops tb_ops_generic;
#if defined(__x86_64__) || defined(_M_X64)
extern const tb_ops tb_ops_avx2, tb_ops_avx512;
#endif
#if defined(__aarch64__)
extern const tb_ops tb_ops_neon;
#endif
const tb_ops *tb_ops_get(void);    /* the level of tb_kernels_get() */

/* Scalar functions that every level agrees with, bit for bit. */
float tb_expf(float x);
float tb_logf(float x);            /* x > 0, normal */
float tb_tanhf(float x);
float tb_erff(float x);
void tb_sincos(double x, float *s, float *c);      /* |x| <= 1e8 */
float tb_half_to_float(uint16_t h);
uint16_t tb_float_to_half(float x);
#endif
