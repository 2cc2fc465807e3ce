/* kernels_avx2.c - the matrix kernels in AVX2, FMA.
 *
 * A dword lane is a row: 8 rows x 16 columns ("half a unit") are two registers of codes at most, activations are
 * broadcast four columns at a time, and nothing is summed across lanes but once per group. All exact integers:
 *
 *   draft    c x with int8 activations: vpmaddubsw over a unit, then vpmaddwd with the row's step 2 A s.
 *   verify   q rebuilt as int16 by one vpmaddubsw per 16 weights: the bytes (a s, f) times the bytes (2^(h+1) c, r),
 *            A = 2^h a (FORMAT.md has a s fit a byte for this), then vpmaddwd with int16 activations. Up to four tokens
 *            use q as it is made; more read it from 4 KB of scratch (16 rows x one group), made once per 128 tokens.
 *
 * What the codes' zero points and B m contribute is one integer per row and unit,
 *   K = B m - (2^b - 1) A s - 2^(R-1) f,   times the sum of x over the unit.
 *
 * The asm fences keep gcc from turning sums into trees (which spill) and loads into repeated memory operands. */
#include "kernels.h"

#include <immintrin.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define KEEP(v) __asm__("" : "+x"(v))
#define AGAIN(p) __asm__("" : "+r"(p))    /* what is read from p is read again, not kept on the stack */
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif

enum { CHUNK = 128 };    /* tokens per rebuild of the weights */

INLINE __m256i load(const void *p) { return _mm256_loadu_si256(p); }
INLINE void store(void *p, __m256i v) { _mm256_storeu_si256(p, v); }
INLINE __m256i words(int v) { return _mm256_set1_epi16((int16_t)v); }
INLINE __m256i bytes(int v) { return _mm256_set1_epi8((int8_t)v); }

INLINE __m256i broadcast(const void *p)
{
    int32_t v;
    memcpy(&v, p, sizeof v);
    return _mm256_set1_epi32(v);
}

/* acc += the products of int16 pairs, as an instruction of its own. */
INLINE __m256i mac(__m256i acc, __m256i a, __m256i b)
{
    acc = _mm256_add_epi32(acc, _mm256_madd_epi16(a, b));
    KEEP(acc);
    return acc;
}

/* Half `h` of the unit at p: per row, the bytes of columns 4 j .. 4 j + 3 (layout: kernels_generic.c). */
INLINE __m256i field(int bits, const uint8_t *p, int h, int j)
{
    const uint8_t *at = p + 32 * h;
    if (bits == 8)
        return load(at + 64 * j);
    if (bits == 6 && j < 3)
        return _mm256_and_si256(load(at + 64 * j), bytes(63));
    if (bits == 6) {
        const __m256i x = _mm256_and_si256(_mm256_srli_epi16(load(at), 6), bytes(0x03));
        const __m256i y = _mm256_and_si256(_mm256_srli_epi16(load(at + 64), 4), bytes(0x0c));
        const __m256i z = _mm256_and_si256(_mm256_srli_epi16(load(at + 128), 2), bytes(0x30));
        return _mm256_or_si256(_mm256_or_si256(x, y), z);
    }
    if (bits == 4)
        return _mm256_and_si256(_mm256_srli_epi16(load(at + 64 * (j / 2)), 4 * (j % 2)), bytes(15));
    __m256i v = load(at);
    if (j)
        v = _mm256_srli_epi16(v, 2 * j);
    v = _mm256_and_si256(v, bytes(3));
    if (bits == 3) {
        /* a dword gets the byte of its row's u16 that holds nibble j, four times; bit b is tested in byte b */
        const __m256i high = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)(p + 64 + 16 * h)));
        const __m256i row = _mm256_setr_epi8(0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6,
                                             8, 8, 8, 8, 10, 10, 10, 10, 12, 12, 12, 12, 14, 14, 14, 14);
        const __m256i bit = _mm256_set1_epi32(j % 2 ? (int32_t)0x80402010u : 0x08040201);
        const __m256i x = _mm256_and_si256(_mm256_shuffle_epi8(high, _mm256_add_epi8(row, bytes(j / 2))), bit);
        v = _mm256_or_si256(v, _mm256_and_si256(_mm256_cmpeq_epi8(x, bit), bytes(4)));
    }
    return v;
}

/* Constants of 8 rows, as pairs of equal words: what s is multiplied with, (2^b - 1) A, B. */
typedef struct rows { __m256i step, an, b; } rows;

