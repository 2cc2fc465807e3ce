/* hybrid_session.c - memory of a hybrid session: its cache, buffers for passes, and what it believes about the bus. */
#include "hybrid_session.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static size_t max_size(size_t a, size_t b) { return a > b ? a : b; }
static int min_int(int a, int b) { return a < b ? a : b; }
static int round8(int n) { return (n + 7) / 8 * 8; }

int tbg_rows_max(const tb_model *m)
{
    int most = m->d.hidden;
    for (int i = 0; i < m->d.n_layers; i++) {
        const tb_layer *l = &m->layers[i];
        const int qkv = l->q.rows + 2 * l->k.rows, ffn = 2 * l->gate.rows;
        most = qkv > most ? qkv : most;
        most = ffn > most ? ffn : most;
    }
    return most;
}

static size_t act_bytes(int kind, size_t m, size_t cols)
{
    const size_t quads = (cols + 63) / 64, groups = kind == TB_ACT16_WIDE ? quads : (cols + 127) / 128;
    return m * (quads * (kind == TB_ACT8 ? 64 : 128) + quads * 16 + groups * 4);
}

/* Of the keys, or the values, of a layer. Behind the context there is room for a block, and for one that is drafted meanwhile. */
static size_t cache_bytes(const tb_model *m, int layer, int max_context, int pass_tokens, int *ring)
{
    const tb_layer *l = &m->layers[layer];
    const int aside = TB_ASIDE + TB_MAX_DRAFT + 1, limit = round8(max_context) + aside;
    const int slots = l->window ? round8(min_int(limit, l->window + pass_tokens + aside)) : limit;
    if (ring)
        *ring = slots;
    return (size_t)slots * (size_t)l->head_dim * (size_t)l->n_kv_heads * sizeof(uint16_t);
}

/* --- life --- */

int tbg_session_new(tb_session *s, char *err, size_t n)
{
    const tb_model *m = s->m;
    tb_gpu *g = m->gpu->g;
    const size_t layers = (size_t)m->d.n_layers;
    tbg_session *h = s->gpu = calloc(1, sizeof *h);
    if (h) {
        h->keys = calloc(layers, sizeof *h->keys);
        h->values = calloc(layers, sizeof *h->values);
    }
    if (!h || !h->keys || !h->values)
        return tb_fail(err, n, TB_ENOMEM, "out of memory for a session");
    double draft = 0, residual = 0;
    for (size_t i = 0; i <= layers; i++) {
        draft += (double)m->gpu->layers[i].draft->bytes;
        residual += m->gpu->layers[i].residual ? (double)m->gpu->layers[i].residual->bytes : 0;
    }
    s->belief.dearer = (draft + residual) / draft;
    tbg_lock(g);
    bool whole = true;
    for (size_t i = 0; i < layers && whole; i++) {
        tb_cache *c = &s->caches[i];
        const size_t bytes = cache_bytes(m, (int)i, s->max_context, m->gpu->pass_tokens, &c->ring);
        c->windowed = m->layers[i].window && c->ring < round8(s->max_context) + TB_ASIDE + TB_MAX_DRAFT + 1;
        h->keys[i] = tbg_new_buffer(g, bytes, TBG_DEVICE);
        h->values[i] = h->keys[i] ? tbg_new_buffer(g, bytes, TBG_DEVICE) : NULL;
        whole = h->values[i] != NULL;
    }
    tbg_unlock(g);
    s->capacity = s->max_context;
    return whole ? TB_OK : tb_fail(err, n, TB_ENOMEM, "%s: out of memory for a cache of %d tokens (lower --ctx, or --gpu-residual-layers)", g->name,
                                   (int)s->max_context);
}

static void free_work(tb_gpu *g, tbg_work *w)
{
    tbg_buffer **const all[] = {&w->x, &w->a, &w->y, &w->acts[0], &w->acts[1], &w->acts[2], &w->ids, &w->positions, &w->slots, &w->path, &w->angles,
                                &w->flag, &w->parts, &w->logits, &w->best, &w->ranked, &w->meta, &w->found};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        tbg_free_buffer(g, *all[i]);
    memset(w, 0, sizeof *w);
}

