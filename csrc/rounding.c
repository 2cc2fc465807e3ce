/* rounding.c - portable level of the rounding loops, and the choice of level. */
#include "rounding.h"

typedef struct v16 {
    float x[16];
} v16;

#define V16_EACH for (int i = 0; i < 16; i++)

static inline v16 v16_load(const float *p) { v16 r; V16_EACH r.x[i] = p[i]; return r; }
static inline void v16_store(float *p, v16 a) { V16_EACH p[i] = a.x[i]; }
static inline v16 v16_set(float a) { v16 r; V16_EACH r.x[i] = a; return r; }
static inline v16 v16_add(v16 a, v16 b) { V16_EACH a.x[i] = a.x[i] + b.x[i]; return a; }
static inline v16 v16_sub(v16 a, v16 b) { V16_EACH a.x[i] = a.x[i] - b.x[i]; return a; }
static inline v16 v16_mul(v16 a, v16 b) { V16_EACH a.x[i] = a.x[i] * b.x[i]; return a; }
static inline v16 v16_fma(v16 a, v16 b, v16 c) { V16_EACH c.x[i] = __builtin_fmaf(a.x[i], b.x[i], c.x[i]); return c; }
static inline v16 v16_min(v16 a, v16 b) { V16_EACH a.x[i] = a.x[i] < b.x[i] ? a.x[i] : b.x[i]; return a; }
static inline v16 v16_max(v16 a, v16 b) { V16_EACH a.x[i] = a.x[i] > b.x[i] ? a.x[i] : b.x[i]; return a; }
/* where a < b: x, elsewhere y */
static inline v16 v16_if_less(v16 a, v16 b, v16 x, v16 y) { V16_EACH x.x[i] = a.x[i] < b.x[i] ? x.x[i] : y.x[i]; return x; }

#define AT_ONCE 4
#define ROUND_ROWS tb_round_rows_generic
#include "rounding_body.inc"

int tb_round_rows(const tb_rounding *r, int32_t first, int32_t last, int32_t level) {
#if defined(__x86_64__)
    if (level > 1 && __builtin_cpu_supports("avx512f"))
        return tb_round_rows_avx512(r, first, last);
    if (level > 0 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return tb_round_rows_avx2(r, first, last);
#elif defined(__aarch64__)
    if (level > 0)
        return tb_round_rows_neon(r, first, last);
#else
    (void)level;
#endif
    return tb_round_rows_generic(r, first, last);
}
