/* rounding_neon.c - NEON level of the rounding loops, for every AArch64 processor. */
#include "rounding.h"

#if defined(__aarch64__)
#include <arm_neon.h>

typedef struct v16 {
    float32x4_t part[4];
} v16;

#define EACH for (int i = 0; i < 4; i++)

static inline v16 v16_load(const float *p) { v16 r; EACH r.part[i] = vld1q_f32(p + 4 * i); return r; }
static inline void v16_store(float *p, v16 x) { EACH vst1q_f32(p + 4 * i, x.part[i]); }
static inline v16 v16_set(float x) { v16 r; EACH r.part[i] = vdupq_n_f32(x); return r; }
static inline v16 v16_add(v16 x, v16 y) { EACH x.part[i] = vaddq_f32(x.part[i], y.part[i]); return x; }
static inline v16 v16_sub(v16 x, v16 y) { EACH x.part[i] = vsubq_f32(x.part[i], y.part[i]); return x; }
static inline v16 v16_mul(v16 x, v16 y) { EACH x.part[i] = vmulq_f32(x.part[i], y.part[i]); return x; }
static inline v16 v16_fma(v16 x, v16 y, v16 z) { EACH z.part[i] = vfmaq_f32(z.part[i], x.part[i], y.part[i]); return z; }
/* where a < b: x, elsewhere y */
static inline v16 v16_if_less(v16 a, v16 b, v16 x, v16 y) { EACH x.part[i] = vbslq_f32(vcltq_f32(a.part[i], b.part[i]), x.part[i], y.part[i]); return x; }
static inline v16 v16_min(v16 x, v16 y) { return v16_if_less(x, y, x, y); }
static inline v16 v16_max(v16 x, v16 y) { return v16_if_less(y, x, x, y); }

#define AT_ONCE 4
#define ROUND_ROWS tb_round_rows_neon
#include "rounding_body.inc"
#else
int tb_round_rows_neon(const tb_rounding *r, int32_t first, int32_t last) { return tb_round_rows_generic(r, first, last); }
#endif
