/* speculate.c - one step: proposers grow a tree of tokens, the full weights verify it, the sampler decides.
 *
 * A proposed token is accepted exactly when it is the token the sampler draws from the verifier's logits at that position,
 * so a step emits what plain decoding would. What to propose is a question of time alone: a node is worth it while
 *     P(it and all above it are accepted)  >  rate * (what it costs to draft it and to verify one token more),
 * with every quantity measured as the session runs (belief.c). The proposers, cheapest first: lookup in the text, the 2-bit
 * weights, recycled successors. Each adds children to nodes that are there; another one is another propose_ function. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "gpu/hybrid.h"
#include "os.h"
#include "plan.h"
#include "sampler.h"

static bool ends(const tb_step_options *o, int32_t token)
{
    for (int32_t i = 0; i < o->n_eos; i++)
        if (o->eos[i] == token)
            return true;
    return false;
}

bool tb_plan_branches(const plan *p) { return (p->o->use & TB_USE_TREE) && p->o->draft_fixed != 1; }

/* --- the tree --- */

static double limited(double chance) { return chance < 1e-3 ? 1e-3 : chance > 0.999 ? 0.999 : chance; }

/* Adds a child, or strengthens the one that is there; returns its index, -1: no room. */
static int32_t add_child(plan *p, int32_t parent, int32_t token, int32_t kind, int32_t bin)
{
    double chance = tb_belief_chance(&p->s->belief, kind, bin);
    const node *above = &p->nodes[parent];
    if (above->ends || above->depth >= p->most)
        return -1;
    for (int32_t i = parent + 1; i < p->n_nodes; i++) {
        node *c = &p->nodes[i];
        if (c->parent != parent || c->token != token)
            continue;
        if (c->bins[kind] < 0 && kind != TB_KIND_RECYCLED) {
            c->bins[kind] = bin;
            c->own = kind == TB_KIND_DRAFT ? limited(1 - (1 - c->own) * (1 - chance)) : fmax(c->own, chance);
        }
        return i;
    }
    if (p->n_nodes == POOL)
        return -1;
    node *c = &p->nodes[p->n_nodes];
    *c = (node){.token = token, .parent = parent, .depth = above->depth + 1, .kind = kind, .bins = {-1, -1, -1, -1}, .slot = -1, .first = -1,
                .own = chance, .value = above->value * chance, .ends = ends(p->o, token)};
    c->bins[kind] = bin;
    return p->n_nodes++;
}

void tb_plan_revalue(plan *p)
{
    for (int32_t i = 1; i < p->n_nodes; i++)
        p->nodes[i].value = p->nodes[p->nodes[i].parent].value * p->nodes[i].own;
}

/* Takes the likeliest nodes, as many as pay; without a tree, along the likeliest chain. Fills p->chosen, unordered. */
static void choose(plan *p, double rate, int32_t least)
{
    int32_t order[POOL], n = 0;
    tb_plan_revalue(p);
    if (tb_plan_branches(p)) {
        for (int32_t i = 1; i < p->n_nodes; i++) {
            int32_t at = n++;
            for (; at > 0 && p->nodes[order[at - 1]].value < p->nodes[i].value; at--)
                order[at] = order[at - 1];
            order[at] = i;
        }
    } else {
        for (int32_t at = 0, best; ; at = order[n++] = best) {
            best = 0;
            for (int32_t i = at + 1; i < p->n_nodes; i++)
                if (p->nodes[i].parent == at && (!best || p->nodes[i].own > p->nodes[best].own))
                    best = i;
            if (!best)
                break;
        }
    }
    double sum = 0, best = -rate;
    p->n_chosen = 1;
    p->chosen[0] = 0;
    for (int32_t m = 1; m <= n && m <= p->most; m++) {
        sum += p->nodes[order[m - 1]].value;
        double net = sum - rate * tb_belief_verify(&p->s->belief, m + 1);
        if (net > best || m <= least) {
            best = net;
            p->n_chosen = m + 1;
        }
    }
    memcpy(p->chosen + 1, order, (size_t)(p->n_chosen - 1) * sizeof *order);
}

