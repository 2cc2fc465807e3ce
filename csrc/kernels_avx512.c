/* kernels_avx512.c - the AVX-512 level of the matrix kernels: vectors of 512 bits, no VNNI; built with -mavx512f -mavx512bw
 * -mavx512vl on top of AVX2's flags. */
#define TABLE tb_kernels_avx512
#define NAME "avx512"
#include "kernels_x86.inc"
