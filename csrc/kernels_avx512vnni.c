/* kernels_avx512vnni.c - the AVX512-VNNI level of the matrix kernels: 256-bit vectors too, but 32 registers and VNNI; built with
 * -mavx512f -mavx512bw -mavx512vl -mavx512vnni on top of AVX2's flags.
 *
 * Checked with the two VNNI instructions emulated (tests/test_vnni.py); on a processor that has them only where one runs
 * the tests. */
#define TABLE tb_kernels_avx512vnni
#define NAME "avx512vnni"
#include "kernels_256.inc"
