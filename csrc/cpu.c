/* cpu.c - which kernels to use, and how many threads.
 *
 * A level needs the processor's word (CPUID) and the operating system's (XCR0: it saves the wide registers); on AArch64 the
 * operating system tells both (hwcaps).
 * TWOBIT_CPU caps the level; one that is unknown or cannot run here is an error, not a silent fallback.
 * Nothing in this file is compiled for a wider instruction set than the baseline. */
#define _GNU_SOURCE
#include "kernels.h"
#include "os.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef __linux__
#include <sched.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#if defined(__x86_64__) || defined(_M_X64)
#include <cpuid.h>
#endif

static struct { const tb_kernels *kernels; char error[160]; } chosen;

#if defined(__x86_64__) || defined(_M_X64)
static int has_avx2(void)
{
    unsigned a, b, c, d, xcr0, high;
    const unsigned want = bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & want) != want)
        return 0;
    __asm__ volatile("xgetbv" : "=a"(xcr0), "=d"(high) : "c"(0));
    if ((xcr0 & 6) != 6)
        return 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2);
}

/* F, BW and VL; registers of 512 bits and masks saved by the operating system. `vnni`: the processor's word for that. */
static int has_avx512(int vnni)
{
    const unsigned want = 1u << 16 | 1u << 30 | 1u << 31;
    unsigned a, b, c, d, xcr0, high;
    if (!has_avx2() || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || (b & want) != want || (vnni && !(c & 1 << 11)))
        return 0;
    __asm__ volatile("xgetbv" : "=a"(xcr0), "=d"(high) : "c"(0));
    return (xcr0 & 0xe6) == 0xe6;
}

static int has_avx512bw(void) { return has_avx512(0); }

#ifdef TB_HAS_VNNI
static int has_avxvnni(void)
{
    unsigned a, b, c, d;
    return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1 << 4);
}

static int has_avx512vnni(void) { return has_avx512(1); }
#endif
#endif

#if defined(__aarch64__)
/* sdot: optional in ARMv8.2, mandatory from ARMv8.4 on. */
static int has_dot_product(void)
{
#if defined(__linux__)
    enum { ASIMDDP = 1 << 20 };    /* HWCAP_ASIMDDP */
    return (getauxval(AT_HWCAP) & ASIMDDP) != 0;
#elif defined(__APPLE__)
    int has = 0;
    size_t size = sizeof has;
    return !sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &size, NULL, 0) && has;
#else
    return 0;
#endif
}
#endif

static int always(void) { return 1; }

/* Best first. A level of another architecture, or unknown to the compiler, is known by name, only not available. */
static const struct { const char *name; const tb_kernels *kernels; int (*available)(void); } levels[] = {
#if (defined(__x86_64__) || defined(_M_X64)) && defined(TB_HAS_VNNI)
    { "avx512vnni", &tb_kernels_avx512vnni, has_avx512vnni },
    { "avxvnni", &tb_kernels_avxvnni, has_avxvnni },
#else
    { "avx512vnni", NULL, NULL },
    { "avxvnni", NULL, NULL },
#endif
#if defined(__x86_64__) || defined(_M_X64)
    { "avx512", &tb_kernels_avx512, has_avx512bw },
    { "avx2", &tb_kernels_avx2, has_avx2 },
#else
    { "avx512", NULL, NULL },
    { "avx2", NULL, NULL },
#endif
#if defined(__aarch64__)
    { "neon", &tb_kernels_neon, has_dot_product },
#else
    { "neon", NULL, NULL },
#endif
    { "generic", &tb_kernels_generic, always },
};

static void choose(void)
{
    const char *cap = getenv("TWOBIT_CPU");
    const int any = !cap || !*cap;
    int known = any;
    for (size_t i = 0; i < sizeof levels / sizeof *levels; i++) {
        const int asked = !any && !strcmp(cap, levels[i].name);
        known |= asked;
        if ((any || asked) && levels[i].kernels && levels[i].available()) {
            chosen.kernels = levels[i].kernels;
            return;
        }
    }
    if (known)
        snprintf(chosen.error, sizeof chosen.error, "TWOBIT_CPU=%s: not available on this processor and operating system", cap);
    else
        snprintf(chosen.error, sizeof chosen.error, "TWOBIT_CPU=%.60s: unknown level, use generic, avx2, avxvnni, avx512, avx512vnni or neon", cap);
}

const tb_kernels *tb_kernels_at(int i)
{
    for (size_t l = 0; l < sizeof levels / sizeof *levels; l++)
        if (levels[l].kernels && levels[l].available() && i-- == 0)
            return levels[l].kernels;
    return NULL;
}

