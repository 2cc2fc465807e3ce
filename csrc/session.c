/* session.c - one sequence: its KV cache, its scratch memory, and the calls that move it.
 *
 * The cache grows by doubling up to max_context. A layer with a sliding window keeps a ring of window + slack slots
 * instead, so that a rejected draft never overwrites a key that is still needed. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"
#include "gpu/hybrid.h"
#include "sampler.h"

static int32_t round8(int32_t n) { return (n + 7) / 8 * 8; }
static int32_t min32(int32_t a, int32_t b) { return a < b ? a : b; }
static int32_t max32(int32_t a, int32_t b) { return a > b ? a : b; }

/* --- cache --- */

static bool cache_resize(tb_cache *c, const tb_layer *l, int32_t ring)
{
    size_t width = (size_t)l->head_dim, old = (size_t)c->ring * width, new = (size_t)ring * width;
    uint16_t *keys = tb_alloc(new * (size_t)l->n_kv_heads * sizeof *keys);
    uint16_t *values = tb_alloc(new * (size_t)l->n_kv_heads * sizeof *values);
    if (!keys || !values) {
        tb_free(keys);
        tb_free(values);
        return false;
    }
    for (size_t h = 0; old && h < (size_t)l->n_kv_heads; h++) {
        memcpy(keys + h * new, c->keys + h * old, old * sizeof *keys);
        memcpy(values + h * new, c->values + h * old, old * sizeof *values);
    }
    tb_free(c->keys);
    tb_free(c->values);
    c->keys = keys;
    c->values = values;
    c->ring = ring;
    return true;
}

static int reserve_cache(tb_session *s, int32_t needed, char *err, size_t n)
{
    if (needed <= s->capacity)
        return TB_OK;
    int32_t limit = round8(s->max_context);
    int32_t capacity = max32(s->capacity, 256);
    while (capacity < needed)
        capacity = capacity > limit / 2 ? limit : capacity * 2;
    capacity = min32(round8(capacity), limit);
    for (int32_t i = 0; i < s->m->d.n_layers; i++) {
        const tb_layer *l = &s->m->layers[i];
        tb_cache *c = &s->caches[i];
        int32_t ring = l->window ? round8(min32(limit, l->window + TB_RING_SLACK)) : capacity;
        if (l->window && ring < limit)
            c->windowed = true;
        if (!c->windowed)
            ring = capacity;
        if (ring > c->ring && !cache_resize(c, l, ring))
            return tb_fail(err, n, TB_ENOMEM, "out of memory for a cache of %d tokens (lower --ctx)", (int)capacity);
    }
    s->capacity = capacity;
    return TB_OK;
}

/* --- scratch --- */

static float *take(char **cursor, size_t floats)
{
    float *p = (float *)(void *)*cursor;
    if (*cursor)
        *cursor += (floats * sizeof(float) + 63) / 64 * 64;
    return p;
}

static int reserve_tokens(tb_session *s, int32_t tokens, char *err, size_t n)
{
    tb_scratch *b = &s->s;
    if (tokens <= b->tokens)
        return TB_OK;
    const tb_model *m = s->m;
    size_t t = (size_t)tokens, hidden = (size_t)m->d.hidden, inter = (size_t)m->d.intermediate_max;
    size_t widths[] = {hidden, hidden, hidden, (size_t)m->q_max, (size_t)m->kv_max, (size_t)m->kv_max,
                       (size_t)m->q_max, inter, inter, 2 * (size_t)m->rope_half};
    float **slots[] = {&b->x, &b->a, &b->h, &b->q, &b->k, &b->v, &b->attention, &b->gate, &b->up, &b->angles};
    size_t bytes = 0, act_bytes[3];
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++)
        bytes += (t * widths[i] * sizeof(float) + 63) / 64 * 64;
    for (int32_t kind = 0; kind < 3; kind++)
        bytes += act_bytes[kind] = tb_act_bytes(kind, tokens, m->cols_max);
    char *block = tb_alloc(bytes);
    if (!block)
        return tb_fail(err, n, TB_ENOMEM, "out of memory: a pass of %d tokens needs %zu MB of scratch", (int)tokens, bytes / 1000000);
    tb_free(b->block);
    b->block = block;
    char *cursor = block;
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++)
        *slots[i] = take(&cursor, t * widths[i]);
    for (int32_t kind = 0; kind < 3; kind++) {
        b->acts[kind] = cursor;
        cursor += act_bytes[kind];
    }
    b->tokens = tokens;
    b->bytes = bytes;
    return TB_OK;
}