INLINE __m256i pairs(__m256i dwords)
{
    return _mm256_blend_epi16(dwords, _mm256_slli_epi32(dwords, 16), 0xaa);
}

/* Steps are 2 A s, or A s / 2^shift where a shift is given. */
INLINE rows load_rows(const tb_matrix *w, int bits, int shift, int32_t row)
{
    const __m256i a = pairs(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)(w->row_a + row))));
    const __m256i b = pairs(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)(w->row_b + row))));
    const __m256i step = shift < 0 ? _mm256_add_epi16(a, a) : _mm256_srli_epi16(a, shift);
    return (rows){ step, _mm256_mullo_epi16(a, words((1 << bits) - 1)), b };
}

/* Scales of 8 rows over one quad, as words: [0] of units 0 and 2, [1] of units 1 and 3. */
typedef struct quad { __m256i step[2], f[2], k[2]; } quad;    /* step, f, K */

INLINE quad draft_quad(const uint8_t *record, int h, const rows *r)
{
    const __m256i x = load(record + 32 * h), low = words(15), m = _mm256_xor_si256(x, bytes(-128));
    const __m256i s0 = _mm256_and_si256(x, low), s1 = _mm256_and_si256(_mm256_srli_epi16(x, 8), low);
    const __m256i m0 = _mm256_srai_epi16(_mm256_slli_epi16(m, 8), 12), m1 = _mm256_srai_epi16(m, 12);
    quad q;
    q.step[0] = _mm256_mullo_epi16(s0, r->step);
    q.step[1] = _mm256_mullo_epi16(s1, r->step);
    q.k[0] = _mm256_sub_epi16(_mm256_mullo_epi16(m0, r->b), _mm256_mullo_epi16(s0, r->an));
    q.k[1] = _mm256_sub_epi16(_mm256_mullo_epi16(m1, r->b), _mm256_mullo_epi16(s1, r->an));
    q.f[0] = q.f[1] = _mm256_setzero_si256();
    return q;
}

/* Here step holds the bytes (a s, f). */
INLINE quad verify_quad(const uint8_t *record, const uint8_t *residual, int group, int bits, int h, const rows *r)
{
    quad q = draft_quad(record, h, r);
    const __m256i low = words(15);
    if (group == 16) {
        const __m256i at = _mm256_setr_epi8(0, -1, 1, -1, 2, -1, 3, -1, 4, -1, 5, -1, 6, -1, 7, -1,
                                            8, -1, 9, -1, 10, -1, 11, -1, 12, -1, 13, -1, 14, -1, 15, -1);
        const __m128i x = _mm_loadu_si128((const void *)(residual + 16 * h));
        const __m256i f = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(x), at);
        q.f[0] = _mm256_and_si256(f, low);
        q.f[1] = _mm256_srli_epi16(f, 4);
    } else {
        const __m256i f = pairs(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)(residual + 8 * h))));
        q.f[0] = q.f[1] = _mm256_and_si256(_mm256_blend_epi16(f, _mm256_srli_epi16(f, 4), 0xaa), low);
    }
    for (int i = 0; i < 2; i++) {
        if (bits < 8)    /* 8-bit codes become signed instead */
            q.k[i] = _mm256_sub_epi16(q.k[i], _mm256_slli_epi16(q.f[i], bits - 1));
        q.step[i] = _mm256_or_si256(q.step[i], _mm256_slli_epi16(q.f[i], 8));
    }
    return q;
}

/* The word of unit u of a quad, in both words of each row. */
INLINE __m256i of_unit(const __m256i v[2], int u)
{
    const __m256i first = _mm256_set1_epi64x(0x0504050401000100), second = _mm256_set1_epi64x(0x0706070603020302);
    const __m256i lane = _mm256_setr_epi64x(0, 0x0808080808080808, 0, 0x0808080808080808);
    return _mm256_shuffle_epi8(v[u % 2], _mm256_add_epi8(u < 2 ? first : second, lane));
}

/* The word of unit u of a quad, four times over: of rows 0 1 4 5 (pair 0) or 2 3 6 7 (pair 1) of the 8. */
INLINE __m256i of_rows(const __m256i v[2], int u, int pair)
{
    const int64_t at = 0x0100010001000100 + (u < 2 ? 0 : 0x0202020202020202) + (pair ? 0x0808080808080808 : 0);
    const int64_t next = at + 0x0404040404040404;
    return _mm256_shuffle_epi8(v[u % 2], _mm256_setr_epi64x(at, next, at, next));
}