const tb_kernels *tb_kernels_get(void)
{
    static tb_once once = TB_ONCE;
    tb_run_once(&once, choose);
    return chosen.kernels;
}

const char *tb_cpu_level(void)
{
    const tb_kernels *k = tb_kernels_get();
    return k ? k->name : NULL;
}

const char *tb_cpu_error(void)
{
    return tb_kernels_get() ? "" : chosen.error;
}

#ifdef __linux__
enum { MAX_CPUS = 8192 };

/* The first line of a file, without its end; 0 if there is none. */
static int read_line(const char *path, char *line, int n)
{
    FILE *f = fopen(path, "r");
    const int ok = f && fgets(line, n, f);
    if (f)
        fclose(f);
    if (ok)
        line[strcspn(line, "\n")] = 0;
    return ok;
}

/* Cores in the affinity mask: of the hardware threads of one core, the lowest in the mask counts. */
static int cores_in_mask(void)
{
    cpu_set_t *mask = CPU_ALLOC(MAX_CPUS);
    const size_t size = CPU_ALLOC_SIZE(MAX_CPUS);
    int cores = 0;
    if (!mask || sched_getaffinity(0, size, mask)) {
        CPU_FREE(mask);
        return tb_processors();
    }
    for (int cpu = 0; cpu < MAX_CPUS; cpu++) {
        char path[96], line[256];
        int counted = 0;
        if (!CPU_ISSET_S((size_t)cpu, size, mask))
            continue;
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
        if (read_line(path, line, sizeof line))
            for (char *at = line; *at && !counted;) {    /* "0,64" or "0-1" */
                char *end;
                long first = strtol(at, &end, 10), last = first;
                if (end == at)
                    break;
                if (*end == '-')
                    last = strtol(end + 1, &end, 10);
                for (long s = first; s <= last && s < cpu; s++)
                    counted |= s >= 0 && CPU_ISSET_S((size_t)s, size, mask);
                at = *end == ',' ? end + 1 : end + strlen(end);
            }
        cores += !counted;
    }
    CPU_FREE(mask);
    return cores;
}

/* What `quota` (microseconds per `period`) leaves, in whole processors; the lower of that and `cores`. */
static int limit(int cores, double quota, double period)
{
    if (quota <= 0 || period <= 0 || quota >= cores * period)
        return cores;
    const int whole = (int)(quota / period);
    return whole < 1 ? 1 : whole;
}

/* Applies the quotas of the control group `group` under `root` and of all its parents. */
static int limit_by_group(int cores, const char *root, const char *group, int v2)
{
    char path[1024], name[512], line[64];
    snprintf(name, sizeof name, "%s", strcmp(group, "/") ? group : "");
    for (;;) {
        double quota = 0, period = 0;
        if (v2) {
            if (snprintf(path, sizeof path, "%s%s/cpu.max", root, name) < (int)sizeof path && read_line(path, line, sizeof line))
                cores = sscanf(line, "%lf %lf", &quota, &period) == 2 ? limit(cores, quota, period) : cores;
        } else {
            if (snprintf(path, sizeof path, "%s%s/cpu.cfs_quota_us", root, name) < (int)sizeof path && read_line(path, line, sizeof line))
                quota = atof(line);
            if (snprintf(path, sizeof path, "%s%s/cpu.cfs_period_us", root, name) < (int)sizeof path && read_line(path, line, sizeof line))
                period = atof(line);
            cores = limit(cores, quota, period);
        }
        char *slash = strrchr(name, '/');
        if (!slash)
            return cores;
        *slash = 0;
    }
}

static int limit_by_cgroups(int cores)
{
    char line[1024];
    FILE *f = fopen("/proc/self/cgroup", "r");
    while (f && fgets(line, sizeof line, f)) {    /* id:controllers:path */
        char *controllers = strchr(line, ':'), *group = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!group)
            continue;
        *group++ = 0;
        group[strcspn(group, "\n")] = 0;
        controllers++;
        if (!*controllers)
            cores = limit_by_group(cores, "/sys/fs/cgroup", group, 1);
        char *rest;
        for (char *c = strtok_r(controllers, ",", &rest); c; c = strtok_r(NULL, ",", &rest))
            if (!strcmp(c, "cpu"))
                cores = limit_by_group(cores, "/sys/fs/cgroup/cpu", group, 0);
    }
    if (f)
        fclose(f);
    return cores;
}

int tb_cpu_threads(void)
{
    const int cores = cores_in_mask();
    return limit_by_cgroups(cores < 1 ? 1 : cores);
}
#else
int tb_cpu_threads(void) { return tb_processors(); }
#endif
