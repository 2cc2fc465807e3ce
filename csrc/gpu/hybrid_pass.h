/* hybrid_pass.h - one pass over a batch of tokens, for hybrid.c and hybrid_draft.c alone. After the first failure, which `code` keeps, all that
 * follows does nothing. */
#ifndef TBG_HYBRID_PASS_H
#define TBG_HYBRID_PASS_H
#include "hybrid_session.h"

typedef struct pass {
    tb_session *s;
    tbg_session *h;
    const tb_model *m;
    const tbg_model *gm;
    tb_gpu *g;
    int op, n, position, queue, phase, code;
    const tb_tree *tree;
    struct overlap *overlap;        /* a draft that goes on meanwhile; NULL: none */
    bool stream;
    bool full;                      /* a draft: layers that have their residual on the device compute with it */
    bool listed;                    /* the head: only the rows of the short one */
    int link, more, angles;         /* of a chain: passes before this one, and behind it; where the angles of these begin */
    int staged;                     /* the slot that holds, or gets, the planes of the next linear group */
    double cpu_s;
    tbg_work *w;
} pass;

/* A draft that goes on in the pass of a verification. */
typedef struct overlap {
    pass p;
    tb_overlap *of;
    tb_tree tree;
    int layer;                      /* the next one; NOTHING: no pass is under way; n_layers: what it has found is on its way */
    bool enough;
    double credit;                  /* layers that the device has time for */
} overlap;

void tbg_go(pass *p, int kernel, int gx, int gy, int gz, const tbg_params *q, tbg_buffer *const b[TBG_BUFFERS]);
void tbg_read_from(pass *p, tbg_buffer *b, size_t at, void *to, size_t bytes);
void tbg_mark(pass *p, int queue, int event);
void tbg_wait_for(pass *p, int event);
/* Ids, positions, slots and angles to the device, and the tokens' input rows. */
void tbg_start(pass *p, const int32_t *tokens);
/* The rows of the ids that the device has. */
void tbg_embed(pass *p);
void tbg_run_layer(pass *p, int i);
void tbg_last_norm(pass *p);
/* The head's product for m tokens from t on, to tbg_logits(p). */
int tbg_head_product(pass *p, int t, int m);
tbg_buffer *tbg_logits(const pass *p);
/* Keys and values in the slots of position + slots[d] to position + d, d < n, in order; `slots` is pinned. */
void tbg_move(pass *p, int position, const int32_t *slots, int n);

/* Whether the draft computes a part of the vocabulary only, which is then known to the device. */
bool tbg_short_head(pass *p);
/* What the sampler could draw for each of m tokens, on its way to the host: its choices, those of a chain with its last pass, or the best of
 * every span of logits without the noise and with it. */
void tbg_seek(pass *p, int t, int m);
/* It has come: choices into s->ranked, or candidates among `logits`, the others -inf. */
void tbg_gather(pass *p, int m, float *logits);
/* Begins the next pass of a chain, whose place in the tree `below` then holds. */
void tbg_follow(pass *p, tb_tree *below);

/* Gives copies of the draft's slots to a draft that goes on in v. */
void tbg_overlap_begin(overlap *o, pass *v, tb_overlap *of);
/* As many of its layers as the device has time for while the CPU multiplies a linear group. */
void tbg_overlap_go_on(pass *v, int place);
/* Takes in what its last pass has found, if that has ended. */
void tbg_overlap_end(overlap *o);
#endif
