/* rounding.c - portable level of the rounding loops, and the choice of level. */
#include "rounding.h"

typedef struct v8 {
    float x[8];
} v8;

#define V8_EACH for (int i = 0; i < 8; i++)

static inline v8 v8_load(const float *p) { v8 r; V8_EACH r.x[i] = p[i]; return r; }
static inline void v8_store(float *p, v8 a) { V8_EACH p[i] = a.x[i]; }
static inline v8 v8_set(float a) { v8 r; V8_EACH r.x[i] = a; return r; }
static inline v8 v8_add(v8 a, v8 b) { V8_EACH a.x[i] = a.x[i] + b.x[i]; return a; }
static inline v8 v8_sub(v8 a, v8 b) { V8_EACH a.x[i] = a.x[i] - b.x[i]; return a; }
static inline v8 v8_mul(v8 a, v8 b) { V8_EACH a.x[i] = a.x[i] * b.x[i]; return a; }
static inline v8 v8_fma(v8 a, v8 b, v8 c) { V8_EACH c.x[i] = __builtin_fmaf(a.x[i], b.x[i], c.x[i]); return c; }
static inline v8 v8_min(v8 a, v8 b) { V8_EACH a.x[i] = a.x[i] < b.x[i] ? a.x[i] : b.x[i]; return a; }
static inline v8 v8_max(v8 a, v8 b) { V8_EACH a.x[i] = a.x[i] > b.x[i] ? a.x[i] : b.x[i]; return a; }
/* where a < b: x, elsewhere y */
static inline v8 v8_if_less(v8 a, v8 b, v8 x, v8 y) { V8_EACH x.x[i] = a.x[i] < b.x[i] ? x.x[i] : y.x[i]; return x; }

#define ROUND_ROWS tb_round_rows_generic
#include "rounding_body.inc"

int tb_round_rows(const tb_rounding *r, int32_t first, int32_t last, int32_t level) {
#if defined(__x86_64__)
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
