/* probe.h - what the machine can do, for `twobit bench`: the inner loops behind the tb_probe_* functions of tb.h.
 *
 * One multiply loop per level: the multiplications and additions that its kernel cannot do without, on registers. The levels of
 * x86 also read in their own vectors. */
#ifndef TB_PROBE_H
#define TB_PROBE_H
#include "tb.h"

/* n rounds; returns how many multiply-accumulates they were. */
int64_t tb_multiply_generic(int32_t op, int32_t n);
#if defined(__x86_64__) || defined(_M_X64)
int64_t tb_multiply_avx2(int32_t op, int32_t n);
int64_t tb_multiply_avx512(int32_t op, int32_t n);
int64_t tb_multiply_avxvnni(int32_t op, int32_t n);
int64_t tb_multiply_avx512vnni(int32_t op, int32_t n);
/* n bytes as 1, 2 or 4 streams; returns something made of all of them. */
uint64_t tb_read_avx2(const uint8_t *p, size_t n, int32_t streams);
uint64_t tb_read_avx512(const uint8_t *p, size_t n, int32_t streams);
uint64_t tb_read_avxvnni(const uint8_t *p, size_t n, int32_t streams);
uint64_t tb_read_avx512vnni(const uint8_t *p, size_t n, int32_t streams);
#endif
#if defined(__aarch64__)
int64_t tb_multiply_neon(int32_t op, int32_t n);
#endif

extern volatile uint64_t tb_probe_sink;     /* results go here, so that no compiler leaves them out */
#endif
