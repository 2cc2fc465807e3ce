/* engine.h - what model, session, forward and speculate share: the structs behind tb_model and tb_session.
 *
 * A session owns everything mutable. Positions [0, length) of the cache are committed: they hold the full model's
 * keys and values. A forward pass may write beyond; whoever asked for it decides what becomes committed. */
#ifndef TB_ENGINE_H
#define TB_ENGINE_H
#include <stdatomic.h>
#include <stdbool.h>

#include "belief.h"
#include "kernels.h"
#include "lookup.h"
#include "ops.h"
#include "pool.h"
#include "tb.h"

enum { TB_CHUNK_MAX = 512, TB_RING_SLACK = TB_CHUNK_MAX + TB_MAX_DRAFT + 1 };

struct tb_model {
    struct tbg_model *gpu;      /* where it is placed on a device; NULL: CPU alone */
    atomic_int users;           /* the handle and its sessions; the last one frees */
    tb_model_desc d;            /* with layers and ropes copied below */
    tb_layer *layers;
    tb_rope *ropes;
    const tb_kernels *kernels;
    const tb_ops *ops;
    int32_t q_max, kv_max;      /* widest projections, in floats per token */
    int32_t cols_max;           /* widest input of any matrix */
    int32_t group_max;          /* most query heads that share a kv head */
    int32_t rope_half;          /* sum over ropes of dim / 2 */
    int32_t head_dim_max;
};

/* Keys and values of one layer: for each kv head `ring` slots, position p in slot p mod ring. */
typedef struct tb_cache {
    uint16_t *keys, *values;
    int32_t ring;
    bool windowed;              /* ring never grows; else ring == session capacity */
} tb_cache;

/* Forward-pass buffers for up to `tokens` tokens; one allocation each, grown on demand. */
typedef struct tb_scratch {
    int32_t tokens, rows_out;
    float *x, *a, *h, *q, *k, *v, *attention, *gate, *up, *angles;   /* [tokens, width] */
    float *logits;              /* [rows_out, vocab] */
    void *acts[3];              /* by activation kind */
    void *block;                /* the allocation behind all but logits and scores */
    float *scores;              /* [threads, scores_n] */
    size_t scores_n;
    char *kernel;               /* [threads] kernel scratch, kernel_n bytes each */
    size_t kernel_n;
    size_t bytes;
} tb_scratch;

/* Tokens of a pass that form a tree: token t is at position + depth[t], and the one at depth d above it, or t itself, in the slot of
 * position + path[t][d]. A slot belongs to one token. */
typedef struct tb_tree {
    int32_t depth[TB_MAX_DRAFT + 1], path[TB_MAX_DRAFT + 1][TB_MAX_DRAFT + 1];
} tb_tree;

enum { TB_TAIL = TB_MAX_DRAFT + 1 + 8 };    /* positions that a branch may need beyond the cache's whole blocks */

/* Blocks of 16 rows of the head that the draft computes, in runs [first, end); n_runs 0: all. */
typedef struct tb_rows {
    int32_t n_runs, n_active, (*runs)[2];
    uint8_t *active;            /* [blocks] */
} tb_rows;

enum { TB_LEVEL = 8 };           /* most tokens that the draft takes at once */
enum { TB_CHOICES = 4 };         /* most tokens that it proposes behind one of them */

/* What a draft pass proposes behind each of its tokens, best first, where the device has ranked it. */
typedef struct tb_ranked {
    bool there;
    int32_t want;               /* choices to look for, at least 2 */
    int32_t more;               /* passes that follow the next draft pass, each over the first choice of the one before; a row for each */
    int32_t ids[TB_LEVEL][TB_CHOICES];      /* -1: none */
    float confidence[TB_LEVEL][TB_CHOICES];
} tb_ranked;

/* A draft that goes on while a verification leaves the device idle. What lies in a draft's slot i has a copy in slot TB_ASIDE + i, behind
 * the slots that are verified; there it goes on. `next` takes in what the pass before has found and gives the next batch of at most
 * TB_LEVEL tokens, unless `more` is false; returns its size, 0: enough. */
