/* speculate.c - one step: the 2-bit weights draft, the full weights verify, the sampler decides.
 *
 * A drafted token is accepted exactly when it is the token the sampler draws from the verifier's logits at that position,
 * so a step emits what plain decoding would. How far to draft is a question of time alone: one more token is worth
 * drafting while   P(all drafted so far and it are accepted)  >  rate * (draft step + verify(M + 1) - verify(M)),
 * with every quantity measured as the session runs. */
#include <stdlib.h>
#include <string.h>

#include "engine.h"
#include "os.h"
#include "sampler.h"

/* --- what the session believes about its speed --- */

static void learn(double *mean, double seen, double weight) { *mean = *mean > 0 ? *mean + weight * (seen - *mean) : seen; }

static int32_t bin_of(float confidence)
{
    int32_t bin = (int32_t)(confidence * TB_BINS);
    return bin < 0 ? 0 : bin >= TB_BINS ? TB_BINS - 1 : bin;
}

/* Cost of verifying M tokens: measured, else between or beyond the nearest measured ones (12 % of a plain step each at first). */
static double verify_cost(const tb_belief *b, int32_t m)
{
    if (m == 1 || b->verify[m] > 0)
        return m == 1 ? 1 : b->verify[m];
    int32_t below = m - 1, above = m + 1;
    while (below > 1 && !(b->verify[below] > 0))
        below--;
    while (above < TB_HISTORY_TIMES && !(b->verify[above] > 0))
        above++;
    double low = below == 1 ? 1 : b->verify[below];
    if (above < TB_HISTORY_TIMES)
        return low + (b->verify[above] - low) * (m - below) / (above - below);
    return low + 0.12 * (m - below);
}

/* A step drafted `drafted` tokens in draft_s and verified in verify_s. What both took together, against what was expected,
 * says how fast the machine is at the moment; the rest is how draft and verify compare. A step that took more than twice
 * as long as expected was interrupted and teaches nothing else. */
static void learn_times(tb_belief *b, int32_t drafted, double draft_s, double verify_s)
{
    double expected = verify_cost(b, drafted + 1);
    if (!(b->plain_s > 0))
        b->plain_s = verify_s / expected;
    double now = (draft_s + verify_s) / (expected + drafted * b->draft);
    if (now > 2 * b->plain_s) {
        learn(&b->plain_s, now, 0.1);
        return;
    }
    learn(&b->plain_s, now, 0.25);
    if (drafted) {
        learn(&b->verify[drafted + 1], verify_s / b->plain_s, 0.1);
        learn(&b->draft, draft_s / drafted / b->plain_s, 0.1);
    }
}

/* Best rate that a fixed draft length promises, in tokens per plain step; plain decoding is length 0. */
static double best_rate(const tb_belief *b, int32_t most)
{
    double best = 0, expected = 1, path = 1;
    for (int32_t k = 0; k <= most; k++) {
        if (k) {
            path *= b->accept_mean;
            expected += path;
        }
        double rate = expected / (k * b->draft + verify_cost(b, k + 1));
        if (rate > best)
            best = rate;
    }
    return best;
}

/* Every so often a step is spent on learning what drafting, or not drafting, would give. */
enum { WARM_STEPS = 3, LOOK_AGAIN = 32 };

static bool worth_drafting(const tb_belief *b, int32_t drafted, int32_t most, double path, double rate)
{
    if (drafted >= most)
        return false;
    if (b->steps < WARM_STEPS)                      /* plain, 1, 3: enough to know the machine */
        return drafted < (b->steps == 0 ? 0 : b->steps == 1 ? 1 : 3);
    if (b->steps % LOOK_AGAIN == LOOK_AGAIN - 1 && drafted < 2)
        return true;
    double cost = b->draft + verify_cost(b, drafted + 2) - verify_cost(b, drafted + 1);
    return path * b->accept_mean > rate * cost;
}

/* --- the step --- */

static bool ends(const tb_step_options *o, int32_t token)
{
    for (int32_t i = 0; i < o->n_eos; i++)
        if (o->eos[i] == token)
            return true;
    return false;
}

