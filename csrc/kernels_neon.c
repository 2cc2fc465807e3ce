/* kernels_neon.c - the matrix kernels for AArch64 with the dot-product extension (sdot).
 *
 * A dword lane is a row: 16 bytes of a line are 4 rows x 4 columns, which one sdot multiplies with 4 bytes of activations out
 * of a register of 16. int16 activations are split into signed bytes, x = 128 xh + xl, so that sdot takes them too:
 *
 *   draft    sums of c x over a unit, then one multiply-add with the row's step 2 A s.
 *   verify   up to TWO_SUMS tokens: sums of c x and of r x over a unit, joined with 2 A s and f; nothing is rebuilt.
 *            More tokens: q rebuilt as int16 and split like x, q = 128 qh + ql (|q| <= 8191), once per 128 tokens, in 4 KB
 *            of scratch; then q x = 2^14 qh xh + 2^7 (qh xl + ql xh) + ql xl, three sums along the whole group.
 *   residual verify without draft codes: bits = 0 below.
 *
 * What the codes' zero points and B m contribute is one integer per row and unit,
 *   K = B m - (2^b - 1) A s - 2^(R-1) f,   times the sum of x over the unit.
 *
 * Sums are exact modulo 2^32 and a group's result fits, so the order does not matter: unsigned, they may wrap.
 * Checked under qemu, never timed: TWO_SUMS and the tile of four tokens follow from counting instructions. */
#include "kernels.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif

enum { CHUNK = 128, TWO_SUMS = 8 };

/* The 16 bytes at p, shifted right by n bits. */
INLINE uint8x16_t load(const uint8_t *p, int n)
{
    const uint8x16_t v = vld1q_u8(p);
    switch (n) {
    case 2: return vshrq_n_u8(v, 2);
    case 4: return vshrq_n_u8(v, 4);
    case 6: return vshrq_n_u8(v, 6);
    default: return v;
    }
}

INLINE uint8x16_t low(uint8x16_t v, int bits) { return vandq_u8(v, vdupq_n_u8((uint8_t)((1 << bits) - 1))); }

/* Rows 4 g .. 4 g + 3 of the unit at p: per row, the bytes of columns 4 j .. 4 j + 3 (layout: kernels_generic.c).
 * 8-bit codes come with the sign bit flipped, as r itself; all others are unsigned. */
INLINE int8x16_t field(int bits, const uint8_t *p, int g, int j)
{
    const uint8_t *at = p + 16 * g;
    uint8x16_t v;
    if (bits == 8) {
        v = veorq_u8(load(at + 64 * j, 0), vdupq_n_u8(128));
    } else if (bits == 6 && j < 3) {
        v = low(load(at + 64 * j, 0), 6);
    } else if (bits == 6) {    /* zz...... yy...... xx...... -> zzyyxx.. -> 00zzyyxx */
        v = vsriq_n_u8(load(at + 128, 0), load(at + 64, 0), 2);
        v = vshrq_n_u8(vsriq_n_u8(v, load(at, 0), 4), 2);
    } else if (bits == 4) {
        v = low(load(at + 64 * (j / 2), 4 * (j % 2)), 4);
    } else {
        v = low(load(at, 2 * j), 2);
    }
    if (bits == 3) {
        /* a dword gets the byte of its row's u16 that holds nibble j, four times; bit b is tested in byte b */
        static const uint8_t rows[16] = { 0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6 };
        const uint8x16_t high = vcombine_u8(vld1_u8(p + 64 + 8 * g), vdup_n_u8(0));
        const uint8x16_t byte = vqtbl1q_u8(high, vaddq_u8(vld1q_u8(rows), vdupq_n_u8((uint8_t)(j / 2))));
        const uint8x16_t bit = vreinterpretq_u8_u32(vdupq_n_u32(j % 2 ? 0x80402010u : 0x08040201u));
        v = vorrq_u8(v, vandq_u8(vtstq_u8(byte, bit), vdupq_n_u8(4)));
    }
    return vreinterpretq_s8_u8(v);
}

/* What one row group of 4 rows needs of a block: 2 A, (2^b - 1) A, B; and its fp32 sums are lanes of the block's. */
typedef struct rows { uint32x4_t step, an, b; } rows;

