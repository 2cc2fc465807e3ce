/* hybrid.c - the decoder on a device, for one batch of tokens and one set of weights.
 *
 * A linear group (q k v, o, gate up, down, head) in a verification: its inputs are rounded on the device and go to the host, the device
 * multiplies the 2-bit part while the CPU multiplies the residual, whose results come back to be added. Every result is
 *     (2-bit sum * U + residual sum * U) + bias
 * with each sum in the order of activation groups, wherever the residual was multiplied: so the bits do not depend on the placement. */
#include "hybrid.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "hybrid_pass.h"

static int min_int(int a, int b) { return a < b ? a : b; }

enum { AT_QKV, AT_O, AT_GATE_UP, AT_DOWN, AT_HEAD };

static int depth_of(const pass *p, int t) { return p->tree ? p->tree->depth[t] : t; }
static int slot_of(const pass *p, int t) { return p->tree ? p->tree->path[t][p->tree->depth[t]] : t; }

/* --- queue --- */

void tbg_go(pass *p, int kernel, int gx, int gy, int gz, const tbg_params *q, tbg_buffer *const b[TBG_BUFFERS])
{
    const int groups[3] = {gx, gy, gz};
    if (!p->code && gx > 0 && gy > 0 && gz > 0)
        p->code = p->g->driver->launch(p->g, p->queue, kernel, groups, b, q);
}

static void write_to(pass *p, tbg_buffer *b, const void *from, size_t bytes)
{
    if (!p->code && bytes)
        p->code = p->g->driver->write(p->g, p->queue, b, 0, from, bytes);
    p->h->bus.to[p->phase] += (double)bytes;
}

void tbg_read_from(pass *p, tbg_buffer *b, size_t at, void *to, size_t bytes)
{
    if (!p->code && bytes)
        p->code = p->g->driver->read(p->g, p->queue, b, at, to, bytes);
    p->h->bus.back[p->phase] += (double)bytes;
}

void tbg_mark(pass *p, int queue, int event)
{
    if (!p->code)
        p->code = p->g->driver->mark(p->g, queue, event);
}

void tbg_wait_for(pass *p, int event)
{
    if (!p->code)
        p->code = p->g->driver->wait(p->g, event);
}

static void after(pass *p, int queue, int event)
{
    if (!p->code)
        p->code = p->g->driver->after(p->g, queue, event);
}

/* --- the CPU's share: the residual --- */

typedef struct residual {
    pass *p;
    tb_matrix w[3];                 /* without bias: it is added where the parts meet */
    const float *x;                 /* [m, cols] */
    float *y[3];
    int n_w, m, step, chunks;
    atomic_int bad;
} residual;

static void round_part(void *arg, int ith, int nth)
{
    residual *r = arg;
    const int t0 = (int)((int64_t)r->m * ith / nth), t1 = (int)((int64_t)r->m * (ith + 1) / nth);
    bool done[3] = {false, false, false};
    for (int i = 0; i < r->n_w; i++) {
        const int kind = tb_act_kind(&r->w[i], TB_RESIDUAL);
        if (done[kind])
            continue;
        done[kind] = true;
        tb_act act;
        tb_act_layout(&act, kind, r->m, r->w[i].cols, r->p->h->acts_host[kind]);
        if (t1 > t0 && r->p->m->kernels->quantize(&act, r->x, r->w[i].cols, t0, t1))
            atomic_store(&r->bad, 1);
    }
}

static int chunks_of(const residual *r, int i) { return ((r->w[i].rows + 15) / 16 + r->step - 1) / r->step; }

