/* kernels_avx2.c - the AVX2 level of the matrix kernels; built with -mavx2 -mfma -mf16c. */
#define TABLE tb_kernels_avx2
#define NAME "avx2"
#include "kernels_x86.inc"
