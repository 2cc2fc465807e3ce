/* belief.h - what a session has learned about its speed and its proposals. It changes how fast a text comes, never the text.
 *
 * Costs are in units of one plain step, so that other work on the machine, which slows everything alike, does not tip the
 * balance. Chances are running means per kind of proposal and bin of confidence. */
#ifndef TB_BELIEF_H
#define TB_BELIEF_H
#include <stdbool.h>

#include "tb.h"

typedef struct tb_mean {
    double mean, weight;                    /* weight: how much was seen, the prior included */
} tb_mean;

typedef struct tb_belief {
    double plain_s;                         /* seconds of verifying one token, as of late; 0: not seen yet */
    tb_mean draft[TB_MAX_DRAFT + 1];        /* cost of a draft pass over M tokens */
    tb_mean verify[TB_MAX_DRAFT + 2];       /* of verifying M tokens; M = 1 is 1 */
    double draft_slope, verify_slope;       /* of a token more, whatever M */
    tb_mean accept[TB_KINDS][TB_BINS];      /* chance that a proposal is the sampled token, given that its parent was */
    double hit[TB_KINDS], hoped[TB_KINDS];  /* what came and what was expected, over the last few proposals */
    tb_mean ahead[TB_BINS + 1];             /* the same of the draft's next token, after one of this bin; the last: after the root */
    double tokens, cost;                    /* decaying sums of the last steps */
    int64_t steps, idle, patience;          /* idle: steps since the last draft; patience: how many before looking again */
} tb_belief;

typedef struct tb_pass_time {
    int32_t m;
    double seconds;
} tb_pass_time;

void tb_belief_init(tb_belief *b);
int32_t tb_belief_draft_bin(float confidence);
int32_t tb_belief_sibling_bin(float confidence);
double tb_belief_verify(const tb_belief *b, int32_t m);
double tb_belief_draft(const tb_belief *b, int32_t m);
/* Tokens per plain step that the time now spent could bring elsewhere: what more drafting has to beat. */
double tb_belief_rate(const tb_belief *b, int32_t most);
/* Chance of a proposal: what its bin has seen, times how expectations of its kind have turned out just now. */
double tb_belief_chance(const tb_belief *b, int32_t kind, int32_t bin);
void tb_belief_learn(tb_belief *b, int32_t kind, int32_t bin, bool accepted);
/* Another text: what lookups were worth in the one before says nothing. */
void tb_belief_new_text(tb_belief *b);
void tb_belief_learn_mean(tb_mean *mean, double seen);
/* A step of n draft passes, a verification of m tokens in verify_s, and `tokens` tokens emitted. */
void tb_belief_learn_step(tb_belief *b, const tb_pass_time *passes, int32_t n, int32_t m, double verify_s, int32_t tokens);
#endif