static void residual_part(void *arg, int ith, int nth)
{
    residual *r = arg;
    const tb_session *s = r->p->s;
    (void)nth;
    for (int chunk; (chunk = tb_pool_next(s->pool, r->chunks)) >= 0;) {
        int i = 0;
        for (int n; chunk >= (n = chunks_of(r, i)); i++)
            chunk -= n;
        const int blocks = (r->w[i].rows + 15) / 16, b0 = chunk * r->step, b1 = min_int(b0 + r->step, blocks);
        tb_act act;
        const int kind = tb_act_kind(&r->w[i], TB_RESIDUAL);
        tb_act_layout(&act, kind, r->m, r->w[i].cols, r->p->h->acts_host[kind]);
        r->p->m->kernels->matmul(&r->w[i], TB_RESIDUAL, &act, r->y[i], r->w[i].rows, b0, b1, s->s.kernel + (size_t)ith * s->s.kernel_n);
    }
}

/* Rounds x again and multiplies; y: the matrices' results, one after the other. */
static void multiply_residual(pass *p, residual *r, const float *x, float *y, int place, int layer)
{
    int blocks = 0;
    const double start = tb_clock();
    if (!p->code)
        p->code = tbg_reserve_acts(p->s, r->m);
    if (p->code)
        return;
    r->p = p;
    r->x = x;
    for (int i = 0; i < r->n_w; i++) {
        r->y[i] = y;
        y += (size_t)r->m * (size_t)r->w[i].rows;
        blocks += (r->w[i].rows + 15) / 16;
    }
    r->step = tb_step(blocks, p->s->threads);
    r->chunks = 0;
    for (int i = 0; i < r->n_w; i++)
        r->chunks += chunks_of(r, i);
    atomic_init(&r->bad, 0);
    if (r->m == 1)
        round_part(r, 0, 1);
    else
        tb_parallel_for(p->s->pool, round_part, r);
    if (atomic_load(&r->bad)) {
        int expected = 0;
        atomic_compare_exchange_strong(&p->s->bad, &expected, 1 + layer * 8 + place);
    }
    tb_parallel_for(p->s->pool, residual_part, r);
    const double took = tb_clock() - start;
    p->s->product_seconds += took;
    p->cpu_s += took;
    if (p->phase == TB_BUS_VERIFY)
        p->h->group_s[place] = took;
}

/* --- planes that stream through the device --- */

typedef struct copy {
    const uint8_t *from[6];
    uint8_t *to[6];
    size_t bytes[6];
    int n;
} copy;

static void copy_part(void *arg, int ith, int nth)
{
    const copy *c = arg;
    for (int i = 0; i < c->n; i++) {
        const size_t a = c->bytes[i] / 64 * (size_t)ith / (size_t)nth * 64, b = ith + 1 == nth ? c->bytes[i] : c->bytes[i] / 64 * (size_t)(ith + 1) / (size_t)nth * 64;
        memcpy(c->to[i] + a, c->from[i] + a, b - a);
    }
}

static const int group_first[5] = {TBG_Q, TBG_O, TBG_GATE, TBG_DOWN, TBG_PARTS};

/* The residual of linear group `group` of a layer into slot p->staged, by way of pinned memory. */
static void bring(pass *p, int layer, int group)
{
    tbg_session *h = p->h;
    const int k = p->staged, first = group_first[group];
    const int *d = p->gm->rows + (layer * TBG_PARTS + first) * TBG_DESC;
    const size_t base = (size_t)(uint32_t)d[TBG_RCODES];
    copy c = {.n = 0};
    size_t end = 0;
    tbg_wait_for(p, TBG_STAGED + k);        /* what is in the pinned slot has gone */
    if (p->code)
        return;
    for (int part = first; part < group_first[group + 1]; part++) {
        const tb_matrix *w = tbg_matrix(p->m, layer, part);
        const int *e = p->gm->rows + (layer * TBG_PARTS + part) * TBG_DESC;
        if (!w->rows)
            continue;
        for (int plane = 0; plane < 2; plane++) {
            const size_t at = 16 * ((size_t)(uint32_t)e[plane ? TBG_RSCALES : TBG_RCODES] - base);
            c.from[c.n] = plane ? w->residual_scales : w->residual_codes;
            c.bytes[c.n] = plane ? tbg_scales_bytes(w, true) : tbg_codes_bytes(w, true);
            c.to[c.n] = (uint8_t *)h->pinned[k]->host + at;
            end = at + c.bytes[c.n++];
        }
    }
    tb_parallel_for(p->s->pool, copy_part, &c);
    after(p, TBG_COPY, TBG_USED + k);
    if (!p->code)
        p->code = p->g->driver->write(p->g, TBG_COPY, h->stage[k], 0, h->pinned[k]->host, end);
    tbg_mark(p, TBG_COPY, TBG_STAGED + k);
    h->bus.to[p->phase] += (double)end;
    h->bus.weights[p->phase] += (double)end;
}

