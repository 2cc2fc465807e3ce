/* Every operation on both levels with the same random inputs and NaN-filled outputs; then the sampler. */
#include "kernels.h"
#include "ops.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static tb_kernels chosen = {"generic", 0, 0};
const tb_kernels *tb_kernels_get(void) { return &chosen; }
const char *tb_cpu_error(void) { return ""; }

static uint64_t state = 7;
static uint32_t any(uint32_t n)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(((state >> 32) * n) >> 32);
}
static float number(void)
{
    static const float special[] = {0.0f, -0.0f, 1e-30f, -1e-40f, 87.0f, -104.5f, 3e38f, 65504.0f, 1e-7f, 6e-8f};
    if (any(30) == 0) return special[any(10)];
    return ((float)any(1 << 24) * 0x1p-23f - 1.0f) * (any(4) ? 4.0f : 60.0f);
}
static float x[4096], y[4096], z[4096], out[2][9000], *o;
static uint16_t halves[2][70000], scales[128];
static int8_t codes[4096];

static void same(const char *what, int32_t n)
{
    if (memcmp(out[0], out[1], sizeof out[0]) || memcmp(halves[0], halves[1], sizeof halves[0])) {
        fprintf(stderr, "%s, n = %d: other bits than generic\n", what, (int)n);
        exit(1);
    }
    memset(out, 0xff, sizeof out);
    memset(halves, 0xff, sizeof halves);
}

static const tb_ops *levels[2] = {&tb_ops_generic, &tb_ops_neon};
#define BOTH(what, call) do { for (int l = 0; l < 2; l++) { const tb_ops *ops = levels[l]; o = out[l]; call; } same(what, n); } while (0)

static void rows(int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        x[i] = number();
        y[i] = number();
        z[i] = (float)any(1000) * 0.01f;
        codes[i] = (int8_t)any(256);
    }
    for (int i = 0; i < 128; i++) scales[i] = (uint16_t)any(0x7c00);
    BOTH("rms_norm", ops->rms_norm(o, x, y, n, 1e-6f));
    BOTH("rms_norm without weight", ops->rms_norm(o, x, NULL, n, 1e-6f));
    BOTH("add", (memcpy(o, x, (size_t)n * 4), ops->add(o, y, n)));
    BOTH("scale", (memcpy(o, x, (size_t)n * 4), ops->scale(o, 1.7f, n)));
    if (n % 2 == 0) BOTH("rope", (memcpy(o, x, (size_t)n * 4), ops->rope(o, y, z, n)));
    for (int32_t a = 0; a < 3; a++) BOTH("gate", ops->gate(o, x, y, n, a));
    BOTH("softcap", (memcpy(o, x, (size_t)n * 4), ops->softcap(o, 30.0f, n)));
    BOTH("store_value", ops->store_value(halves[l], x, n, 2));
    BOTH("store_key", ops->store_key(halves[l], x, n, 11));
    BOTH("embedding_row", ops->embedding_row(o, codes, scales, n));
    BOTH("exps", ops->exps(o, x, n));
    BOTH("block_max", o[200] = (float)ops->block_max(o, x, n));
    x[n / 2] = NAN;
    BOTH("block_max with NaN", o[200] = (float)ops->block_max(o, x, n));
    BOTH("exps with NaN", ops->exps(o, x, n));
    for (int32_t i = 0; i < n; i++) x[i] = -z[i];
    for (int l = 0; l < 2; l++) {
        uint64_t mass = levels[l]->mass(x, n, 0.0f, 0.8f);
        memcpy(out[l], &mass, sizeof mass);
    }
    same("mass", n);
}

static void attention(int32_t dim, int32_t n, int32_t first, int32_t last)
{
    int32_t ring = (last - first + 8) / 8 * 8;
    static uint16_t keys[200 * 128], values[200 * 128];
    static float scores[9 * 200];
    for (int32_t i = 0; i < ring * dim; i++) {
        keys[i] = tb_float_to_half(number() * 0.1f);
        values[i] = tb_float_to_half(number() * 0.1f);
    }
    for (int32_t i = 0; i < n * dim; i++) x[i] = number() * 0.1f;
    tb_attention a = {keys, values, dim, ring, first, last, 0.1f, n & 1 ? 30.0f : 0.0f, NULL, NULL, 0};
    BOTH("attend", ops->attend(&a, x, o, n, scores));
}

static void sampling(int32_t vocab)
{
    static float logits[5000];
    int32_t history[3] = {0, 1 % vocab, vocab - 1}, ids[1] = {vocab / 2};
    float values[1] = {1.5f};
    char err[80];
    for (int32_t i = 0; i < vocab; i++) logits[i] = number() * 0.2f;
    for (int c = 0; c < 32; c++) {
        tb_sampling s = {c & 1 ? 0.8f : 0.0f, c & 2 ? 0.9f : 1.0f, c & 4 ? 0.05f : 0.0f, c & 8 ? 1.2f : 1.0f,
                         0.1f, 0.1f, c & 16 ? 5 : 0, -1, any(1u << 31), 1, ids, values};
        int32_t token[2];
        for (int l = 0; l < 2; l++) {
            chosen.name = l ? "neon" : "generic";
            if (tb_ops_get() != levels[l] || tb_sample(logits, vocab, history, 3, &s, c, &token[l], err, sizeof err)) exit(2);
        }
        if (token[0] != token[1]) {
            fprintf(stderr, "vocabulary %d, case %d: tokens %d and %d\n", (int)vocab, c, (int)token[0], (int)token[1]);
            exit(1);
        }
    }
}

int main(void)
{
    for (int l = 0; l < 2; l++)
        for (int h = 0; h < 65536; h += 8) {
            float f[8];
            for (int i = 0; i < 8; i++) f[i] = tb_half_to_float((uint16_t)(h + i));
            if ((h & 0x7c00) == 0x7c00 && (h & 0x3ff)) continue;     /* NaN */
            levels[l]->store_value(halves[l], f, 8, 0);
            for (int i = 0; i < 8; i++)
                if (f[i] == f[i] && halves[l][i] != h + i) return 3;
        }
    for (int32_t n = 1; n <= 80; n++) rows(n);
    for (int32_t n = 90; n <= 3900; n += 381) rows(n);
    for (int32_t n = 1; n <= 9; n++)
        for (int32_t dim = 1; dim <= 128; dim += n % 3 ? 31 : 127)
            for (int32_t first = 0; first < 24; first += 5) attention(dim, n, first, first + first * first / 4);
    for (int32_t n = 1; n <= 70; n++) sampling(n);
    sampling(5000);
    puts("ok");
    return 0;
}
