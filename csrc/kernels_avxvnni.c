/* kernels_avxvnni.c - the AVX-VNNI level of the matrix kernels; built with -mavxvnni on top of AVX2's flags.
 *
 * Run on Zen 5; checked everywhere with the two VNNI instructions emulated (tests/test_vnni.py). */
#define TABLE tb_kernels_avxvnni
#define NAME "avxvnni"
#include "kernels_x86.inc"