/* ---- activations ----
 *
 * A record (one token, one group), `sums` at 2 * group:
 *   ACT8          int8 [group] in column order; sums: per quad, words X0 X2 X1 X3, the sums of x over its units
 *   ACT16         int16 [group] in column order; sums X = 128 Xh + Xl: per quad, words Xl0 Xl2 Xl1 Xl3 Xh0 Xh2 Xh1 Xh3 */

/* X0 .. X3 as int32. */
INLINE __m128i unit_sums(const int16_t *x)
{
    const __m256i one = words(1);
    __m256i s[4];
    for (int u = 0; u < 4; u++)
        s[u] = _mm256_madd_epi16(load(x + 16 * u), one);
    s[0] = _mm256_hadd_epi32(_mm256_hadd_epi32(s[0], s[1]), _mm256_hadd_epi32(s[2], s[3]));
    return _mm_add_epi32(_mm256_castsi256_si128(s[0]), _mm256_extracti128_si256(s[0], 1));
}

/* x[0..31] as int8, in order. */
INLINE void store_bytes(int8_t *out, __m256i lo, __m256i hi)
{
    store(out, _mm256_permute4x64_epi64(_mm256_packs_epi16(lo, hi), 0xd8));
}

/* Words of units 0 2 1 3, of a then of b. */
INLINE __m128i in_pairs(__m128i a, __m128i b)
{
    return _mm_shufflehi_epi16(_mm_shufflelo_epi16(_mm_packs_epi32(a, b), 0xd8), 0xd8);
}

static void finish_record(const tb_act *a, const int16_t *x, uint8_t *record)
{
    uint8_t *sums = record + 2 * a->group;
    if (a->kind == TB_ACT8) {
        for (int32_t k = 0; k < a->group; k += 32)
            store_bytes((int8_t *)record + k, load(x + k), load(x + k + 16));
        for (int32_t k = 0; k < a->group; k += 64, sums += 8)
            _mm_storel_epi64((void *)sums, in_pairs(unit_sums(x + k), _mm_setzero_si128()));
    } else {
        memcpy(record, x, 2 * (size_t)a->group);
        for (int32_t k = 0; k < a->group; k += 64, sums += 16) {
            const __m128i sum = unit_sums(x + k), half = _mm_set1_epi32(64);
            const __m128i low = _mm_sub_epi32(_mm_and_si128(_mm_add_epi32(sum, half), _mm_set1_epi32(127)), half);
            _mm_storeu_si128((void *)sums, in_pairs(low, _mm_srai_epi32(_mm_sub_epi32(sum, low), 7)));
        }
    }
}

static int quantize(tb_act *a, const float *x, ptrdiff_t ldx, int32_t t0, int32_t t1)
{
    const float limit = a->kind == TB_ACT8 ? 127 : a->kind == TB_ACT16 ? 8191 : 4095;
    const __m256i magnitude = _mm256_set1_epi32(INT32_MAX), top = _mm256_set1_epi32((int32_t)limit);
    for (int32_t t = t0; t < t1; t++)
        for (int32_t g = 0; g < a->groups; g++) {
            const size_t at = (size_t)g * (size_t)a->m + (size_t)t;
            const float *v = x + t * ldx + (ptrdiff_t)g * a->group;
            const int32_t left = a->cols - g * a->group;
            uint8_t *record = a->data + at * (size_t)a->record;
            float tail[128];
            int16_t q[128];

            if (left < a->group) {
                memset(tail, 0, sizeof tail);
                memcpy(tail, v, (size_t)left * sizeof *v);
                v = tail;
            }
            /* magnitudes order as their bits do, infinities and NaNs above all others */
            __m256i most = _mm256_setzero_si256();
            for (int32_t k = 0; k < a->group; k += 8)
                most = _mm256_max_epi32(most, _mm256_and_si256(load(v + k), magnitude));
            __m128i max4 = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
            max4 = _mm_max_epi32(max4, _mm_shuffle_epi32(max4, 0x4e));
            max4 = _mm_max_epi32(max4, _mm_shuffle_epi32(max4, 0xb1));
            const float amax = _mm_cvtss_f32(_mm_castsi128_ps(max4));
            if (_mm_cvtsi128_si32(max4) >= 0x7f800000)
                return -1;
            if (amax < 1e-30f) {
                a->scale[at] = 0;
                memset(record, 0, (size_t)a->record);
                continue;
            }
            a->scale[at] = amax / limit;
            const __m256 by = _mm256_set1_ps(limit / amax);
            for (int32_t k = 0; k < a->group; k += 16) {
                __m256i lo = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(v + k), by));
                __m256i hi = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(v + k + 8), by));
                lo = _mm256_max_epi32(_mm256_min_epi32(lo, top), _mm256_sub_epi32(_mm256_setzero_si256(), top));
                hi = _mm256_max_epi32(_mm256_min_epi32(hi, top), _mm256_sub_epi32(_mm256_setzero_si256(), top));
                store(q + k, _mm256_permute4x64_epi64(_mm256_packs_epi32(lo, hi), 0xd8));
            }
            finish_record(a, q, record);
        }
    return 0;
}

