/* ops_neon.c - the operations of ops.h with NEON, which every AArch64 processor has: a vector of 8 is two registers. */
#include "ops.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#include <string.h>

#define HEADS 4
#define OPS_TABLE tb_ops_neon

typedef struct { float32x4_t a, b; } V;
typedef struct { uint32x4_t a, b; } VM;
typedef struct { int32x4_t a, b; } VI;

#define BOTH(type, f) ((type){ f(x.a, y.a), f(x.b, y.b) })

static inline V v_load(const float *p) { return (V){ vld1q_f32(p), vld1q_f32(p + 4) }; }
static inline void v_store(float *p, V x) { vst1q_f32(p, x.a); vst1q_f32(p + 4, x.b); }
static inline V v_load_part(const float *p, int32_t n)
{
    float x[8] = { 0 };
    memcpy(x, p, (size_t)n * sizeof *x);
    return v_load(x);
}
static inline void v_store_part(float *p, V a, int32_t n)
{
    float x[8];
    v_store(x, a);
    memcpy(p, x, (size_t)n * sizeof *x);
}
static inline V v_load_half(const uint16_t *p)
{
    const uint16x8_t h = vld1q_u16(p);
    return (V){ vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(h))), vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(h))) };
}
static inline void v_store_half(uint16_t *p, V x)
{
    vst1q_u16(p, vcombine_u16(vreinterpret_u16_f16(vcvt_f16_f32(x.a)), vreinterpret_u16_f16(vcvt_f16_f32(x.b))));
}
static inline V v_set1(float a) { return (V){ vdupq_n_f32(a), vdupq_n_f32(a) }; }
static inline V v_lane(void)
{
    static const float lane[8] = { 0, 1, 2, 3, 4, 5, 6, 7 };
    return v_load(lane);
}
static inline V v_add(V x, V y) { return BOTH(V, vaddq_f32); }
static inline V v_sub(V x, V y) { return BOTH(V, vsubq_f32); }
static inline V v_mul(V x, V y) { return BOTH(V, vmulq_f32); }
static inline V v_div(V x, V y) { return BOTH(V, vdivq_f32); }
static inline V v_fma(V x, V y, V z) { return (V){ vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b) }; }
/* x > y ? x : y, also for NaN, where vmaxq would differ */
static inline V v_max(V x, V y) { return (V){ vbslq_f32(vcgtq_f32(x.a, y.a), x.a, y.a), vbslq_f32(vcgtq_f32(x.b, y.b), x.b, y.b) }; }
static inline V v_min(V x, V y) { return (V){ vbslq_f32(vcltq_f32(x.a, y.a), x.a, y.a), vbslq_f32(vcltq_f32(x.b, y.b), x.b, y.b) }; }
static inline VM v_lt(V x, V y) { return BOTH(VM, vcltq_f32); }
static inline V v_blend(VM m, V x, V y) { return (V){ vbslq_f32(m.a, x.a, y.a), vbslq_f32(m.b, x.b, y.b) }; }
static inline VM vm_and(VM x, VM y) { return BOTH(VM, vandq_u32); }
static inline int v_any(VM m) { return vmaxvq_u32(vorrq_u32(m.a, m.b)) != 0; }
static inline int v_all(VM m) { return vminvq_u32(vandq_u32(m.a, m.b)) != 0; }
static inline VI v_bits(V x) { return (VI){ vreinterpretq_s32_f32(x.a), vreinterpretq_s32_f32(x.b) }; }
static inline V v_from_bits(VI x) { return (V){ vreinterpretq_f32_s32(x.a), vreinterpretq_f32_s32(x.b) }; }
static inline V v_from_int(VI x) { return (V){ vcvtq_f32_s32(x.a), vcvtq_f32_s32(x.b) }; }
static inline VI vi_trunc(V x) { return (VI){ vcvtq_s32_f32(x.a), vcvtq_s32_f32(x.b) }; }
static inline void vi_store(int32_t *p, VI x) { vst1q_s32(p, x.a); vst1q_s32(p + 4, x.b); }
static inline VI vi_set1(int32_t a) { return (VI){ vdupq_n_s32(a), vdupq_n_s32(a) }; }
static inline VI vi_lane(void)
{
    static const int32_t lane[8] = { 0, 1, 2, 3, 4, 5, 6, 7 };
    return (VI){ vld1q_s32(lane), vld1q_s32(lane + 4) };
}
static inline VI vi_add(VI x, VI y) { return BOTH(VI, vaddq_s32); }
static inline VI vi_sub(VI x, VI y) { return BOTH(VI, vsubq_s32); }
static inline VI vi_and(VI x, VI y) { return BOTH(VI, vandq_s32); }
static inline VI vi_andnot(VI x, VI y) { return (VI){ vbicq_s32(y.a, x.a), vbicq_s32(y.b, x.b) }; }
static inline VI vi_or(VI x, VI y) { return BOTH(VI, vorrq_s32); }
static inline VI vi_xor(VI x, VI y) { return BOTH(VI, veorq_s32); }
static inline VI vi_shl(VI x, int n) { return (VI){ vshlq_s32(x.a, vdupq_n_s32(n)), vshlq_s32(x.b, vdupq_n_s32(n)) }; }
static inline VI vi_sra(VI x, int n) { return vi_shl(x, -n); }
static inline VI vi_srl(VI x, int n)
{
    const int32x4_t by = vdupq_n_s32(-n);
    return (VI){ vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(x.a), by)),
                 vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(x.b), by)) };
}
static inline void mul_wide(int32x4_t x, uint32_t by, int32x4_t *hi, int32x4_t *lo)
{
    const uint32x4_t u = vreinterpretq_u32_s32(x);
    const uint64x2_t first = vmull_n_u32(vget_low_u32(u), by), second = vmull_n_u32(vget_high_u32(u), by);
    *hi = vreinterpretq_s32_u32(vcombine_u32(vshrn_n_u64(first, 32), vshrn_n_u64(second, 32)));
    *lo = vreinterpretq_s32_u32(vcombine_u32(vmovn_u64(first), vmovn_u64(second)));
}
static inline void vi_mul_wide(VI x, uint32_t by, VI *hi, VI *lo)
{
    mul_wide(x.a, by, &hi->a, &lo->a);
    mul_wide(x.b, by, &hi->b, &lo->b);
}

#include "ops_body.inc"
#else
typedef int tb_no_neon;              /* a translation unit must not be empty */
#endif
