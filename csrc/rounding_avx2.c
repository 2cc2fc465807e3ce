/* rounding_avx2.c - AVX2 level of the rounding loops; built with -mavx2 -mfma. */
#include "rounding.h"

#if defined(__x86_64__)
#include <immintrin.h>

typedef __m256 v8;

static inline v8 v8_load(const float *p) { return _mm256_loadu_ps(p); }
static inline void v8_store(float *p, v8 a) { _mm256_storeu_ps(p, a); }
static inline v8 v8_set(float a) { return _mm256_set1_ps(a); }
static inline v8 v8_add(v8 a, v8 b) { return _mm256_add_ps(a, b); }
static inline v8 v8_sub(v8 a, v8 b) { return _mm256_sub_ps(a, b); }
static inline v8 v8_mul(v8 a, v8 b) { return _mm256_mul_ps(a, b); }
static inline v8 v8_fma(v8 a, v8 b, v8 c) { return _mm256_fmadd_ps(a, b, c); }
static inline v8 v8_min(v8 a, v8 b) { return _mm256_min_ps(a, b); }
static inline v8 v8_max(v8 a, v8 b) { return _mm256_max_ps(a, b); }
static inline v8 v8_if_less(v8 a, v8 b, v8 x, v8 y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }

#define ROUND_ROWS tb_round_rows_avx2
#include "rounding_body.inc"
#else
int tb_round_rows_avx2(const tb_rounding *r, int32_t first, int32_t last) { return tb_round_rows_generic(r, first, last); }
#endif