/* ---- results ---- */

typedef struct sums { __m256 lane[2]; } sums;    /* fp32 of the 16 rows of a block, one token */

INLINE __m256 add_group(__m256 acc, __m256i dot, float scale)
{
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_set1_ps(scale), acc);
}

INLINE void store_block(const tb_matrix *w, int32_t block, const sums *acc, float *y)
{
    const int32_t row = 16 * block, n = w->rows - row < 16 ? w->rows - row : 16;
    float out[16], bias[16] = { 0 };
    if (w->bias)
        memcpy(bias, w->bias + row, (size_t)n * sizeof *bias);
    for (int h = 0; h < 2; h++) {
        __m256 v = _mm256_mul_ps(acc->lane[h], _mm256_loadu_ps(w->row_scale + row + 8 * h));
        if (w->bias)
            v = _mm256_add_ps(v, _mm256_loadu_ps(bias + 8 * h));
        _mm256_storeu_ps(out + 8 * h, v);
    }
    memcpy(y + row, out, (size_t)n * sizeof *out);
}

/* Where block b's planes start, and how its units are grouped. */
typedef struct place {
    const uint8_t *codes, *scales, *residual, *factors;
    int32_t units;
} place;

INLINE place block_at(const tb_matrix *w, int bits, int residual_bits, int32_t block)
{
    const int32_t units = (w->cols + 15) / 16, quads = (units + 3) / 4;
    const size_t unit = (size_t)block * (size_t)units, q = (size_t)block * (size_t)quads;
    place p = { w->draft_codes + 32 * (size_t)bits * unit, w->draft_scales + 64 * q, NULL, NULL, units };
    if (residual_bits) {
        p.residual = w->residual_codes + 32 * (size_t)residual_bits * unit;
        p.factors = w->residual_scales + (w->residual_group == 32 ? 16 : 32) * q;
    }
    return p;
}

INLINE int smaller(int a, int b) { return a < b ? a : b; }

/* Fetches `lines` lines of 64 bytes, `ahead` times as many after p: planes are contiguous, so into the next block too.
 * How far ahead, and which planes, was found by measuring pairs. */
INLINE void fetch(const uint8_t *p, int ahead, int lines)
{
    for (int i = 0; i < lines; i++)
        _mm_prefetch((const char *)p + 64 * (ahead * lines + i), _MM_HINT_T0);
}

/* ---- draft ---- */

/* sum (+)= c x for four columns, as int16 pairs; j == 0 starts a sum. */
INLINE void mac_bytes(__m256i *sum, __m256i c, __m256i x, int j)
{
    const __m256i p = _mm256_maddubs_epi16(c, x);
    *sum = j ? _mm256_add_epi16(*sum, p) : p;
    KEEP(*sum);
}

/* One token and quad; both halves of a unit share the activations. */
INLINE void draft_one(int bits, const uint8_t *codes, const uint8_t *record, const rows r[2], int units,
                      const uint8_t *x, const uint8_t *sums_at, __m256i acc[2])
{
    const quad q[2] = { draft_quad(record, 0, &r[0]), draft_quad(record, 1, &r[1]) };
    UNROLL
    for (int u = 0; u < 4; u++) {
        if (u >= units)
            continue;
        __m256i sum[2];
        UNROLL
        for (int j = 0; j < 4; j++) {
            __m256i v = broadcast(x + 16 * u + 4 * j);
            KEEP(v);
            mac_bytes(&sum[0], field(bits, codes + 32 * bits * u, 0, j), v, j);
            mac_bytes(&sum[1], field(bits, codes + 32 * bits * u, 1, j), v, j);
        }
        for (int h = 0; h < 2; h++)
            acc[h] = mac(acc[h], sum[h], of_unit(q[h].step, u));
    }
    for (int i = 0; i < 2; i++) {
        const __m256i v = broadcast(sums_at + 4 * i);
        acc[0] = mac(acc[0], q[0].k[i], v);
        acc[1] = mac(acc[1], q[1].k[i], v);
    }
}

