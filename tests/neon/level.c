#include "tb.h"
#include <stdio.h>
int main(void)
{
    const char *level = tb_cpu_level();
    printf("%s|%s\n", level ? level : "-", tb_cpu_error());
    return 0;
}
