/* probe_avx512.c - the multiply probe of this level, built with its flags. */
#define MULTIPLY tb_multiply_avx512
#define READ tb_read_avx512
#include "probe_x86.inc"