static int reserve_buffer(float **buffer, size_t *have, size_t want, char *err, size_t n)
{
    if (want <= *have)
        return TB_OK;
    tb_free(*buffer);
    *have = 0;
    *buffer = tb_alloc(want * sizeof(float));
    if (!*buffer)
        return tb_fail(err, n, TB_ENOMEM, "out of memory for %zu MB of scratch", want * sizeof(float) / 1000000);
    *have = want;
    return TB_OK;
}

int tb_session_reserve(tb_session *s, int32_t needed, int32_t tokens, int32_t rows_out, char *err, size_t n)
{
    int code = s->gpu ? tbg_session_reserve(s, tokens, err, n) : reserve_cache(s, needed, err, n);
    if (!code && !s->gpu)
        code = reserve_tokens(s, tokens, err, n);
    if (!code && !s->gpu)
        code = reserve_buffer(&s->s.scores, &s->s.scores_n, (size_t)s->threads * (size_t)s->m->group_max * ((size_t)s->capacity + 24), err, n);
    if (!code && rows_out > s->s.rows_out) {
        size_t have = (size_t)s->s.rows_out * (size_t)s->m->d.vocab;
        code = reserve_buffer(&s->s.logits, &have, (size_t)rows_out * (size_t)s->m->d.vocab, err, n);
        s->s.rows_out = code ? 0 : rows_out;
    }
    return code;
}

/* --- life --- */

tb_session *tb_session_new(tb_model *m, int32_t max_context, int32_t threads, char *err, size_t n)
{
    if (max_context < 1 || max_context > (1 << 30) || threads < 1 || threads > 1024) {
        tb_fail(err, n, TB_EINVAL, "a session needs a context of 1 or more tokens and 1 to 1024 threads");
        return NULL;
    }
    tb_session *s = calloc(1, sizeof *s);
    if (s) {
        s->m = m;
        atomic_fetch_add(&m->users, 1);
        s->threads = threads;
        s->max_context = max_context;
        s->caches = calloc((size_t)m->d.n_layers, sizeof *s->caches);
        s->pool = tb_pool_new(threads, tb_cpu_threads());
        s->s.kernel_n = tb_kernel_scratch_bytes(m->cols_max);
        s->s.kernel = tb_alloc(s->s.kernel_n * (size_t)threads);
        s->sampler = tb_alloc(tb_sample_scratch_bytes(m->d.vocab));
        s->tails = tb_alloc((size_t)threads * 2 * TB_TAIL * (size_t)m->head_dim_max * sizeof *s->tails);
        tb_belief_init(&s->belief);
    }
    if (!s || !s->caches || !s->pool || !s->s.kernel || !s->sampler || !s->tails) {
        tb_session_free(s);
        tb_fail(err, n, TB_ENOMEM, "out of memory for a session");
        return NULL;
    }
    if (m->gpu && tbg_session_new(s, err, n)) {
        tb_session_free(s);
        return NULL;
    }
    return s;
}