INLINE rows load_rows(const tb_matrix *w, int bits, int32_t row)
{
    uint32_t a[4], b[4];
    if (!bits)
        return (rows){ vdupq_n_u32(0), vdupq_n_u32(0), vdupq_n_u32(0) };
    for (int i = 0; i < 4; i++) {
        a[i] = w->row_a[row + i];
        b[i] = (uint32_t)(int32_t)w->row_b[row + i];
    }
    const uint32x4_t va = vld1q_u32(a);
    return (rows){ vaddq_u32(va, va), vmulq_n_u32(va, (1u << bits) - 1), vld1q_u32(b) };
}

/* Scales of 4 rows and one unit: 2 A s, f, K. */
typedef struct scales { uint32x4_t step, f, k; } scales;

INLINE uint32x4_t nibble(uint32x4_t v, int at)
{
    return vandq_u32(vshlq_u32(v, vdupq_n_s32(-4 * at)), vdupq_n_u32(15));
}

/* `record`, `factors`: of the unit's quad; u: the unit in it. rbits 0: draft. */
INLINE scales load_scales(int bits, const uint8_t *record, const uint8_t *factors, int group, int rbits, int g, int u, const rows *r)
{
    scales q = { vdupq_n_u32(0), vdupq_n_u32(0), vdupq_n_u32(0) };
    if (bits) {
        const uint32x4_t sm = vreinterpretq_u32_u8(vld1q_u8(record + 16 * g));
        const uint32x4_t s = nibble(sm, 2 * u), m = vsubq_u32(nibble(sm, 2 * u + 1), vdupq_n_u32(8));
        q.step = vmulq_u32(s, r->step);
        q.k = vmlsq_u32(vmulq_u32(m, r->b), s, r->an);
    }
    if (rbits) {
        if (group == 16) {
            q.f = nibble(vmovl_u16(vreinterpret_u16_u8(vld1_u8(factors + 8 * g))), u);
        } else {
            uint32_t four;
            memcpy(&four, factors + 4 * g, sizeof four);
            q.f = nibble(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four)))), u / 2);
        }
        if (rbits < 8)    /* 8-bit codes become signed instead */
            q.k = vmlsq_n_u32(q.k, q.f, 1u << (rbits - 1));
    }
    return q;
}

/* ---- activations ----
 *
 * A record (one token, one group): per unit of 16 columns
 *   ACT8          16 bytes x;                  at 2 * group: int32 sums of x, one per unit
 *   ACT16         16 bytes xh, 16 bytes xl;    the same */

static void finish_record(const tb_act *a, const int16_t *x, uint8_t *record)
{
    uint8_t *sums = record + 2 * a->group;
    for (int32_t k = 0; k < a->group; k += 16, sums += 4) {
        const int16x8_t v0 = vld1q_s16(x + k), v1 = vld1q_s16(x + k + 8);
        const int32_t sum = vaddlvq_s16(v0) + vaddlvq_s16(v1);
        const int8x16_t bytes = vcombine_s8(vmovn_s16(v0), vmovn_s16(v1));
        memcpy(sums, &sum, sizeof sum);
        if (a->kind == TB_ACT8) {
            vst1q_s8((int8_t *)record + k, bytes);
        } else {
            vst1q_s8((int8_t *)record + 2 * k, vcombine_s8(vrshrn_n_s16(v0, 7), vrshrn_n_s16(v1, 7)));
            vst1q_s8((int8_t *)record + 2 * k + 16, vshrq_n_s8(vshlq_n_s8(bytes, 1), 1));
        }
    }
}

