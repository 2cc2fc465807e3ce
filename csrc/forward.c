/* forward.c - the decoder, for one batch of tokens and one set of weights (2-bit draft, or in full).
 *
 * Four kinds of parallel section per layer: products, keys and rope (by token), attention (by head and token), and the
 * steps between products (by token). Threads split rows, heads or tokens and never a sum, so the logits of a token
 * are the same bits whatever the batch it came in and whatever the number of threads. */
#include <string.h>

#include "engine.h"
#include "gpu/hybrid.h"
#include "guard.h"
#include "os.h"

typedef struct pass {
    tb_session *s;
    const tb_model *m;
    const tb_layer *l;
    tb_cache *cache;
    int32_t op, n, position, layer;
    const int32_t *tokens;
    const tb_tree *tree;        /* NULL: token t is at position + t, in the slot of that position */
    const tb_rows *rows;        /* of the head; NULL: all */
} pass;

static int32_t depth_of(const pass *p, int32_t t) { return p->tree ? p->tree->depth[t] : t; }
static int32_t slot_of(const pass *p, int32_t t) { return p->tree ? p->tree->path[t][p->tree->depth[t]] : t; }

/* --- which input was not finite: 1 + layer * 8 + place, layers counted from 0, the head as the last layer --- */

enum { AT_QKV, AT_O, AT_GATE_UP, AT_DOWN, AT_HEAD };

static void mark_bad(pass *p, int32_t place)
{
    int expected = 0;
    atomic_compare_exchange_strong(&p->s->bad, &expected, 1 + p->layer * 8 + place);
}

int tb_check_files(char *err, size_t n)
{
    if (tb_guard_broken())
        return tb_fail(err, n, TB_EINVAL, "a file of the model became shorter while it was in use: the model is incomplete, download or copy it again");
    return TB_OK;
}

int tb_fail_not_finite(int bad, int32_t position, int32_t n_tokens, char *err, size_t n)
{
    static const char *const places[] = {"q/k/v_proj", "o_proj", "gate/up_proj", "down_proj", "lm_head"};
    int place = (bad - 1) % 8, layer = (bad - 1) / 8;
    if (place == AT_HEAD)
        return tb_fail(err, n, TB_ENONFINITE, "the input of lm_head is not finite (positions %d to %d): the model's weights are damaged",
                       (int)position, (int)(position + n_tokens - 1));
    return tb_fail(err, n, TB_ENONFINITE, "layer %d: the input of %s is not finite (positions %d to %d): the model's weights are damaged",
                   layer, places[place], (int)position, (int)(position + n_tokens - 1));
}

static int check(pass *p, char *err, size_t n)
{
    const int code = tb_check_files(err, n);
    if (code)
        return code;
    int bad = atomic_load(&p->s->bad);
    if (!bad)
        return TB_OK;
    atomic_store(&p->s->bad, 0);
    return tb_fail_not_finite(bad, p->position, p->n, err, n);
}

/* --- by token: the steps between products --- */

typedef void (*token_step)(pass *p, int32_t t0, int32_t t1);
typedef struct token_section {
    pass *p;
    token_step step;
} token_section;

static void token_part(void *arg, int ith, int nth)
{
    token_section *t = arg;
    int32_t n = t->p->n;
    t->step(t->p, (int32_t)((int64_t)n * ith / nth), (int32_t)((int64_t)n * (ith + 1) / nth));
}

/* A single token is less work than waking anybody. */
static void by_token(pass *p, token_step step)
{
    token_section t = {p, step};
    if (p->n == 1)
        step(p, 0, 1);
    else
        tb_parallel_for(p->s->pool, token_part, &t);
}

/* Rounds rows [t0, t1) of x for every activation kind that the given matrices ask for. */
static void round_inputs(pass *p, const tb_matrix *const *w, int32_t n_w, const float *x, int32_t t0, int32_t t1, int32_t place)
{
    bool done[3] = {false, false, false};
    for (int32_t i = 0; i < n_w; i++) {
        int32_t kind = w[i]->rows ? tb_act_kind(w[i], p->op) : -1;
        if (kind < 0 || done[kind])
            continue;
        done[kind] = true;
        tb_act act;
        tb_act_layout(&act, kind, p->n, w[i]->cols, p->s->s.acts[kind]);
        if (t1 > t0 && p->m->kernels->quantize(&act, x, w[i]->cols, t0, t1))
            mark_bad(p, place);
    }
}