INLINE void draft_half(int bits, int tokens, const uint8_t *codes, const uint8_t *record, const rows *r, int h, int units,
                       const uint8_t *x, const uint8_t *sums_at, ptrdiff_t ldr, __m256i acc[4])
{
    const quad q = draft_quad(record, h, r);
    AGAIN(x);
    AGAIN(sums_at);
    UNROLL
    for (int u = 0; u < 4; u++) {
        if (u >= units)
            continue;
        __m256i c[4];
        UNROLL
        for (int j = 0; j < 4; j++)
            c[j] = field(bits, codes + 32 * bits * u, h, j);
        const __m256i step = of_unit(q.step, u);
        for (int t = 0; t < tokens; t++) {
            __m256i sum;
            UNROLL
            for (int j = 0; j < 4; j++)
                mac_bytes(&sum, c[j], broadcast(x + t * ldr + 16 * u + 4 * j), j);
            acc[t] = mac(acc[t], sum, step);
        }
    }
    for (int t = 0; t < tokens; t++) {
        acc[t] = mac(acc[t], q.k[0], broadcast(sums_at + t * ldr));
        acc[t] = mac(acc[t], q.k[1], broadcast(sums_at + t * ldr + 4));
    }
}

INLINE void draft_block(const tb_matrix *w, const tb_act *a, int bits, int tokens, int32_t t0, int32_t block, float *y, ptrdiff_t ldy)
{
    const rows r[2] = { load_rows(w, bits, -1, 16 * block), load_rows(w, bits, -1, 16 * block + 8) };
    place p = block_at(w, bits, 0, block);
    sums acc[4];
    for (int t = 0; t < tokens; t++)
        acc[t].lane[0] = acc[t].lane[1] = _mm256_setzero_ps();
    for (int32_t g = 0; g < a->groups; g++) {
        const size_t at = (size_t)g * (size_t)a->m + (size_t)t0;
        const uint8_t *x = a->data + at * (size_t)a->record, *sums_at = x + 2 * a->group;
        __m256i dot[2][4], one[2];
        one[0] = one[1] = _mm256_setzero_si256();
        for (int t = 0; t < tokens; t++)
            dot[0][t] = dot[1][t] = one[0];
        for (int left = smaller(8, p.units - 8 * g); left > 0; left -= 4) {
            fetch(p.codes, 8, 2 * bits);
            fetch(p.scales, 16, 1);
            if (tokens == 1)
                draft_one(bits, p.codes, p.scales, r, left, x, sums_at, one);
            for (int h = 0; h < 2 && tokens > 1; h++)
                draft_half(bits, tokens, p.codes, p.scales, &r[h], h, left, x, sums_at, a->record, dot[h]);
            p.codes += 128 * bits;
            p.scales += 64;
            x += 64;
            sums_at += 8;
        }
        for (int t = 0; t < tokens; t++)
            for (int h = 0; h < 2; h++)
                acc[t].lane[h] = add_group(acc[t].lane[h], tokens == 1 ? one[h] : dot[h][t], a->scale[at + (size_t)t]);
    }
    for (int t = 0; t < tokens; t++)
        store_block(w, block, &acc[t], y + (t0 + t) * ldy);
}

INLINE void draft(const tb_matrix *w, const tb_act *a, int bits, float *y, ptrdiff_t ldy, int32_t b0, int32_t b1)
{
    for (int32_t b = b0; b < b1; b++)
        for (int32_t t = 0; t < a->m; t += 4)
            switch (a->m - t) {
            case 1: draft_block(w, a, bits, 1, t, b, y, ldy); break;
            case 2: draft_block(w, a, bits, 2, t, b, y, ldy); break;
            case 3: draft_block(w, a, bits, 3, t, b, y, ldy); break;
            default: draft_block(w, a, bits, 4, t, b, y, ldy); break;
            }
}

/* ---- verify ---- */

/* h of FORMAT.md: A is a multiple of 2^h, and A / 2^h at most 17. */
INLINE int shift_of(int bits, int rbits)
{
    const int wide = rbits == 8 || (bits == 4 && rbits == 6);
    return bits == 2 ? (wide ? 3 : 1) : bits == 3 ? (wide ? 2 : 0) : wide;
}

