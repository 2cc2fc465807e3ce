/* belief.c - see belief.h. */
#include <math.h>
#include <string.h>

#include "belief.h"

enum { SLOPE_PRIOR = 8, SLOPE_MEMORY = 400 };    /* as weights of a slope */
enum { FIRST_WAIT = 8, LAST_WAIT = 256 };         /* steps before the other precision is tried */

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

/* --- two precisions --- */

#define DRAFTER(X) \
    X(draft, draft) X(chained, chained) X(overlap, overlap) X(draft_slope, draft_slope) X(accept[TB_KIND_DRAFT], accept) \
    X(hit[TB_KIND_DRAFT], hit) X(hoped[TB_KIND_DRAFT], hoped) X(often, often) X(best, best) X(promise, promise)

_Static_assert(TB_KIND_SIBLING == TB_KIND_DRAFT + 1, "a tb_drafter's two kinds are one piece of tb_belief's");

static void swap(void *a, void *b, size_t n)
{
    for (unsigned char *x = a, *y = b, t; n--; x++, y++) {
        t = *x;
        *x = *y;
        *y = t;
    }
}

/* Before it was seen the draft at full precision is as good as the other, and costs what its bytes say. */
static void assume_other(tb_belief *b)
{
#define COPY(mine, its) memcpy(&b->other.its, &b->mine, sizeof b->other.its);
    DRAFTER(COPY)
    for (int32_t m = 1; m <= TB_MAX_DRAFT; m++)
        b->other.draft[m] = (tb_mean){b->dearer * b->draft[m].mean, b->pinned ? b->draft[m].weight : fmin(b->draft[m].weight, 1)};
    for (int32_t i = 0; i < TB_BINS; i++)
        for (int32_t k = 0; k < 2; k++)
            b->other.accept[k][i].weight = fmin(b->other.accept[k][i].weight, 4);
    b->other.draft_slope.mean *= b->dearer;
    b->other.overlap.mean *= b->dearer;
}

void tb_belief_use(tb_belief *b, bool full)
{
#define SWAP(mine, its) swap(&b->mine, &b->other.its, sizeof b->other.its);
    if (b->full == full)
        return;
    if (b->other.best <= 0)
        assume_other(b);
    DRAFTER(SWAP)
    b->full = full;
}

/* A text that is copied teaches within a step or two that it is; one that is not must not pay for the hope. */
void tb_belief_new_text(tb_belief *b)
{
    static const double lookup[TB_BINS] = {.14, .35, .39, .45, .49, .52, .56, .59, .05, .17, .35, .42, .49, .56, .59, .63};
    for (int32_t i = 0; i < TB_BINS; i++)
        b->accept[TB_KIND_LOOKUP][i] = (tb_mean){lookup[i], 4};
    for (int32_t kind = 0; kind < TB_KINDS; kind++)
        b->hit[kind] = b->hoped[kind] = 0.5;
    for (int32_t k = 0; k < 2; k++)
        b->other.hit[k] = b->other.hoped[k] = 0.5;
}

/* What is assumed before anything was seen; a few observations outweigh it. */
void tb_belief_init(tb_belief *b)
{
    static const double recycled[TB_BINS] = {.12, .2, .22, .25, .1, .1, .06, .02, .07, .07, .05, .02, .05, .05, .03, .02};
    static const double often[TB_BINS] = {.01, .07, .09, .08, .09, .09, .08, .09, .05, .06, .05, .04, .05, .04, .04, .07};
    memset(b, 0, sizeof *b);
    tb_belief_new_text(b);
    for (int32_t i = 0; i < TB_BINS; i++) {
        double low = i ? (double)draft_edges[i - 1] : 0, high = i < TB_BINS - 1 ? (double)draft_edges[i] : 1;
        double few = i ? (double)sibling_edges[i - 1] : 0.005;
        b->accept[TB_KIND_DRAFT][i] = (tb_mean){pow((low + high) / 2, .8), 8};
        b->accept[TB_KIND_SIBLING][i] = (tb_mean){few * .9, 10};
        b->accept[TB_KIND_RECYCLED][i] = (tb_mean){recycled[i], 8};
        for (int32_t context = 0; context < TB_CONTEXTS; context++)
            b->often[context][i] = often[i];
    }
    b->best = 1;
    b->draft[1] = (tb_mean){0.35, 2};
    b->chained = (tb_mean){0.8, 2};
    b->overlap = (tb_mean){0.02, 2};
    b->draft_slope = (tb_mean){0.05, SLOPE_PRIOR};
    b->verify_slope = (tb_mean){0.15, SLOPE_PRIOR};
    b->tokens = b->cost = 4;
    b->patience = 16;
    b->wait = FIRST_WAIT;
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
    double weight = kind == TB_KIND_LOOKUP ? 0.15 : 0.02;
    b->hit[kind] += weight * (accepted - b->hit[kind]);
    b->hoped[kind] += weight * (b->accept[kind][bin].mean - b->hoped[kind]);
    tb_belief_learn_mean(&b->accept[kind][bin], accepted);
}

