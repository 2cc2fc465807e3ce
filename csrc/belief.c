/* belief.c - see belief.h. */
#include <string.h>

#include "belief.h"

static void follow(double *mean, double seen, double weight) { *mean = *mean > 0 ? *mean + weight * (seen - *mean) : seen; }

/* --- bins of confidence --- */

static const float draft_edges[TB_BINS - 1] = {.1f, .2f, .3f, .4f, .5f, .6f, .7f, .8f, .85f, .9f, .93f, .95f, .97f, .98f, .99f};
static const float sibling_edges[TB_BINS - 1] = {.01f, .02f, .03f, .05f, .07f, .1f, .13f, .16f, .2f, .24f, .28f, .32f, .37f, .42f, .47f};

static int32_t bin_of(const float *edges, float confidence)
{
    int32_t bin = 0;
    while (bin < TB_BINS - 1 && confidence >= edges[bin])
        bin++;
    return bin;
}

int32_t tb_belief_draft_bin(float confidence) { return bin_of(draft_edges, confidence); }
int32_t tb_belief_sibling_bin(float confidence) { return bin_of(sibling_edges, confidence); }

/* A text that is copied teaches within a step or two that it is; one that is not must not pay for the hope. */
void tb_belief_new_text(tb_belief *b)
{
    static const double lookup[TB_BINS] = {.05, .15, .25, .35, .45, .55, .65, .75, .1, .2, .3, .4, .5, .6, .7, .8};
    for (int32_t i = 0; i < TB_BINS; i++)
        b->accept[TB_KIND_LOOKUP][i] = (tb_mean){lookup[i], 2};
    for (int32_t kind = 0; kind < TB_KINDS; kind++)
        b->hit[kind] = b->hoped[kind] = 0.5;
}

/* What is assumed before anything was seen; a few observations outweigh it. */
void tb_belief_init(tb_belief *b)
{
    static const double recycled[4] = {.3, .1, .06, .04};
    memset(b, 0, sizeof *b);
    tb_belief_new_text(b);
    for (int32_t i = 0; i < TB_BINS; i++) {
        double low = i ? (double)draft_edges[i - 1] : 0, high = i < TB_BINS - 1 ? (double)draft_edges[i] : 1;
        double few = i ? (double)sibling_edges[i - 1] : 0.005;
        b->accept[TB_KIND_DRAFT][i] = (tb_mean){(low + high) / 2 * .95, 4};
        b->accept[TB_KIND_SIBLING][i] = (tb_mean){few * .8, 6};
        b->accept[TB_KIND_RECYCLED][i] = (tb_mean){recycled[i / 4] * (.4 + .4 * (i % 4)), 4};
        b->ahead[i] = (tb_mean){.4 + .5 * i / (TB_BINS - 1), 4};
    }
    b->ahead[TB_BINS] = (tb_mean){.6, 4};
    b->draft[1] = (tb_mean){0.35, 2};
    b->draft_slope = 0.1;
    b->verify_slope = 0.12;
    b->tokens = b->cost = 4;
    b->patience = 16;
}

void tb_belief_learn_mean(tb_mean *m, double seen)
{
    m->weight += 1;
    double weight = m->weight < 30 ? 1 / m->weight : 1.0 / 30;
    m->mean += weight * (seen - m->mean);
}

double tb_belief_chance(const tb_belief *b, int32_t kind, int32_t bin)
{
    double trust = (b->hit[kind] + 0.05) / (b->hoped[kind] + 0.05);
    double chance = b->accept[kind][bin].mean * (trust > 1.2 ? 1.2 : trust);
    return chance < 1e-3 ? 1e-3 : chance > 0.999 ? 0.999 : chance;
}

void tb_belief_learn(tb_belief *b, int32_t kind, int32_t bin, bool accepted)
{
    b->hit[kind] += 0.15 * (accepted - b->hit[kind]);
    b->hoped[kind] += 0.15 * (b->accept[kind][bin].mean - b->hoped[kind]);
    tb_belief_learn_mean(&b->accept[kind][bin], accepted);
}

/* --- costs: a line through what was measured, and the more often a number of tokens was, the more its own mean --- */

static double cost_of(const tb_mean *seen, int32_t m, double first, double slope)
{
    double line = first + slope * (m - 1), trust = seen[m].weight / (seen[m].weight + 6);
    return m <= 1 ? first : line + trust * (seen[m].mean - line);
}

double tb_belief_verify(const tb_belief *b, int32_t m) { return cost_of(b->verify, m, 1, b->verify_slope); }

double tb_belief_draft(const tb_belief *b, int32_t m) { return m < 1 ? 0 : cost_of(b->draft, m, b->draft[1].mean, b->draft_slope); }

static void learn_cost(tb_mean *seen, double *slope, double first, int32_t m, double cost)
{
    tb_belief_learn_mean(&seen[m], cost);
    if (m > 1) {
        double found = (cost - first) / (m - 1);
        *slope += (m < 5 ? 0.025 * (m - 1) : 0.1) * ((found > 0 ? found : 0) - *slope);
    }
}

/* What was done lately, but no more than the best chain of drafts promises from here: a rate that a passage gave which is over now
 * says nothing about what drafting is worth in this one. */
double tb_belief_rate(const tb_belief *b, int32_t most)
{
    double lately = b->tokens / b->cost, best = 1, expected = 1, path = 1;
    for (int32_t k = 1; k <= most && k < 24; k++) {
        path *= b->ahead[k == 1 ? TB_BINS : TB_BINS * 2 / 3].mean;
        expected += path;
        double rate = expected / (k * b->draft[1].mean + tb_belief_verify(b, k + 1));
        best = rate > best ? rate : best;
    }
    return lately < 1 ? 1 : lately < best ? lately : best;
}

/* What a step took altogether, against what was expected, says how fast the machine is at the moment; the rest is how its parts
 * compare. A step that took more than twice as long as expected was interrupted and teaches nothing else. */
void tb_belief_learn_step(tb_belief *b, const tb_pass_time *passes, int32_t n, int32_t m, double verify_s, int32_t tokens)
{
    double expected = tb_belief_verify(b, m), seconds = verify_s;
    for (int32_t i = 0; i < n; i++) {
        expected += tb_belief_draft(b, passes[i].m);
        seconds += passes[i].seconds;
    }
    double now = seconds / expected;
    b->steps++;
    b->tokens += 0.15 * (tokens - b->tokens);
    b->cost += 0.15 * (expected - b->cost);
    b->idle = n ? 0 : b->idle + 1;
    if (b->plain_s > 0 && now > 2 * b->plain_s) {
        follow(&b->plain_s, now, 0.1);
        return;
    }
    follow(&b->plain_s, now, 0.25);
    if (m > 1)
        learn_cost(b->verify, &b->verify_slope, 1, m, verify_s / b->plain_s);
    for (int32_t i = 0; i < n; i++)
        learn_cost(b->draft, &b->draft_slope, b->draft[1].mean, passes[i].m, passes[i].seconds / b->plain_s);
}
