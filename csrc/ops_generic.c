/* ops_generic.c - the operations of ops.h in plain C: arrays of 8 floats and fmaf. This is the specification. */
#include "ops.h"

#include <math.h>
#include <string.h>

#define HEADS 1
#define OPS_TABLE tb_ops_generic

typedef struct { float x[8]; } V;
typedef struct { int32_t x[8]; } VI;
typedef VI VM;                       /* 0 or -1 */

#define LANES(type, expr) do { type r_; for (int i = 0; i < 8; i++) r_.x[i] = (expr); return r_; } while (0)

static inline V v_load(const float *p) { LANES(V, p[i]); }
static inline V v_load_part(const float *p, int32_t n) { LANES(V, i < n ? p[i] : 0.0f); }
static inline void v_store(float *p, V a) { memcpy(p, a.x, sizeof a.x); }
static inline void v_store_part(float *p, V a, int32_t n) { memcpy(p, a.x, (size_t)n * sizeof *p); }
static inline V v_load_half(const uint16_t *p) { LANES(V, tb_half_to_float(p[i])); }
static inline void v_store_half(uint16_t *p, V a) { for (int i = 0; i < 8; i++) p[i] = tb_float_to_half(a.x[i]); }
static inline V v_set1(float a) { LANES(V, a); }
static inline V v_lane(void) { LANES(V, (float)i); }
static inline V v_add(V a, V b) { LANES(V, a.x[i] + b.x[i]); }
static inline V v_sub(V a, V b) { LANES(V, a.x[i] - b.x[i]); }
static inline V v_mul(V a, V b) { LANES(V, a.x[i] * b.x[i]); }
static inline V v_div(V a, V b) { LANES(V, a.x[i] / b.x[i]); }
static inline V v_fma(V a, V b, V c) { LANES(V, fmaf(a.x[i], b.x[i], c.x[i])); }
static inline V v_max(V a, V b) { LANES(V, a.x[i] > b.x[i] ? a.x[i] : b.x[i]); }
static inline V v_min(V a, V b) { LANES(V, a.x[i] < b.x[i] ? a.x[i] : b.x[i]); }
static inline VM v_lt(V a, V b) { LANES(VM, a.x[i] < b.x[i] ? -1 : 0); }
static inline V v_blend(VM m, V a, V b) { LANES(V, m.x[i] ? a.x[i] : b.x[i]); }
static inline VM vm_and(VM a, VM b) { LANES(VM, a.x[i] & b.x[i]); }
static inline int v_any(VM m) { int any = 0; for (int i = 0; i < 8; i++) any |= m.x[i]; return any != 0; }
static inline int v_all(VM m) { int all = -1; for (int i = 0; i < 8; i++) all &= m.x[i]; return all != 0; }
static inline VI v_bits(V a) { VI r; memcpy(r.x, a.x, sizeof r.x); return r; }
static inline V v_from_bits(VI a) { V r; memcpy(r.x, a.x, sizeof r.x); return r; }
static inline V v_from_int(VI a) { LANES(V, (float)a.x[i]); }
static inline VI vi_trunc(V a) { LANES(VI, (int32_t)a.x[i]); }
static inline void vi_store(int32_t *p, VI a) { memcpy(p, a.x, sizeof a.x); }
static inline VI vi_set1(int32_t a) { LANES(VI, a); }
static inline VI vi_lane(void) { LANES(VI, i); }
static inline VI vi_add(VI a, VI b) { LANES(VI, (int32_t)((uint32_t)a.x[i] + (uint32_t)b.x[i])); }
static inline VI vi_sub(VI a, VI b) { LANES(VI, (int32_t)((uint32_t)a.x[i] - (uint32_t)b.x[i])); }
static inline VI vi_and(VI a, VI b) { LANES(VI, a.x[i] & b.x[i]); }
static inline VI vi_andnot(VI a, VI b) { LANES(VI, ~a.x[i] & b.x[i]); }
static inline VI vi_or(VI a, VI b) { LANES(VI, a.x[i] | b.x[i]); }
static inline VI vi_xor(VI a, VI b) { LANES(VI, a.x[i] ^ b.x[i]); }
static inline VI vi_shl(VI a, int n) { LANES(VI, (int32_t)((uint32_t)a.x[i] << n)); }
static inline VI vi_srl(VI a, int n) { LANES(VI, (int32_t)((uint32_t)a.x[i] >> n)); }
static inline VI vi_sra(VI a, int n) { LANES(VI, a.x[i] >> n); }
static inline void vi_mul_wide(VI a, uint32_t b, VI *hi, VI *lo)
{
    for (int i = 0; i < 8; i++) {
        uint64_t p = (uint64_t)(uint32_t)a.x[i] * b;
        hi->x[i] = (int32_t)(uint32_t)(p >> 32);
        lo->x[i] = (int32_t)(uint32_t)p;
    }
}

#include "ops_body.inc"
