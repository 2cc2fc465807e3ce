/* belief.h - what a session has learned about its speed and its proposals. It changes how fast a text comes, never the text.
 *
 * Costs are in units of one plain step, so that other work on the machine, which slows everything alike, does not tip the
 * balance. Chances are running means per kind of proposal and bin of confidence. */
#ifndef TB_BELIEF_H
#define TB_BELIEF_H
#include <stdbool.h>

#include "tb.h"

/* Where a draft pass stands: behind the root after a step whose draft was wrong or not asked, or right; behind a draft's own token that it
 * was little sure of, or sure. */
enum { TB_AFTER_MISS = 0, TB_AFTER_HIT = 1, TB_BEHIND_GUESS = 2, TB_BEHIND_SURE = 3, TB_CONTEXTS = 4 };
enum { TB_AHEAD = 8, TB_GRID = 16, TB_TRIAL = 6 };      /* TRIAL: steps */

typedef struct tb_mean {
    double mean, weight;                    /* weight: how much was seen, the prior included */
} tb_mean;

/* What is known of the draft at the precision that is not in use: as in tb_belief, accept, hit and hoped of its two kinds. */
typedef struct tb_drafter {
    tb_mean draft[TB_MAX_DRAFT + 1], chained, overlap, draft_slope, accept[2][TB_BINS], promise;
    double hit[2], hoped[2], often[TB_CONTEXTS][TB_BINS], best;
} tb_drafter;

typedef struct tb_belief {
    double plain_s;                         /* seconds of verifying one token, as of late; 0: not seen yet */
    tb_mean draft[TB_MAX_DRAFT + 1];        /* cost of a draft pass over M tokens */
    tb_mean verify[TB_MAX_DRAFT + 2];       /* of verifying M tokens; M = 1 is 1 */
    tb_mean chained;                        /* cost of a pass that follows another without the host, as a share of draft[1] */
    tb_mean overlap;                        /* what a draft pass adds to the verification that it runs in */
    tb_mean draft_slope, verify_slope;      /* of a token more, whatever M; weight: sum of (M - 1)^2 */
    double token_s;                         /* seconds per token of the quickest evaluation of many tokens; 0: none */
    tb_mean accept[TB_KINDS][TB_BINS];      /* chance that a proposal is the sampled token, given that its parent was */
    double hit[TB_KINDS], hoped[TB_KINDS];  /* what came and what was expected, over the last few proposals */
    double often[TB_CONTEXTS][TB_BINS];     /* how often the draft's next token comes in a bin */
    double likely[TB_BINS];                 /* chances of the draft's first choice by bin, for this step */
    double worth[TB_CONTEXTS][TB_AHEAD + 1][TB_GRID + 1];   /* see tb_belief_worth */
    double best;                            /* tokens per plain step that drafting alone promises */
    tb_mean promise;                        /* the same over some steps */
    double tokens, cost;                    /* decaying sums of the last steps */
    double total;                           /* tokens so far */
    double spent;                           /* cost of all steps so far */
    bool missed;                            /* the draft was wrong about the last token */
    bool pinned;                            /* costs were given and stay */
    int64_t steps, idle, patience;          /* idle: steps since the last draft; patience: how many before looking again */
    bool full;                              /* layers that have their residual on the device draft with it */
    double dearer;                          /* so many times the bytes of a pass are read then; not above 1: there are no such layers */
    int64_t trial, since, wait;             /* steps of a trial of the other precision that are left; since the last one; how many before the next */
    tb_drafter other;
} tb_belief;

typedef struct tb_pass_time {
    int32_t m, more;                        /* tokens; passes over one token each that followed without the host */
    double seconds;
} tb_pass_time;

void tb_belief_init(tb_belief *b);
int32_t tb_belief_draft_bin(float confidence);
int32_t tb_belief_sibling_bin(float confidence);
double tb_belief_verify(const tb_belief *b, int32_t m);
double tb_belief_draft(const tb_belief *b, int32_t m);
/* Tokens per plain step that the time now spent could bring elsewhere: what more drafting has to beat. Comes first in a step: what
 * follows builds on what it finds. */
double tb_belief_rate(tb_belief *b);
/* Which precision to draft at, for the step that comes: the one that promises more, now and then the other for a few steps. Before the rate. */
void tb_belief_choose(tb_belief *b);
void tb_belief_use(tb_belief *b, bool full);
int32_t tb_belief_context(int32_t bin);
/* Tokens that drafting from here on brings, less what it costs at this rate: a first pass that costs `draft`, then as long as each next one
 * pays; behind a path of chance c, m tokens to verify so far. */
double tb_belief_worth(const tb_belief *b, int32_t context, int32_t m, double c, double rate, double draft);
/* How many passes to run in one go where the first is worth it, at most `most`: the next one while the chance that it would be asked for
 * exceeds what it costs so, against what it costs when it is. */
int32_t tb_belief_chain(const tb_belief *b, int32_t context, int32_t m, double c, int32_t most);
void tb_belief_learn_often(tb_belief *b, int32_t context, int32_t bin);
/* Chance of a proposal: what its bin has seen, times how expectations of its kind have turned out just now. */
double tb_belief_chance(const tb_belief *b, int32_t kind, int32_t bin);
void tb_belief_learn(tb_belief *b, int32_t kind, int32_t bin, bool accepted);
/* Costs of passes over M tokens in plain steps, draft[TB_MAX_DRAFT + 1], verify[TB_MAX_DRAFT + 2], instead of measured ones. */
void tb_belief_pin(tb_belief *b, const double *draft, const double *verify);
/* Another text: what lookups were worth in the one before says nothing. */
void tb_belief_new_text(tb_belief *b);
void tb_belief_learn_mean(tb_mean *mean, double seen);
/* m tokens of a prompt were evaluated in one pass: what a token costs where arithmetic is the limit, which verifying one more comes near to. */
void tb_belief_learn_prompt(tb_belief *b, int32_t m, double seconds);
/* Whether a step's costs could be told apart: a step, or a prompt, was timed. */
bool tb_belief_begun(const tb_belief *b);
/* A step of n draft passes, chains being one, a verification of m tokens in verify_s, in which `overlapped` more ran, and `tokens` tokens
 * emitted. */
void tb_belief_learn_step(tb_belief *b, const tb_pass_time *passes, int32_t n, int32_t m, double verify_s, int32_t overlapped, int32_t tokens);
#endif