/* Puts the chosen nodes in the order of a walk that goes down likelier branches first: the best path then lies in the cache as plain
 * decoding would have it. */
static void arrange(plan *p)
{
    int32_t rest[TB_MAX_DRAFT + 1], stack[TB_MAX_DRAFT + 1], n = p->n_chosen, out = 0, top = 1;
    memcpy(rest, p->chosen, (size_t)n * sizeof *rest);      /* by falling value */
    stack[0] = 0;
    while (top) {
        int32_t at = stack[--top];
        p->chosen[out++] = at;
        for (int32_t i = n - 1; i > 0; i--)
            if (p->nodes[rest[i]].parent == at)
                stack[top++] = rest[i];
    }
}

bool tb_plan_lay_out(const plan *p, tb_tree *tree, const int32_t *batch, int32_t m, const int32_t *slot_of)
{
    bool chain = true;
    for (int32_t t = 0; t < m; t++) {
        int32_t depth = tree->depth[t] = p->nodes[batch[t]].depth;
        for (int32_t i = batch[t], d = depth; d >= 0; d--, i = p->nodes[i].parent)
            tree->path[t][d] = slot_of[i];
        chain = chain && depth == t && tree->path[t][t] == t;
    }
    return chain;
}

/* --- proposers --- */

static void propose_lookup(plan *p)
{
    tb_lookup *l = &p->s->lookup;
    int32_t bin, start, chain[TB_MAX_DRAFT], at = 0, texts = l->texts;
    if (!(p->o->use & TB_USE_LOOKUP) || tb_lookup_follow(l, p->s->history, p->n, p->s->m->d.vocab))
        return;
    if (l->texts != texts)
        tb_belief_new_text(&p->s->belief);
    if ((start = tb_lookup_find(l, &bin)) < 0)
        return;
    for (int32_t i = 0; i < p->most; i++, bin = tb_lookup_next_bin(bin)) {
        /* A match that reaches the end of the text goes on with what it has proposed itself. */
        chain[i] = start + i < p->n ? l->tokens[start + i] : chain[start + i - p->n];
        at = add_child(p, at, chain[i], TB_KIND_LOOKUP, bin);
        if (at < 0 || p->nodes[at].value < LEAST)
            break;
    }
}

/* Successors of whatever nothing better has been proposed for. */
static void propose_recycled(plan *p)
{
    int32_t ids[TB_RECYCLED], bins[TB_RECYCLED];
    if (!(p->o->use & TB_USE_RECYCLED))
        return;
    for (int32_t i = 0; i < p->n_nodes && p->n_nodes + 2 <= POOL; i++) {
        const node *c = &p->nodes[i];
        if (c->slot >= 0 || c->ends || c->value < 2 * LEAST)
            continue;
        int32_t found = tb_recycled_find(&p->s->recycled, c->token, p->sampling, p->n + c->depth, ids, bins);
        for (int32_t k = 0; k < found && k < 2; k++)
            if (p->nodes[i].value * tb_belief_chance(&p->s->belief, TB_KIND_RECYCLED, bins[k]) > LEAST)
                (void)add_child(p, i, ids[k], TB_KIND_RECYCLED, bins[k]);
    }
}

/* Which of the draft's expectations applies behind node i. */
static int32_t context_of(const plan *p, int32_t i)
{
    const node *c = &p->nodes[i];
    if (i == 0)
        return p->s->belief.missed ? TB_AFTER_MISS : TB_AFTER_HIT;
    return tb_belief_context(c->bins[TB_KIND_DRAFT] >= 0 ? c->bins[TB_KIND_DRAFT] : tb_belief_draft_bin((float)c->own));
}