static void embed(pass *p, int32_t t0, int32_t t1)
{
    const tb_model_desc *d = &p->m->d;
    for (int32_t t = t0; t < t1; t++) {
        float *x = p->s->s.x + (size_t)t * (size_t)d->hidden;
        size_t id = (size_t)p->tokens[t], scales = ((size_t)d->hidden + 31) / 32;
        if (d->embedding_codes)
            p->m->ops->embedding_row(x, d->embedding_codes + id * (size_t)d->hidden, d->embedding_scales + id * scales, d->hidden);
        else
            tb_matrix_row(&d->head, d->head.residual_bits != 0, p->tokens[t], x);
        if (d->embedding_scale != 1.0f)
            p->m->ops->scale(x, d->embedding_scale, d->hidden);
    }
    /* Angles of every rope at these positions: cos then sin, rope after rope. */
    for (int32_t t = t0; t < t1; t++) {
        float *angles = p->s->s.angles + (size_t)t * 2 * (size_t)p->m->rope_half;
        for (int32_t r = 0; r < d->n_ropes; r++) {
            const tb_rope *rope = &d->ropes[r];
            int32_t half = rope->dim / 2;
            for (int32_t i = 0; i < half; i++) {
                float sin, cos, angle = (float)(p->position + depth_of(p, t)) * rope->inv_freq[i];
                tb_sincos((double)angle, &sin, &cos);
                angles[i] = cos * rope->factor;
                angles[half + i] = sin * rope->factor;
            }
            angles += 2 * half;
        }
    }
}

static void enter_attention(pass *p, int32_t t0, int32_t t1)
{
    const tb_layer *l = p->l;
    int32_t hidden = p->m->d.hidden;
    const float *x = p->s->s.x;
    if (l->input_norm) {
        for (int32_t t = t0; t < t1; t++)
            p->m->ops->rms_norm(p->s->s.a + (size_t)t * (size_t)hidden, x + (size_t)t * (size_t)hidden, l->input_norm, hidden, p->m->d.norm_eps);
        x = p->s->s.a;
    }
    const tb_matrix *w[] = {&l->q, &l->k, &l->v};
    round_inputs(p, w, 3, x, t0, t1, AT_QKV);
}

/* q/k/v norms, rope, and keys and values into the cache. */
static void place_keys(pass *p, int32_t t0, int32_t t1)
{
    const tb_layer *l = p->l;
    const tb_ops *ops = p->m->ops;
    int32_t hd = l->head_dim, half = 0;
    size_t skip = 0;
    if (l->rope >= 0) {
        half = p->m->ropes[l->rope].dim / 2;
        for (int32_t r = 0; r < l->rope; r++)
            skip += (size_t)p->m->ropes[r].dim;
    }
    float eps = p->m->d.norm_eps;
    for (int32_t t = t0; t < t1; t++) {
        float *q = p->s->s.q + (size_t)t * (size_t)l->q.rows;
        float *k = p->s->s.k + (size_t)t * (size_t)l->k.rows;
        float *v = p->s->s.v + (size_t)t * (size_t)l->k.rows;
        const float *cos = p->s->s.angles + (size_t)t * 2 * (size_t)p->m->rope_half + skip;
        if (!l->v.rows)
            memcpy(v, k, (size_t)l->k.rows * sizeof *v);
        if (l->qk_norm_whole) {
            if (l->q_norm)
                ops->rms_norm(q, q, l->q_norm, l->q.rows, eps);
            if (l->k_norm)
                ops->rms_norm(k, k, l->k_norm, l->k.rows, eps);
        }
        for (int32_t h = 0; h < l->n_heads; h++) {
            float *head = q + (size_t)h * (size_t)hd;
            if (l->q_norm && !l->qk_norm_whole)
                ops->rms_norm(head, head, l->q_norm, hd, eps);
            if (half)
                ops->rope(head, cos, cos + half, 2 * half);
        }
        int32_t slot = (p->position + slot_of(p, t)) % p->cache->ring;
        for (int32_t h = 0; h < l->n_kv_heads; h++) {
            size_t at = (size_t)h * (size_t)p->cache->ring * (size_t)hd;
            float *key = k + (size_t)h * (size_t)hd, *value = v + (size_t)h * (size_t)hd;
            if (l->k_norm && !l->qk_norm_whole)
                ops->rms_norm(key, key, l->k_norm, hd, eps);
            if (half)
                ops->rope(key, cos, cos + half, 2 * half);
            if (l->v_norm)
                ops->rms_norm(value, value, NULL, hd, eps);
            ops->store_key(p->cache->keys + at, key, hd, slot);
            ops->store_value(p->cache->values + at, value, hd, slot);
        }
    }
}

