/* rounding_avx512.c - AVX-512 level of the rounding loops; built with -mavx512f. */
#include "rounding.h"

#if defined(__x86_64__)
#include <immintrin.h>

typedef __m512 v16;

static inline v16 v16_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void v16_store(float *p, v16 a) { _mm512_storeu_ps(p, a); }
static inline v16 v16_set(float a) { return _mm512_set1_ps(a); }
static inline v16 v16_add(v16 a, v16 b) { return _mm512_add_ps(a, b); }
static inline v16 v16_sub(v16 a, v16 b) { return _mm512_sub_ps(a, b); }
static inline v16 v16_mul(v16 a, v16 b) { return _mm512_mul_ps(a, b); }
static inline v16 v16_fma(v16 a, v16 b, v16 c) { return _mm512_fmadd_ps(a, b, c); }
static inline v16 v16_min(v16 a, v16 b) { return _mm512_min_ps(a, b); }
static inline v16 v16_max(v16 a, v16 b) { return _mm512_max_ps(a, b); }
/* where a < b: x, elsewhere y */
static inline v16 v16_if_less(v16 a, v16 b, v16 x, v16 y) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x); }

#define AT_ONCE 8
#define ROUND_ROWS tb_round_rows_avx512
#include "rounding_body.inc"
#else
int tb_round_rows_avx512(const tb_rounding *r, int32_t first, int32_t last) { return tb_round_rows_generic(r, first, last); }
#endif