void tb_session_free(tb_session *s)
{
    if (!s)
        return;
    tbg_session_free(s);
    for (int32_t i = 0; s->caches && i < s->m->d.n_layers; i++) {
        tb_free(s->caches[i].keys);
        tb_free(s->caches[i].values);
    }
    free(s->caches);
    tb_pool_free(s->pool);
    tb_free(s->s.block);
    tb_free(s->s.logits);
    tb_free(s->s.scores);
    tb_free(s->s.kernel);
    tb_free(s->sampler);
    tb_free(s->tails);
    tb_free(s->draft_logits);
    tb_lookup_free(&s->lookup);
    tb_recycled_free(&s->recycled);
    free(s->kept);
    free(s->head.active);
    free(s->head.runs);
    free(s->top_ids);
    free(s->top_logprobs);
    free(s->history);
    tb_model_free(s->m);
    free(s);
}

int32_t tb_session_length(const tb_session *s) { return s->length; }
int32_t tb_session_high(const tb_session *s) { return round8(max32(s->high, s->length)); }
const int32_t *tb_session_tokens(const tb_session *s) { return s->history; }
void tb_session_abort(tb_session *s, int32_t on) { atomic_store(&s->abort, on ? 1 : 0); }

double tb_session_product_seconds(const tb_session *s) { return s->product_seconds; }

size_t tb_session_bytes(const tb_session *s)
{
    size_t vocab = (size_t)s->m->d.vocab;
    size_t bytes = (s->draft_logits ? TB_LEVEL * vocab * sizeof(float) : 0) + tb_lookup_bytes(&s->lookup, s->m->d.vocab) +
                   tb_recycled_bytes(&s->recycled, s->m->d.vocab) + s->s.bytes + s->s.scores_n * sizeof(float) + s->s.kernel_n * (size_t)s->threads +
                   (size_t)s->s.rows_out * (size_t)s->m->d.vocab * sizeof(float);
    for (int32_t i = 0; !s->gpu && i < s->m->d.n_layers; i++) {
        const tb_layer *l = &s->m->layers[i];
        bytes += 2 * sizeof(uint16_t) * (size_t)s->caches[i].ring * (size_t)l->head_dim * (size_t)l->n_kv_heads;
    }
    return bytes + tbg_session_bytes(s);
}

/* --- moving --- */

int tb_session_keep_history(tb_session *s, int32_t at, const int32_t *tokens, int32_t n)
{
    if (at + n + TB_MAX_DRAFT + 1 > s->history_n) {
        int32_t want = at + n + max32(at + n, 1024);
        int32_t *grown = realloc(s->history, (size_t)want * sizeof *grown);
        if (!grown)
            return TB_ENOMEM;
        s->history = grown;
        s->history_n = want;
    }
    memcpy(s->history + at, tokens, (size_t)n * sizeof *tokens);
    return TB_OK;
}

void tb_session_commit(tb_session *s, int32_t op, int32_t length)
{
    if (op == TB_VERIFY && s->pure == s->length)
        s->pure = length;
    s->length = length;
    s->kept_at = 0;
}

static int eval(tb_session *s, int32_t op, const int32_t *tokens, int32_t n, int32_t chunk, int32_t every, float *logits, char *err, size_t err_n)
{
    if (n < 1 || chunk < 1)
        return tb_fail(err, err_n, TB_EINVAL, "nothing to evaluate");
    if (n > s->max_context - s->length)
        return tb_fail(err, err_n, TB_ECONTEXT, "the context holds %d tokens: %d are in use and %d more do not fit", (int)s->max_context,
                       (int)s->length, (int)n);
    chunk = min32(min32(chunk, s->gpu ? s->m->gpu->pass_tokens : TB_CHUNK_MAX), n);
    int code = tb_session_reserve(s, s->length + min32(chunk, n), min32(chunk, n), 0, err, err_n);
    if (!code && tb_session_keep_history(s, s->length, tokens, n))
        code = tb_fail(err, err_n, TB_ENOMEM, "out of memory for the history");
    for (int32_t done = 0; done < n && !code;) {
        int32_t m = s->gpu ? tbg_next_chunk(s, min32(chunk, n - done)) : min32(chunk, n - done);
        bool last = done + m == n;
        int32_t which = !logits ? TB_LOGITS_NONE : every ? TB_LOGITS_ALL : last ? TB_LOGITS_LAST : TB_LOGITS_NONE;
        code = tb_session_reserve(s, s->length + m, m, 0, err, err_n);
        const double start = tb_clock();
        if (!code)
            code = tb_forward(s, op, tokens + done, m, s->length, NULL, which, every && logits ? logits + (size_t)done * (size_t)s->m->d.vocab : logits, err, err_n);
        if (!code && op == TB_VERIFY && !s->gpu)
            tb_belief_learn_prompt(&s->belief, m, tb_clock() - start);
        if (code)
            break;
        tb_session_commit(s, op, s->length + m);
        done += m;
    }
    return code;
}