bool tb_plan_add_drafted(plan *p, int32_t i, int32_t row)
{
    tb_session *s = p->s;
    int32_t tokens[SIBLINGS], found = 0, want = tb_plan_branches(p) ? SIBLINGS : 1;
    float confidence[SIBLINGS];
    for (int32_t at = i; at; at = p->nodes[at].parent)
        s->history[p->n + p->nodes[at].depth - 1] = p->nodes[at].token;
    int32_t end = p->n + p->nodes[i].depth;
    if (s->ranked.there) {
        for (; found < want && s->ranked.ids[row][found] >= 0; found++) {
            tokens[found] = s->ranked.ids[row][found];
            confidence[found] = s->ranked.confidence[row][found];
        }
    } else if (tb_sample_ranked(s->draft_logits + (size_t)row * (size_t)s->m->d.vocab, s->m->d.vocab, s->history, end, p->sampling, end, want, tokens,
                                confidence, &found, s->sampler)) {
        return false;
    }
    for (int32_t k = 0; k < found; k++) {
        bool first = k == 0;
        int32_t bin = first ? tb_belief_draft_bin(confidence[k]) : tb_belief_sibling_bin(confidence[k]);
        int32_t kind = first ? TB_KIND_DRAFT : TB_KIND_SIBLING;
        if (!first && !p->o->draft_fixed && p->nodes[i].value * tb_belief_chance(&s->belief, kind, bin) < LEAST)
            continue;
        if (first)
            tb_belief_learn_often(&s->belief, context_of(p, i), bin);
        int32_t child = add_child(p, i, tokens[k], kind, bin);
        if (!first || child < 0)
            continue;
        p->nodes[i].first = child;
        for (int32_t c = i + 1; c < p->n_nodes; c++)    /* what it contradicts */
            if (p->nodes[c].parent == i && c != child)
                p->nodes[c].own = limited(p->nodes[c].own * (1 - p->nodes[child].own));
    }
    return true;
}

/* Whether the device can run a pass over what the one before has found. */
static bool chains(const plan *p) { return p->s->gpu && (p->o->use & TB_USE_CHAIN) && tbg_ranks(p->s); }

/* Runs the draft on nodes whose ancestors are all drafted or in the batch, before them; logits of all, or of the last alone. Behind the
 * last, `more` passes follow, each over the first choice of the one before. */
static bool run_draft(plan *p, const int32_t *batch, int32_t m, bool all, int32_t more)
{
    tb_session *s = p->s;
    int32_t tokens[TB_MAX_DRAFT + 1], slot_of[POOL];
    double t0 = tb_clock();
    for (int32_t t = 0; t < m; t++) {
        p->nodes[batch[t]].slot = p->n_slots++;
        tokens[t] = p->nodes[batch[t]].token;
    }
    for (int32_t i = 0; i < p->n_nodes; i++)
        slot_of[i] = p->nodes[i].slot;
    (void)tb_plan_lay_out(p, &p->tree, batch, m, slot_of);
    s->ranked.more = more;
    int code = tb_forward(s, TB_DRAFT, tokens, m, p->n - 1, &p->tree, all ? TB_LOGITS_ALL : TB_LOGITS_LAST, s->draft_logits, p->err, sizeof p->err);
    s->ranked.more = 0;
    if (code)
        return false;
    for (int32_t t = all ? 0 : m - 1; t < m; t++)
        if (!tb_plan_add_drafted(p, batch[t], all ? t : 0))
            return false;
    for (int32_t k = 1, at = batch[m - 1]; k <= more; k++) {
        at = p->nodes[at].first;
        if (at < 0 || !tb_plan_can_draft(p, at))
            break;
        p->nodes[at].slot = p->n_slots++;
        if (!tb_plan_add_drafted(p, at, k))
            return false;
    }
    p->passes[p->n_passes++] = (tb_pass_time){m, more, tb_clock() - t0};
    return true;
}

/* The chance that nothing proposed behind node i is right. */
static double unknown(const plan *p, int32_t i)
{
    double known = 0;
    for (int32_t k = i + 1; k < p->n_nodes; k++)
        known += p->nodes[k].parent == i ? p->nodes[k].own : 0;
    return known < 1 ? 1 - known : 0;
}