static void bring_next(pass *p, int layer, int group)
{
    do {
        if (++group == 4) {
            group = 0;
            layer++;
        }
    } while (layer < p->m->d.n_layers && p->gm->layers[layer].residual);
    if (layer < p->m->d.n_layers)
        bring(p, layer, group);
}

/* --- linear groups --- */

typedef struct linear {
    int layer, first, count, place;
    int m, cols, at;                /* tokens; input of so many columns from float `at` of `input` on */
    bool gated;
    tbg_buffer *input, *y;
} linear;

/* Whether the 2-bit part of a layer is all that is computed. */
static bool low(const pass *p, int layer) { return p->op == TB_DRAFT && !(p->full && p->gm->layers[layer].residual); }

static int act_kind(const pass *p, int layer, const tb_matrix *w) { return low(p, layer) ? TB_ACT8 : w->wide ? TB_ACT16_WIDE : TB_ACT16; }

static void round_inputs(pass *p, const linear *l)
{
    bool done[TBG_KINDS] = {false, false, false};
    for (int i = 0; i < l->count; i++) {
        const tb_matrix *w = tbg_matrix(p->m, l->layer, l->first + i);
        const int kind = act_kind(p, l->layer, w), size = kind == TB_ACT16_WIDE ? 64 : 128;
        if (!w->rows || done[kind])
            continue;
        done[kind] = true;
        const tbg_params q = {.m = l->m, .n = l->cols, .kind = kind, .place = 1 + l->layer * 8 + l->place, .x = l->at,
                              .flags = l->gated ? TBG_GATED : 0, .activation = p->m->d.activation};
        tbg_buffer *const b[TBG_BUFFERS] = {l->input, p->w->a, p->w->acts[kind], p->w->flag};
        tbg_go(p, TBG_K_round_acts, (l->cols + size - 1) / size, l->m, 1, &q, b);
    }
}

/* The product of one plane: matrices of the same kind in one launch. */
static void multiply(pass *p, const linear *l, bool rest, tbg_buffer *planes, int shift, int flags)
{
    const tbg_layer *place = &p->gm->layers[l->layer];
    for (int i = 0, n; i < l->count; i += n) {
        const tb_matrix *w = tbg_matrix(p->m, l->layer, l->first + i);
        const int kind = act_kind(p, l->layer, w), bits = rest ? w->residual_bits : w->draft_bits, many = l->m > 1;
        int blocks = 0;
        for (n = 0; i + n < l->count; n++) {
            const tb_matrix *v = tbg_matrix(p->m, l->layer, l->first + i + n);
            if (v->rows && (act_kind(p, l->layer, v) != kind || (rest ? v->residual_bits : v->draft_bits) != bits))
                break;
            blocks += (v->rows + 15) / 16;
        }
        int count = n;
        while (count > 1 && !tbg_matrix(p->m, l->layer, l->first + i + count - 1)->rows)
            count--;
        const int kernel = rest ? (bits == 4 ? TBG_K_residual4_t1 : bits == 6 ? TBG_K_residual6_t1 : TBG_K_residual8_t1) + many
                                : TBG_K_draft2_a8_t1 + 4 * (bits - 2) + 2 * (kind != TB_ACT8) + many;
        const tbg_params q = {.m = l->m, .first = l->layer * TBG_PARTS + l->first + i, .count = count, .a = shift,
                              .flags = flags | (p->listed ? TBG_LISTED : 0)};
        tbg_buffer *const b[TBG_BUFFERS] = {planes, p->gm->table, p->w->acts[kind], l->y, place->draft, p->gm->weights, p->listed ? p->h->blocks : NULL};
        if (p->listed)
            blocks = p->h->n_blocks;
        if (w->rows)
            tbg_go(p, kernel, many ? (l->m + 7) / 8 : 1, blocks, 1, &q, b);
    }
}

