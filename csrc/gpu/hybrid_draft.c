/* hybrid_draft.c - what only drafts do on a device: the choice of tokens, and going on while the CPU multiplies for a verification. */
#include <math.h>
#include <string.h>

#include "hybrid_pass.h"

/* --- choices --- */

/* Whether the sampler draws the largest logit, or the largest with noise: then the device can tell which it is. */
static bool unfiltered(const tb_sampling *o, int vocab)
{
    const bool penalties = o->repeat_last_n && (o->repeat_penalty != 1 || o->presence_penalty != 0 || o->frequency_penalty != 0);
    return !o->n_bias && !penalties && (o->temperature == 0 || ((o->top_k == 0 || o->top_k >= vocab) && o->top_p == 1 && o->min_p == 0));
}

bool tbg_ranks(const tb_session *s) { return unfiltered(s->sampling, s->m->d.vocab); }

bool tbg_short_head(pass *p)
{
    return p->s->head.n_runs && !p->code && tbg_list_head(p->s) == TB_OK;     /* without it all rows are computed */
}

static int found_size(const pass *p) { return (p->m->d.vocab + TBG_SPAN - 1) / TBG_SPAN * TBG_FOUND; }

void tbg_seek(pass *p, int t, int m)
{
    const tb_sampling *o = p->s->sampling;
    const int vocab = p->m->d.vocab, spans = (vocab + TBG_SPAN - 1) / TBG_SPAN, n = m * found_size(p);
    const bool ranked = tbg_ranks(p->s);
    int32_t *found = p->w->found->host;
    tbg_params q = {.m = m, .n = vocab, .token = t, .seed0 = (uint32_t)o->seed, .seed1 = (uint32_t)(o->seed >> 32), .count = p->s->ranked.want,
                    .a = p->link * TBG_BEST * 2};
    for (int noisy = ranked && o->temperature > 0; noisy <= (o->temperature > 0); noisy++) {
        q.temperature = noisy ? o->temperature : 0;
        tbg_buffer *const b[TBG_BUFFERS] = {tbg_logits(p), p->w->best, p->w->positions};
        tbg_go(p, TBG_K_top_logits, spans, m, 1, &q, b);
        if (!ranked)
            tbg_read_from(p, p->w->best, 0, found + noisy * 2 * n, (size_t)n * 2 * sizeof *found);
    }
    tbg_buffer *const b[TBG_BUFFERS] = {p->w->best, p->w->ranked, p->w->positions};
    if (ranked) {
        tbg_go(p, TBG_K_rank_tokens, m, 1, 1, &q, b);
        if (!p->more)
            tbg_read_from(p, p->w->ranked, 0, found, (size_t)(p->link + m) * TBG_BEST * 2 * sizeof *found);
    }
}

void tbg_follow(pass *p, tb_tree *below)
{
    const int last = p->n - 1;
    const tbg_params q = {.m = last, .n = p->angles + p->link, .position = p->position, .angles = 2 * p->m->rope_half, .a = p->link * TBG_BEST * 2};
    tbg_buffer *const b[TBG_BUFFERS] = {p->w->ranked, p->w->ids, p->w->positions, p->w->slots, p->w->path, p->w->angles};
    tbg_go(p, TBG_K_next_token, 1, 1, 1, &q, b);
    below->depth[0] = p->tree->depth[last] + 1;
    p->tree = below;
    p->n = 1;
    p->link++;
    p->more--;
    tbg_embed(p);
}