static void enter_o(pass *p, int32_t t0, int32_t t1)
{
    const tb_matrix *w[] = {&p->l->o};
    round_inputs(p, w, 1, p->s->s.attention, t0, t1, AT_O);
}

/* x += norm(h); then the input of the feed-forward block. */
static void leave_attention(pass *p, int32_t t0, int32_t t1)
{
    const tb_layer *l = p->l;
    const tb_ops *ops = p->m->ops;
    int32_t hidden = p->m->d.hidden;
    float eps = p->m->d.norm_eps;
    for (int32_t t = t0; t < t1; t++) {
        size_t at = (size_t)t * (size_t)hidden;
        float *x = p->s->s.x + at, *h = p->s->s.h + at;
        if (l->post_attention_norm)
            ops->rms_norm(h, h, l->post_attention_norm, hidden, eps);
        ops->add(x, h, hidden);
        if (l->pre_ffn_norm)
            ops->rms_norm(p->s->s.a + at, x, l->pre_ffn_norm, hidden, eps);
    }
    const tb_matrix *w[] = {&l->gate, &l->up};
    round_inputs(p, w, 2, l->pre_ffn_norm ? p->s->s.a : p->s->s.x, t0, t1, AT_GATE_UP);
}

static void enter_down(pass *p, int32_t t0, int32_t t1)
{
    const tb_matrix *w[] = {&p->l->down};
    round_inputs(p, w, 1, p->s->s.gate, t0, t1, AT_DOWN);
}

static void leave_ffn(pass *p, int32_t t0, int32_t t1)
{
    const tb_layer *l = p->l;
    int32_t hidden = p->m->d.hidden;
    for (int32_t t = t0; t < t1; t++) {
        size_t at = (size_t)t * (size_t)hidden;
        float *x = p->s->s.x + at, *h = p->s->s.h + at;
        if (l->post_ffn_norm)
            p->m->ops->rms_norm(h, h, l->post_ffn_norm, hidden, p->m->d.norm_eps);
        p->m->ops->add(x, h, hidden);
        if (l->output_scale != 1.0f)
            p->m->ops->scale(x, l->output_scale, hidden);
    }
}

/* --- by rows: products --- */

typedef struct products {
    pass *p;
    const tb_matrix *w[3];
    float *y[3];
    int32_t n_w, step, chunks;
    bool gated;     /* w = gate, up: a chunk is rows of both, and their activation */
    const tb_rows *rows;        /* NULL: all; else the blocks of w[0] to compute, a chunk each */
} products;

static int32_t chunks_of(const products *g, int32_t i)
{
    return ((g->w[i]->rows + 15) / 16 + g->step - 1) / g->step;
}