static int quantize(tb_act *a, const float *x, ptrdiff_t ldx, int32_t t0, int32_t t1)
{
    const float limit = a->kind == TB_ACT8 ? 127 : a->kind == TB_ACT16 ? 8191 : 4095;
    const int32x4_t top = vdupq_n_s32((int32_t)limit), bottom = vnegq_s32(top);
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
            uint32x4_t most = vdupq_n_u32(0);
            for (int32_t k = 0; k < a->group; k += 4)
                most = vmaxq_u32(most, vreinterpretq_u32_f32(vabsq_f32(vld1q_f32(v + k))));
            const uint32_t bits = vmaxvq_u32(most);
            float amax;
            memcpy(&amax, &bits, sizeof amax);
            if (bits >= 0x7f800000)
                return -1;
            if (amax < 1e-30f) {
                a->scale[at] = 0;
                memset(record, 0, (size_t)a->record);
                continue;
            }
            a->scale[at] = amax / limit;
            const float by = limit / amax;
            for (int32_t k = 0; k < a->group; k += 8) {
                int32x4_t lo = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(v + k), by));
                int32x4_t hi = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(v + k + 4), by));
                lo = vmaxq_s32(vminq_s32(lo, top), bottom);
                hi = vmaxq_s32(vminq_s32(hi, top), bottom);
                vst1q_s16(q + k, vcombine_s16(vmovn_s32(lo), vmovn_s32(hi)));
            }
            finish_record(a, q, record);
        }
    return 0;
}

/* ---- results ---- */

typedef struct sums { float32x4_t row[4]; } sums;    /* fp32 of the 16 rows of a block, one token */

INLINE float32x4_t add_group(float32x4_t acc, uint32x4_t dot, float scale)
{
    return vfmaq_n_f32(acc, vcvtq_f32_s32(vreinterpretq_s32_u32(dot)), scale);
}

INLINE void store_block(const tb_matrix *w, int32_t block, const sums *acc, float *y)
{
    const int32_t row = 16 * block, n = w->rows - row < 16 ? w->rows - row : 16;
    float out[16], bias[16] = { 0 };
    if (w->bias)
        memcpy(bias, w->bias + row, (size_t)n * sizeof *bias);
    for (int g = 0; g < 4; g++) {
        float32x4_t v = vmulq_f32(acc->row[g], vld1q_f32(w->row_scale + row + 4 * g));
        if (w->bias)
            v = vaddq_f32(v, vld1q_f32(bias + 4 * g));
        vst1q_f32(out + 4 * g, v);
    }
    memcpy(y + row, out, (size_t)n * sizeof *out);
}

/* Where block b's planes start, and how its units are grouped. */
typedef struct place {
    const uint8_t *codes, *scales, *residual, *factors;
    int32_t units;
} place;

INLINE place block_at(const tb_matrix *w, int bits, int rbits, int32_t block)
{
    const int32_t units = (w->cols + 15) / 16, quads = (units + 3) / 4;
    const size_t unit = (size_t)block * (size_t)units, q = (size_t)block * (size_t)quads;
    place p = { NULL, NULL, NULL, NULL, units };
    if (bits) {
        p.codes = w->draft_codes + 32 * (size_t)bits * unit;
        p.scales = w->draft_scales + 64 * q;
    }
    if (rbits) {
        p.residual = w->residual_codes + 32 * (size_t)rbits * unit;
        p.factors = w->residual_scales + (w->residual_group == 32 ? 16 : 32) * q;
    }
    return p;
}

/* Over one activation group. */
INLINE void next_group(int bits, int rbits, int group, int columns, place *p)
{
    if (bits) {
        p->codes += 2 * bits * columns;
        p->scales += columns;
    }
    if (rbits) {
        p->residual += 2 * rbits * columns;
        p->factors += (group == 32 ? 16 : 32) * (columns / 64);
    }
}

INLINE int smaller(int a, int b) { return a < b ? a : b; }

INLINE int32_t unit_sum(const uint8_t *at, int u)
{
    int32_t v;
    memcpy(&v, at + 4 * u, sizeof v);
    return v;
}

/* sum + v x over a unit: v of columns 4 j .. 4 j + 3 in v[j]. */
INLINE int32x4_t dot(int32x4_t sum, const int8x16_t v[4], int8x16_t x)
{
    sum = vdotq_laneq_s32(sum, v[0], x, 0);
    sum = vdotq_laneq_s32(sum, v[1], x, 1);
    sum = vdotq_laneq_s32(sum, v[2], x, 2);
    return vdotq_laneq_s32(sum, v[3], x, 3);
}

/* The same with x = 128 xh + xl. */
INLINE int32x4_t dot16(const int8x16_t v[4], int8x16_t xh, int8x16_t xl)
{
    return dot(vshlq_n_s32(dot(vdupq_n_s32(0), v, xh), 7), v, xl);
}

/* ---- the draft, and verify by two sums: a block times up to four tokens ---- */