void tbg_session_free(tb_session *s)
{
    tbg_session *h = s->gpu;
    if (!h)
        return;
    tb_gpu *g = s->m->gpu->g;
    tbg_lock(g);
    for (int i = 0; i < TBG_QUEUES; i++)
        (void)g->driver->finish(g, i);
    for (int i = 0; i < s->m->d.n_layers; i++) {
        if (h->keys)
            tbg_free_buffer(g, h->keys[i]);
        if (h->values)
            tbg_free_buffer(g, h->values[i]);
    }
    free_work(g, &h->work);
    free_work(g, &h->aside);
    tbg_buffer *const all[] = {h->yr, h->logits_r, h->in, h->out, h->stage[0], h->stage[1], h->pinned[0], h->pinned[1], h->blocks, h->some_logits};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        tbg_free_buffer(g, all[i]);
    tbg_unlock(g);
    for (int i = 0; i < 3; i++)
        tb_free(h->acts_host[i]);
    free(h->keys);
    free(h->values);
    free(h);
    s->gpu = NULL;
}

size_t tbg_session_bytes(const tb_session *s)
{
    const tbg_session *h = s->gpu;
    size_t bytes = 0;
    if (!h)
        return 0;
    const tbg_buffer *const pinned[] = {h->in, h->out, h->pinned[0], h->pinned[1], h->work.meta, h->work.found, h->aside.meta, h->aside.found};
    for (size_t i = 0; i < sizeof pinned / sizeof *pinned; i++)
        bytes += pinned[i] ? pinned[i]->bytes : 0;
    return bytes + h->acts_bytes[0] + h->acts_bytes[1] + h->acts_bytes[2];
}

/* --- room --- */

typedef struct item {
    tbg_buffer **b;
    size_t bytes;
    int place;
} item;

enum { ITEMS = 18 };

static void list_work(const tb_model *m, int max_context, int tokens, tbg_work *w, item items[ITEMS])
{
    const size_t t = (size_t)tokens, f = sizeof(float), hidden = (size_t)m->d.hidden, vocab = (size_t)m->d.vocab, cols = (size_t)m->cols_max;
    const size_t heads = (size_t)min_int(tokens, TBG_HEAD_TOKENS), spans = (vocab + TBG_SPAN - 1) / TBG_SPAN, found = heads * spans * TBG_FOUND * 8;
    const size_t angles = t * 2 * (size_t)m->rope_half * f, path = TBG_AHEAD * TBG_AHEAD * 4;
    size_t parts = (size_t)4 << 20;
    for (int i = 0; i < m->d.n_layers; i++) {
        const size_t chunks = (size_t)(max_context + TB_MAX_DRAFT) / TBG_CHUNK + 2;
        parts = max_size(parts, (size_t)m->layers[i].n_heads * chunks * (size_t)(m->layers[i].head_dim + 2) * f);
    }
    const item all[ITEMS] = {
        {&w->x, t * hidden * f, TBG_DEVICE}, {&w->a, t * cols * f, TBG_DEVICE}, {&w->y, t * (size_t)tbg_rows_max(m) * f, TBG_DEVICE},
        {&w->acts[0], act_bytes(0, t, cols), TBG_DEVICE}, {&w->acts[1], act_bytes(1, t, cols), TBG_DEVICE}, {&w->acts[2], act_bytes(2, t, cols), TBG_DEVICE},
        {&w->ids, max_size(t, TB_ASIDE) * 4, TBG_DEVICE}, {&w->positions, t * 4, TBG_DEVICE}, {&w->slots, t * 4, TBG_DEVICE}, {&w->path, path, TBG_DEVICE},
        {&w->angles, angles, TBG_DEVICE}, {&w->flag, 4, TBG_DEVICE}, {&w->parts, parts, TBG_DEVICE},
        {&w->logits, heads * vocab * f, TBG_DEVICE}, {&w->best, found, TBG_DEVICE}, {&w->ranked, heads * TBG_BEST * 8, TBG_DEVICE},
        {&w->meta, t * 12 + path + angles, TBG_STAGING}, {&w->found, 2 * found, TBG_STAGING}};
    memcpy(items, all, sizeof all);
}