void tbg_gather(pass *p, int m, float *logits)
{
    const tb_sampling *o = p->s->sampling;
    tb_ranked *r = &p->s->ranked;
    const int32_t *found = p->w->found->host;
    const size_t vocab = (size_t)p->m->d.vocab;
    r->there = tbg_ranks(p->s);
    if (p->code)
        return;
    if (r->there) {
        for (int i = 0; i < (p->link + m) * TBG_BEST; i++) {
            r->ids[i / TBG_BEST][i % TBG_BEST] = found[2 * i];
            memcpy(&r->confidence[i / TBG_BEST][i % TBG_BEST], &found[2 * i + 1], sizeof(float));
        }
        return;
    }
    for (size_t k = 0; k < (size_t)m * vocab; k++)
        logits[k] = -INFINITY;
    const int n = found_size(p);
    for (int noisy = 0; noisy <= (o->temperature > 0); noisy++, found += 2 * m * n)
        for (int i = 0; i < m * n; i++)
            if (i % TBG_FOUND != TBG_BEST && found[2 * i] >= 0 && found[2 * i] < p->m->d.vocab)
                memcpy(&logits[(size_t)(i / n) * vocab + (size_t)found[2 * i]], &found[2 * i + 1], sizeof(float));
}

/* --- the draft that goes on --- */

enum { NOTHING = -1 };

void tbg_overlap_begin(overlap *o, pass *v, tb_overlap *of)
{
    o->p = *v;
    o->p.w = &v->h->aside;
    o->p.op = TB_DRAFT;
    o->p.phase = TB_BUS_DRAFT;
    o->p.tree = &o->tree;
    o->p.stream = false;
    o->p.full = v->s->belief.full;
    o->of = of;
    o->layer = NOTHING;
    o->enough = false;
    o->credit = 0;
    int32_t *slots = o->p.w->found->host;
    for (int i = 0; i < of->slots; i++)
        slots[i] = i - TB_ASIDE;
    tbg_move(&o->p, v->position + TB_ASIDE, slots, of->slots);
    of->begun = !o->p.code;
    v->overlap = o;
}

static void take_in(overlap *o)
{
    if (o->layer != o->p.m->d.n_layers)
        return;
    tbg_wait_for(&o->p, TBG_FOUND_ASIDE);
    tbg_gather(&o->p, o->p.n, o->p.s->draft_logits);
    o->enough = o->p.code != TB_OK;
}

/* These layers follow the group's 2-bit product in the queue; what a pass has found is waited for at the next chance, when it has come. */
void tbg_overlap_go_on(pass *v, int place)
{
    overlap *o = v->overlap;
    if (!o || o->enough || v->code)
        return;
    const int layers = o->p.m->d.n_layers;
    const double each = v->h->draft_layer_s[o->p.full], time = each > 0 ? v->h->group_s[place] / each - 0.4 : 0;   /* 0.4: the product of v itself */
    o->credit = fmin(o->credit + (o->of->always ? 1 : time > 0 ? time : 0), layers + 1);
    while (o->credit >= 1 && !o->enough) {
        if (o->layer == NOTHING || o->layer == layers) {
            int32_t tokens[TB_LEVEL];
            take_in(o);
            o->p.n = o->enough ? 0 : o->of->next(o->of->arg, true, tokens, &o->tree);
            o->layer = NOTHING;
            o->enough = o->p.n < 1;
            if (o->enough)
                return;
            tbg_start(&o->p, tokens);
            o->layer = 0;
        }
        o->credit -= 1;
        tbg_run_layer(&o->p, o->layer++);
        if (o->layer < layers)
            continue;
        tbg_last_norm(&o->p);
        o->p.listed = tbg_short_head(&o->p);
        if (!tbg_head_product(&o->p, 0, o->p.n))
            tbg_seek(&o->p, 0, o->p.n);
        o->p.listed = false;
        tbg_mark(&o->p, o->p.queue, TBG_FOUND_ASIDE);
        break;
    }
    tbg_mark(&o->p, o->p.queue, TBG_ASIDE);     /* so that they start now */
}

void tbg_overlap_end(overlap *o)
{
    take_in(o);
    if (!o->enough && o->layer == o->p.m->d.n_layers)
        (void)o->of->next(o->of->arg, false, NULL, NULL);
}