/* What drafting behind node i is worth where others that have proposed something there are wrong, if the first pass costs so much. */
static double worth_of(const plan *p, int32_t i, double cost)
{
    double open = unknown(p, i);
    return open > 0 ? tb_belief_worth(&p->s->belief, context_of(p, i), p->n_chosen, p->nodes[i].value * open, p->rate, cost) : -1;
}

bool tb_plan_can_draft(const plan *p, int32_t i) { return p->nodes[i].slot < 0 && !p->nodes[i].ends && p->nodes[i].depth < p->most; }

static bool room(const plan *p, int32_t m) { return p->n_slots - p->n_kept + m <= p->most + 1 && p->n_slots + m <= TB_ASIDE; }

/* The next batch for the draft, 0: nothing pays. A node whose ancestors are not drafted takes them along. */
static int32_t next_batch(plan *p, int32_t *batch, bool forced)
{
    const tb_belief *b = &p->s->belief;
    int32_t best = -1, best_new = 0, m = 0;
    choose(p, p->rate, 0);
    double best_net = forced ? -1e9 : 0;
    for (int32_t i = 0; i < p->n_nodes; i++) {
        if (!tb_plan_can_draft(p, i))
            continue;
        int32_t fresh = 1;
        for (int32_t at = i; at && p->nodes[p->nodes[at].parent].slot < 0; at = p->nodes[at].parent)
            fresh++;
        if (!room(p, fresh))
            continue;
        double net = worth_of(p, i, tb_belief_draft(b, fresh));
        if (net > best_net) {
            best_net = net;
            best = i;
            best_new = fresh;
        }
    }
    if (best < 0)
        return 0;
    m = best_new;
    for (int32_t at = best, k = m; k > 0; at = p->nodes[at].parent)
        batch[--k] = at;
    for (int32_t i = 0; tb_plan_branches(p) && best_new == 1 && i < p->n_nodes && m < TB_LEVEL && room(p, m + 1); i++)
        if (i && i != best && tb_plan_can_draft(p, i) && p->nodes[p->nodes[i].parent].slot >= 0 &&
            worth_of(p, i, tb_belief_draft(b, m + 1) - tb_belief_draft(b, m)) > 0)
            batch[m++] = i;
    return m;
}

/* Passes to run behind one over m tokens, of which `last` is the last, before the host looks at what they have found. */
static int32_t chain_behind(const plan *p, int32_t last, int32_t m)
{
    int32_t most = p->most - p->nodes[last].depth < TB_LEVEL ? p->most - p->nodes[last].depth : TB_LEVEL;
    while (most > 1 && !room(p, m + most - 1))
        most--;
    return chains(p) ? tb_belief_chain(&p->s->belief, context_of(p, last), p->n_chosen, p->nodes[last].value * unknown(p, last), most) - 1 : 0;
}

/* `forced` passes come whether they pay or not. */
static void propose_draft(plan *p, int32_t forced)
{
    int32_t batch[TB_MAX_DRAFT + 1], m;
    if (!(p->o->use & TB_USE_DRAFT))
        return;
    while (p->n_passes < TB_MAX_DRAFT && (m = next_batch(p, batch, p->n_passes < forced)) > 0) {
        bool level = m > 1 && p->nodes[batch[1]].parent != batch[0];
        if (!run_draft(p, batch, m, level, level || p->n_passes < forced ? 0 : chain_behind(p, batch[m - 1], m)))
            break;
    }
}

/* A chain of exactly so many tokens from the 2-bit weights. */
static void propose_chain(plan *p)
{
    for (int32_t at = 0; at >= 0 && p->n_slots < p->most && p->nodes[at].depth < p->most; at = p->nodes[at].first) {
        int32_t left = p->most - p->n_slots, more = !chains(p) ? 0 : left < TB_LEVEL ? left - 1 : TB_LEVEL - 1;
        if (p->nodes[at].slot < 0 && (!tb_plan_can_draft(p, at) || !run_draft(p, &at, 1, false, more)))
            break;
    }
}

