/* libnvrtc.c - stands in for NVIDIA's run-time compiler in tests: its "machine code" says for which device it is. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char code[32];

int nvrtcVersion(int *major, int *minor) { *major = 12; *minor = 4; return 0; }

int nvrtcCreateProgram(void **program, const char *source, const char *name, int n, const char *const *headers, const char *const *includes)
{
    (void)name;
    (void)headers;
    (void)includes;
    if (n || !strstr(source, "KERNEL(embed") || strstr(source, "#include \"")) return 3;
    *program = code;
    return 0;
}

int nvrtcCompileProgram(void *program, int n, const char *const *options)
{
    const char *refuse = getenv("FAKE_NVRTC");
    if (refuse && !strcmp(refuse, "refuses")) return 6;
    if (program != code || n != 2 || strncmp(options[0], "--gpu-architecture=", 19) || strcmp(options[1], "--fmad=false")) return 5;
    snprintf(code, sizeof code, "fake %s", options[0] + 19);
    return 0;
}

int nvrtcGetCUBINSize(void *program, size_t *bytes) { (void)program; *bytes = sizeof code; return 0; }
int nvrtcGetCUBIN(void *program, char *to) { (void)program; memcpy(to, code, sizeof code); return 0; }
int nvrtcDestroyProgram(void **program) { *program = NULL; return 0; }
