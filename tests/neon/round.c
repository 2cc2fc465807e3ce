/* Rounds a matrix on both levels. */
#include "rounding.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 37, COLS = 160 };
static float weight[ROWS * COLS], factor[COLS * COLS], energy[COLS];
static unsigned char out[2][1 << 19];

int main(void)
{
    unsigned state = 1;
    for (int i = 0; i < ROWS * COLS; i++) weight[i] = ((float)((state = state * 1664525u + 1013904223u) >> 8) * 0x1p-23f - 1.0f) * 0.05f;
    for (int i = 0; i < COLS; i++) {
        energy[i] = 1.0f + (float)(i % 7);
        for (int j = i + 1; j < COLS; j++) factor[i * COLS + j] = ((float)((state = state * 1664525u + 1013904223u) >> 8) * 0x1p-23f - 1.0f) * 0.1f;
    }
    for (int level = 0; level < 2; level++) {
        unsigned char *at = out[level];
#define PLANE(type, n) (void *)(at += 65536, at - 65536)
        tb_rounding r = {.rows = ROWS, .cols = COLS, .padded = COLS, .draft_bits = 2, .residual_bits = 6, .residual_group = 16, .range = 2047,
                         .weight = weight, .factor = factor, .stride = COLS, .energy = energy};
        r.codes = PLANE(uint8_t, 0);
        r.s = PLANE(uint8_t, 0);
        r.m = PLANE(int8_t, 0);
        r.row_scale = PLANE(float, 0);
        r.row_a = r.codes + 20000;
        r.row_b = (int8_t *)r.codes + 30000;
        r.residual = PLANE(int16_t, 0);
        r.f = PLANE(uint8_t, 0);
        r.errors = PLANE(double, 0);
        if (tb_round_rows(&r, 0, ROWS, level)) return 2;
    }
    if (memcmp(out[0], out[1], sizeof out[0])) return 1;
    puts("ok");
    return 0;
}
