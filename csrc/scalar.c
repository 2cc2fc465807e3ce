/* scalar.c - the scalar functions of ops.h, sine and cosine, half floats: the same text as the vector code, one lane wide. */
#include "ops.h"
#include "sampler.h"

#include <math.h>
#include <string.h>

typedef float V;
typedef int32_t VI;
typedef int VM;

static inline int32_t v_bits(float x) { int32_t b; memcpy(&b, &x, 4); return b; }
static inline float v_from_bits(int32_t b) { float x; memcpy(&x, &b, 4); return x; }
static inline float v_set1(float x) { return x; }
static inline float v_add(float a, float b) { return a + b; }
static inline float v_sub(float a, float b) { return a - b; }
static inline float v_mul(float a, float b) { return a * b; }
static inline float v_div(float a, float b) { return a / b; }
static inline float v_fma(float a, float b, float c) { return fmaf(a, b, c); }
static inline float v_max(float a, float b) { return a > b ? a : b; }
static inline float v_min(float a, float b) { return a < b ? a : b; }
static inline int v_lt(float a, float b) { return a < b; }
static inline float v_blend(int m, float a, float b) { return m ? a : b; }
static inline float v_from_int(int32_t a) { return (float)a; }
static inline int32_t vi_set1(int32_t a) { return a; }
static inline int32_t vi_add(int32_t a, int32_t b) { return (int32_t)((uint32_t)a + (uint32_t)b); }
static inline int32_t vi_sub(int32_t a, int32_t b) { return (int32_t)((uint32_t)a - (uint32_t)b); }
static inline int32_t vi_and(int32_t a, int32_t b) { return a & b; }
static inline int32_t vi_andnot(int32_t a, int32_t b) { return ~a & b; }
static inline int32_t vi_or(int32_t a, int32_t b) { return a | b; }
static inline int32_t vi_xor(int32_t a, int32_t b) { return a ^ b; }
static inline int32_t vi_shl(int32_t a, int n) { return (int32_t)((uint32_t)a << n); }
static inline int32_t vi_srl(int32_t a, int n) { return (int32_t)((uint32_t)a >> n); }
static inline int32_t vi_sra(int32_t a, int n) { return a >> n; }
static inline void vi_mul_wide(int32_t a, uint32_t b, int32_t *hi, int32_t *lo)
{
    uint64_t p = (uint64_t)(uint32_t)a * b;
    *hi = (int32_t)(uint32_t)(p >> 32);
    *lo = (int32_t)(uint32_t)p;
}

#include "math_body.inc"

float tb_expf(float x) { return v_exp(x); }
float tb_logf(float x) { return v_log(x); }
float tb_tanhf(float x) { return v_tanh(x); }
float tb_erff(float x) { return v_erf(x); }

/* Counter (c, position, 0, 0) and key (seed low, seed high): token t takes word (t / 8) mod 4 of counter c = 8 (t / 32) + t mod 8,
 * so that 8 counters in 8 lanes give the noise of 32 tokens in order. */
float tb_gumbel(uint64_t seed, int32_t position, int32_t token)
{
    int32_t c[4] = {(token >> 5 << 3) | (token & 7), position, 0, 0};
    v_philox(c, (uint32_t)seed, (uint32_t)(seed >> 32));
    return v_gumbel(c[token >> 3 & 3]);
}

/* |x| <= 1e8: x - n pi/2 in three parts of pi/2, then Taylor polynomials on [-pi/4, pi/4] (1e-11). */
void tb_sincos(double x, float *s, float *c)
{
    const double magic = 6755399441055744.0;    /* 1.5 * 2^52 rounds to an integer */
    double n = x * 0.63661977236758134308 + magic - magic;
    double r = x - n * 1.57079632673412561417e+00;
    r -= n * 6.07710050630396597660e-11;
    r -= n * 2.02226624879595063154e-21;
    double z = r * r;
    double sine = r + r * z * (-1.0 / 6 + z * (1.0 / 120 + z * (-1.0 / 5040 + z * (1.0 / 362880 - z / 39916800))));
    double cosine = 1 + z * (-0.5 + z * (1.0 / 24 + z * (-1.0 / 720 + z * (1.0 / 40320 + z * (-1.0 / 3628800 + z / 479001600)))));
    int64_t quadrant = (int64_t)n & 3;
    double ss = quadrant & 1 ? cosine : sine, cc = quadrant & 1 ? sine : cosine;
    *s = (float)(quadrant & 2 ? -ss : ss);
    *c = (float)(quadrant == 1 || quadrant == 2 ? -cc : cc);
}

float tb_half_to_float(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = h >> 10 & 31, m = h & 0x3ff, bits;
    if (e == 31) bits = 0x7f800000 | m << 13 | (m ? 0x400000 : 0);
    else if (e) bits = (e + 112) << 23 | m << 13;
    else bits = (uint32_t)v_bits((float)m * 0x1p-24f);
    return v_from_bits((int32_t)(sign | bits));
}

/* Round to nearest, ties to even; too large gives infinity; NaN stays NaN (quiet, upper payload kept). */
uint16_t tb_float_to_half(float x)
{
    uint32_t bits = (uint32_t)v_bits(x), sign = bits >> 16 & 0x8000, a = bits & 0x7fffffff;
    if (a > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (a >> 13 & 0x3ff));
    if (a >= 0x47800000) return (uint16_t)(sign | 0x7c00);
    if (a < 0x38800000) {                            /* below 2^-14: adding 1/2 leaves multiples of 2^-24 in the low bits */
        float sum = v_from_bits((int32_t)a) + 0.5f;
        return (uint16_t)(sign | ((uint32_t)v_bits(sum) - 0x3f000000));
    }
    uint32_t odd = a >> 13 & 1;
    return (uint16_t)(sign | ((a + 0xfff + odd - 0x38000000) >> 13));
}
