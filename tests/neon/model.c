/* A small random model: logits of a prompt and drafted steps as one hash, the same on every level and architecture. */
#include "os.h"
#include "tb.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HIDDEN = 96, HEAD = 32, HEADS = 4, INNER = 208, VOCAB = 300, LAYERS = 2, PROMPT = 30 };

static uint64_t state = 5, hash = 1469598103934665603u;
static uint32_t any(uint32_t n)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(((state >> 32) * n) >> 32);
}
static void add(const void *p, size_t n)
{
    for (size_t i = 0; i < n; i++) hash = (hash ^ ((const unsigned char *)p)[i]) * 1099511628211u;
}
static void *bytes(size_t n, uint32_t low, uint32_t size)
{
    uint8_t *p = tb_aligned(n);
    for (size_t i = 0; i < n; i++) p[i] = (uint8_t)(low + any(size));
    return p;
}
static tb_matrix matrix(int32_t rows, int32_t cols, int32_t b, int32_t r)
{
    size_t blocks = (size_t)(rows + 15) / 16, units = (size_t)(cols + 15) / 16, quads = (units + 3) / 4;
    tb_matrix w = {.rows = rows, .cols = cols, .draft_bits = b, .residual_bits = r, .residual_group = 16};
    float *u = tb_aligned(blocks * 64);
    uint8_t *a = bytes(blocks * 16, 1, b == 2 ? 10 : 6);
    for (size_t i = 0; i < blocks * 16; i++) {
        u[i] = (float)(1 + any(100)) * (b == 2 ? 3e-6f : 3e-6f);
        a[i] = (uint8_t)(b == 2 ? 2 * a[i] : a[i]);
    }
    w.draft_codes = bytes(32 * (size_t)b * blocks * units, 0, 256);
    w.draft_scales = bytes(64 * blocks * quads, 0, 256);
    w.residual_codes = bytes(32 * (size_t)r * blocks * units, 0, 256);
    w.residual_scales = bytes(32 * blocks * quads, 0, 256);
    w.row_scale = u;
    w.row_a = a;
    w.row_b = bytes(blocks * 16, 236, 41);
    return w;
}
static float *norm(int32_t n)
{
    float *w = malloc((size_t)n * sizeof *w);
    for (int32_t i = 0; i < n; i++) w[i] = 0.8f + (float)any(400) * 1e-3f;
    return w;
}

int main(void)
{
    static tb_layer layers[LAYERS];
    float frequencies[HEAD / 2];
    for (int i = 0; i < HEAD / 2; i++) frequencies[i] = 1.0f / (float)(1 << i % 12);
    tb_rope rope = {HEAD, 1.0f, frequencies};
    for (int l = 0; l < LAYERS; l++)
        layers[l] = (tb_layer){
            .q = matrix(HEADS * HEAD, HIDDEN, 2, 6), .k = matrix(HEAD, HIDDEN, 2, 6), .v = matrix(HEAD, HIDDEN, 2, 6),
            .o = matrix(HIDDEN, HEADS * HEAD, 2, 6), .gate = matrix(INNER, HIDDEN, 2, 6), .up = matrix(INNER, HIDDEN, 2, 6),
            .down = matrix(HIDDEN, INNER, 2, 6), .input_norm = norm(HIDDEN), .pre_ffn_norm = norm(HIDDEN), .n_heads = HEADS,
            .n_kv_heads = 1, .head_dim = HEAD, .window = l ? 16 : 0, .attention_scale = 0.18f, .output_scale = 1.0f};
    tb_model_desc d = {.n_layers = LAYERS, .hidden = HIDDEN, .intermediate_max = INNER, .vocab = VOCAB, .n_ropes = 1, .activation = TB_ACT_SILU,
                       .layers = layers, .ropes = &rope, .final_norm = norm(HIDDEN), .head = matrix(VOCAB, HIDDEN, 4, 4),
                       .embedding_scale = 1.0f, .norm_eps = 1e-5f};
    char err[200] = "";
    tb_model *m = tb_model_new(&d, err, sizeof err);
    tb_session *s = m ? tb_session_new(m, 200, 2, err, sizeof err) : NULL;
    int32_t history[200], n = PROMPT + 1;
    static float logits[PROMPT * VOCAB];
    for (int i = 0; i < n; i++) history[i] = (int32_t)any(VOCAB);
    if (!s || tb_session_eval(s, history, PROMPT, 7, 1, logits, err, sizeof err)) {
        fprintf(stderr, "%s\n", err);
        return 1;
    }
    add(logits, sizeof logits);
    int accepted = 0;
    for (int step = 0; n < 120; step++) {
        tb_sampling how = {.temperature = step % 2 ? 0.7f : 0.0f, .top_p = 0.95f, .repeat_penalty = 1.1f, .repeat_last_n = 64, .seed = 3};
        tb_step_options options = {.draft_max = step % 12, .draft_fixed = 1 + step % 2, .use = TB_USE_ALL, .budget = 1000};
        tb_step_result r;
        if (tb_session_step(s, history, n, &how, &options, &r, err, sizeof err)) {
            fprintf(stderr, "%s\n", err);
            return 1;
        }
        memcpy(history + n, r.tokens, (size_t)r.n_tokens * sizeof *r.tokens);
        n += r.n_tokens;
        accepted += r.accepted;
        add(&r.drafted, sizeof r.drafted);
    }
    add(history, (size_t)n * sizeof *history);
    printf("%s %016llx %d\n", tb_cpu_level(), (unsigned long long)hash, accepted);
    tb_session_free(s);
    tb_model_free(m);
    return 0;
}
