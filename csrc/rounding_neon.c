/* rounding_neon.c - NEON level of the rounding loops, for every AArch64 processor. */
#include "rounding.h"

#if defined(__aarch64__)
#include <arm_neon.h>

typedef struct v8 {
    float32x4_t a, b;
} v8;

static inline v8 v8_load(const float *p) { return (v8){vld1q_f32(p), vld1q_f32(p + 4)}; }
static inline void v8_store(float *p, v8 x) { vst1q_f32(p, x.a); vst1q_f32(p + 4, x.b); }
static inline v8 v8_set(float x) { return (v8){vdupq_n_f32(x), vdupq_n_f32(x)}; }
static inline v8 v8_add(v8 x, v8 y) { return (v8){vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b)}; }
static inline v8 v8_sub(v8 x, v8 y) { return (v8){vsubq_f32(x.a, y.a), vsubq_f32(x.b, y.b)}; }
static inline v8 v8_mul(v8 x, v8 y) { return (v8){vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b)}; }
static inline v8 v8_fma(v8 x, v8 y, v8 z) { return (v8){vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b)}; }
/* where a < b: x, elsewhere y */
static inline v8 v8_if_less(v8 a, v8 b, v8 x, v8 y) { return (v8){vbslq_f32(vcltq_f32(a.a, b.a), x.a, y.a), vbslq_f32(vcltq_f32(a.b, b.b), x.b, y.b)}; }
static inline v8 v8_min(v8 x, v8 y) { return v8_if_less(x, y, x, y); }
static inline v8 v8_max(v8 x, v8 y) { return v8_if_less(y, x, x, y); }

#define ROUND_ROWS tb_round_rows_neon
#include "rounding_body.inc"
#else
int tb_round_rows_neon(const tb_rounding *r, int32_t first, int32_t last) { return tb_round_rows_generic(r, first, last); }
#endif