INLINE void group_rows(int bits, int rbits, int tokens, const place *p, int group, const rows *r, int g, int units, int columns,
                       const uint8_t *x, ptrdiff_t ldr, uint32x4_t sum[4])
{
    for (int u = 0; u < units; u++) {
        const uint8_t *record = bits ? p->scales + 64 * (u / 4) : NULL;
        const uint8_t *factors = rbits ? p->factors + (group == 32 ? 16 : 32) * (u / 4) : NULL;
        const scales q = load_scales(bits, record, factors, group, rbits, g, u % 4, r);
        int8x16_t c[4], fine[4];
        UNROLL
        for (int j = 0; j < 4; j++) {
            c[j] = bits ? field(bits, p->codes + 32 * bits * u, g, j) : vdupq_n_s8(0);
            fine[j] = rbits ? field(rbits, p->residual + 32 * rbits * u, g, j) : c[j];
        }
        for (int t = 0; t < tokens; t++) {
            const int8_t *at = (const int8_t *)(x + t * ldr) + (rbits ? 32 : 16) * u;
            const int8x16_t x0 = vld1q_s8(at);
            if (rbits) {
                const int8x16_t x1 = vld1q_s8(at + 16);
                if (bits)
                    sum[t] = vmlaq_u32(sum[t], vreinterpretq_u32_s32(dot16(c, x0, x1)), q.step);
                sum[t] = vmlaq_u32(sum[t], vreinterpretq_u32_s32(dot16(fine, x0, x1)), q.f);
            } else {
                sum[t] = vmlaq_u32(sum[t], vreinterpretq_u32_s32(dot(vdupq_n_s32(0), c, x0)), q.step);
            }
            sum[t] = vmlaq_n_u32(sum[t], q.k, (uint32_t)unit_sum(x + t * ldr + 2 * columns, u));
        }
    }
}

INLINE void multiply_block(const tb_matrix *w, const tb_act *a, int bits, int rbits, int tokens, int32_t t0, int32_t block, float *y, ptrdiff_t ldy)
{
    const int group = w->residual_group, columns = a->group;
    place p = block_at(w, bits, rbits, block);
    rows r[4];
    sums acc[4];
    for (int g = 0; g < 4; g++) {
        r[g] = load_rows(w, bits, 16 * block + 4 * g);
        for (int t = 0; t < tokens; t++)
            acc[t].row[g] = vdupq_n_f32(0);
    }
    for (int32_t i = 0; i < a->groups; i++) {
        const size_t at = (size_t)i * (size_t)a->m + (size_t)t0;
        const uint8_t *x = a->data + at * (size_t)a->record;
        const int units = smaller(columns / 16, p.units - columns / 16 * i);
        for (int g = 0; g < 4; g++) {
            uint32x4_t sum[4];
            for (int t = 0; t < tokens; t++)
                sum[t] = vdupq_n_u32(0);
            group_rows(bits, rbits, tokens, &p, group, &r[g], g, units, columns, x, a->record, sum);
            for (int t = 0; t < tokens; t++)
                acc[t].row[g] = add_group(acc[t].row[g], sum[t], a->scale[at + (size_t)t]);
        }
        next_group(bits, rbits, group, columns, &p);
    }
    for (int t = 0; t < tokens; t++)
        store_block(w, block, &acc[t], y + (t0 + t) * ldy);
}

INLINE void by_sums(const tb_matrix *w, const tb_act *a, int bits, int rbits, int32_t b, float *y, ptrdiff_t ldy)
{
    for (int32_t t = 0; t < a->m; t += 4)
        switch (a->m - t) {
        case 1: multiply_block(w, a, bits, rbits, 1, t, b, y, ldy); break;
        case 2: multiply_block(w, a, bits, rbits, 2, t, b, y, ldy); break;
        case 3: multiply_block(w, a, bits, rbits, 3, t, b, y, ldy); break;
        default: multiply_block(w, a, bits, rbits, 4, t, b, y, ldy); break;
        }
}

/* ---- verify with q rebuilt ---- */