/* --- costs: a line through what was measured, and the more often a number of tokens was, the more its own mean --- */

void tb_belief_pin(tb_belief *b, const double *draft, const double *verify)
{
    tb_belief_use(b, false);
    b->other.best = 0;
    b->pinned = true;
    b->chained = (tb_mean){0.8, 1e12};
    b->overlap = (tb_mean){0.1 * draft[1], 1e12};
    for (int32_t m = 1; m <= TB_MAX_DRAFT; m++)
        b->draft[m] = (tb_mean){draft[m], 1e12};
    for (int32_t m = 1; m <= TB_MAX_DRAFT + 1; m++)
        b->verify[m] = (tb_mean){verify[m], 1e12};
}

static double cost_of(const tb_mean *seen, int32_t m, double first, double slope)
{
    double line = first + slope * (m - 1), trust = seen[m].weight / (seen[m].weight + 6);
    return m <= 1 ? first : line + trust * (seen[m].mean - line);
}

double tb_belief_verify(const tb_belief *b, int32_t m) { return cost_of(b->verify, m, 1, b->verify_slope.mean); }

double tb_belief_draft(const tb_belief *b, int32_t m) { return m < 1 ? 0 : cost_of(b->draft, m, b->draft[1].mean, b->draft_slope.mean); }

/* The slope is that of the line through (1, first) nearest to what was seen. */
static void learn_cost(tb_mean *seen, tb_mean *slope, double first, int32_t m, double cost)
{
    tb_belief_learn_mean(&seen[m], cost);
    if (m > 1) {
        const double found = (cost - first) / (m - 1), weight = (double)(m - 1) * (m - 1);
        slope->weight = fmin(slope->weight + weight, SLOPE_MEMORY + weight);
        slope->mean += weight / slope->weight * ((found > 0 ? found : 0) - slope->mean);
    }
}

void tb_belief_learn_prompt(tb_belief *b, int32_t m, double seconds)
{
    if (m >= 16 && (b->token_s <= 0 || seconds / m < b->token_s))
        b->token_s = seconds / m;
}

bool tb_belief_begun(const tb_belief *b) { return b->steps > 0 || b->token_s > 0 || b->pinned; }

int32_t tb_belief_context(int32_t bin) { return bin < 7 ? TB_BEHIND_GUESS : TB_BEHIND_SURE; }

void tb_belief_learn_often(tb_belief *b, int32_t context, int32_t bin)
{
    for (int32_t i = 0; i < TB_BINS; i++)
        b->often[context][i] += 0.03 * ((i == bin) - b->often[context][i]);
}

static double more_worth(const tb_belief *b, int32_t context, int32_t m, double c)
{
    double at = c * TB_GRID;
    int32_t i = at < TB_GRID - 1 ? (int32_t)at : TB_GRID - 1;
    const double *w = b->worth[context][m < TB_AHEAD ? m : TB_AHEAD];
    return w[i] + (at - i) * (w[i + 1] - w[i]);
}

double tb_belief_worth(const tb_belief *b, int32_t context, int32_t m, double c, double rate, double draft)
{
    double token = tb_belief_verify(b, m + 1) - tb_belief_verify(b, m), sum = -rate * draft;
    token = rate * (token > 0.01 ? token : 0.01);
    for (int32_t i = 0; i < TB_BINS; i++) {
        double path = c * b->likely[i], net = path - token + more_worth(b, tb_belief_context(i), m + 1, path);
        sum += net > 0 ? b->often[context][i] * net : 0;
    }
    return sum;
}

/* Chances of states (context, path's chance) in which the draft goes on. */
typedef double states[TB_CONTEXTS][TB_GRID + 1];

/* Adds to `next` where a pass from a state of chance `mass` leads, if the draft goes on there, with m tokens to verify; returns how much. */
static double go_on(const tb_belief *b, int32_t context, double c, double mass, int32_t m, states next)
{
    double sum = 0;
    for (int32_t i = 0; i < TB_BINS; i++) {
        double path = c * b->likely[i], at = path * TB_GRID, some = mass * b->often[context][i];
        int32_t to = tb_belief_context(i), low = at < TB_GRID - 1 ? (int32_t)at : TB_GRID - 1;
        for (int32_t k = low; k <= low + 1; k++)
            if (b->worth[to][m < TB_AHEAD ? m : TB_AHEAD][k] > 0) {
                double part = some * (1 - fabs(at - k));
                next[to][k] += part;
                sum += part;
            }
    }
    return sum;
}

int32_t tb_belief_chain(const tb_belief *b, int32_t context, int32_t m, double c, int32_t most)
{
    states here = {{0}}, next;
    double wanted = go_on(b, context, c, 1, m + 1, here);
    int32_t n = 1;
    while (n < most && wanted > b->chained.mean) {
        n++;
        wanted = 0;
        memset(next, 0, sizeof next);
        for (int32_t at = 0; at < TB_CONTEXTS; at++)
            for (int32_t k = 0; k <= TB_GRID; k++)
                wanted += here[at][k] > 0 ? go_on(b, at, (double)k / TB_GRID, here[at][k], m + n, next) : 0;
        memcpy(here, next, sizeof here);
    }
    return n;
}

