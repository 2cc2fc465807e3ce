/* ops.c - which table of operations goes with the kernels in use. */
#include "kernels.h"
#include "ops.h"

#include <string.h>

const tb_ops *tb_ops_get(void)
{
    const tb_kernels *kernels = tb_kernels_get();
    if (!kernels) return NULL;
#if defined(__x86_64__) || defined(_M_X64)
    if (strncmp(kernels->name, "avx512", 6) == 0) return &tb_ops_avx512;
    if (strcmp(kernels->name, "generic") != 0) return &tb_ops_avx2;
#elif defined(__aarch64__)
    if (strcmp(kernels->name, "generic") != 0) return &tb_ops_neon;
#endif
    return &tb_ops_generic;
}