static void run_linear(pass *p, const linear *l)
{
    const tbg_layer *place = &p->gm->layers[l->layer];
    tbg_session *h = p->h;
    round_inputs(p, l);
    if (low(p, l->layer)) {
        multiply(p, l, false, place->draft, 0, TBG_FINISH);
        return;
    }
    if (place->residual) {
        multiply(p, l, false, place->draft, 0, 0);
        multiply(p, l, true, place->residual, 0, TBG_ADD | TBG_FINISH);
        return;
    }
    if (p->stream && l->layer < p->m->d.n_layers) {
        const int k = p->staged, shift = p->gm->rows[(l->layer * TBG_PARTS + l->first) * TBG_DESC + TBG_RCODES];
        multiply(p, l, false, place->draft, 0, 0);
        after(p, p->queue, TBG_STAGED + k);
        multiply(p, l, true, h->stage[k], shift, TBG_ADD | TBG_FINISH);
        tbg_mark(p, p->queue, TBG_USED + k);
        p->staged = 1 - k;
        bring_next(p, l->layer, l->place);
        return;
    }
    residual r = {.m = l->m};
    int rows = 0, parts = 0;
    for (int i = 0; i < l->count; i++) {
        const tb_matrix *w = tbg_matrix(p->m, l->layer, l->first + i);
        if (!w->rows)
            continue;
        r.w[r.n_w] = *w;
        r.w[r.n_w++].bias = NULL;
        rows += w->rows;
        parts = i + 1;
    }
    if (!p->code)
        p->code = tbg_reserve_staging(p->s, (size_t)l->m * (size_t)l->cols, (size_t)l->m * (size_t)rows);
    if (p->code)
        return;
    tbg_read_from(p, l->gated ? p->w->a : l->input, (size_t)(l->gated ? 0 : l->at) * sizeof(float), h->in->host,
              (size_t)l->m * (size_t)l->cols * sizeof(float));
    tbg_mark(p, p->queue, TBG_INPUT);
    multiply(p, l, false, place->draft, 0, 0);
    tbg_mark(p, p->queue, TBG_OTHER);       /* so that the product starts now */
    tbg_overlap_go_on(p, l->place);
    tbg_wait_for(p, TBG_INPUT);
    multiply_residual(p, &r, h->in->host, h->out->host, l->place, l->layer);
    tbg_buffer *const yr = l->layer == p->m->d.n_layers ? h->logits_r : h->yr;
    write_to(p, yr, h->out->host, (size_t)l->m * (size_t)rows * sizeof(float));
    const tbg_params q = {.m = l->m, .first = l->layer * TBG_PARTS + l->first, .count = parts};
    tbg_buffer *const b[TBG_BUFFERS] = {l->y, p->gm->table, NULL, yr, NULL, p->gm->weights};
    tbg_go(p, TBG_K_sum_parts, (rows + 63) / 64, l->m, 1, &q, b);
}

/* --- between them --- */