/* One word per row, four times over: of rows 0 1 (half 0) or 2 3 (half 1). */
INLINE uint16x8_t spread(uint32x4_t v, int half)
{
    static const uint8_t at[2][16] = { { 0, 1, 0, 1, 0, 1, 0, 1, 4, 5, 4, 5, 4, 5, 4, 5 },
                                       { 8, 9, 8, 9, 8, 9, 8, 9, 12, 13, 12, 13, 12, 13, 12, 13 } };
    return vreinterpretq_u16_u8(vqtbl1q_u8(vreinterpretq_u8_u32(v), vld1q_u8(at[half])));
}

INLINE int16x8_t join(int8x8_t c, uint16x8_t step, int8x8_t r, uint16x8_t f, uint16x8_t k)
{
    k = vmlaq_u16(k, vreinterpretq_u16_s16(vmovl_s8(c)), step);
    return vreinterpretq_s16_u16(vmlaq_u16(k, vreinterpretq_u16_s16(vmovl_s8(r)), f));
}

/* q of one group of a block: [unit][row group][j], 16 bytes of qh and 16 of ql. */
INLINE void rebuild(int bits, int rbits, const place *p, int group, const rows r[4], int units, int8_t *out)
{
    for (int u = 0; u < units; u++)
        for (int g = 0; g < 4; g++) {
            const uint8_t *record = bits ? p->scales + 64 * (u / 4) : NULL, *factors = p->factors + (group == 32 ? 16 : 32) * (u / 4);
            const scales q = load_scales(bits, record, factors, group, rbits, g, u % 4, &r[g]);
            const uint16x8_t step[2] = { spread(q.step, 0), spread(q.step, 1) }, f[2] = { spread(q.f, 0), spread(q.f, 1) };
            const uint16x8_t k[2] = { spread(q.k, 0), spread(q.k, 1) };
            UNROLL
            for (int j = 0; j < 4; j++, out += 32) {
                const int8x16_t c = bits ? field(bits, p->codes + 32 * bits * u, g, j) : vdupq_n_s8(0), fine = field(rbits, p->residual + 32 * rbits * u, g, j);
                const int16x8_t q0 = join(vget_low_s8(c), step[0], vget_low_s8(fine), f[0], k[0]);
                const int16x8_t q1 = join(vget_high_s8(c), step[1], vget_high_s8(fine), f[1], k[1]);
                const int8x16_t bytes = vcombine_s8(vmovn_s16(q0), vmovn_s16(q1));
                vst1q_s8(out, vcombine_s8(vrshrn_n_s16(q0, 7), vrshrn_n_s16(q1, 7)));
                vst1q_s8(out + 16, vshrq_n_s8(vshlq_n_s8(bytes, 1), 1));
            }
        }
}

#define COLUMNS(j)                                                                          \
    do {                                                                                    \
        const int8x16_t qh = vld1q_s8(at + 32 * (j)), ql = vld1q_s8(at + 32 * (j) + 16);    \
        for (int t = 0; t < tokens; t++) {                                                  \
            hh[t] = vdotq_laneq_s32(hh[t], qh, xh[t], j);                                   \
            hl[t] = vdotq_laneq_s32(hl[t], qh, xl[t], j);                                   \
            hl[t] = vdotq_laneq_s32(hl[t], ql, xh[t], j);                                   \
            ll[t] = vdotq_laneq_s32(ll[t], ql, xl[t], j);                                   \
        }                                                                                   \
    } while (0)

/* One group of a block times `tokens` tokens. */
INLINE void multiply_tile(int tokens, const int8_t *q, int units, const uint8_t *x, ptrdiff_t ldr, const float *scale, sums *acc)
{
    for (int g = 0; g < 4; g++) {
        int32x4_t hh[4], hl[4], ll[4];
        for (int t = 0; t < tokens; t++)
            hh[t] = hl[t] = ll[t] = vdupq_n_s32(0);
        for (int u = 0; u < units; u++) {
            const int8_t *at = q + 512 * u + 128 * g;
            int8x16_t xh[4], xl[4];
            for (int t = 0; t < tokens; t++) {
                xh[t] = vld1q_s8((const int8_t *)(x + t * ldr) + 32 * u);
                xl[t] = vld1q_s8((const int8_t *)(x + t * ldr) + 32 * u + 16);
            }
            COLUMNS(0);
            COLUMNS(1);
            COLUMNS(2);
            COLUMNS(3);
        }
        for (int t = 0; t < tokens; t++) {
            uint32x4_t sum = vaddq_u32(vshlq_n_u32(vreinterpretq_u32_s32(hh[t]), 7), vreinterpretq_u32_s32(hl[t]));
            sum = vaddq_u32(vshlq_n_u32(sum, 7), vreinterpretq_u32_s32(ll[t]));
            acc[t].row[g] = add_group(acc[t].row[g], sum, scale[t]);
        }
    }
}

