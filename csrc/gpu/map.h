/* map.h - the few words in which the kernels are written, for OpenCL C 1.2, CUDA C and plain C.
 *
 * A kernel is a sequence of steps  EACH(i) ... NEXT  that all work items i of a group take together; what lives longer than a step is
 * LOCAL. In plain C a step is a loop, so the same text runs without any device. Multiply-adds are fused where fmaf says so and
 * nowhere else: the command lines of the compilers forbid it, and so does the pragma below. */
#ifndef TBG_MAP_H
#define TBG_MAP_H

#if defined(__OPENCL_VERSION__) || defined(__OPENCL_C_VERSION__)

#pragma OPENCL FP_CONTRACT OFF
#define GLOBAL __global
#define LOCAL __local
#define LOCAL_POINTER __local
#define KERNEL(name, size) __kernel __attribute__((reqd_work_group_size(size, 1, 1))) void name(ARGS)
#define GROUP(d) ((int)get_group_id(d))
#define EACH(i) { const int i = (int)get_local_id(0);
#define NEXT } barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
#ifdef TBG_CPU      /* a processor's compiler gains nothing from it, and takes minutes */
#define UNROLL _Pragma("unroll 1")
#else
#define UNROLL _Pragma("unroll")
#endif
#define DEVICE static inline
typedef uchar u8;
typedef ushort u16;
typedef uint u32;
typedef ulong u64;
typedef uint4 u32x4;
#define int32_t int
#define uint32_t uint
#define INT32_MIN (-2147483647 - 1)
#define fmaf(a, b, c) fma(a, b, c)
#define fabsf(x) fabs(x)
#define sqrtf(x) sqrt(x)
#define rintf(x) rint(x)
#define BITS_OF(x) as_int(x)
#define FLOAT_OF(x) as_float(x)
#define MUL_HIGH(a, b) mul_hi((uint)(a), (uint)(b))
static inline u32x4 load4(__global const u8 *p) { return *(__global const uint4 *)p; }
static inline float load_half(__global const u16 *p) { return vload_half(0, (__global const half *)p); }
static inline void load_half8(__global const u16 *p, float *out) { vstore8(vload_half8(0, (__global const half *)p), 0, out); }
static inline void store_half(__global u16 *p, float x) { vstore_half_rte(x, 0, (__global half *)p); }
#if defined(cl_khr_integer_dot_product) && defined(__opencl_c_integer_dot_product_input_4x8bit_packed)
#define DOT4(a, b, c) ((u32)dot_4x8packed_ss_int((u32)(a), (u32)(b)) + (c))
#else
static inline u32 dot4_of(u32 a, u32 b, u32 c)
{
    int4 p = convert_int4(as_char4(a)) * convert_int4(as_char4(b));
    return c + (u32)(p.x + p.y + p.z + p.w);
}
#define DOT4(a, b, c) dot4_of(a, b, c)
#endif

#elif defined(__CUDACC__)

#define GLOBAL
#define LOCAL __shared__
#define LOCAL_POINTER
#define KERNEL(name, size) extern "C" __global__ void __launch_bounds__(size, 1) name(ARGS)
#define GROUP(d) ((int)((d) == 0 ? blockIdx.x : (d) == 1 ? blockIdx.y : blockIdx.z))
#define EACH(i) { const int i = (int)threadIdx.x;
#define NEXT } __syncthreads();
#define UNROLL _Pragma("unroll")
#define DEVICE static __device__ __forceinline__
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef uint4 u32x4;
#define int32_t int
#define uint32_t unsigned int
#define INT32_MIN (-2147483647 - 1)
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#define inline __device__ __forceinline__
#define BITS_OF(x) __float_as_int(x)
#define FLOAT_OF(x) __int_as_float(x)
#define MUL_HIGH(a, b) __umulhi((u32)(a), (u32)(b))
DEVICE u32x4 load4(const u8 *p) { return __ldg((const uint4 *)p); }
DEVICE float half_of(u32 h)
{
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((u16)h));
    return f;
}
DEVICE float load_half(const u16 *p) { return half_of(*p); }
DEVICE void load_half8(const u16 *p, float *out)
{
    const uint4 v = *(const uint4 *)p;
    out[0] = half_of(v.x & 0xffff);
    out[1] = half_of(v.x >> 16);
    out[2] = half_of(v.y & 0xffff);
    out[3] = half_of(v.y >> 16);
    out[4] = half_of(v.z & 0xffff);
    out[5] = half_of(v.z >> 16);
    out[6] = half_of(v.w & 0xffff);
    out[7] = half_of(v.w >> 16);
}
DEVICE void store_half(u16 *p, float x)
{
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
    *p = h;
}
#define DOT4(a, b, c) ((u32)__dp4a((int)(a), (int)(b), (int)(c)))