void tbg_start(pass *p, const int32_t *tokens)
{
    tbg_work *w = p->w;
    int32_t *ids = w->meta->host, *positions = ids + w->tokens, *slots = positions + w->tokens, *path = slots + w->tokens;
    float *angles = (float *)(void *)(path + TBG_AHEAD * TBG_AHEAD);
    const tb_model *m = p->m;
    p->angles = p->n;
    for (int t = 0; t < p->n + p->more; t++) {
        positions[t] = t < p->n ? p->position + depth_of(p, t) : positions[t - 1] + 1;
        if (t < p->n) {
            ids[t] = tokens ? tokens[t] : 0;
            slots[t] = p->position + slot_of(p, t);
            for (int d = 0; p->tree && d <= p->tree->depth[t]; d++)
                path[t * TBG_AHEAD + d] = p->tree->path[t][d];
        }
        float *a = angles + (size_t)t * 2 * (size_t)m->rope_half;
        for (int r = 0; r < m->d.n_ropes; r++) {
            const tb_rope *rope = &m->ropes[r];
            for (int i = 0; i < rope->dim / 2; i++) {
                float sine, cosine, angle = (float)positions[t] * rope->inv_freq[i];
                tb_sincos((double)angle, &sine, &cosine);
                a[i] = cosine * rope->factor;
                a[rope->dim / 2 + i] = sine * rope->factor;
            }
            a += rope->dim;
        }
    }
    if (tokens)
        write_to(p, w->ids, ids, (size_t)p->n * sizeof *ids);
    write_to(p, w->positions, positions, (size_t)p->n * sizeof *ids);
    write_to(p, w->slots, slots, (size_t)p->n * sizeof *ids);
    if (p->tree)
        write_to(p, w->path, path, (size_t)p->n * TBG_AHEAD * sizeof *path);
    write_to(p, w->angles, angles, (size_t)(p->n + p->more) * 2 * (size_t)m->rope_half * sizeof *angles);
    tbg_embed(p);
}

void tbg_embed(pass *p)
{
    const tb_model *m = p->m;
    const tb_matrix *head = &m->d.head;
    const tbg_layer *at = &p->gm->layers[m->d.n_layers];
    const bool tied = !m->d.embedding_codes, full = head->residual_bits != 0;
    const tbg_params q = {.m = p->n, .n = m->d.hidden, .flags = tied ? TBG_TIED | (full ? TBG_TIED_FULL : 0) : 0, .scale = m->d.embedding_scale,
                          .first = m->d.n_layers * TBG_PARTS, .kind = 256 * head->draft_bits + head->residual_bits};
    tbg_buffer *const b[TBG_BUFFERS] = {p->gm->embedding_codes, p->gm->embedding_scales, at->draft, p->gm->table,
                                        at->residual ? at->residual : p->gm->tied_residual, NULL, p->w->ids, p->w->x};
    tbg_go(p, TBG_K_embed, (m->d.hidden + 63) / 64, p->n, 1, &q, b);
    /* what the kernel reads of rows that lie in RAM */
    if (!tied)
        p->h->bus.to[p->phase] += (double)p->n * (m->d.hidden + 2 * ((m->d.hidden + 31) / 32));
    else if (full && !at->residual)
        p->h->bus.to[p->phase] += (double)p->n * (m->d.hidden * (head->residual_bits / 8.0 + 0.5 / head->residual_group));
}

void tbg_move(pass *p, int position, const int32_t *slots, int n)
{
    write_to(p, p->w->ids, slots, (size_t)n * sizeof *slots);
    for (int i = 0; i < p->m->d.n_layers && n > 0; i++) {
        const tb_layer *l = &p->m->layers[i];
        const tbg_params q = {.n = n, .position = position, .ring = p->s->caches[i].ring, .head_dim = l->head_dim};
        tbg_buffer *const b[TBG_BUFFERS] = {p->w->ids, NULL, NULL, p->h->keys[i], p->h->values[i]};
        tbg_go(p, TBG_K_move_slots, l->n_kv_heads, 1, 1, &q, b);
    }
}

/* x = (x + norm(h)) * scale where there is an h; a = norm(x). */
static void step_norm(pass *p, bool has_h, int w0, float scale, int w1)
{
    const tbg_params q = {.m = p->n, .n = p->m->d.hidden, .flags = has_h ? TBG_HAS_H : 0, .w0 = w0, .w1 = w1, .scale = scale, .eps = p->m->d.norm_eps};
    tbg_buffer *const b[TBG_BUFFERS] = {p->w->x, p->w->y, p->gm->weights, p->w->a};
    tbg_go(p, TBG_K_norm_step, 1, p->n, 1, &q, b);
}