/* Fills `worth`, from the longest path back, and moves `best` towards the rate at which a step that drafts is worth its time. */
static void look_ahead(tb_belief *b, double rate)
{
    for (int32_t i = 0; i < TB_BINS; i++)
        b->likely[i] = tb_belief_chance(b, TB_KIND_DRAFT, i);
    for (int32_t m = TB_AHEAD; m > 1; m--)
        for (int32_t context = TB_BEHIND_GUESS; context < TB_CONTEXTS; context++)
            for (int32_t i = 0; i <= TB_GRID; i++) {
                double net = m == TB_AHEAD ? 0 : tb_belief_worth(b, context, m, (double)i / TB_GRID, rate, b->draft[1].mean);
                b->worth[context][m][i] = net > 0 ? net : 0;
            }
}

static void improve_best(tb_belief *b)
{
    for (int32_t i = b->steps ? 1 : 8; i > 0; i--) {
        look_ahead(b, b->best);
        b->best += 0.3 * (1 - b->best + tb_belief_worth(b, TB_AFTER_HIT, 1, 1, b->best, b->draft[1].mean));
        b->best = b->best < 1 ? 1 : b->best > 8 ? 8 : b->best;
    }
}

void tb_belief_choose(tb_belief *b)
{
    if (b->dearer <= 1 || b->steps < 2)
        return;
    improve_best(b);
    tb_belief_learn_mean(&b->promise, b->best);
    if (b->trial > 0) {
        if (--b->trial > 0)
            return;
        if (b->promise.mean >= b->other.promise.mean)
            b->wait = FIRST_WAIT;
        else
            tb_belief_use(b, !b->full);
    } else if (b->other.promise.mean > 1.05 * b->promise.mean) {
        b->since = 0;
        tb_belief_use(b, !b->full);
    } else if (++b->since > b->wait) {
        b->since = 0;
        b->wait = b->wait < LAST_WAIT ? 2 * b->wait : LAST_WAIT;
        b->trial = TB_TRIAL;
        tb_belief_use(b, !b->full);
        b->promise.weight = 0;
    }
}

/* What drafting alone promises. What a passage brought that could be looked up says nothing about what time is worth in this one.
 * Where drafting has lost time so far, it must promise more. */
double tb_belief_rate(tb_belief *b)
{
    improve_best(b);
    double lost = b->spent - b->total - 0.5;
    return b->best * (lost > 0 ? 1 + fmin(0.2 * lost, 1) : 1);
}

/* What a step took altogether, against what was expected, says how fast the machine is at the moment; the rest is how its parts
 * compare. A step that took more than twice as long as expected was interrupted and teaches nothing else. */
void tb_belief_learn_step(tb_belief *b, const tb_pass_time *passes, int32_t n, int32_t m, double verify_s, int32_t overlapped, int32_t tokens)
{
    double alone = tb_belief_verify(b, m), expected = alone + overlapped * b->overlap.mean, seconds = verify_s;
    for (int32_t i = 0; i < n; i++) {
        expected += tb_belief_draft(b, passes[i].m) + passes[i].more * b->chained.mean * b->draft[1].mean;
        seconds += passes[i].seconds;
    }
    double now = seconds / expected;
    b->steps++;
    b->spent += expected;
    b->total += tokens;
    b->tokens += 0.15 * (tokens - b->tokens);
    b->cost += 0.15 * (expected - b->cost);
    b->idle = n ? 0 : b->idle + 1;
    if (b->pinned)
        return;
    if (b->plain_s > 0 && now > 2 * b->plain_s) {
        follow(&b->plain_s, now, 0.1);
        return;
    }
    follow(&b->plain_s, now, 0.25);
    if (b->steps == 1 && b->token_s > 0) {
        b->plain_s = fmax(verify_s - b->token_s * (m - 1), 0.4 * verify_s);
        b->verify_slope.mean = fmin(fmax(b->token_s / b->plain_s, 0.02), 0.3);
        b->draft_slope.mean = 0.35 * b->verify_slope.mean;
    }
    double took = verify_s / b->plain_s;
    if (m > 1)
        learn_cost(b->verify, &b->verify_slope, 1, m, fmax(took - overlapped * b->overlap.mean, 0.1));
    if (overlapped)
        tb_belief_learn_mean(&b->overlap, fmax(took - alone, 0) / overlapped);
    else
        b->overlap.mean *= 0.98;        /* so that it is tried again some time */
    for (int32_t i = 0; i < n; i++) {
        const double cost = passes[i].seconds / b->plain_s, first = b->draft[1].mean;
        if (!passes[i].more)
            learn_cost(b->draft, &b->draft_slope, first, passes[i].m, cost);
        else
            tb_belief_learn_mean(&b->chained, fmin(fmax(cost - tb_belief_draft(b, passes[i].m), 0) / passes[i].more / first, 1.5));
    }
    if (b->chained.mean > 0.9)
        b->chained.mean *= 0.998;       /* above 1 nothing is chained: so that it is tried again */
}