static int allocate_work(tb_session *s, tbg_work *w, int tokens)
{
    tb_gpu *g = s->m->gpu->g;
    item items[ITEMS];
    list_work(s->m, s->max_context, tokens, w, items);
    for (int i = 0; i < ITEMS; i++)
        if (!(*items[i].b = tbg_new_buffer(g, items[i].bytes, items[i].place)))
            return TB_ENOMEM;
    w->tokens = tokens;
    const int32_t none = 0;
    return tbg_upload(g, w->flag, 0, &none, sizeof none);
}

size_t tb_model_session_bytes(const tb_model *m, int32_t max_context, int32_t pass_tokens)
{
    tbg_work w;
    item items[ITEMS];
    size_t bytes = 0, stage = 0;
    const int tokens = pass_tokens < TB_MAX_DRAFT + 1 ? TB_MAX_DRAFT + 1 : pass_tokens;
    list_work(m, max_context, tokens, &w, items);
    for (int aside = 0; aside < 2; aside++) {
        for (int i = 0; i < ITEMS; i++)
            bytes += items[i].place == TBG_DEVICE ? items[i].bytes + 256 : 0;
        list_work(m, max_context, TB_LEVEL, &w, items);
    }
    for (int i = 0; i < m->d.n_layers; i++) {
        bytes += 2 * cache_bytes(m, i, max_context, pass_tokens, NULL) + 512;
        for (int part = 0; part < TBG_PARTS; part++) {
            const tb_matrix *v = tbg_matrix(m, i, part);        /* the two widest of a group bound it */
            stage = max_size(stage, v->rows ? 2 * (tbg_codes_bytes(v, true) + tbg_scales_bytes(v, true)) : 0);
        }
    }
    /* the short head; the CPU's results, and two linear groups on their way */
    bytes += (size_t)m->d.vocab * TB_LEVEL * sizeof(float) + (size_t)m->d.vocab / 4 + 512;
    return bytes + (size_t)tokens * (size_t)tbg_rows_max(m) * sizeof(float) + (size_t)m->d.vocab * TBG_HEAD_TOKENS * sizeof(float) + 2 * stage;
}

int tbg_session_reserve(tb_session *s, int32_t tokens, char *err, size_t n)
{
    tbg_session *h = s->gpu;
    tb_gpu *g = s->m->gpu->g;
    if (tokens <= h->work.tokens)
        return TB_OK;
    tbg_lock(g);
    free_work(g, &h->work);
    const int want = tokens < TB_MAX_DRAFT + 1 ? TB_MAX_DRAFT + 1 : tokens;
    const int code = allocate_work(s, &h->work, want);
    if (code)
        free_work(g, &h->work);
    tbg_unlock(g);
    return tbg_report(g, code, err, n);
}

/* Room for the draft that goes on in a verification; the device is locked. */
int tbg_reserve_aside(tb_session *s)
{
    tbg_session *h = s->gpu;
    const int code = h->aside.tokens ? TB_OK : allocate_work(s, &h->aside, TB_LEVEL);
    if (code)
        free_work(s->m->gpu->g, &h->aside);
    return code;
}

int tbg_list_head(tb_session *s)
{
    tbg_session *h = s->gpu;
    tb_gpu *g = s->m->gpu->g;
    const tb_rows *rows = &s->head;
    const size_t all = ((size_t)s->m->d.vocab + 15) / 16, logits = TB_LEVEL * (size_t)s->m->d.vocab;
    if (h->n_blocks == rows->n_active)
        return TB_OK;
    const bool first = !h->blocks;
    if (first && (!(h->blocks = tbg_new_buffer(g, all * sizeof(int32_t), TBG_DEVICE)) ||
                  !(h->some_logits = tbg_new_buffer(g, logits * sizeof(float), TBG_DEVICE))))
        return TB_ENOMEM;
    float *none = tb_alloc(logits * sizeof *none);      /* the list needs less */
    if (!none)
        return tbg_fail(g, TB_ENOMEM, "out of memory for the draft's head");
    for (size_t i = 0; i < logits; i++)
        none[i] = -INFINITY;
    int code = first ? tbg_upload(g, h->some_logits, 0, none, logits * sizeof *none) : TB_OK;
    int32_t *list = (int32_t *)(void *)none, n = 0;
    for (size_t i = 0; i < all; i++)
        if (rows->active[i])
            list[n++] = (int32_t)i;
    code = code ? code : tbg_upload(g, h->blocks, 0, list, (size_t)n * sizeof *list);
    tb_free(none);
    h->n_blocks = code ? 0 : n;
    return code;
}

