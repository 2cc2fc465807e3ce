/* pages.c - how fast memory reads from small pages, from huge pages and from a mapped file: cc -O2 bench/pages.c -o build/pages && build/pages FILE */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>

enum { ROUNDS = 31, HUGE_PAGE = 2 << 20 };

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static uint64_t read_four_streams(const uint8_t *p, size_t n)
{
    const size_t part = n / 4 / 64 * 64;
    uint64_t sum = 0;
    for (size_t i = 0; i < part; i += 64)
        for (size_t s = 0; s < 4; s++) {
            const uint8_t *line = p + s * part + i;
            uint64_t at[8];
            __builtin_prefetch(line + 1024);
            memcpy(at, line, sizeof at);
            sum += (at[0] ^ at[1]) + (at[2] ^ at[3]) + (at[4] ^ at[5]) + (at[6] ^ at[7]);
        }
    return sum;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
    static const char *const names[] = { "anonymous, small pages", "anonymous, huge pages", "mapped file" };
    static double seconds[3][ROUNDS];
    struct stat st;
    const int fd = argc == 2 ? open(argv[1], O_RDONLY) : -1;
    if (fd < 0 || fstat(fd, &st)) {
        fprintf(stderr, "usage: pages FILE, larger than the caches\n");
        return 2;
    }
    const size_t n = (size_t)st.st_size;
    const int private = MAP_PRIVATE | MAP_ANONYMOUS;
    uint8_t *m[] = { mmap(NULL, n, PROT_READ | PROT_WRITE, private, -1, 0),
                     mmap(NULL, n + HUGE_PAGE, PROT_READ | PROT_WRITE, private, -1, 0), mmap(NULL, n, PROT_READ, MAP_SHARED, fd, 0) };
    if (m[0] == MAP_FAILED || m[1] == MAP_FAILED || m[2] == MAP_FAILED)
        return 1;
    m[1] = (uint8_t *)(((uintptr_t)m[1] + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
    if (madvise(m[0], n, MADV_NOHUGEPAGE) || madvise(m[1], n, MADV_HUGEPAGE))
        fprintf(stderr, "huge pages cannot be chosen here\n");
    memset(m[0], 1, n);
    memset(m[1], 1, n);
    volatile uint64_t sink = read_four_streams(m[2], n);
    for (int round = 0; round < ROUNDS; round++)
        for (int k = 0; k < 3; k++) {
            const double start = now();
            sink = read_four_streams(m[k], n);
            seconds[k][round] = now() - start;
        }
    (void)sink;
    for (int k = 0; k < 3; k++) {
        qsort(seconds[k], ROUNDS, sizeof **seconds, by_value);
        printf("%-24s %.2f GB/s\n", names[k], (double)n / seconds[k][ROUNDS / 2] * 1e-9);
    }
    return 0;
}
