/* kernels_generic.c - the matrix kernels in plain C: the specification that every other level agrees with, bit for bit.
 *
 * A weight is an integer q on the row's lattice times the row's U. A row is decoded to integers once, then each
 * activation group of each token is an integer dot product and one fmaf. FORMAT.md draws the planes; in short:
 * a block is 16 rows, a unit 16 rows x 16 columns, a quad four units side by side. In a 64-byte line, row i has the
 * four bytes at 32 (i / 8) + 4 (i % 8), and column k = 4 j + b of a unit goes with byte b. */
#include "kernels.h"

#include <math.h>
#include <string.h>

static const struct { float limit; int32_t group; } act_kinds[] = { { 127, 128 }, { 8191, 128 }, { 4095, 64 } };

static int32_t ceil_div(int32_t a, int32_t b)
{
    return a / b + (a % b != 0);
}

/* The 16 unsigned `bits`-wide values of row i (0..15) in the unit at p, which takes 32 * bits bytes.
 *
 *   2   line:       k = 12+b | 8+b | 4+b | b              (two bits each, high to low)
 *   3   the same for the low two bits, then u16 [16]:     bit k is bit 2 of value k
 *   4   line l:     k = 8l+4+b | 8l+b                     (l = 0, 1)
 *   6   line l:     bits 2l, 2l+1 of k = 12+b | k = 4l+b  (l = 0, 1, 2; two bits, six bits)
 *   8   line l:     k = 4l+b                              (l = 0..3) */
static void decode(int32_t bits, const uint8_t *p, int i, int32_t out[16])
{
    const uint8_t *at = p + 4 * i;
    for (int b = 0; b < 4; b++)
        for (int j = 0; j < 4; j++) {
            int32_t v;
            switch (bits) {
            case 2:
                v = at[b] >> 2 * j & 3;
                break;
            case 3:
                v = (at[b] >> 2 * j & 3) | (p[64 + 2 * i + j / 2] >> (4 * (j % 2) + b) & 1) << 2;
                break;
            case 4:
                v = at[64 * (j / 2) + b] >> 4 * (j % 2) & 15;
                break;
            case 6:
                v = j < 3 ? at[64 * j + b] & 63 : at[b] >> 6 | at[64 + b] >> 6 << 2 | at[128 + b] >> 6 << 4;
                break;
            default:
                v = at[64 * j + b];
            }
            out[4 * j + b] = v;
        }
}

/* q of row i of a block, 16 columns of one unit: A s (2c - (2^b - 1)) + B m, and f r on top, or either alone. */
static void decode_unit(const tb_matrix *w, int32_t op, int32_t block, int32_t unit, int i, int16_t q[16])
{
    const int32_t units = ceil_div(w->cols, 16), u = unit % 4;
    const size_t at = (size_t)block * (size_t)units + (size_t)unit;
    const size_t quad = (size_t)block * (size_t)ceil_div(units, 4) + (size_t)(unit / 4);
    const int32_t row = 16 * block + i;
    int32_t c[16], r[16] = { 0 }, f = 0, step = 0, centre = 0;

    if (op != TB_RESIDUAL) {
        const int32_t sm = w->draft_scales[64 * quad + (size_t)(4 * i + u)];
        step = w->row_a[row] * (sm & 15);
        centre = w->row_b[row] * ((sm >> 4) - 8);
        decode(w->draft_bits, w->draft_codes + 32 * (size_t)w->draft_bits * at, i, c);
    }
    if (op != TB_DRAFT) {
        const uint8_t *scales = w->residual_scales;
        decode(w->residual_bits, w->residual_codes + 32 * (size_t)w->residual_bits * at, i, r);
        f = w->residual_group == 32 ? scales[16 * quad + (size_t)i] >> 4 * (u / 2) & 15
                                    : scales[32 * quad + (size_t)(2 * i + u / 2)] >> 4 * (u % 2) & 15;
    }
    for (int k = 0; k < 16; k++) {
        int32_t v = op == TB_RESIDUAL ? 0 : step * (2 * c[k] - ((1 << w->draft_bits) - 1)) + centre;
        if (op != TB_DRAFT)
            v += f * (r[k] - (1 << (w->residual_bits - 1)));
        q[k] = (int16_t)v;
    }
}

int tb_matrix_row(const tb_matrix *w, int32_t full, int32_t row, float *out)
{
    if (row < 0 || row >= w->rows || (full && !w->residual_bits))
        return TB_EINVAL;
    for (int32_t k = 0; k < w->cols; k += 16) {
        int16_t q[16];
        decode_unit(w, full ? TB_VERIFY : TB_DRAFT, row / 16, k / 16, row % 16, q);
        for (int32_t j = 0; j < 16 && k + j < w->cols; j++)
            out[k + j] = (float)q[j] * w->row_scale[row];
    }
    return TB_OK;
}