int tbg_reserve_acts(tb_session *s, int m)
{
    tbg_session *h = s->gpu;
    for (int kind = TB_ACT16; kind <= TB_ACT16_WIDE; kind++) {
        const size_t bytes = tb_act_bytes(kind, m, s->m->cols_max);
        if (bytes <= h->acts_bytes[kind])
            continue;
        tb_free(h->acts_host[kind]);
        h->acts_bytes[kind] = 0;
        if (!(h->acts_host[kind] = tb_alloc(bytes)))
            return tbg_fail(s->m->gpu->g, TB_ENOMEM, "out of memory for a pass of %d tokens", m);
        h->acts_bytes[kind] = bytes;
    }
    return TB_OK;
}

static int grow(tb_gpu *g, tbg_buffer **b, size_t bytes, int place)
{
    if (*b && (*b)->bytes >= bytes)
        return TB_OK;
    for (int i = 0; i < 2; i++)                     /* nothing may still be on its way */
        if (g->driver->finish(g, i))
            return TB_EDEVICE;
    tbg_free_buffer(g, *b);
    *b = tbg_new_buffer(g, bytes, place);
    return *b ? TB_OK : TB_ENOMEM;
}

int tbg_reserve_staging(tb_session *s, size_t in, size_t out)
{
    tbg_session *h = s->gpu;
    tb_gpu *g = s->m->gpu->g;
    const size_t vocab = (size_t)s->m->d.vocab * TBG_HEAD_TOKENS * sizeof(float), f = sizeof(float);
    int code = grow(g, &h->in, in * f, TBG_STAGING);
    if (!code)
        code = grow(g, &h->out, out * f, TBG_STAGING);
    if (!code)
        code = grow(g, &h->yr, (size_t)h->work.tokens * (size_t)tbg_rows_max(s->m) * f < out * f ? (size_t)h->work.tokens * (size_t)tbg_rows_max(s->m) * f : out * f,
                    TBG_DEVICE);
    if (!code && !h->logits_r)
        code = grow(g, &h->logits_r, vocab, TBG_DEVICE);
    return code;
}

int tbg_reserve_stages(tb_session *s)
{
    tbg_session *h = s->gpu;
    tb_gpu *g = s->m->gpu->g;
    int code = TB_OK;
    for (int k = 0; k < 2 && !code; k++) {
        code = grow(g, &h->stage[k], s->m->gpu->residual_max, TBG_DEVICE);
        if (!code)
            code = grow(g, &h->pinned[k], s->m->gpu->residual_max, TBG_STAGING);
    }
    return code;
}

/* --- when to stream --- */

enum { TBG_LOOK = 32 };    /* tokens that tell the CPU's speed */

static double residual_in_ram(const tb_model *m)
{
    double bytes = 0;
    for (int i = 0; i < m->d.n_layers; i++)
        for (int part = 0; part < TBG_PARTS && !m->gpu->layers[i].residual; part++) {
            const tb_matrix *w = tbg_matrix(m, i, part);
            bytes += w->rows ? (double)tbg_codes_bytes(w, true) + (double)tbg_scales_bytes(w, true) : 0;
        }
    return bytes;
}