int tb_session_eval(tb_session *s, const int32_t *tokens, int32_t n, int32_t chunk, int32_t every, float *logits, char *err, size_t err_n)
{
    return eval(s, TB_VERIFY, tokens, n, chunk, every, logits, err, err_n);
}

int tb_session_eval_draft(tb_session *s, const int32_t *tokens, int32_t n, int32_t every, float *logits, char *err, size_t err_n)
{
    return eval(s, TB_DRAFT, tokens, n, TB_CHUNK_MAX, every, logits, err, err_n);
}

int tb_session_rewind(tb_session *s, int32_t length, char *err, size_t n)
{
    if (length < 0 || length > s->length)
        return tb_fail(err, n, TB_EINVAL, "cannot rewind %d tokens to %d", (int)s->length, (int)length);
    for (int32_t i = 0; i < s->m->d.n_layers; i++) {
        const tb_cache *c = &s->caches[i];
        int32_t oldest = max32(0, length - s->m->layers[i].window + 1);
        if (c->windowed && length && oldest + c->ring < s->high)
            return tb_fail(err, n, TB_ECONTEXT, "layer %d keeps a sliding window: going back from %d to %d needs keys that are gone; start from 0",
                           (int)i, (int)s->high, (int)length);
    }
    s->length = length;
    s->kept_at = 0;
    s->pure = min32(s->pure, length);
    if (!length)
        s->high = 0;
    return TB_OK;
}

int32_t tb_session_keep(tb_session *s, const int32_t *tokens, int32_t n)
{
    int32_t common = 0, most = min32(n, s->pure);
    while (common < most && s->history[common] == tokens[common])
        common++;
    char unused[8];
    if (tb_session_rewind(s, common, unused, sizeof unused))
        (void)tb_session_rewind(s, 0, unused, sizeof unused);
    return s->length;
}

void tb_session_compact(tb_session *s, int32_t position, const int32_t *slots, int32_t n)
{
    int32_t d0 = 0;
    while (d0 < n && slots[d0] == d0)
        d0++;
    if (s->gpu) {
        if (d0 < n)
            tbg_compact(s, position, slots, n);
        return;
    }
    for (int32_t i = 0; d0 < n && i < s->m->d.n_layers; i++) {
        const tb_layer *l = &s->m->layers[i];
        tb_cache *c = &s->caches[i];
        size_t hd = (size_t)l->head_dim;
        for (size_t h = 0; h < (size_t)l->n_kv_heads; h++) {
            uint16_t *keys = c->keys + h * (size_t)c->ring * hd, *values = c->values + h * (size_t)c->ring * hd;
            for (int32_t d = d0; d < n; d++) {
                size_t from = (size_t)((position + slots[d]) % c->ring), to = (size_t)((position + d) % c->ring);
                const uint16_t *key = keys + (from >> 3) * 8 * hd + (from & 7);
                uint16_t *into = keys + (to >> 3) * 8 * hd + (to & 7);
                for (size_t e = 0; e < hd; e++)
                    into[e * 8] = key[e * 8];
                memcpy(values + to * hd, values + from * hd, hd * sizeof *values);
            }
        }
    }
}

/* --- state: per layer and kv head the blocks of 8 positions that are still there, keys then values --- */

static int32_t first_block(const tb_cache *c, int32_t high) { return c->windowed ? max32(0, (high + 7) / 8 - c->ring / 8) : 0; }