/* Draft codes of columns 4 j .. 4 j + 3, times 2^(h+1). */
INLINE __m256i scaled_field(int bits, int by, const uint8_t *p, int h, int j)
{
    if (bits == 3)
        return _mm256_slli_epi16(field(3, p, h, j), by);
    const int from = bits == 2 ? 2 * j : 4 * (j % 2);
    const __m256i v = load(p + 32 * h + (bits == 2 ? 0 : 64 * (j / 2))), mask = bytes(((1 << bits) - 1) << by);
    return _mm256_and_si256(by > from ? _mm256_slli_epi16(v, by - from) : by < from ? _mm256_srli_epi16(v, from - by) : v, mask);
}

/* q - K of columns 4 j .. 4 j + 3 of half a unit: v[0] of rows 0 1 4 5, v[1] of rows 2 3 6 7, four words a row. */
INLINE void rebuild_columns(int bits, int rbits, const place *p, int u, int h, int j, __m256i scale0, __m256i scale1, __m256i v[2])
{
    const __m256i c = scaled_field(bits, shift_of(bits, rbits) + 1, p->codes + 32 * bits * u, h, j);
    __m256i r = field(rbits, p->residual + 32 * rbits * u, h, j);
    if (rbits == 8)
        r = _mm256_xor_si256(r, bytes(-128));
    v[0] = _mm256_maddubs_epi16(scale0, _mm256_unpacklo_epi8(c, r));
    v[1] = _mm256_maddubs_epi16(scale1, _mm256_unpackhi_epi8(c, r));
}

INLINE __m256i broadcast4(const void *p)
{
    int64_t v;
    memcpy(&v, p, sizeof v);
    return _mm256_set1_epi64x(v);
}

INLINE void next_quad(int bits, int rbits, int group, place *p)
{
    p->codes += 128 * bits;
    p->residual += 128 * rbits;
    p->scales += 64;
    p->factors += group == 32 ? 16 : 32;
}

/* Half a quad times up to four tokens. K goes through the unit sums for one or two tokens, else into q. */
INLINE void verify_half(int bits, int rbits, int tokens, const place *p, int group, const rows *r, int h, int units,
                        const uint8_t *x, ptrdiff_t ldr, const uint8_t *sums_at, __m256i dot[4][2], __m256i k[2][2])
{
    const quad q = verify_quad(p->scales, p->factors, group, rbits, h, r);
    UNROLL
    for (int u = 0; u < 4; u++) {
        if (u >= units)
            continue;
        const __m256i scale0 = of_rows(q.step, u, 0), scale1 = of_rows(q.step, u, 1);
        const __m256i k0 = of_rows(q.k, u, 0), k1 = of_rows(q.k, u, 1);
        UNROLL
        for (int j = 0; j < 4; j++) {
            __m256i v[2];
            rebuild_columns(bits, rbits, p, u, h, j, scale0, scale1, v);
            if (tokens > 2) {
                v[0] = _mm256_add_epi16(v[0], k0);
                v[1] = _mm256_add_epi16(v[1], k1);
            }
            KEEP(v[0]);
            KEEP(v[1]);
            for (int t = 0; t < tokens; t++) {
                __m256i xt = broadcast4(x + t * ldr + 32 * u + 8 * j);
                KEEP(xt);
                dot[t][0] = mac(dot[t][0], v[0], xt);
                dot[t][1] = mac(dot[t][1], v[1], xt);
            }
        }
    }
    for (int t = 0; t < tokens && tokens <= 2; t++)
        for (int i = 0; i < 2; i++) {
            k[t][0] = mac(k[t][0], q.k[i], broadcast(sums_at + t * ldr + 4 * i));
            k[t][1] = mac(k[t][1], q.k[i], broadcast(sums_at + t * ldr + 8 + 4 * i));
        }
}

