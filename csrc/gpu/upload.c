/* upload.c - puts a model on a device: the 2-bit planes layer by layer, norms and biases, and the residual of as many layers as asked. */
#include "hybrid.h"

#include <stdlib.h>
#include <string.h>

static size_t padded(size_t bytes) { return (bytes + 255) / 256 * 256; }

static size_t blocks_of(const tb_matrix *w) { return ((size_t)w->rows + 15) / 16; }
static size_t units_of(const tb_matrix *w) { return ((size_t)w->cols + 15) / 16; }
static size_t quads_of(const tb_matrix *w) { return (units_of(w) + 3) / 4; }

size_t tbg_codes_bytes(const tb_matrix *w, bool residual)
{
    return blocks_of(w) * units_of(w) * 32 * (size_t)(residual ? w->residual_bits : w->draft_bits);
}

size_t tbg_scales_bytes(const tb_matrix *w, bool residual)
{
    return blocks_of(w) * quads_of(w) * (size_t)(!residual ? 64 : w->residual_group == 32 ? 16 : 32);
}

const tb_matrix *tbg_matrix(const tb_model *m, int32_t layer, int part)
{
    static const tb_matrix none;
    if (layer == m->d.n_layers)
        return part ? &none : &m->d.head;
    const tb_layer *l = &m->layers[layer];
    const tb_matrix *const parts[TBG_PARTS] = {&l->q, &l->k, &l->v, &l->o, &l->gate, &l->up, &l->down};
    return parts[part];
}

/* --- where things go: first measured, then written --- */

typedef struct cursor {
    tbg_model *gm;
    tbg_buffer *b;          /* NULL: only counts */
    size_t at;
    int code;
} cursor;

static int put(cursor *c, const void *from, size_t bytes)
{
    const size_t at = c->at;
    c->at += padded(bytes);
    if (c->b && !c->code && bytes) {
        const double start = tb_clock();
        c->code = tbg_upload(c->gm->g, c->b, at, from, bytes);
        c->gm->upload_s += tb_clock() - start;
        c->gm->upload_bytes += (double)bytes;
        tb_memory_unneeded(from, bytes);
    }
    return (int)(at / 16);
}

static void put_draft(cursor *c, const tb_matrix *w, int *d)
{
    d[TBG_CODES] = put(c, w->draft_codes, tbg_codes_bytes(w, false));
    d[TBG_SCALES] = put(c, w->draft_scales, tbg_scales_bytes(w, false));
    d[TBG_U] = put(c, w->row_scale, blocks_of(w) * 64);
    d[TBG_A] = put(c, w->row_a, blocks_of(w) * 16);
    d[TBG_B] = put(c, w->row_b, blocks_of(w) * 16);
}

/* Offsets are the same wherever the planes lie, so they are set even where nothing is uploaded. */
static void put_residual(cursor *c, const tb_matrix *w, int *d)
{
    d[TBG_RCODES] = put(c, w->residual_codes, tbg_codes_bytes(w, true));
    d[TBG_RSCALES] = put(c, w->residual_scales, tbg_scales_bytes(w, true));
}

static int put_floats(float *all, size_t *at, const float *from, int32_t n)
{
    if (!from)
        return -1;
    const int start = (int)*at;
    if (all)
        memcpy(all + start, from, (size_t)n * sizeof *from);
    *at += (size_t)n;
    return start;
}

/* Norms and biases in one buffer; all NULL: counts. */
static size_t gather_floats(const tb_model *m, tbg_model *gm, float *all)
{
    size_t at = 0;
    gm->final_norm = put_floats(all, &at, m->d.final_norm, m->d.hidden);
    for (int32_t i = 0; i <= m->d.n_layers; i++) {
        for (int part = 0; part < TBG_PARTS; part++) {
            const tb_matrix *w = tbg_matrix(m, i, part);
            gm->rows[(i * TBG_PARTS + part) * TBG_DESC + TBG_BIAS] = w->rows ? put_floats(all, &at, w->bias, w->rows) : -1;
        }
        if (i == m->d.n_layers)
            break;
        const tb_layer *l = &m->layers[i];
        const float *const norms[TBG_NORMS] = {l->input_norm, l->q_norm, l->k_norm, l->post_attention_norm, l->pre_ffn_norm, l->post_ffn_norm};
        const int32_t whole_q = l->q.rows, whole_k = l->k.rows, hidden = m->d.hidden;
        const int32_t sizes[TBG_NORMS] = {hidden, l->qk_norm_whole ? whole_q : l->head_dim, l->qk_norm_whole ? whole_k : l->head_dim, hidden, hidden, hidden};
        for (int k = 0; k < TBG_NORMS; k++)
            gm->layers[i].norms[k] = put_floats(all, &at, norms[k], sizes[k]);
    }
    return at;
}

