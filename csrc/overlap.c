/* overlap.c - the draft that goes on while a hybrid session verifies: what it takes up, and what of it the next step begins with.
 *
 * A verification leaves the device idle while the CPU multiplies. The draft then goes on in slots of its own, below the likeliest nodes of
 * the step's tree: behind the last token that is verified, and behind tokens that the verifier may draw in place of a drafted one. When the
 * step ends at one of these nodes, what lies below it is the next step's draft, for which no time was spent. Like all drafts it
 * only proposes. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "plan.h"

/* The part of a step's tree below the last token that it emitted, with its keys in a draft's slots. */
struct tb_kept {
    int32_t n_nodes, n_slots;
    bool full;                      /* drafted at full precision */
    node nodes[POOL];
};

/* The likeliest nodes whose ancestors are drafted or in the batch; 0: it would cost more time than it is likely to spare. A pass is worth
 * what it costs between two verifications, if the text goes through one of its nodes. */
static int32_t next_overlapped(plan *p)
{
    const tb_belief *b = &p->s->belief;
    int32_t m = 0, *batch = p->under_way;
    double value = 0;
    tb_plan_revalue(p);
    for (; m < (tb_plan_branches(p) ? TB_LEVEL : 1) && p->n_slots + m < TB_ASIDE; m++) {
        int32_t best = -1;
        for (int32_t i = 0; i < p->n_nodes; i++) {
            bool taken = false, above = i == 0 || p->nodes[p->nodes[i].parent].slot >= 0;
            for (int32_t t = 0; t < m; t++) {
                taken = taken || batch[t] == i;
                above = above || batch[t] == p->nodes[i].parent;
            }
            if (!taken && above && tb_plan_can_draft(p, i) && p->nodes[i].value >= LEAST && (best < 0 || p->nodes[i].value > p->nodes[best].value))
                best = i;
        }
        if (best < 0)
            break;
        batch[m] = best;
        value += p->nodes[best].value;
    }
    return p->o->draft_fixed || fmin(value, 1) * tb_belief_draft(b, 1) > b->overlap.mean ? m : 0;
}

/* tb_overlap's `next`. */
static int32_t overlap(void *arg, bool more, int32_t *tokens, tb_tree *tree)
{
    plan *p = arg;
    int32_t slot_of[POOL], before = p->n_nodes, n = p->n_under_way;
    bool whole = true;
    p->n_under_way = 0;
    for (int32_t t = 0; t < n; t++)
        whole = whole && tb_plan_add_drafted(p, p->under_way[t], t);
    for (int32_t i = before; i < p->n_nodes; i++)
        p->nodes[i].early = true;
    p->n_overlapped += n > 0;
    if (!more || !whole || (n = next_overlapped(p)) == 0)
        return 0;
    for (int32_t t = 0; t < n; t++) {
        p->nodes[p->under_way[t]].slot = p->n_slots++;
        tokens[t] = p->nodes[p->under_way[t]].token;
    }
    for (int32_t i = 0; i < p->n_nodes; i++)
        slot_of[i] = TB_ASIDE + p->nodes[i].slot;
    (void)tb_plan_lay_out(p, tree, p->under_way, n, slot_of);
    p->n_under_way = n;
    return n;
}

void tb_overlap_prepare(plan *p, int32_t deepest)
{
    tb_session *s = p->s;
    s->overlap = NULL;
    if (!s->gpu || !(p->o->use & TB_USE_OVERLAP) || !(p->o->use & TB_USE_DRAFT) || p->o->draft_only || p->most < 1)
        return;
    p->most = deepest;
    p->overlap = (tb_overlap){overlap, p, p->n_slots, p->o->draft_fixed || s->belief.pinned, false};
    s->overlap = &p->overlap;
}

void tb_overlap_keep(plan *p, const tb_step_result *r)
{
    tb_session *s = p->s;
    int32_t at = 0, new_of[POOL], slots[TB_ASIDE], n = 0;
    for (int32_t t = p->n_under_way; t > 0; t--, p->n_slots--)      /* the pass that did not end */
        p->nodes[p->under_way[t - 1]].slot = -1;
    for (int32_t t = 0; t < r->n_tokens && at >= 0; t++) {
        int32_t child = -1;
        for (int32_t c = at + 1; c < p->n_nodes; c++)
            if (p->nodes[c].parent == at && p->nodes[c].token == r->tokens[t])
                child = c;
        at = child;
    }
    if (at < 0 || p->nodes[at].slot < 0 || r->hit_eos || (!s->kept && !(s->kept = malloc(sizeof *s->kept))))
        return;
    struct tb_kept *k = s->kept;
    k->n_nodes = 0;
    k->full = s->belief.full;
    int32_t node_in[TB_ASIDE];                      /* by slot */
    for (int32_t i = 0; i < TB_ASIDE; i++)
        node_in[i] = -1;
    for (int32_t i = 0; i < p->n_nodes; i++) {
        const node *c = &p->nodes[i];
        new_of[i] = i == at ? 0 : i > at && new_of[c->parent] >= 0 ? k->n_nodes : -1;
        if (new_of[i] < 0)
            continue;
        node *to = &k->nodes[k->n_nodes++];
        *to = *c;
        to->parent = i == at ? -1 : new_of[c->parent];
        to->depth -= p->nodes[at].depth;
        if (c->slot >= 0)
            node_in[c->slot] = new_of[i];
    }
    for (int32_t i = 0; i < k->n_nodes; i++)
        k->nodes[i].first = k->nodes[i].first < 0 ? -1 : new_of[k->nodes[i].first];
    for (int32_t i = 0; i < TB_ASIDE; i++)
        if (node_in[i] >= 0) {
            k->nodes[node_in[i]].slot = n;
            slots[n++] = TB_ASIDE + i - r->n_tokens;
        }
    k->n_slots = n;
    k->nodes[0].kind = 0;
    k->nodes[0].own = k->nodes[0].value = 1;
    tb_session_compact(s, p->n - 1 + r->n_tokens, slots, n);
    s->kept_at = p->n + r->n_tokens;
}

void tb_overlap_take(plan *p)
{
    const struct tb_kept *k = p->s->kept;
    const int32_t token = p->nodes[0].token;
    if (!p->s->kept_at || p->s->kept_at != p->n || k->nodes[0].token != token || k->full != p->s->belief.full)
        return;
    memcpy(p->nodes, k->nodes, (size_t)k->n_nodes * sizeof *k->nodes);
    for (int32_t kind = 0; kind < TB_KINDS; kind++)
        p->nodes[0].bins[kind] = -1;
    p->nodes[0].early = false;
    p->n_nodes = k->n_nodes;
    p->n_slots = p->n_kept = k->n_slots;
    tb_plan_revalue(p);
}