/* A tree of exactly so many tokens where there are as many: levels of the likeliest nodes, whatever they cost. */
static void propose_tree(plan *p)
{
    for (bool more = true; more && p->n_slots < p->most && p->n_nodes < 2 * p->most + 1;) {
        int32_t batch[TB_LEVEL], m = 0;
        tb_plan_revalue(p);
        for (; m < TB_LEVEL && p->n_slots + m < p->most; m++) {
            int32_t best = -1;
            for (int32_t i = 0; i < p->n_nodes; i++) {
                bool taken = false;
                for (int32_t t = 0; t < m; t++)
                    taken = taken || batch[t] == i;
                if (!taken && tb_plan_can_draft(p, i) && (i == 0 || p->nodes[p->nodes[i].parent].slot >= 0) && (best < 0 || p->nodes[i].value > p->nodes[best].value))
                    best = i;
            }
            if (best < 0)
                break;
            batch[m] = best;
        }
        more = m > 0 && run_draft(p, batch, m, true, 0);
    }
}

/* Every so often a step is spent on learning what drafting would give. */
static int32_t forced_drafts(tb_belief *b)
{
    if (b->idle == b->steps)                        /* never so far: now the cost that everything hangs on */
        return 1;
    if (b->trial == TB_TRIAL)
        return 1;
    if (b->idle < b->patience)
        return 0;
    b->patience = b->patience < 256 ? 2 * b->patience : 256;
    return 1;
}

static void propose(plan *p)
{
    tb_belief *b = &p->s->belief;
    p->n_chosen = 1;
    p->chosen[0] = 0;
    if (p->most < 1 || (!p->o->draft_fixed && !tb_belief_begun(b))) {
        p->most = 0;
        return;
    }
    if (p->o->draft_full || p->o->draft_fixed)
        tb_belief_use(b, p->o->draft_full > 0 && b->dearer > 1);
    else
        tb_belief_choose(b);
    tb_overlap_take(p);
    if (p->o->draft_fixed == 1) {
        propose_chain(p);
        choose(p, 0, p->most);
    } else if (p->o->draft_fixed) {
        propose_lookup(p);
        if (p->o->use & TB_USE_DRAFT)
            propose_tree(p);
        propose_recycled(p);
        choose(p, 0, p->most);
    } else {
        p->rate = tb_belief_rate(b);
        const bool first = b->idle == b->steps;
        const int32_t forced = p->o->use & TB_USE_DRAFT ? forced_drafts(b) : 0;
        propose_lookup(p);
        propose_draft(p, forced);
        if (p->n_passes > forced)
            b->patience = 16;
        propose_recycled(p);
        choose(p, p->rate, first ? forced : 0);
    }
    arrange(p);
}

/* --- the short head --- */

static int32_t short_head(const tb_step_options *o, int32_t vocab)
{
    int32_t rows = o->draft_vocab > 0 ? o->draft_vocab : vocab / 6 > 8192 ? vocab / 6 : 8192;
    return !(o->use & TB_USE_SHORT_HEAD) || rows > vocab / 2 ? 0 : rows;
}

/* The blocks of the first rows and of every token of the text. Byte-pair vocabularies come in the order of their merges, which is
 * roughly that of frequency; what a text has used it will use again. */