enum { TB_ASIDE = TB_MAX_DRAFT + 1 };
typedef struct tb_overlap {
    int32_t (*next)(void *arg, bool more, int32_t *tokens, tb_tree *tree);
    void *arg;
    int32_t slots;              /* of the draft before */
    bool always;                /* a layer at every chance, whatever time it takes */
    bool begun;                 /* the copies were made */
} tb_overlap;

struct tb_session {
    tb_model *m;
    struct tbg_session *gpu;    /* hybrid: cache and passes are there; NULL: CPU alone */
    const tb_sampling *sampling;    /* of the step that is under way */
    tb_ranked ranked;
    tb_overlap *overlap;        /* for the verification that comes; NULL: none */
    struct tb_kept *kept;       /* what is drafted already behind kept_at tokens; kept_at 0: nothing */
    int32_t kept_at;
    tb_pool *pool;
    int32_t threads, max_context, capacity, length, high;  /* high: one past the highest position ever written */
    tb_cache *caches;
    tb_scratch s;
    void *sampler;              /* scratch of the sampler */
    int32_t *history;           /* the tokens of the cache, and what a step works on behind them: [history_n] */
    int32_t history_n;
    int32_t pure;               /* so many leading positions hold the full model's keys and values */
    tb_belief belief;
    double product_seconds;     /* spent in matrix products so far */
    tb_lookup lookup;
    tb_recycled recycled;
    tb_rows head;
    float *draft_logits;        /* [TB_LEVEL, vocab]; -inf for rows that the draft does not compute */
    bool draft_logits_full;     /* they hold more than the rows in `head` */
    uint16_t *tails;            /* [threads, 2, TB_TAIL, head_dim_max] keys and values of a branch */
    int32_t *top_ids;           /* [TB_MAX_DRAFT + 1, TB_MAX_LOGPROBS], of the last step */
    float *top_logprobs;
    double bytes_read;          /* of weights, since the session began */
    atomic_int abort;
    atomic_int bad;             /* 0, or 1 + code of the first input that was not finite */
};

enum { TB_LOGITS_NONE = 0, TB_LOGITS_LAST = 1, TB_LOGITS_ALL = 2 };

void *tb_alloc(size_t bytes);   /* 64-byte aligned, zeroed; NULL when out of memory */
void tb_free(void *p);
/* TB_OK, or the line about a mapped file that was cut short: what was computed is worth nothing. */
int tb_check_files(char *err, size_t n);
/* The line about an input that was not finite; bad: 1 + 8 * layer + place, the head as the last layer. */
int tb_fail_not_finite(int bad, int32_t position, int32_t n_tokens, char *err, size_t n);
int tb_fail(char *err, size_t n, int code, const char *format, ...);

/* Room for positions up to `needed` and for `tokens` tokens per pass with `rows_out` rows of logits. */
int tb_session_reserve(tb_session *s, int32_t needed, int32_t tokens, int32_t rows_out, char *err, size_t n);

/* Puts n tokens at history[at]; TB_OK, or TB_ENOMEM. Room for a drafted block stays behind them. */
int tb_session_keep_history(tb_session *s, int32_t at, const int32_t *tokens, int32_t n);
/* Positions up to `length` are what op computed: they count from now on. */
void tb_session_commit(tb_session *s, int32_t op, int32_t length);

/* Evaluates n tokens at positions [position, position + n), or as `tree` places them, with op's weights; reserve() came first. Logits
 * (fp32, [.., vocab]) go to s->s.logits, or to `logits` if not NULL. Does not touch s->length. */
int tb_forward(tb_session *s, int32_t op, const int32_t *tokens, int32_t n, int32_t position, const tb_tree *tree, int32_t which,
               float *logits, char *err, size_t err_n);
/* Moves the keys and values in the slots of position + slots[d] to position + d, d < n; slots[d] >= d, ascending. */
void tb_session_compact(tb_session *s, int32_t position, const int32_t *slots, int32_t n);
#endif
