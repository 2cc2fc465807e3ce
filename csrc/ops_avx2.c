/* ops_avx2.c - the operations of ops.h with AVX2, FMA and F16C. Compiled with -mavx2 -mfma -mf16c, used only where the
 * processor has them (tb_ops_get). */
#include "ops.h"

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>

#define HEADS 4
#define OPS_TABLE tb_ops_avx2

typedef __m256 V, VM;
typedef __m256i VI;

static inline V v_load(const float *p) { return _mm256_loadu_ps(p); }
static inline void v_store(float *p, V a) { _mm256_storeu_ps(p, a); }
static inline __m256i first_lanes(int32_t n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
static inline V v_load_part(const float *p, int32_t n) { return _mm256_maskload_ps(p, first_lanes(n)); }
static inline void v_store_part(float *p, V a, int32_t n) { _mm256_maskstore_ps(p, first_lanes(n), a); }
static inline V v_load_half(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p)); }
static inline void v_store_half(uint16_t *p, V a) { _mm_storeu_si128((__m128i *)(void *)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT)); }
static inline V v_set1(float a) { return _mm256_set1_ps(a); }
static inline V v_lane(void) { return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7); }
static inline V v_add(V a, V b) { return _mm256_add_ps(a, b); }
static inline V v_sub(V a, V b) { return _mm256_sub_ps(a, b); }
static inline V v_mul(V a, V b) { return _mm256_mul_ps(a, b); }
static inline V v_div(V a, V b) { return _mm256_div_ps(a, b); }
static inline V v_fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
static inline V v_max(V a, V b) { return _mm256_max_ps(a, b); }
static inline V v_min(V a, V b) { return _mm256_min_ps(a, b); }
static inline VM v_lt(V a, V b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
static inline V v_blend(VM m, V a, V b) { return _mm256_blendv_ps(b, a, m); }
static inline VM vm_and(VM a, VM b) { return _mm256_and_ps(a, b); }
static inline int v_any(VM m) { return _mm256_movemask_ps(m) != 0; }
static inline int v_all(VM m) { return _mm256_movemask_ps(m) == 255; }
static inline VI v_bits(V a) { return _mm256_castps_si256(a); }
static inline V v_from_bits(VI a) { return _mm256_castsi256_ps(a); }
static inline V v_from_int(VI a) { return _mm256_cvtepi32_ps(a); }
static inline VI vi_trunc(V a) { return _mm256_cvttps_epi32(a); }
static inline void vi_store(int32_t *p, VI a) { _mm256_storeu_si256((__m256i *)(void *)p, a); }
static inline VI vi_set1(int32_t a) { return _mm256_set1_epi32(a); }
static inline VI vi_lane(void) { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
static inline VI vi_add(VI a, VI b) { return _mm256_add_epi32(a, b); }
static inline VI vi_sub(VI a, VI b) { return _mm256_sub_epi32(a, b); }
static inline VI vi_and(VI a, VI b) { return _mm256_and_si256(a, b); }
static inline VI vi_andnot(VI a, VI b) { return _mm256_andnot_si256(a, b); }
static inline VI vi_or(VI a, VI b) { return _mm256_or_si256(a, b); }
static inline VI vi_xor(VI a, VI b) { return _mm256_xor_si256(a, b); }
static inline VI vi_shl(VI a, int n) { return _mm256_slli_epi32(a, n); }
static inline VI vi_srl(VI a, int n) { return _mm256_srli_epi32(a, n); }
static inline VI vi_sra(VI a, int n) { return _mm256_srai_epi32(a, n); }
static inline void vi_mul_wide(VI a, uint32_t b, VI *hi, VI *lo)
{
    const __m256i m = _mm256_set1_epi32((int32_t)b);
    __m256i even = _mm256_mul_epu32(a, m), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), m);
    *hi = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
    *lo = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
}

#include "ops_body.inc"
#else
typedef int tb_no_avx2;              /* a translation unit must not be empty */
#endif
