/* hybrid_session.h - what a hybrid session holds; for hybrid.c and hybrid_session.c alone. */
#ifndef TBG_HYBRID_SESSION_H
#define TBG_HYBRID_SESSION_H
#include "hybrid.h"

enum { TBG_INPUT = 0, TBG_OTHER = 1, TBG_STAGED = 2, TBG_USED = 4, TBG_ASIDE = 6, TBG_FOUND_ASIDE = 7 };  /* events; STAGED, USED: one for each slot */

/* Buffers of a pass over up to `tokens` tokens. */
typedef struct tbg_work {
    int tokens;
    tbg_buffer *x, *a, *y;              /* [tokens, hidden], widest input, results of the widest linear group */
    tbg_buffer *acts[TBG_KINDS];
    tbg_buffer *ids, *positions, *slots, *path, *angles, *flag, *parts;
    tbg_buffer *logits, *best, *ranked; /* of TBG_HEAD_TOKENS tokens at most */
    tbg_buffer *meta, *found;           /* pinned: what start() writes; candidates as they come back */
} tbg_work;

struct tbg_session {
    tbg_buffer **keys, **values;        /* by layer: [kv head][slot][head_dim], fp16 */
    tbg_work work, aside;               /* aside: of the draft that goes on in a verification */
    tbg_buffer *yr, *logits_r;          /* the CPU's results */
    tbg_buffer *blocks, *some_logits;   /* the short head: which blocks of rows; [TB_LEVEL, vocab], -inf for the others */
    int n_blocks;
    tbg_buffer *in, *out;               /* pinned: inputs for the CPU, its results */
    tbg_buffer *stage[2], *pinned[2];   /* residual planes on their way */
    void *acts_host[3];
    size_t acts_bytes[3];
    int stream_from;
    double cpu_token_s;                 /* the CPU's time for the residual of one token of many */
    double group_s[5], draft_layer_s[2];    /* the CPU's for that of a linear group in the last verification; the device's for a draft's layer, full or not */
    tb_bus bus;
};

int tbg_reserve_aside(tb_session *s);
/* The list of the short head's blocks as the session has it now. */
int tbg_list_head(tb_session *s);
int tbg_reserve_acts(tb_session *s, int m);
/* Pinned memory for so many floats of inputs and of results, and room for the results on the device. */
int tbg_reserve_staging(tb_session *s, size_t in, size_t out);
int tbg_reserve_stages(tb_session *s);
/* Whether a pass of n tokens brings the residual to the device. */
bool tbg_stream_pays(const tb_session *s, int n);
int tbg_rows_max(const tb_model *m);
#endif
