/* probe_avxvnni.c - the multiply probe of this level, built with its flags. */
#define MULTIPLY tb_multiply_avxvnni
#define READ tb_read_avxvnni
#include "probe_x86.inc"