int32_t tb_act_kind(const tb_matrix *w, int32_t op)
{
    return op == TB_DRAFT ? TB_ACT8 : w->wide ? TB_ACT16_WIDE : TB_ACT16;
}

void tb_act_layout(tb_act *a, int32_t kind, int32_t m, int32_t cols, void *memory)
{
    a->kind = kind;
    a->m = m;
    a->cols = cols;
    a->group = act_kinds[kind].group;
    a->groups = ceil_div(cols, a->group);
    a->record = 2 * a->group + 64;
    a->data = memory;
    a->scale = (float *)(void *)(a->data + (size_t)a->groups * (size_t)m * (size_t)a->record);
}

size_t tb_act_bytes(int32_t kind, int32_t m, int32_t cols)
{
    const int32_t group = act_kinds[kind].group;
    const size_t records = (size_t)ceil_div(cols, group) * (size_t)m;
    return records * (size_t)(2 * group + 64) + (records * sizeof(float) + 63) / 64 * 64;
}

int32_t tb_step(int32_t blocks, int32_t threads)
{
    const int32_t chunks = 4 * threads * ((blocks + 256 * threads - 1) / (256 * threads));
    return blocks ? (blocks + chunks - 1) / chunks : 1;
}

size_t tb_kernel_scratch_bytes(int32_t max_cols)
{
    const size_t row = (size_t)ceil_div(max_cols, 16) * 16 * sizeof(int16_t);
    return ((row > TB_SCRATCH_MIN ? row : TB_SCRATCH_MIN) + 63) / 64 * 64;
}

static int quantize(tb_act *a, const float *x, ptrdiff_t ldx, int32_t t0, int32_t t1)
{
    const float limit = act_kinds[a->kind].limit;
    for (int32_t t = t0; t < t1; t++)
        for (int32_t g = 0; g < a->groups; g++) {
            const size_t at = (size_t)g * (size_t)a->m + (size_t)t;
            const float *v = x + t * ldx + (ptrdiff_t)g * a->group;
            const int32_t left = a->cols - g * a->group, n = left < a->group ? left : a->group;
            int16_t *out = (int16_t *)(void *)(a->data + at * (size_t)a->record);
            float amax = 0;

            for (int32_t k = 0; k < n; k++) {
                if (!isfinite(v[k]))
                    return -1;
                amax = fabsf(v[k]) > amax ? fabsf(v[k]) : amax;
            }
            memset(out, 0, (size_t)a->group * sizeof *out);
            a->scale[at] = 0;
            if (amax < 1e-30f)
                continue;
            a->scale[at] = amax / limit;
            for (int32_t k = 0; k < n; k++) {
                const float q = rintf(v[k] * (limit / amax));
                out[k] = (int16_t)(q > limit ? limit : q < -limit ? -limit : q);
            }
        }
    return 0;
}

static void matmul(const tb_matrix *w, int32_t op, const tb_act *a, float *y, ptrdiff_t ldy, int32_t b0, int32_t b1, void *scratch)
{
    const int32_t units = ceil_div(w->cols, 16);
    int16_t *q = scratch;    /* one row, [16 * units] */
    for (int32_t row = 16 * b0; row < 16 * b1 && row < w->rows; row++) {
        for (int32_t unit = 0; unit < units; unit++)
            decode_unit(w, op, row / 16, unit, row % 16, q + 16 * unit);
        for (int32_t t = 0; t < a->m; t++) {
            float acc = 0;
            for (int32_t g = 0; g < a->groups; g++) {
                const size_t at = (size_t)g * (size_t)a->m + (size_t)t;
                const int16_t *x = (const int16_t *)(const void *)(a->data + at * (size_t)a->record);
                const int16_t *qg = q + g * a->group;
                const int32_t left = w->cols - g * a->group, n = left < a->group ? left : a->group;
                uint32_t dot = 0;    /* wraps, as the sums of every level do */
                for (int32_t k = 0; k < n; k++)
                    dot += (uint32_t)(qg[k] * x[k]);
                acc = fmaf((float)(int32_t)dot, a->scale[at], acc);
            }
            acc *= w->row_scale[row];
            y[t * ldy + row] = w->bias ? acc + w->bias[row] : acc;
        }
    }
}

const tb_kernels tb_kernels_generic = { "generic", quantize, matmul };
