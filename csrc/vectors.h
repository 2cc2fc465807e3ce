/* vectors.h - the vectors of the x86 levels, 256 or 512 bits wide: what kernels_x86.inc and probe_x86.inc are written over.
 *
 * A level that has AVX-512 BW uses 512 bits, others 256. OP(name) is the intrinsic of that width. A line of 64 bytes, four columns
 * of 16 rows, is HALVES vectors of ROWS rows each.
 *
 *   dpwssd(acc, a, b)   acc + a0 b0 + a1 b1 per dword, words signed
 *   dpbusd(acc, a, b)   acc + a0 b0 + .. + a3 b3 per dword, a unsigned bytes, b signed
 *
 * TB_VNNI is 1 where the level has them as one instruction each (no saturation in either). TB_VNNI_EMULATED is for tests: the
 * same kernels on a processor without VNNI. */
#ifndef TB_VECTORS_H
#define TB_VECTORS_H
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

/* Keeps v in a register, as it is. */
#ifdef __AVX512VL__
#define KEEP(v) __asm__("" : "+v"(v))
#else
#define KEEP(v) __asm__("" : "+x"(v))
#endif

/* acc += p in the register of acc. What gcc makes of the intrinsic is an addition into the register of p and a move back, and moves
 * of vectors are not free: on Skylake-SP the multiply probe loses a third to them. */
#ifdef __AVX512VL__
#define INTO(op, acc, p) __asm__(op " %1, %0, %0" : "+v"(acc) : "v"(p))
#else
#define INTO(op, acc, p) __asm__(op " %1, %0, %0" : "+x"(acc) : "x"(p))
#endif

#ifdef __AVX512BW__

#define OP(name) _mm512_##name
enum { HALVES = 1, ROWS = 16 };
typedef __m512i vec;
typedef __m512 vecf;
INLINE vec load(const void *p) { return _mm512_loadu_si512(p); }
INLINE void store(void *p, vec v) { _mm512_storeu_si512(p, v); }
INLINE vec zero(void) { return _mm512_setzero_si512(); }
INLINE vec both(vec a, vec b) { return _mm512_and_si512(a, b); }
INLINE vec either(vec a, vec b) { return _mm512_or_si512(a, b); }
INLINE vec differing(vec a, vec b) { return _mm512_xor_si512(a, b); }
INLINE vec quads(int64_t v) { return _mm512_set1_epi64(v); }

/* b in odd words, a in even ones. */
INLINE vec alternate(vec a, vec b) { return _mm512_mask_blend_epi16(0xaaaaaaaau, a, b); }

/* a in the low eight bytes of every 16, b in the high ones. */
INLINE vec lanes(int64_t a, int64_t b) { return _mm512_set_epi64(b, a, b, a, b, a, b, a); }

/* ROWS bytes as dwords. */
INLINE vec widen_u8(const void *p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(p)); }
INLINE vec widen_i8(const void *p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128(p)); }

/* ROWS words: the 16 bytes of eight rows twice, for shuffles within 16 bytes. */
INLINE vec twice(const void *p)
{
    const __m512i at = _mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3);
    return _mm512_permutexvar_epi64(at, _mm512_castsi256_si512(_mm256_loadu_si256(p)));
}

/* Bytes of b where those of a equal those of `of`. */
INLINE vec where_equal(vec a, vec of, vec b) { return _mm512_maskz_mov_epi8(_mm512_cmpeq_epi8_mask(a, of), b); }

/* Sums of neighbours within 16 bytes: two of a, two of b. */
INLINE vec neighbours(vec a, vec b)
{
    const __m512 x = _mm512_castsi512_ps(a), y = _mm512_castsi512_ps(b);
    return _mm512_add_epi32(_mm512_castps_si512(_mm512_shuffle_ps(x, y, 0x88)), _mm512_castps_si512(_mm512_shuffle_ps(x, y, 0xdd)));
}

#else