/* Drafts up to `most` tokens behind history[n - 1]; returns how many. A draft that fails is only shorter. */
static int32_t draft(tb_session *s, int32_t n, int32_t most, const tb_sampling *sampling, const tb_step_options *o, float *confidence,
                     double *seconds, char *err, size_t err_n)
{
    tb_belief *b = &s->belief;
    double path = 1, rate = o->draft_fixed ? 0 : best_rate(b, most);
    int32_t drafted = 0;
    while (o->draft_fixed ? drafted < most : worth_drafting(b, drafted, most, path, rate)) {
        double t0 = tb_clock();
        int32_t token, at = n - 1 + drafted;
        float *logits = s->s.logits;
        if (tb_forward(s, TB_DRAFT, s->history + at, 1, at, TB_LOGITS_LAST, NULL, err, err_n) ||
            tb_sample_with(logits, s->m->d.vocab, s->history, at + 1, sampling, at + 1, &token, &confidence[drafted], s->sampler))
            break;
        *seconds += tb_clock() - t0;
        s->history[n + drafted] = token;
        path *= b->accept[bin_of(confidence[drafted])];
        drafted++;
        if (ends(o, token))
            break;
    }
    return drafted;
}

int tb_session_step(tb_session *s, const int32_t *history, int32_t n, const tb_sampling *sampling, const tb_step_options *o,
                    tb_step_result *r, char *err, size_t err_n)
{
    memset(r, 0, sizeof *r);
    if (n < 1 || s->length != n - 1)
        return tb_fail(err, err_n, TB_EINVAL, "the cache holds %d tokens, a history of %d needs %d", (int)s->length, (int)n, (int)n - 1);
    if (o->budget < 1 || o->draft_max < 0)
        return tb_fail(err, err_n, TB_EINVAL, "a step needs a budget of 1 or more tokens");
    if (n > s->max_context)
        return tb_fail(err, err_n, TB_ECONTEXT, "the context of %d tokens is full", (int)s->max_context);
    int code = tb_sample_check(sampling, s->m->d.vocab, err, err_n);
    if (code)
        return code;
    int32_t most = o->draft_only ? 0 : o->draft_max;
    if (most > TB_MAX_DRAFT)
        most = TB_MAX_DRAFT;
    if (most > o->budget - 1)
        most = o->budget - 1;
    if (most > s->max_context - n)
        most = s->max_context - n;
    code = tb_session_reserve(s, n + most, most + 1, most + 1, err, err_n);
    if (code)
        return code;
    if (tb_session_keep_history(s, 0, history, n))
        return tb_fail(err, err_n, TB_ENOMEM, "out of memory for the history");

    float confidence[TB_MAX_DRAFT];
    int32_t drafted = draft(s, n, most, sampling, o, confidence, &r->draft_s, err, err_n);
    if (atomic_load(&s->abort))
        return tb_fail(err, err_n, TB_EABORT, "interrupted");

    double t0 = tb_clock();
    code = tb_forward(s, o->draft_only ? TB_DRAFT : TB_VERIFY, s->history + n - 1, drafted + 1, n - 1, TB_LOGITS_ALL, NULL, err, err_n);
    if (code)
        return code;
    r->verify_s = tb_clock() - t0;
    learn_times(&s->belief, drafted, r->draft_s, r->verify_s);

    t0 = tb_clock();
    r->drafted = drafted;
    for (int32_t i = 0; i <= drafted; i++) {
        int32_t token, guess = i < drafted ? s->history[n + i] : -1;
        const float *logits = s->s.logits + (size_t)i * (size_t)s->m->d.vocab;
        code = tb_sample_with(logits, s->m->d.vocab, s->history, n + i, sampling, n + i, &token, NULL, s->sampler);
        if (code == TB_ENONFINITE)
            return tb_fail(err, err_n, code, "the logits for position %d are not finite: the model's weights are damaged", (int)(n + i));
        if (code)
            return tb_fail(err, err_n, code, "the history holds a token outside the vocabulary of %d", (int)s->m->d.vocab);
        r->tokens[r->n_tokens++] = token;
        bool accepted = i < drafted && token == guess;
        if (i < drafted) {
            learn(&s->belief.accept[bin_of(confidence[i])], accepted ? 1 : 1e-3, 0.05);
            learn(&s->belief.accept_mean, accepted ? 1 : 1e-3, 0.05);
        }
        r->accepted += accepted;
        r->hit_eos = ends(o, token);
        if (!accepted || r->hit_eos || r->n_tokens >= o->budget)
            break;
    }
    r->sample_s = tb_clock() - t0;
    tb_session_commit(s, o->draft_only ? TB_DRAFT : TB_VERIFY, n - 1 + r->n_tokens);
    s->belief.steps++;
    return TB_OK;
}