static void product_part(void *arg, int ith, int nth)
{
    products *g = arg;
    pass *p = g->p;
    void *scratch = p->s->s.kernel + (size_t)ith * p->s->s.kernel_n;
    (void)nth;
    for (int32_t chunk; (chunk = tb_pool_next(p->s->pool, g->chunks)) >= 0;) {
        int32_t i = 0, b0, b1;
        if (g->rows) {
            b0 = g->rows->runs[chunk][0];
            b1 = g->rows->runs[chunk][1];
        } else {
            for (int32_t n; chunk >= (n = chunks_of(g, i)); i++)
                chunk -= n;
            int32_t blocks = (g->w[i]->rows + 15) / 16;
            b0 = chunk * g->step;
            b1 = b0 + g->step < blocks ? b0 + g->step : blocks;
        }
        for (int32_t j = i; j < (g->gated ? 2 : i + 1); j++) {
            tb_act act;
            int32_t kind = tb_act_kind(g->w[j], p->op);
            tb_act_layout(&act, kind, p->n, g->w[j]->cols, p->s->s.acts[kind]);
            p->m->kernels->matmul(g->w[j], p->op, &act, g->y[j], g->w[j]->rows, b0, b1, scratch);
        }
        if (g->gated) {
            int32_t rows = g->w[0]->rows, r0 = b0 * 16, r1 = b1 * 16 < rows ? b1 * 16 : rows;
            for (int32_t t = 0; t < p->n; t++) {
                float *gate = g->y[0] + (size_t)t * (size_t)rows + r0;
                p->m->ops->gate(gate, gate, g->y[1] + (size_t)t * (size_t)rows + r0, r1 - r0, p->m->d.activation);
            }
        }
    }
}

static void run_products(pass *p, products *g)
{
    int32_t blocks = 0;
    for (int32_t i = 0; i < (g->gated ? 1 : g->n_w); i++)
        blocks += (g->w[i]->rows + 15) / 16;
    g->p = p;
    g->step = tb_step(blocks, p->s->threads);
    if (p->s->threads == 1)
        g->step = p->n == 1 ? blocks : 16;
    g->chunks = 0;
    for (int32_t i = 0; i < (g->gated ? 1 : g->n_w); i++)
        g->chunks += chunks_of(g, i);
    if (g->rows)
        g->chunks = g->rows->n_runs;
    const double start = tb_clock();
    tb_parallel_for(p->s->pool, product_part, g);
    p->s->product_seconds += tb_clock() - start;
}

/* --- by head and token: attention --- */

/* Puts the ancestors of token t where plain decoding would have them: into blocks that go on where the cache's whole blocks of
 * committed positions end. */
static void gather_tail(const pass *p, tb_attention *a, int32_t t, uint16_t *memory)
{
    const int32_t *path = p->tree->path[t], depth = p->tree->depth[t], ring = a->ring;
    size_t hd = (size_t)a->head_dim;
    uint16_t *keys = memory, *values = memory + TB_TAIL * hd;
    a->tail = p->position & ~7;
    size_t slot = (size_t)(a->tail % ring), before = (size_t)(p->position & 7);
    memcpy(keys, a->keys + slot * hd, 8 * hd * sizeof *keys);
    memcpy(values, a->values + slot * hd, before * hd * sizeof *values);
    for (int32_t d = 0; d <= depth; d++) {
        size_t from = (size_t)((p->position + path[d]) % ring), to = before + (size_t)d;
        const uint16_t *key = a->keys + (from >> 3) * 8 * hd + (from & 7);
        uint16_t *into = keys + (to >> 3) * 8 * hd + (to & 7);
        for (size_t i = 0; i < hd; i++)
            into[i * 8] = key[i * 8];
        memcpy(values + to * hd, a->values + from * hd, hd * sizeof *values);
    }
    a->tail_keys = keys;
    a->tail_values = values;
}

static bool off_the_trunk(const pass *p, int32_t t)
{
    for (int32_t d = 1; p->tree && d <= p->tree->depth[t]; d++)
        if (p->tree->path[t][d] != d)
            return true;
    return false;
}

/* Into how many parts each group of heads is cut. Heads of one part share the conversion of keys and values, which costs about
 * what one head does; more parts share the work better among threads. */
static int32_t group_parts(int32_t group, int32_t groups, int32_t threads)
{
    int32_t best = 1, least = INT32_MAX;
    for (int32_t parts = 1; parts <= group; parts++) {
        const int32_t cost = (groups * parts + threads - 1) / threads * (group / parts + 1);
        if (group % parts == 0 && cost < least) {
            least = cost;
            best = parts;
        }
    }
    return best;
}