size_t tb_session_state_bytes(tb_session *s, int32_t length, int32_t high)
{
    char unused[8];
    if (length < 0 || length > s->max_context || high < length || high > (1 << 30) + 8 ||
        (!s->gpu && reserve_cache(s, length, unused, sizeof unused)))
        return 0;
    size_t bytes = 0;
    for (int32_t i = 0; i < s->m->d.n_layers; i++) {
        int32_t blocks = max32(0, (length + 7) / 8 - first_block(&s->caches[i], high));
        bytes += (size_t)blocks * 8 * 2 * sizeof(uint16_t) * (size_t)s->m->layers[i].head_dim * (size_t)s->m->layers[i].n_kv_heads;
    }
    return bytes;
}

/* Copies the blocks of positions [0, length) out of the cache, or into it; what a last block holds beyond length is zero outside. */
static int move_state(tb_session *s, int32_t length, int32_t high, uint8_t *state, bool in)
{
    int code = TB_OK;
    for (int32_t i = 0; i < s->m->d.n_layers && !code; i++) {
        const tb_layer *l = &s->m->layers[i];
        tb_cache *c = &s->caches[i];
        if (s->gpu && (code = tbg_cache_open(s, i)))
            break;
        size_t block = 8 * (size_t)l->head_dim, bytes = block * sizeof(uint16_t);
        for (size_t h = 0; h < (size_t)l->n_kv_heads; h++)
            for (int32_t b = first_block(c, high); b < (length + 7) / 8; b++) {
                size_t at = h * (size_t)c->ring * (size_t)l->head_dim + (size_t)(b % (c->ring / 8)) * block;
                uint16_t *parts[2] = {c->keys + at, c->values + at};
                for (int part = 0; part < 2; part++, state += bytes) {
                    if (in) {
                        memcpy(parts[part], state, bytes);
                        continue;
                    }
                    memcpy(state, parts[part], bytes);
                    for (size_t e = 0; b == length / 8 && e < block; e++)
                        if ((int32_t)(part ? e / (size_t)l->head_dim : e % 8) >= length % 8)
                            memset(state + e * sizeof(uint16_t), 0, sizeof(uint16_t));
                }
            }
        if (s->gpu)
            code = tbg_cache_close(s, i, in);
    }
    return code;
}

int tb_session_state_get(tb_session *s, uint8_t *state, size_t bytes, char *err, size_t n)
{
    if (s->pure != s->length)
        return tb_fail(err, n, TB_EINVAL, "the cache holds keys of the 2-bit part alone: nothing to save");
    if (bytes != tb_session_state_bytes(s, s->length, tb_session_high(s)))
        return tb_fail(err, n, TB_EINVAL, "the state has another size");
    const int code = move_state(s, s->length, tb_session_high(s), state, false);
    return code ? tbg_session_fail(s, code, err, n) : TB_OK;
}

int tb_session_state_set(tb_session *s, const int32_t *tokens, int32_t length, int32_t high, uint8_t *state, size_t bytes, char *err, size_t n)
{
    if (bytes != tb_session_state_bytes(s, length, high))
        return tb_fail(err, n, TB_EINVAL, "the state has another size");
    for (int32_t i = 0; i < length; i++)
        if (tokens[i] < 0 || tokens[i] >= s->m->d.vocab)
            return tb_fail(err, n, TB_EINVAL, "token id %d is outside the model's vocabulary of %d", (int)tokens[i], (int)s->m->d.vocab);
    if (tb_session_keep_history(s, 0, tokens, length))
        return tb_fail(err, n, TB_ENOMEM, "out of memory for the history");
    s->kept_at = 0;
    const int code = move_state(s, length, high, state, true);
    if (code) {
        s->length = s->pure = s->high = 0;
        return tbg_session_fail(s, code, err, n);
    }
    s->length = s->pure = length;
    s->high = (high + 7) / 8 * 8;
    return TB_OK;
}
