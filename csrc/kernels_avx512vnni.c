/* kernels_avx512vnni.c - the AVX512-VNNI level of the matrix kernels; built with -mavx512vnni on top of the flags of AVX-512.
 *
 * Checked with the two VNNI instructions emulated (tests/test_vnni.py); on a processor that has them only where one runs
 * the tests. */
#define TABLE tb_kernels_avx512vnni
#define NAME "avx512vnni"
#include "kernels_x86.inc"