static int prepare_head(tb_session *s, const tb_step_options *o, int32_t n)
{
    int32_t vocab = s->m->d.vocab, blocks = (vocab + 15) / 16, rows = short_head(o, vocab);
    size_t logits = TB_LEVEL * (size_t)vocab;
    tb_rows *h = &s->head;
    if (!s->draft_logits && !(s->draft_logits = tb_alloc(logits * sizeof *s->draft_logits)))
        return TB_ENOMEM;
    if (!rows) {
        h->n_runs = 0;
        s->draft_logits_full = true;
        return TB_OK;
    }
    if (!h->active) {
        h->active = calloc((size_t)blocks, 1);
        h->runs = malloc((size_t)blocks * sizeof *h->runs);
        if (!h->active || !h->runs)
            return TB_ENOMEM;
        s->draft_logits_full = true;
    }
    int32_t before = h->n_active;
    for (int32_t i = 0; i < (rows + 15) / 16; i++) {
        h->n_active += !h->active[i];
        h->active[i] = 1;
    }
    for (int32_t i = 0; i < n; i++) {
        h->n_active += !h->active[s->history[i] / 16];
        h->active[s->history[i] / 16] = 1;
    }
    if (h->n_active != before || !h->n_runs) {
        h->n_runs = 0;
        for (int32_t i = 0; i < blocks; i++) {
            if (!h->active[i])
                continue;
            int32_t(*run)[2] = &h->runs[h->n_runs - (h->n_runs > 0)];
            if (h->n_runs && (*run)[1] == i && i - (*run)[0] < 32)
                (*run)[1]++;
            else {
                h->runs[h->n_runs][0] = i;
                h->runs[h->n_runs++][1] = i + 1;
            }
        }
    }
    if (s->draft_logits_full)
        for (size_t i = 0; i < logits; i++)
            s->draft_logits[i] = -INFINITY;
    s->draft_logits_full = false;
    return TB_OK;
}

/* --- the step --- */

/* `token` was drawn behind node i: who had expected it, and who something else. */
static void learn_accepted(plan *p, int32_t i, int32_t token)
{
    tb_belief *b = &p->s->belief;
    for (int32_t c = i + 1; c < p->n_nodes; c++)
        if (p->nodes[c].parent == i)
            for (int32_t kind = 0; kind < TB_KINDS; kind++)
                if (p->nodes[c].bins[kind] >= 0)
                    tb_belief_learn(b, kind, p->nodes[c].bins[kind], p->nodes[c].token == token);
    b->missed = p->nodes[i].first >= 0 && p->nodes[p->nodes[i].first].token != token;
}

static int report_probabilities(tb_session *s, const float *logits, int32_t logprobs, tb_step_result *r)
{
    int32_t at = r->n_tokens - 1, vocab = s->m->d.vocab, n = logprobs < 1 ? 1 : logprobs, ids[TB_MAX_LOGPROBS];
    if (!s->top_ids)
        s->top_ids = malloc((TB_MAX_DRAFT + 1) * TB_MAX_LOGPROBS * sizeof *s->top_ids);
    if (!s->top_logprobs)
        s->top_logprobs = malloc((TB_MAX_DRAFT + 1) * TB_MAX_LOGPROBS * sizeof *s->top_logprobs);
    if (!s->top_ids || !s->top_logprobs)
        return TB_ENOMEM;
    int code = tb_sample_top(logits, vocab, n, ids, s->sampler);
    if (code)
        return code;
    double sum = tb_sample_log_sum(logits, vocab, logits[ids[0]]);
    r->logprob[at] = (float)((double)logits[r->tokens[at]] - sum);
    for (int32_t i = 0; i < logprobs; i++) {
        s->top_ids[at * logprobs + i] = ids[i];
        s->top_logprobs[at * logprobs + i] = ids[i] < 0 ? -INFINITY : (float)((double)logits[ids[i]] - sum);
    }
    r->top_ids = s->top_ids;
    r->top_logprobs = s->top_logprobs;
    return TB_OK;
}