static void describe(const tb_matrix *w, int out, int *d)
{
    d[TBG_ROWS] = w->rows;
    d[TBG_COLS] = w->cols;
    d[TBG_BLOCKS] = (int)blocks_of(w);
    d[TBG_UNITS] = (int)units_of(w);
    d[TBG_QUADS] = (int)quads_of(w);
    d[TBG_GROUP_QUADS] = w->wide ? 1 : 2;
    d[TBG_OUT] = out;
    d[TBG_RGROUP] = w->residual_group;
}

static int upload_layer(const tb_model *m, tbg_model *gm, int32_t i, bool residual)
{
    tbg_layer *l = &gm->layers[i];
    static const int starts[TBG_PARTS] = {1, 0, 0, 1, 1, 0, 1};     /* the first of a linear group: q k v | o | gate up | down */
    for (int pass = 0; pass < 2; pass++) {
        cursor draft = {gm, pass ? l->draft : NULL, 0, TB_OK}, rest = {gm, pass ? l->residual : NULL, 0, TB_OK};
        size_t group_start = 0;
        for (int part = 0, out = 0; part < TBG_PARTS; part++) {
            const tb_matrix *w = tbg_matrix(m, i, part);
            int *d = gm->rows + (i * TBG_PARTS + part) * TBG_DESC;
            if (!w->rows)
                continue;
            if (starts[part]) {
                out = 0;
                group_start = rest.at;
            }
            describe(w, out, d);
            out += w->rows;
            put_draft(&draft, w, d);
            if (w->residual_bits)
                put_residual(&rest, w, d);
            if (i == m->d.n_layers)
                gm->head_residual = rest.at;
            else if (rest.at - group_start > gm->residual_max)
                gm->residual_max = rest.at - group_start;
        }
        if (draft.code || rest.code)
            return draft.code ? draft.code : rest.code;
        if (!pass) {
            l->draft = tbg_new_buffer(gm->g, draft.at, TBG_DEVICE);
            l->residual = residual && rest.at ? tbg_new_buffer(gm->g, rest.at, TBG_DEVICE) : NULL;
            if (!l->draft || (residual && rest.at && !l->residual))
                return TB_ENOMEM;
        }
    }
    return TB_OK;
}

/* Input rows stay in RAM, where the device reads the few that it needs; a tied embedding needs the head's residual for that. */
static int share_embedding(const tb_model *m, tbg_model *gm)
{
    const tb_model_desc *d = &m->d;
    const size_t vocab = (size_t)d->vocab, hidden = (size_t)d->hidden;
    if (d->embedding_codes) {
        const size_t scales = vocab * ((hidden + 31) / 32) * sizeof(uint16_t);
        gm->embedding_codes = tbg_new_buffer(gm->g, vocab * hidden, TBG_VISIBLE);
        gm->embedding_scales = tbg_new_buffer(gm->g, scales, TBG_VISIBLE);
        if (!gm->embedding_codes || !gm->embedding_scales)
            return TB_ENOMEM;
        const int code = tbg_upload(gm->g, gm->embedding_codes, 0, d->embedding_codes, vocab * hidden);
        return code ? code : tbg_upload(gm->g, gm->embedding_scales, 0, d->embedding_scales, scales);
    }
    if (!d->head.residual_bits || gm->layers[d->n_layers].residual)
        return TB_OK;
    int ignored[TBG_DESC];
    cursor c = {gm, NULL, 0, TB_OK};
    put_residual(&c, &d->head, ignored);
    if (!(gm->tied_residual = tbg_new_buffer(gm->g, c.at, TBG_VISIBLE)))
        return TB_ENOMEM;
    const size_t codes = tbg_codes_bytes(&d->head, true);
    const int code = tbg_upload(gm->g, gm->tied_residual, 0, d->head.residual_codes, codes);
    return code ? code : tbg_upload(gm->g, gm->tied_residual, padded(codes), d->head.residual_scales, tbg_scales_bytes(&d->head, true));
}

