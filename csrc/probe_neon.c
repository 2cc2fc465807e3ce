/* probe_neon.c - the multiply probe of the NEON level. */
#include "probe.h"

#if defined(__aarch64__)
#include "kernels.h"

#include <arm_neon.h>

#define KEEP(v) __asm__ volatile("" : "+w"(v))
#define EACH16(f) f(0) f(1) f(2) f(3) f(4) f(5) f(6) f(7) f(8) f(9) f(10) f(11) f(12) f(13) f(14) f(15)
#define ZERO(i) int32x4_t acc##i = vdupq_n_s32(0);
#define STEP(i) acc##i = vdotq_laneq_s32(acc##i, x, y, 0); KEEP(acc##i);
#define ADD(i) sum = veorq_s32(sum, acc##i);

/* sdot; verify needs four of them for 16 products of int16 and weights of 14 bits. */
int64_t tb_multiply_neon(int32_t op, int32_t n)
{
    const int8x16_t x = vdupq_n_s8(3), y = vdupq_n_s8(5);
    int32x4_t sum = vdupq_n_s32(0);
    EACH16(ZERO)
    for (int32_t k = 0; k < n; k++) {
        EACH16(STEP)
    }
    EACH16(ADD)
    tb_probe_sink = (uint64_t)vaddlvq_s32(sum);
    return (int64_t)n * 16 * (op == TB_VERIFY ? 4 : 16);
}
#else
typedef int tb_no_neon;              /* a translation unit must not be empty */
#endif