#else /* plain C: one group after the other, on the thread that asks */

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "../ops.h"

#define GLOBAL
#define LOCAL
#define LOCAL_POINTER
#define KERNEL(name, size) static void name(ARGS)
#define GROUP(d) (tbg_group[d])
#define EACH(i) for (int i = 0; i < LOCAL_SIZE; i++) {
#define NEXT }
#define UNROLL
#define DEVICE static inline
typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef struct u32x4 { u32 x, y, z, w; } u32x4;
static _Thread_local int tbg_group[3];
static inline int bits_of(float x) { int b; memcpy(&b, &x, 4); return b; }
static inline float float_of(int b) { float x; memcpy(&x, &b, 4); return x; }
#define BITS_OF(x) bits_of(x)
#define FLOAT_OF(x) float_of(x)
#define MUL_HIGH(a, b) ((u32)((u64)(u32)(a) * (u32)(b) >> 32))
static inline u32x4 load4(const u8 *p) { u32x4 v; memcpy(&v, p, 16); return v; }
static inline float load_half(const u16 *p) { return tb_half_to_float(*p); }
static inline void load_half8(const u16 *p, float *out) { for (int i = 0; i < 8; i++) out[i] = tb_half_to_float(p[i]); }
static inline void store_half(u16 *p, float x) { *p = tb_float_to_half(x); }
static inline u32 dot4_of(u32 a, u32 b, u32 c)
{
    for (int i = 0; i < 32; i += 8) c += (u32)((int8_t)(a >> i) * (int8_t)(b >> i));
    return c;
}
#define DOT4(a, b, c) dot4_of(a, b, c)

#endif

#define ARGS GLOBAL u8 *b0, GLOBAL u8 *b1, GLOBAL u8 *b2, GLOBAL u8 *b3, GLOBAL u8 *b4, GLOBAL u8 *b5, GLOBAL u8 *b6, GLOBAL u8 *b7, tbg_params p
#define FLOATS(b) ((GLOBAL float *)(b))
#define INTS(b) ((GLOBAL int *)(b))

/* Sum or maximum of LOCAL_SIZE values, in one fixed tree: it ends in v[0]. */
#define TREE(v, op) for (int s_ = LOCAL_SIZE / 2; s_ > 0; s_ >>= 1) { EACH(i_) if (i_ < s_) v[i_] = op(v[i_], v[i_ + s_]); NEXT }
#define PLUS(a, b) ((a) + (b))
#define LARGER(a, b) ((a) > (b) ? (a) : (b))

/* The scalar face of math_body.inc. */
#define V float
#define VI int
DEVICE int v_bits(float x) { return BITS_OF(x); }
DEVICE float v_from_bits(int b) { return FLOAT_OF(b); }
DEVICE float v_set1(float x) { return x; }
DEVICE float v_add(float a, float b) { return a + b; }
DEVICE float v_sub(float a, float b) { return a - b; }
DEVICE float v_mul(float a, float b) { return a * b; }
DEVICE float v_div(float a, float b) { return a / b; }
DEVICE float v_fma(float a, float b, float c) { return fmaf(a, b, c); }
DEVICE float v_max(float a, float b) { return a > b ? a : b; }
DEVICE float v_min(float a, float b) { return a < b ? a : b; }
DEVICE int v_lt(float a, float b) { return a < b; }
DEVICE float v_blend(int m, float a, float b) { return m ? a : b; }
DEVICE float v_from_int(int a) { return (float)a; }
DEVICE int vi_set1(int a) { return a; }
DEVICE int vi_add(int a, int b) { return (int)((u32)a + (u32)b); }
DEVICE int vi_sub(int a, int b) { return (int)((u32)a - (u32)b); }
DEVICE int vi_and(int a, int b) { return a & b; }
DEVICE int vi_andnot(int a, int b) { return ~a & b; }
DEVICE int vi_or(int a, int b) { return a | b; }
DEVICE int vi_xor(int a, int b) { return a ^ b; }
DEVICE int vi_shl(int a, int n) { return (int)((u32)a << n); }
DEVICE int vi_srl(int a, int n) { return (int)((u32)a >> n); }
DEVICE int vi_sra(int a, int n) { return a >> n; }
DEVICE void vi_mul_wide(int a, u32 b, int *hi, int *lo)
{
    *hi = (int)MUL_HIGH(a, b);
    *lo = (int)((u32)a * b);
}
#endif