static void norm_whole(pass *p, int at, int n, int weight)
{
    const tbg_params q = {.m = p->n, .n = n, .w0 = -1, .w1 = weight, .x = at, .a = at, .scale = 1, .eps = p->m->d.norm_eps};
    tbg_buffer *const b[TBG_BUFFERS] = {p->w->y, NULL, p->gm->weights, p->w->y};
    if (weight >= 0)
        tbg_go(p, TBG_K_norm_step, 1, p->n, 1, &q, b);
}

static void attention(pass *p, int layer)
{
    const tb_layer *l = &p->m->layers[layer];
    const tbg_layer *at = &p->gm->layers[layer];
    tbg_session *h = p->h;
    const int hd = l->head_dim, ring = p->s->caches[layer].ring;
    int skip = 0;
    for (int r = 0; r < l->rope; r++)
        skip += p->m->ropes[r].dim;
    if (l->qk_norm_whole) {
        norm_whole(p, 0, l->q.rows, at->norms[TBG_Q_NORM]);
        norm_whole(p, p->n * l->q.rows, l->k.rows, at->norms[TBG_K_NORM]);
    }
    tbg_params q = {.m = p->n, .position = p->position, .ring = ring, .window = l->window, .heads = l->n_heads, .kv_heads = l->n_kv_heads, .head_dim = hd,
                    .rope = l->rope < 0 ? 0 : p->m->ropes[l->rope].dim / 2, .rope_skip = skip, .angles = 2 * p->m->rope_half,
                    .w0 = l->qk_norm_whole ? -1 : at->norms[TBG_Q_NORM], .w1 = l->qk_norm_whole ? -1 : at->norms[TBG_K_NORM],
                    .eps = p->m->d.norm_eps, .scale = l->attention_scale, .softcap = l->attention_softcap,
                    .flags = (l->v.rows ? 0 : TBG_VALUES_ARE_KEYS) | (l->v_norm ? TBG_V_NORM : 0) | (p->tree ? TBG_TREE : 0)};
    tbg_buffer *const place[TBG_BUFFERS] = {p->w->y, p->w->angles, p->gm->weights, h->keys[layer], h->values[layer], p->w->slots};
    tbg_go(p, TBG_K_place_heads, l->n_heads + l->n_kv_heads, p->n, 1, &q, place);

    /* Tokens in tiles, so that the parts of all chunks find room. */
    const int oldest = l->window && p->position >= l->window ? p->position - l->window + 1 : 0;
    int newest = p->position;
    for (int t = 0; t < p->n; t++)
        newest = p->position + depth_of(p, t) > newest ? p->position + depth_of(p, t) : newest;
    q.chunk = oldest / TBG_CHUNK;
    q.chunks = newest / TBG_CHUNK - q.chunk + 1;
    const size_t floats = (size_t)l->n_heads * (size_t)q.chunks * (size_t)(hd + 2);
    int tile = (int)(p->w->parts->bytes / sizeof(float) / floats);
    tile = tile < 1 ? 1 : tile;
    for (int t = 0; t < p->n; t += tile) {
        const int m = min_int(tile, p->n - t);
        q.token = t;
        tbg_buffer *const chunk[TBG_BUFFERS] = {p->w->y, h->keys[layer], h->values[layer], p->w->parts, p->w->positions, p->w->path};
        tbg_go(p, TBG_K_attend_chunk, l->n_heads, m, q.chunks, &q, chunk);
        tbg_buffer *const join[TBG_BUFFERS] = {p->w->parts, p->w->a, p->w->positions};
        tbg_go(p, TBG_K_attend_join, l->n_heads, m, 1, &q, join);
    }
}