/* One block times tokens t0 .. t0 + tokens - 1. */
INLINE void verify_block(const tb_matrix *w, const tb_act *a, int bits, int rbits, int tokens, int32_t t0, int32_t b, float *y, ptrdiff_t ldy)
{
    const int group = w->residual_group, columns = a->group, shift = shift_of(bits, rbits);
    const rows r[2] = { load_rows(w, bits, shift, 16 * b), load_rows(w, bits, shift, 16 * b + 8) };
    place p = block_at(w, bits, rbits, b);
    sums acc[4];
    for (int t = 0; t < tokens; t++)
        acc[t].lane[0] = acc[t].lane[1] = _mm256_setzero_ps();
    for (int32_t g = 0; g < a->groups; g++) {
        const size_t at = (size_t)g * (size_t)a->m + (size_t)t0;
        const int units = smaller(columns / 16, p.units - columns / 16 * g);
        place end = p;
        for (int h = 0; h < 2; h++) {
            const uint8_t *x = a->data + at * (size_t)a->record, *sums_at = x + 2 * columns;
            __m256i dot[4][2], k[2][2];
            for (int t = 0; t < tokens; t++)
                dot[t][0] = dot[t][1] = _mm256_setzero_si256();
            k[0][0] = k[0][1] = k[1][0] = k[1][1] = _mm256_setzero_si256();
            end = p;
            for (int left = units; left > 0; left -= 4) {
                if (!h)
                    fetch(end.residual, 4, 2 * rbits);
                verify_half(bits, rbits, tokens, &end, group, &r[h], h, left, x, a->record, sums_at, dot, k);
                next_quad(bits, rbits, group, &end);
                x += 128;
                sums_at += 16;
            }
            for (int t = 0; t < tokens; t++) {
                __m256i sum = _mm256_hadd_epi32(dot[t][0], dot[t][1]);
                if (tokens <= 2)
                    sum = _mm256_add_epi32(sum, _mm256_add_epi32(k[t][0], _mm256_slli_epi32(k[t][1], 7)));
                acc[t].lane[h] = add_group(acc[t].lane[h], sum, a->scale[at + (size_t)t]);
            }
        }
        p = end;
    }
    for (int t = 0; t < tokens; t++)
        store_block(w, b, &acc[t], y + (t0 + t) * ldy);
}

/* q of one group of a block as int16, in the order that multiply reads: [half][unit][j][8 rows x 4 columns]. */
INLINE void rebuild(int bits, int rbits, place *p, int group, const rows r[2], int units, int16_t *out)
{
    for (int left = units; left > 0; left -= 4) {
        for (int h = 0; h < 2; h++) {
            const quad q = verify_quad(p->scales, p->factors, group, rbits, h, &r[h]);
            UNROLL
            for (int u = 0; u < 4; u++) {
                if (u >= left)
                    continue;
                const __m256i scale0 = of_rows(q.step, u, 0), scale1 = of_rows(q.step, u, 1);
                const __m256i k0 = of_rows(q.k, u, 0), k1 = of_rows(q.k, u, 1);
                UNROLL
                for (int j = 0; j < 4; j++) {
                    __m256i v[2];
                    int16_t *at = out + 1024 * h + 128 * u + 32 * j;
                    rebuild_columns(bits, rbits, p, u, h, j, scale0, scale1, v);
                    store(at, _mm256_add_epi16(v[0], k0));
                    store(at + 16, _mm256_add_epi16(v[1], k1));
                }
            }
        }
        fetch(p->codes, 4, 2 * bits);
        fetch(p->residual, 4, 2 * rbits);
        fetch(p->scales, 4, 1);
        fetch(p->factors, 4, 1);
        next_quad(bits, rbits, group, p);
        out += 512;
    }
}

/* One group of a block times `tokens` tokens. */
INLINE void multiply_tile(int tokens, const int16_t *q, int units, const uint8_t *x, ptrdiff_t ldr, const float *scale, sums *acc)
{
    for (int h = 0; h < 2; h++) {
        __m256i dot[4][2];
        for (int t = 0; t < tokens; t++)
            dot[t][0] = dot[t][1] = _mm256_setzero_si256();
        for (int u = 0; u < units; u++)
            UNROLL
            for (int j = 0; j < 4; j++) {
                const int16_t *at = q + 1024 * h + 128 * u + 32 * j;
                __m256i q0 = load(at), q1 = load(at + 16);
                KEEP(q0);
                KEEP(q1);
                for (int t = 0; t < tokens; t++) {
                    __m256i v = broadcast4(x + t * ldr + 32 * u + 8 * j);
                    KEEP(v);
                    dot[t][0] = mac(dot[t][0], q0, v);
                    dot[t][1] = mac(dot[t][1], q1, v);
                }
            }
        for (int t = 0; t < tokens; t++)
            acc[t].lane[h] = add_group(acc[t].lane[h], _mm256_hadd_epi32(dot[t][0], dot[t][1]), scale[t]);
    }
}

