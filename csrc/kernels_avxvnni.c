/* kernels_avxvnni.c - the AVX-VNNI level of the matrix kernels; built with -mavxvnni on top of AVX2's flags.
 *
 * Checked with the two VNNI instructions emulated (tests/test_vnni.py); on a processor that has them only where one runs
 * the tests. */
#define TABLE tb_kernels_avxvnni
#define NAME "avxvnni"
#include "kernels_x86.inc"