static __attribute__((noinline)) void multiply(int tokens, const int8_t *q, int units, const uint8_t *x, ptrdiff_t ldr,
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

INLINE void by_rebuilding(const tb_matrix *w, const tb_act *a, int bits, int rbits, int32_t b, float *y, ptrdiff_t ldy, void *scratch)
{
    const int group = w->residual_group, columns = a->group;
    sums *acc = scratch;
    int8_t *q = (int8_t *)(acc + CHUNK);
    rows r[4];
    for (int g = 0; g < 4; g++)
        r[g] = load_rows(w, bits, 16 * b + 4 * g);
    for (int32_t t0 = 0; t0 < a->m; t0 += CHUNK) {
        const int m = smaller(CHUNK, a->m - t0);
        place p = block_at(w, bits, rbits, b);
        for (int t = 0; t < m; t++)
            for (int g = 0; g < 4; g++)
                acc[t].row[g] = vdupq_n_f32(0);
        for (int32_t i = 0; i < a->groups; i++) {
            const size_t at = (size_t)i * (size_t)a->m + (size_t)t0;
            const int units = smaller(columns / 16, p.units - columns / 16 * i);
            rebuild(bits, rbits, &p, group, r, units, q);
            multiply(m, q, units, a->data + at * (size_t)a->record, a->record, a->scale + at, acc);
            next_group(bits, rbits, group, columns, &p);
        }
        for (int t = 0; t < m; t++)
            store_block(w, b, &acc[t], y + (t0 + t) * ldy);
    }
}

/* ---- one function per format ---- */

typedef void product(const tb_matrix *w, const tb_act *a, float *y, ptrdiff_t ldy, int32_t b0, int32_t b1, void *scratch);

#define DRAFT(b)                                                                                                              \
    static void draft_##b(const tb_matrix *w, const tb_act *a, float *y, ptrdiff_t ldy, int32_t b0, int32_t b1, void *scratch) \
    {                                                                                                                         \
        (void)scratch;                                                                                                        \
        for (int32_t i = b0; i < b1; i++)                                                                                     \
            by_sums(w, a, b, 0, i, y, ldy);                                                                                   \
    }
#define VERIFY(b, r)                                                                                                              \
    static void verify_##b##r(const tb_matrix *w, const tb_act *a, float *y, ptrdiff_t ldy, int32_t b0, int32_t b1, void *scratch) \
    {                                                                                                                             \
        for (int32_t i = b0; i < b1; i++)                                                                                         \
            if (a->m <= TWO_SUMS)                                                                                                 \
                by_sums(w, a, b, r, i, y, ldy);                                                                                   \
            else                                                                                                                  \
                by_rebuilding(w, a, b, r, i, y, ldy, scratch);                                                                    \
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
VERIFY(0, 4)
VERIFY(0, 6)
VERIFY(0, 8)

static void matmul(const tb_matrix *w, int32_t op, const tb_act *a, float *y, ptrdiff_t ldy, int32_t b0, int32_t b1, void *scratch)
{
    static product *const drafts[] = { draft_2, draft_3, draft_4 };
    static product *const verifies[][3] = {
        { verify_04, verify_06, verify_08 }, { NULL, NULL, NULL }, { NULL, verify_26, verify_28 },
        { NULL, verify_36, verify_38 }, { verify_44, verify_46, NULL },
    };
    product *f = op == TB_DRAFT ? drafts[w->draft_bits - 2]
                                : verifies[op == TB_RESIDUAL ? 0 : w->draft_bits][w->residual_bits / 2 - 2];
    f(w, a, y, ldy, b0, b1, scratch);
}

const tb_kernels tb_kernels_neon = { "neon", quantize, matmul };
#else
typedef int tb_no_neon;              /* a translation unit must not be empty */
#endif