/* Draws along the tree; slots[d]: where the emitted path lies. */
static int accept(plan *p, tb_step_result *r, int32_t *slots, char *err, size_t err_n)
{
    tb_session *s = p->s;
    const tb_step_options *o = p->o;
    int32_t vocab = s->m->d.vocab;
    for (int32_t at = 0, depth = 0; at >= 0; depth++) {
        int32_t token, i = p->chosen[at], top[TB_RECYCLED];
        const float *logits = s->s.logits + (size_t)at * (size_t)vocab;
        slots[depth] = at;
        int code = tb_sample_with(logits, vocab, s->history, p->n + depth, p->sampling, p->n + depth, &token, NULL, s->sampler);
        if (code == TB_ENONFINITE)
            return tb_fail(err, err_n, code, "the logits for position %d are not finite: the model's weights are damaged", (int)(p->n + depth));
        if (code)
            return tb_fail(err, err_n, code, "the history holds a token outside the vocabulary of %d", (int)vocab);
        s->history[p->n + depth] = r->tokens[r->n_tokens++] = token;
        if (o->logprobs >= 0 && report_probabilities(s, logits, o->logprobs, r))
            return tb_fail(err, err_n, TB_ENOMEM, "out of memory for log probabilities");
        if ((o->use & TB_USE_RECYCLED) && o->draft_max > 0 && !o->draft_only && !tb_sample_top(logits, vocab, TB_RECYCLED, top, s->sampler))
            (void)tb_recycled_keep(&s->recycled, vocab, p->nodes[i].token, top, logits);
        learn_accepted(p, i, token);
        at = -1;
        for (int32_t c = 1; c < p->n_chosen; c++)
            if (p->nodes[p->chosen[c]].parent == i && p->nodes[p->chosen[c]].token == token)
                at = c;
        if (at >= 0) {
            r->accepted++;
            r->early_accepted += p->nodes[p->chosen[at]].early;
            r->accepted_by_kind[p->nodes[p->chosen[at]].kind]++;
        }
        r->hit_eos = ends(o, token);
        if (r->hit_eos || r->n_tokens >= o->budget)
            break;
    }
    return TB_OK;
}

int tb_session_step(tb_session *s, const int32_t *history, int32_t n, const tb_sampling *sampling, const tb_step_options *o,
                    tb_step_result *r, char *err, size_t err_n)
{
    memset(r, 0, sizeof *r);
    if (n < 1 || s->length != n - 1)
        return tb_fail(err, err_n, TB_EINVAL, "the cache holds %d tokens, a history of %d needs %d", (int)s->length, (int)n, (int)n - 1);
    if (o->budget < 1 || o->draft_max < 0 || o->logprobs > TB_MAX_LOGPROBS)
        return tb_fail(err, err_n, TB_EINVAL, "a step needs a budget of 1 or more tokens, and gives at most %d log probabilities", TB_MAX_LOGPROBS);
    if (n > s->max_context)
        return tb_fail(err, err_n, TB_ECONTEXT, "the context of %d tokens is full", (int)s->max_context);
    for (int32_t i = 0; i < n; i++)
        if (history[i] < 0 || history[i] >= s->m->d.vocab)
            return tb_fail(err, err_n, TB_EINVAL, "the history holds a token outside the vocabulary of %d", (int)s->m->d.vocab);
    int code = tb_sample_check(sampling, s->m->d.vocab, err, err_n);
    if (code)
        return code;
    s->sampling = sampling;
    s->overlap = NULL;
    int32_t most = o->draft_only ? 0 : o->draft_max;
    if (most > TB_MAX_DRAFT)
        most = TB_MAX_DRAFT;
    if (most > o->budget - 1)
        most = o->budget - 1;
    if (most > s->max_context - n)
        most = s->max_context - n;
    code = tb_session_reserve(s, n + most, most + 1 > TB_LEVEL ? most + 1 : TB_LEVEL, 1, err, err_n);
    if (code)
        return code;
    if (tb_session_keep_history(s, 0, history, n) || (most && prepare_head(s, o, n)))
        return tb_fail(err, err_n, TB_ENOMEM, "out of memory for drafting");

    plan p = {.s = s, .sampling = sampling, .o = o, .n = n, .most = most, .n_nodes = 1};
    p.nodes[0] = (node){.token = history[n - 1], .parent = -1, .bins = {-1, -1, -1, -1}, .slot = -1, .first = -1, .own = 1, .value = 1};
    double before = s->bytes_read;
    s->ranked = (tb_ranked){.want = tb_plan_branches(&p) ? SIBLINGS : 2};
    propose(&p);
    for (int32_t i = 0; i < p.n_passes; i++) {
        r->draft_s += p.passes[i].seconds;
        r->draft_tokens += p.passes[i].m + p.passes[i].more;
        r->draft_passes += 1 + p.passes[i].more;
        r->chained += p.passes[i].more;
    }
    if (atomic_load(&s->abort))
        return tb_fail(err, err_n, TB_EABORT, "interrupted");

    int32_t m = p.n_chosen, tokens[TB_MAX_DRAFT + 1], slot_of[POOL], slots[TB_MAX_DRAFT + 1];
    for (int32_t t = 0; t < m; t++) {
        const node *c = &p.nodes[p.chosen[t]];
        tokens[t] = c->token;
        slot_of[p.chosen[t]] = t;
        r->depth = c->depth > r->depth ? c->depth : r->depth;
        if (t)
            r->drafted_by_kind[c->kind]++;
        r->early += c->early;
    }
    r->drafted = m - 1;
    bool chain = tb_plan_lay_out(&p, &p.tree, p.chosen, m, slot_of);
    int32_t deepest = s->max_context - n < o->budget - 1 ? s->max_context - n : o->budget - 1;
    tb_overlap_prepare(&p, deepest < TB_MAX_DRAFT ? deepest : TB_MAX_DRAFT);
    code = tb_session_reserve(s, n + most, m, (m + 7) / 8 * 8, err, err_n);
    double t0 = tb_clock();
    if (!code)
        code = tb_forward(s, o->draft_only ? TB_DRAFT : TB_VERIFY, tokens, m, n - 1, chain ? NULL : &p.tree, TB_LOGITS_ALL, NULL, err, err_n);
    s->overlap = NULL;
    if (code)
        return code;
    r->verify_s = tb_clock() - t0;
    r->overlapped_passes = p.n_overlapped;
    r->full = s->belief.full && r->draft_passes + p.n_overlapped > 0;

    t0 = tb_clock();
    code = accept(&p, r, slots, err, err_n);
    if (code)
        return code;
    tb_session_compact(s, n - 1, slots, r->n_tokens);
    if (!o->draft_only)
        tb_belief_learn_step(&s->belief, p.passes, p.n_passes, m, r->verify_s, p.n_overlapped, r->n_tokens);
    r->sample_s = tb_clock() - t0;
    r->bytes = s->bytes_read - before;
    tb_session_commit(s, o->draft_only ? TB_DRAFT : TB_VERIFY, n - 1 + r->n_tokens);
    if (p.overlap.begun) {
        s->high = s->high > n - 1 + TB_ASIDE + p.n_slots ? s->high : n - 1 + TB_ASIDE + p.n_slots;
        tb_overlap_keep(&p, r);
    }
    return TB_OK;
}

