/* rounding_avx2.c - AVX2 level of the rounding loops; built with -mavx2 -mfma. */
#include "rounding.h"

#if defined(__x86_64__)
#include <immintrin.h>

typedef struct v16 {
    __m256 a, b;
} v16;

static inline v16 v16_load(const float *p) { return (v16){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void v16_store(float *p, v16 x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
static inline v16 v16_set(float x) { return (v16){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline v16 v16_add(v16 x, v16 y) { return (v16){_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline v16 v16_sub(v16 x, v16 y) { return (v16){_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline v16 v16_mul(v16 x, v16 y) { return (v16){_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline v16 v16_min(v16 x, v16 y) { return (v16){_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
static inline v16 v16_max(v16 x, v16 y) { return (v16){_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline v16 v16_fma(v16 x, v16 y, v16 z) { return (v16){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
static inline __m256 if_less(__m256 a, __m256 b, __m256 x, __m256 y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
/* where a < b: x, elsewhere y */
static inline v16 v16_if_less(v16 a, v16 b, v16 x, v16 y) { return (v16){if_less(a.a, b.a, x.a, y.a), if_less(a.b, b.b, x.b, y.b)}; }

#define AT_ONCE 4
#define ROUND_ROWS tb_round_rows_avx2
#include "rounding_body.inc"
#else
int tb_round_rows_avx2(const tb_rounding *r, int32_t first, int32_t last) { return tb_round_rows_generic(r, first, last); }
#endif