#define OP(name) _mm256_##name
enum { HALVES = 2, ROWS = 8 };
typedef __m256i vec;
typedef __m256 vecf;
INLINE vec load(const void *p) { return _mm256_loadu_si256(p); }
INLINE void store(void *p, vec v) { _mm256_storeu_si256(p, v); }
INLINE vec zero(void) { return _mm256_setzero_si256(); }
INLINE vec both(vec a, vec b) { return _mm256_and_si256(a, b); }
INLINE vec either(vec a, vec b) { return _mm256_or_si256(a, b); }
INLINE vec differing(vec a, vec b) { return _mm256_xor_si256(a, b); }
INLINE vec quads(int64_t v) { return _mm256_set1_epi64x(v); }
INLINE vec alternate(vec a, vec b) { return _mm256_blend_epi16(a, b, 0xaa); }
INLINE vec lanes(int64_t a, int64_t b) { return _mm256_setr_epi64x(a, b, a, b); }
INLINE vec widen_u8(const void *p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(p)); }
INLINE vec widen_i8(const void *p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64(p)); }
INLINE vec twice(const void *p) { return _mm256_broadcastsi128_si256(_mm_loadu_si128(p)); }
INLINE vec where_equal(vec a, vec of, vec b) { return _mm256_and_si256(_mm256_cmpeq_epi8(a, of), b); }
INLINE vec neighbours(vec a, vec b) { return _mm256_hadd_epi32(a, b); }

#endif

/* An index for shuffles of twice(): of every eight rows a, b for the first four, eight bytes further on for the others. */
INLINE vec by_rows(int64_t a, int64_t b)
{
    const int64_t on = 0x0808080808080808;
#ifdef __AVX512BW__
    return _mm512_setr_epi64(a, b, a + on, b + on, a, b, a + on, b + on);
#else
    return _mm256_setr_epi64x(a, b, a + on, b + on);
#endif
}

/* The count of a shift: intrinsics take an int or an unsigned, by width and by compiler, and this turns into both. */
typedef uint8_t by_t;

INLINE vec words(int v) { return OP(set1_epi16)((int16_t)v); }
INLINE vec bytes(int v) { return OP(set1_epi8)((int8_t)v); }

/* rest | (v & mask), mask the same for every byte. */
INLINE vec bits_of(vec v, int mask, vec rest)
{
#ifdef __AVX512BW__
    return _mm512_ternarylogic_epi64(v, bytes(mask), rest, 0xea);
#else
    return either(both(v, bytes(mask)), rest);
#endif
}

INLINE vec broadcast(const void *p)
{
    int32_t v;
    memcpy(&v, p, sizeof v);
    return OP(set1_epi32)(v);
}

INLINE vec broadcast4(const void *p)
{
    int64_t v;
    memcpy(&v, p, sizeof v);
    return quads(v);
}

#if defined(__AVX512VNNI__)
#define TB_VNNI 1
INLINE vec dpwssd(vec acc, vec a, vec b) { return OP(dpwssd_epi32)(acc, a, b); }
INLINE vec dpbusd(vec acc, vec a, vec b) { return OP(dpbusd_epi32)(acc, a, b); }
#elif defined(__AVXVNNI__)
#define TB_VNNI 1
INLINE vec dpwssd(vec acc, vec a, vec b) { return _mm256_dpwssd_avx_epi32(acc, a, b); }
INLINE vec dpbusd(vec acc, vec a, vec b) { return _mm256_dpbusd_avx_epi32(acc, a, b); }
#else
INLINE vec dpwssd(vec acc, vec a, vec b)
{
    const vec p = OP(madd_epi16)(a, b);
    INTO("vpaddd", acc, p);
    return acc;
}
#ifdef TB_VNNI_EMULATED
#define TB_VNNI 1
INLINE vec dpbusd(vec acc, vec a, vec b)
{
    const vec low = words(255);
    const vec even = OP(madd_epi16)(both(a, low), OP(srai_epi16)(OP(slli_epi16)(b, 8), 8));
    const vec odd = OP(madd_epi16)(OP(srli_epi16)(a, 8), OP(srai_epi16)(b, 8));
    return OP(add_epi32)(acc, OP(add_epi32)(even, odd));
}
#else
#define TB_VNNI 0
#endif
#endif
#endif