static int upload(const tb_model *m, tbg_model *gm, int32_t residual_layers)
{
    int code = TB_OK;
    const size_t n = (size_t)(m->d.n_layers + 1) * TBG_PARTS * TBG_DESC * sizeof(int);
    for (int32_t i = 0; i <= m->d.n_layers && !code; i++)
        code = upload_layer(m, gm, i, i < residual_layers);
    const size_t floats = gather_floats(m, gm, NULL);
    float *all = code ? NULL : tb_alloc(floats * sizeof *all);
    if (!all)
        return code ? code : tbg_fail(gm->g, TB_ENOMEM, "out of memory for norms");
    (void)gather_floats(m, gm, all);
    gm->weights = tbg_new_buffer(gm->g, floats * sizeof *all, TBG_DEVICE);
    gm->table = tbg_new_buffer(gm->g, n, TBG_DEVICE);
    code = gm->weights && gm->table ? tbg_upload(gm->g, gm->weights, 0, all, floats * sizeof *all) : TB_ENOMEM;
    tb_free(all);
    if (!code)
        code = tbg_upload(gm->g, gm->table, 0, gm->rows, n);
    return code ? code : share_embedding(m, gm);
}

void tbg_model_free(tbg_model *gm)
{
    if (!gm)
        return;
    tbg_lock(gm->g);
    for (int32_t i = 0; gm->layers && gm->layers[i].norms[0] != -2; i++) {
        tbg_free_buffer(gm->g, gm->layers[i].draft);
        tbg_free_buffer(gm->g, gm->layers[i].residual);
    }
    tbg_free_buffer(gm->g, gm->table);
    tbg_free_buffer(gm->g, gm->weights);
    tbg_free_buffer(gm->g, gm->embedding_codes);
    tbg_free_buffer(gm->g, gm->embedding_scales);
    tbg_free_buffer(gm->g, gm->tied_residual);
    tbg_unlock(gm->g);
    free(gm->layers);
    free(gm->rows);
    tb_gpu_free(gm->g);
    free(gm);
}

int tb_model_place(tb_model *m, tb_gpu *g, int32_t residual_layers, int32_t pass_tokens, char *err, size_t n)
{
    const int32_t layers = m->d.n_layers;
    if (m->gpu || atomic_load(&m->users) != 1)
        return tb_fail(err, n, TB_EINVAL, "a model is placed once, before any session");
    if (m->head_dim_max > TBG_HEAD_MAX)
        return tb_fail(err, n, TB_EUNSUPPORTED, "heads of %d dimensions: the device's kernels take up to %d", (int)m->head_dim_max, TBG_HEAD_MAX);
    tbg_model *gm = calloc(1, sizeof *gm);
    if (gm) {
        gm->g = g;
        gm->pass_tokens = pass_tokens < 1 ? 1 : pass_tokens > TBG_TOKENS_MAX ? TBG_TOKENS_MAX : pass_tokens;
        tbg_keep(g);
        gm->rows = calloc((size_t)(layers + 1) * TBG_PARTS * TBG_DESC, sizeof *gm->rows);
        gm->layers = calloc((size_t)layers + 2, sizeof *gm->layers);
    }
    if (!gm || !gm->rows || !gm->layers) {
        tbg_model_free(gm);
        return tb_fail(err, n, TB_ENOMEM, "out of memory for the model's description");
    }
    gm->layers[layers + 1].norms[0] = -2;       /* the end */
    tbg_lock(g);
    int code = upload(m, gm, m->d.head.residual_bits ? residual_layers : 0);
    code = code ? tbg_report(g, code, err, n) : tb_check_files(err, n);
    tbg_unlock(g);
    if (code) {
        tbg_model_free(gm);
        return code;
    }
    m->gpu = gm;
    return TB_OK;
}
