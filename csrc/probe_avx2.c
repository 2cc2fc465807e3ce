/* probe_avx2.c - the multiply probe of this level, built with its flags. */
#define MULTIPLY tb_multiply_avx2
#define READ tb_read_avx2
#include "probe_x86.inc"