static void attention_part(void *arg, int ith, int nth)
{
    pass *p = arg;
    const tb_layer *l = p->l;
    int32_t group = l->n_heads / l->n_kv_heads, hd = l->head_dim;
    const int32_t parts = group_parts(group, l->n_kv_heads * p->n, nth), heads = group / parts;
    int32_t items = l->n_kv_heads * parts * p->n;
    float *scores = p->s->s.scores + (size_t)ith * (size_t)p->m->group_max * ((size_t)p->s->capacity + 24);
    for (int32_t item; (item = tb_pool_next(p->s->pool, items)) >= 0;) {
        int32_t t = item / (l->n_kv_heads * parts), part = item % (l->n_kv_heads * parts), kv = part / parts;
        int32_t position = p->position + depth_of(p, t);
        size_t at = (size_t)kv * (size_t)p->cache->ring * (size_t)hd;
        tb_attention a = {p->cache->keys + at, p->cache->values + at, hd, p->cache->ring,
                          l->window && position >= l->window ? position - l->window + 1 : 0, position,
                          l->attention_scale, l->attention_softcap, NULL, NULL, 0};
        if (off_the_trunk(p, t))
            gather_tail(p, &a, t, p->s->tails + (size_t)ith * 2 * TB_TAIL * (size_t)p->m->head_dim_max);
        size_t head = (size_t)t * (size_t)l->q.rows + (size_t)part * (size_t)heads * (size_t)hd;
        p->m->ops->attend(&a, p->s->s.q + head, p->s->s.attention + head, heads, scores);
    }
}

/* --- the head --- */

static void enter_head(pass *p, int32_t t0, int32_t t1)
{
    int32_t hidden = p->m->d.hidden;
    for (int32_t t = t0; t < t1; t++) {
        size_t at = (size_t)t * (size_t)hidden;
        p->m->ops->rms_norm(p->s->s.a + at, p->s->s.x + at, p->m->d.final_norm, hidden, p->m->d.norm_eps);
    }
    const tb_matrix *w[] = {&p->m->d.head};
    round_inputs(p, w, 1, p->s->s.a, t0, t1, AT_HEAD);
}

static void run_head(pass *p, int32_t which, float *logits)
{
    const tb_model_desc *d = &p->m->d;
    if (which == TB_LOGITS_LAST && p->n > 1) {
        memmove(p->s->s.x, p->s->s.x + (size_t)(p->n - 1) * (size_t)d->hidden, (size_t)d->hidden * sizeof(float));
        p->position += p->n - 1;
        p->n = 1;
    }
    by_token(p, enter_head);
    const tb_rows *rows = p->rows;
    products g = {.w = {&d->head}, .y = {logits}, .n_w = 1, .rows = rows};
    run_products(p, &g);
    for (int32_t t = 0; d->final_softcap > 0 && t < p->n; t++) {
        float *row = logits + (size_t)t * (size_t)d->vocab;
        for (int32_t i = 0; rows && i < rows->n_runs; i++) {
            int32_t r0 = rows->runs[i][0] * 16, r1 = rows->runs[i][1] * 16 < d->vocab ? rows->runs[i][1] * 16 : d->vocab;
            p->m->ops->softcap(row + r0, d->final_softcap, r1 - r0);
        }
        if (!rows)
            p->m->ops->softcap(row, d->final_softcap, d->vocab);
    }
}

/* Bytes of weights that op reads of so many row blocks of w. */
static double bytes_of(const tb_matrix *w, int32_t op, int32_t blocks)
{
    double units = (w->cols + 15) / 16, records = (w->cols + 63) / 64 * 4;
    double row = units * 32 * w->draft_bits + records * 16 + 16 * 6;
    if (op == TB_VERIFY && w->residual_bits)
        row += units * 32 * w->residual_bits + records * 8 * 16 / w->residual_group;
    return row * blocks;
}

