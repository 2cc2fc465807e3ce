/* plan.h - the tree of proposals of one step, for speculate.c and overlap.c. */
#ifndef TB_PLAN_H
#define TB_PLAN_H
#include "engine.h"

enum { POOL = 256, SIBLINGS = TB_CHOICES };

#define LEAST 0.02      /* a path less likely than this is never worth a token */

typedef struct node {
    int32_t token, parent, depth;
    int32_t kind;                   /* who proposed it first */
    int32_t bins[TB_KINDS];         /* how confident each proposer was; -1: it did not propose this */
    int32_t slot;                   /* where the draft has put its keys, -1: nowhere yet */
    int32_t first;                  /* once drafted: the draft's first choice */
    double own, value;              /* chance given its parent; of the whole path */
    bool ends, early;               /* early: drafted while the step before was verified */
} node;

typedef struct plan {
    tb_session *s;
    const tb_sampling *sampling;
    const tb_step_options *o;
    int32_t n, most;                /* tokens of history; most nodes, and the deepest */
    int32_t n_nodes, n_slots, n_kept;               /* n_kept: slots that the step before has filled */
    node nodes[POOL];               /* [0]: the last token of the history; parents come before children */
    double rate;
    tb_pass_time passes[TB_MAX_DRAFT + 1];          /* a chain of them is one entry */
    int32_t n_passes;
    int32_t chosen[TB_MAX_DRAFT + 1], n_chosen;     /* nodes to verify, the root first, every branch in one piece */
    tb_tree tree;
    int32_t under_way[TB_LEVEL], n_under_way;       /* nodes of the pass that runs in a verification; how many such passes */
    int32_t n_overlapped;
    tb_overlap overlap;
    char err[8];
} plan;

/* Whether a node may have several children. */
bool tb_plan_branches(const plan *p);
/* The chance of every path, from the chances of its nodes. */
void tb_plan_revalue(plan *p);
/* The tree of a batch of nodes; slot_of[i]: where node i lies. Returns whether it is a chain in the slots of its positions. */
bool tb_plan_lay_out(const plan *p, tb_tree *tree, const int32_t *batch, int32_t m, const int32_t *slot_of);
/* Adds what the draft thinks follows node i, whose pass was the `row`-th with logits; false: these are damaged. */
bool tb_plan_add_drafted(plan *p, int32_t i, int32_t row);
bool tb_plan_can_draft(const plan *p, int32_t i);

/* Asks for a draft in the verification that comes, of paths of at most so many tokens. */
void tb_overlap_prepare(plan *p, int32_t deepest);
/* Keeps what is drafted behind the emitted tokens for the next step, whose first token is the last of them. */
void tb_overlap_keep(plan *p, const tb_step_result *r);
/* Begins a step with what was kept for it. */
void tb_overlap_take(plan *p);
#endif
