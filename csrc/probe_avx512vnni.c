/* probe_avx512vnni.c - the multiply probe of this level, built with its flags. */
#define MULTIPLY tb_multiply_avx512vnni
#define READ tb_read_avx512vnni
#include "probe_x86.inc"
