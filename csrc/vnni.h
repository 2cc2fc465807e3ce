/* vnni.h - how the 256-bit levels of x86 multiply and add: what kernels_256.inc and probe_256.inc are written over.
 *
 *   dpwssd(acc, a, b)   acc + a0 b0 + a1 b1 per dword, words signed
 *   dpbusd(acc, a, b)   acc + a0 b0 + .. + a3 b3 per dword, a unsigned bytes, b signed
 *
 * TB_VNNI is 1 where the level has them as one instruction each (no saturation in either). TB_VNNI_EMULATED is for tests: the
 * same kernels on a processor without VNNI. */
#ifndef TB_VNNI_H
#define TB_VNNI_H
#include <immintrin.h>

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define TB_VNNI 1
static inline __m256i dpwssd(__m256i acc, __m256i a, __m256i b) { return _mm256_dpwssd_epi32(acc, a, b); }
static inline __m256i dpbusd(__m256i acc, __m256i a, __m256i b) { return _mm256_dpbusd_epi32(acc, a, b); }
#elif defined(__AVXVNNI__)
#define TB_VNNI 1
static inline __m256i dpwssd(__m256i acc, __m256i a, __m256i b) { return _mm256_dpwssd_avx_epi32(acc, a, b); }
static inline __m256i dpbusd(__m256i acc, __m256i a, __m256i b) { return _mm256_dpbusd_avx_epi32(acc, a, b); }
#else
static inline __m256i dpwssd(__m256i acc, __m256i a, __m256i b) { return _mm256_add_epi32(acc, _mm256_madd_epi16(a, b)); }
#ifdef TB_VNNI_EMULATED
#define TB_VNNI 1
static inline __m256i dpbusd(__m256i acc, __m256i a, __m256i b)
{
    const __m256i low = _mm256_set1_epi16(255);
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, low), _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
    return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
}
#else
#define TB_VNNI 0
#endif
#endif

/* Keeps v in a register, as it is. */
#ifdef __AVX512VL__
#define KEEP(v) __asm__("" : "+v"(v))
#else
#define KEEP(v) __asm__("" : "+x"(v))
#endif
#endif