void tbg_run_layer(pass *p, int i)
{
    const tb_layer *l = &p->m->layers[i];
    const tbg_layer *at = &p->gm->layers[i];
    const tb_layer *before = i ? l - 1 : NULL;
    tbg_work *w = p->w;
    const int hidden = p->m->d.hidden;
    step_norm(p, i > 0, i ? at[-1].norms[TBG_POST_FFN] : -1, before ? before->output_scale : 1, at->norms[TBG_INPUT_NORM]);
    run_linear(p, &(linear){.layer = i, .first = TBG_Q, .count = 3, .place = AT_QKV, .m = p->n, .cols = hidden, .input = w->a, .y = w->y});
    attention(p, i);
    run_linear(p, &(linear){.layer = i, .first = TBG_O, .count = 1, .place = AT_O, .m = p->n, .cols = l->o.cols, .input = w->a, .y = w->y});
    step_norm(p, true, at->norms[TBG_POST_ATTENTION], 1, at->norms[TBG_PRE_FFN]);
    run_linear(p, &(linear){.layer = i, .first = TBG_GATE, .count = 2, .place = AT_GATE_UP, .m = p->n, .cols = hidden, .input = w->a, .y = w->y});
    run_linear(p, &(linear){.layer = i, .first = TBG_DOWN, .count = 1, .place = AT_DOWN, .m = p->n, .cols = l->down.cols, .gated = true, .input = w->y,
                            .y = w->y});
}

/* --- the head --- */

void tbg_last_norm(pass *p)
{
    const int last = p->m->d.n_layers - 1;
    step_norm(p, true, p->gm->layers[last].norms[TBG_POST_FFN], p->m->layers[last].output_scale, p->gm->final_norm);
}

tbg_buffer *tbg_logits(const pass *p) { return p->listed ? p->h->some_logits : p->w->logits; }

int tbg_head_product(pass *p, int t, int m)
{
    const tb_model_desc *d = &p->m->d;
    run_linear(p, &(linear){.layer = d->n_layers, .first = 0, .count = 1, .place = AT_HEAD, .m = m, .cols = d->hidden, .at = t * d->hidden,
                            .input = p->w->a, .y = tbg_logits(p)});
    if (d->final_softcap > 0) {
        const tbg_params q = {.m = m, .n = d->vocab, .softcap = d->final_softcap};
        tbg_buffer *const b[TBG_BUFFERS] = {tbg_logits(p)};
        tbg_go(p, TBG_K_cap_logits, (d->vocab + 63) / 64, m, 1, &q, b);
    }
    return p->code;
}

static void run_head(pass *p, int32_t which, float *logits)
{
    const size_t vocab = (size_t)p->m->d.vocab;
    const bool sparse = logits == p->s->draft_logits && p->s->sampling;
    const int t0 = which == TB_LOGITS_LAST ? p->n - 1 : 0;
    p->listed = sparse && tbg_short_head(p);
    for (int t = t0; t < p->n && !p->code; t += TBG_HEAD_TOKENS) {
        const int m = min_int(TBG_HEAD_TOKENS, p->n - t);
        float *to = logits + (size_t)(t - t0) * vocab;
        if (tbg_head_product(p, t, m))
            return;
        if (sparse)
            tbg_seek(p, t, m);
        else
            tbg_read_from(p, p->w->logits, 0, to, (size_t)m * vocab * sizeof *to);
        if (p->more)
            continue;
        tbg_mark(p, p->queue, TBG_OTHER);
        tbg_wait_for(p, TBG_OTHER);
        if (sparse)
            tbg_gather(p, m, to);
    }
    p->listed = false;
}

/* --- a pass --- */