/* `full`: a draft whose layers compute with the residual where the device has it. */
static double bytes_read(const pass *p, int32_t which, bool full)
{
    double bytes = 0;
    const tbg_layer *at = full ? p->m->gpu->layers : NULL;
    for (int32_t i = 0; i < p->m->d.n_layers; i++) {
        const tb_layer *l = &p->m->layers[i];
        const tb_matrix *w[] = {&l->q, &l->k, &l->v, &l->o, &l->gate, &l->up, &l->down};
        for (size_t j = 0; j < sizeof w / sizeof *w; j++)
            bytes += w[j]->rows ? bytes_of(w[j], at && at[i].residual ? TB_VERIFY : p->op, (w[j]->rows + 15) / 16) : 0;
    }
    int32_t blocks = (p->m->d.vocab + 15) / 16;
    for (int32_t i = 0; p->rows && i < p->rows->n_runs; i++)
        blocks = (i ? blocks : 0) + p->rows->runs[i][1] - p->rows->runs[i][0];
    return bytes + (which == TB_LOGITS_NONE ? 0 : bytes_of(&p->m->d.head, at && at[p->m->d.n_layers].residual ? TB_VERIFY : p->op, blocks));
}

int tb_forward(tb_session *s, int32_t op, const int32_t *tokens, int32_t n, int32_t position, const tb_tree *tree, int32_t which,
               float *logits, char *err, size_t err_n)
{
    const tb_model *m = s->m;
    if (op == TB_VERIFY && !m->d.head.residual_bits)
        return tb_fail(err, err_n, TB_EINVAL, "only the draft part of the model is there: the residual is missing");
    for (int32_t t = 0; t < n; t++)
        if (tokens[t] < 0 || tokens[t] >= m->d.vocab)
            return tb_fail(err, err_n, TB_EINVAL, "token id %d is outside the model's vocabulary of %d", (int)tokens[t], (int)m->d.vocab);
    pass p = {s, m, NULL, NULL, op, n, position, 0, tokens, tree, logits && logits == s->draft_logits && s->head.n_runs ? &s->head : NULL};
    tb_scratch *b = &s->s;
    const int32_t more = op == TB_DRAFT ? s->ranked.more : 0;
    for (int32_t t = 0; t < n; t++)
        if (position + slot_of(&p, t) + more >= s->high)
            s->high = position + slot_of(&p, t) + more + 1;
    s->bytes_read += (1 + more) * bytes_read(&p, which, op == TB_DRAFT && logits && logits == s->draft_logits && s->belief.full);
    if (s->gpu)
        return tbg_forward(s, op, tokens, n, position, tree, which, logits, err, err_n);
    by_token(&p, embed);
    for (int32_t i = 0; i < m->d.n_layers; i++) {
        if (atomic_load_explicit(&s->abort, memory_order_relaxed))
            return tb_fail(err, err_n, TB_EABORT, "interrupted");
        const tb_layer *l = p.l = &m->layers[i];
        p.cache = &s->caches[i];
        p.layer = i;
        by_token(&p, enter_attention);
        products qkv = {.w = {&l->q, &l->k, &l->v}, .y = {b->q, b->k, b->v}, .n_w = l->v.rows ? 3 : 2};
        run_products(&p, &qkv);
        by_token(&p, place_keys);
        tb_parallel_for(s->pool, attention_part, &p);
        by_token(&p, enter_o);
        products o = {.w = {&l->o}, .y = {b->h}, .n_w = 1};
        run_products(&p, &o);
        by_token(&p, leave_attention);
        products gate_up = {.w = {&l->gate, &l->up}, .y = {b->gate, b->up}, .n_w = 2, .gated = true};
        run_products(&p, &gate_up);
        by_token(&p, enter_down);
        products down = {.w = {&l->down}, .y = {b->h}, .n_w = 1};
        run_products(&p, &down);
        by_token(&p, leave_ffn);
        int code = check(&p, err, err_n);
        if (code)
            return code;
    }
    p.layer = m->d.n_layers;
    if (which != TB_LOGITS_NONE)
        run_head(&p, which, logits ? logits : b->logits);
    return check(&p, err, err_n);
}