static __attribute__((noinline)) void multiply(int tokens, const int16_t *q, int units, const uint8_t *x, ptrdiff_t ldr,
                                               const float *scale, sums *acc)
{
    for (; tokens >= 4; tokens -= 4, x += 4 * ldr, scale += 4, acc += 4)
        multiply_tile(4, q, units, x, ldr, scale, acc);
    switch (tokens) {
    case 3: multiply_tile(3, q, units, x, ldr, scale, acc); break;
    case 2: multiply_tile(2, q, units, x, ldr, scale, acc); break;
    case 1: multiply_tile(1, q, units, x, ldr, scale, acc); break;
    default: break;
    }
}

INLINE void verify_many(const tb_matrix *w, const tb_act *a, int bits, int rbits, float *y, ptrdiff_t ldy, int32_t b, void *scratch)
{
    const int group = w->residual_group, columns = a->group, shift = shift_of(bits, rbits);
    sums *acc = scratch;
    int16_t *q = (int16_t *)(void *)(acc + CHUNK);
    const rows r[2] = { load_rows(w, bits, shift, 16 * b), load_rows(w, bits, shift, 16 * b + 8) };
    for (int32_t t0 = 0; t0 < a->m; t0 += CHUNK) {
        const int m = smaller(CHUNK, a->m - t0);
        place p = block_at(w, bits, rbits, b);
        for (int t = 0; t < m; t++)
            acc[t].lane[0] = acc[t].lane[1] = _mm256_setzero_ps();
        for (int32_t g = 0; g < a->groups; g++) {
            const size_t at = (size_t)g * (size_t)a->m + (size_t)t0;
            const uint8_t *x = a->data + at * (size_t)a->record;
            const int units = smaller(columns / 16, p.units - columns / 16 * g);
            rebuild(bits, rbits, &p, group, r, units, q);
            multiply(m, q, units, x, a->record, a->scale + at, acc);
        }
        for (int t = 0; t < m; t++)
            store_block(w, b, &acc[t], y + (t0 + t) * ldy);
    }
}

INLINE void verify(const tb_matrix *w, const tb_act *a, int bits, int rbits, float *y, ptrdiff_t ldy, int32_t b0, int32_t b1, void *scratch)
{
    for (int32_t b = b0; b < b1; b++)
        switch (a->m) {
        case 1: verify_block(w, a, bits, rbits, 1, 0, b, y, ldy); break;
        case 2: verify_block(w, a, bits, rbits, 2, 0, b, y, ldy); break;
        case 3: verify_block(w, a, bits, rbits, 3, 0, b, y, ldy); break;
        case 4: verify_block(w, a, bits, rbits, 4, 0, b, y, ldy); break;
        default: verify_many(w, a, bits, rbits, y, ldy, b, scratch); break;
        }
}

/* ---- one function per format: smaller ones compile faster ---- */

typedef void product(const tb_matrix *w, const tb_act *a, float *y, ptrdiff_t ldy, int32_t b0, int32_t b1, void *scratch);

#define DRAFT(b)                                                                                                              \
    static void draft_##b(const tb_matrix *w, const tb_act *a, float *y, ptrdiff_t ldy, int32_t b0, int32_t b1, void *scratch) \
    {                                                                                                                         \
        (void)scratch;                                                                                                        \
        draft(w, a, b, y, ldy, b0, b1);                                                                                       \
    }
#define VERIFY(b, r)                                                                                                              \
    static void verify_##b##r(const tb_matrix *w, const tb_act *a, float *y, ptrdiff_t ldy, int32_t b0, int32_t b1, void *scratch) \
    {                                                                                                                             \
        verify(w, a, b, r, y, ldy, b0, b1, scratch);                                                                              \
    }
DRAFT(2)
DRAFT(3)
DRAFT(4)
VERIFY(2, 6)
VERIFY(2, 8)
VERIFY(3, 6)
VERIFY(3, 8)
VERIFY(4, 4)
VERIFY(4, 6)

static void matmul(const tb_matrix *w, int32_t op, const tb_act *a, float *y, ptrdiff_t ldy, int32_t b0, int32_t b1, void *scratch)
{
    static product *const drafts[] = { draft_2, draft_3, draft_4 };
    static product *const verifies[][3] = { { NULL, verify_26, verify_28 }, { NULL, verify_36, verify_38 }, { verify_44, verify_46, NULL } };
    product *f = op == TB_DRAFT ? drafts[w->draft_bits - 2] : verifies[w->draft_bits - 2][w->residual_bits / 2 - 2];
    f(w, a, y, ldy, b0, b1, scratch);
}

const tb_kernels tb_kernels_avx2 = { "avx2", quantize, matmul };
