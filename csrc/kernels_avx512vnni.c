/* kernels_avx512vnni.c - the AVX512-VNNI level of the matrix kernels; built with -mavx512vnni on top of the flags of AVX-512.
 *
 * Run on Zen 5; checked everywhere with the two VNNI instructions emulated (tests/test_vnni.py). */
#define TABLE tb_kernels_avx512vnni
#define NAME "avx512vnni"
#include "kernels_x86.inc"