void tb_session_pin_costs(tb_session *s, const double *draft, const double *verify) { tb_belief_pin(&s->belief, draft, verify); }

void tb_session_belief(const tb_session *s, tb_belief_view *v)
{
    const tb_belief *b = &s->belief;
    memset(v, 0, sizeof *v);
    v->plain_s = b->plain_s;
    v->rate = b->tokens / b->cost;
    v->spent = b->spent;
    v->overlap = b->overlap.mean;
    v->promise[b->full] = b->promise.mean;
    v->promise[!b->full] = b->other.promise.mean;
    for (int32_t m = 1; m <= TB_MAX_DRAFT; m++)
        v->draft[m] = b->draft[m].weight > 0 ? tb_belief_draft(b, m) : 0;
    for (int32_t m = 1; m <= TB_MAX_DRAFT + 1; m++)
        v->verify[m] = m == 1 || b->verify[m].weight > 0 ? tb_belief_verify(b, m) : 0;
    for (int32_t k = 0; k < TB_KINDS; k++)
        for (int32_t i = 0; i < TB_BINS; i++) {
            v->accept[k][i] = b->accept[k][i].mean;
            v->seen[k][i] = b->accept[k][i].weight;
        }
    for (int32_t i = v->head_rows = 0; i < s->head.n_runs; i++)
        v->head_rows += 16 * (s->head.runs[i][1] - s->head.runs[i][0]);
    if (!s->head.n_runs || v->head_rows > s->m->d.vocab)
        v->head_rows = s->m->d.vocab;
}
