/* states.c - one loop, one clock, two speeds: what the other hardware thread of a core takes from this one.
 *
 *   cc -O2 -mavx512bw -o states bench/states.c && ./states
 *
 * 8 tokens times 16 x 16 two-bit weights, as the draft kernel does them, on data that stays in the first cache; after every 10 ms
 * the clock, by a chain of dependent additions. Prints "GMAC/s@GHz" 60 times. On a core of one's own all are alike. */
#define _POSIX_C_SOURCE 199309L
#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double clock_hz(void)
{
    enum { N = 100000 };
    uint64_t x = 1;
    const double start = now();
    for (int i = 0; i < N; i++)
        __asm__ volatile("add $1, %0\n\tadd $1, %0" : "+r"(x));
    return 2 * N / (now() - start);
}

static uint8_t records[8 * 320];

int main(void)
{
    const __m512i code = _mm512_set1_epi8(2), step = _mm512_set1_epi16(3);
    __m512i acc[8];
    for (int t = 0; t < 8; t++)
        acc[t] = _mm512_setzero_si512();
    memset(records, 1, sizeof records);
    for (int sample = 0; sample < 60; sample++) {
        const int n = 300000;
        const double start = now();
        for (int i = 0; i < n; i++) {
            const uint8_t *x = records;
            __asm__ volatile("" : "+r"(x));
            for (int t = 0; t < 8; t++) {
                __m512i sum = _mm512_setzero_si512();
                for (int j = 0; j < 4; j++) {
                    int32_t four;
                    memcpy(&four, x + 320 * t + 4 * j, sizeof four);
                    __m512i product = _mm512_maddubs_epi16(code, _mm512_set1_epi32(four));
                    if (j)
                        __asm__ volatile("vpaddw %1, %0, %0" : "+v"(sum) : "v"(product));
                    else
                        sum = product;
                }
                sum = _mm512_madd_epi16(sum, step);
                __asm__ volatile("vpaddd %1, %0, %0" : "+v"(acc[t]) : "v"(sum));
            }
        }
        const double rate = n * 8.0 * 256 / (now() - start);
        printf("%.0f@%.2f ", rate * 1e-9, clock_hz() * 1e-9);
        fflush(stdout);
    }
    printf("\n");
    return acc[0][0] == 1;
}
