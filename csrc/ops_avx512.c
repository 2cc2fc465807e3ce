/* ops_avx512.c - this level of the operations of ops.h, built with its flags and used only where the processor has it (tb_ops_get). */
#if defined(__x86_64__) || defined(_M_X64)
#define OPS_TABLE tb_ops_avx512
#include "ops_x86.inc"
#else
typedef int tb_no_avx512;              /* a translation unit must not be empty */
#endif