bool tbg_stream_pays(const tb_session *s, int n)
{
    const tbg_session *h = s->gpu;
    const tbg_model *gm = s->m->gpu;
    if (h->stream_from)
        return h->stream_from > 0 && n >= h->stream_from && residual_in_ram(s->m) > 0;
    if (h->cpu_token_s <= 0 || n <= TB_MAX_DRAFT + 1 || gm->upload_bytes <= 0)
        return false;
    const double stream_s = residual_in_ram(s->m) * gm->upload_s / gm->upload_bytes;
    return stream_s > 0 && n * h->cpu_token_s > stream_s;
}

int32_t tbg_next_chunk(const tb_session *s, int32_t n)
{
    const tbg_session *h = s->gpu;
    return !h->stream_from && h->cpu_token_s <= 0 && n > 2 * TBG_LOOK && residual_in_ram(s->m) > 0 ? TBG_LOOK : n;
}

void tb_session_stream_from(tb_session *s, int32_t tokens)
{
    if (s->gpu)
        s->gpu->stream_from = tokens;
}

void tb_session_bus(const tb_session *s, tb_bus *bus)
{
    memset(bus, 0, sizeof *bus);
    if (s->gpu)
        *bus = s->gpu->bus;
}

/* --- the cache as the host keeps it: keys in blocks of 8 positions --- */

static void turn_keys(const tb_layer *l, int ring, uint16_t *blocks, uint16_t *rows, bool to_rows)
{
    const size_t hd = (size_t)l->head_dim;
    for (size_t slot = 0; slot < (size_t)ring * (size_t)l->n_kv_heads; slot++)
        for (size_t e = 0; e < hd; e++) {
            uint16_t *b = &blocks[(slot >> 3) * 8 * hd + e * 8 + (slot & 7)], *r = &rows[slot * hd + e];
            if (to_rows)
                *r = *b;
            else
                *b = *r;
        }
}

static int move_cache(tb_session *s, int layer, bool store)
{
    tbg_session *h = s->gpu;
    tb_gpu *g = s->m->gpu->g;
    tb_cache *c = &s->caches[layer];
    const tb_layer *l = &s->m->layers[layer];
    const size_t bytes = (size_t)c->ring * (size_t)l->head_dim * (size_t)l->n_kv_heads * sizeof(uint16_t);
    uint16_t *rows = tb_alloc(bytes);
    if (!rows)
        return tbg_fail(g, TB_ENOMEM, "out of memory for a copy of the cache");
    int code;
    if (store) {
        turn_keys(l, c->ring, c->keys, rows, true);
        code = tbg_upload(g, h->keys[layer], 0, rows, bytes);
        code = code ? code : tbg_upload(g, h->values[layer], 0, c->values, bytes);
    } else {
        code = tbg_download(g, h->keys[layer], 0, rows, bytes);
        turn_keys(l, c->ring, c->keys, rows, false);
        code = code ? code : tbg_download(g, h->values[layer], 0, c->values, bytes);
    }
    tb_free(rows);
    return code;
}

int tbg_cache_open(tb_session *s, int32_t layer)
{
    tb_cache *c = &s->caches[layer];
    tb_gpu *g = s->m->gpu->g;
    const tb_layer *l = &s->m->layers[layer];
    const size_t bytes = (size_t)c->ring * (size_t)l->head_dim * (size_t)l->n_kv_heads * sizeof(uint16_t);
    c->keys = tb_alloc(bytes);
    c->values = tb_alloc(bytes);
    tbg_lock(g);
    const int code = c->keys && c->values ? move_cache(s, layer, false) : tbg_fail(g, TB_ENOMEM, "out of memory for a copy of the cache");
    tbg_unlock(g);
    if (code)
        (void)tbg_cache_close(s, layer, false);
    return code;
}

int tbg_cache_close(tb_session *s, int32_t layer, bool store)
{
    tb_cache *c = &s->caches[layer];
    tb_gpu *g = s->m->gpu->g;
    tbg_lock(g);
    const int code = store ? move_cache(s, layer, true) : TB_OK;
    tbg_unlock(g);
    tb_free(c->keys);
    tb_free(c->values);
    c->keys = c->values = NULL;
    return code;
}

int tbg_session_fail(tb_session *s, int code, char *err, size_t n) { return tbg_report(s->m->gpu->g, code, err, n); }