static int finish(pass *p, char *err, size_t err_n)
{
    int32_t flag = 0;
    if (!p->code)
        p->code = p->g->driver->read(p->g, p->queue, p->w->flag, 0, &flag, sizeof flag);
    const int drained = p->g->driver->finish(p->g, p->queue), copied = p->stream ? p->g->driver->finish(p->g, TBG_COPY) : TB_OK;
    if (!p->code)
        p->code = drained ? drained : copied;
    if (p->code)
        return p->code == TB_EABORT ? tb_fail(err, err_n, TB_EABORT, "interrupted") : tbg_report(p->g, p->code, err, err_n);
    if (tb_check_files(err, err_n))
        return TB_EINVAL;
    const int seen = atomic_exchange(&p->s->bad, 0);
    flag = flag ? flag : seen;
    if (!flag)
        return TB_OK;
    const int32_t none = 0;
    (void)tbg_upload(p->g, p->w->flag, 0, &none, sizeof none);
    return tb_fail_not_finite(flag, p->position, p->n, err, err_n);
}

static void run_pass(pass *p, int32_t which, float *logits)
{
    for (int i = 0; i < p->m->d.n_layers && !p->code; i++) {
        if (atomic_load_explicit(&p->s->abort, memory_order_relaxed))
            p->code = TB_EABORT;
        else
            tbg_run_layer(p, i);
    }
    if (which != TB_LOGITS_NONE) {
        tbg_last_norm(p);
        run_head(p, which, logits ? logits : p->s->s.logits);
    }
}

int tbg_forward(tb_session *s, int32_t op, const int32_t *tokens, int32_t n, int32_t position, const tb_tree *tree, int32_t which, float *logits,
                char *err, size_t err_n)
{
    tbg_session *h = s->gpu;
    const tb_model *m = s->m;
    const tbg_model *gm = m->gpu;
    pass p = {.s = s, .h = h, .m = m, .gm = gm, .g = gm->g, .op = op, .n = n, .position = position, .tree = tree, .queue = TBG_COMPUTE, .w = &h->work,
              .more = op == TB_DRAFT ? s->ranked.more : 0, .full = op == TB_DRAFT && logits && logits == s->draft_logits && s->belief.full,
              .phase = op == TB_DRAFT ? TB_BUS_DRAFT : which == TB_LOGITS_ALL && !logits ? TB_BUS_VERIFY : TB_BUS_PREFILL};
    overlap aside;
    tb_tree below;
    tbg_lock(p.g);
    const double began = tb_clock();
    p.stream = op == TB_VERIFY && tbg_stream_pays(s, n);
    if (p.stream)
        p.code = tbg_reserve_stages(s);
    if (p.phase == TB_BUS_VERIFY && s->overlap && !p.stream && !p.code && !tbg_reserve_aside(s))
        tbg_overlap_begin(&aside, &p, s->overlap);
    tbg_start(&p, tokens);
    if (p.stream)
        bring_next(&p, 0, -1);
    run_pass(&p, which, logits);
    while (p.more && !p.code) {
        tbg_follow(&p, &below);
        run_pass(&p, which, logits);
    }
    if (p.cpu_s > 0 && n >= 16)
        h->cpu_token_s = h->cpu_token_s > 0 ? 0.7 * h->cpu_token_s + 0.3 * p.cpu_s / n : p.cpu_s / n;
    const int code = finish(&p, err, err_n);
    if (!code && p.overlap)
        tbg_overlap_end(&aside);
    if (!code && op == TB_DRAFT && n == 1)
        h->draft_layer_s[p.full] = (tb_clock() - began) / ((m->d.n_layers + 1) * (p.link + 1));
    tbg_unlock(p.g);
    return code;
}

void tbg_compact(tb_session *s, int32_t position, const int32_t *slots, int32_t n)
{
    tb_gpu *g = s->m->gpu->g;
    pass p = {.s = s, .h = s->gpu, .m = s->m, .gm = s->m->gpu, .g = g, .queue = TBG_COMPUTE, .phase = TB_BUS_VERIFY, .w = &s->gpu->work};
    tbg_lock(g);
    memcpy(p.w->meta->host, slots, (size_t)n * sizeof *slots);
    tbg_move(&p, position, p.w->meta->host, n);
    (void)g->driver->finish(g, TBG_COMPUTE);    /* a failure stays with the device: the next pass reports it */
    tbg_unlock(g);
}
