/* engine.h - what model, session, forward and speculate share: the structs behind tb_model and tb_session.
 *
 * A session owns everything mutable. Positions [0, length) of the cache are committed: they hold the full model's
 * keys and values. A forward pass may write beyond; whoever asked for it decides what becomes committed. */
#ifndef TB_ENGINE_H
#define TB_ENGINE_H
#include <stdatomic.h>
#include <stdbool.h>

#include "kernels.h"
#include "ops.h"
#include "pool.h"
#include "tb.h"

enum { TB_CHUNK_MAX = 512, TB_RING_SLACK = TB_CHUNK_MAX + TB_MAX_DRAFT + 1 };

struct tb_model {
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

enum { TB_BINS = 8, TB_HISTORY_TIMES = TB_MAX_DRAFT + 2 };

/* What the draft-length rule has learned; it changes speed only, never text. Costs are in units of one plain step, so that
 * other work on the machine, which slows everything alike, does not tip the balance. */
typedef struct tb_belief {
    double plain_s;                         /* seconds of verifying one token, as of late */
    double draft;                           /* one draft step */
    double verify[TB_HISTORY_TIMES];        /* verifying M tokens; 0: not seen yet; [1] is 1 */
    double accept[TB_BINS];                 /* chance that a drafted token of this confidence is accepted */
    double accept_mean;
    int64_t steps;
} tb_belief;

struct tb_session {
    tb_model *m;
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
    atomic_int abort;
    atomic_int bad;             /* 0, or 1 + code of the first input that was not finite */
};

enum { TB_LOGITS_NONE = 0, TB_LOGITS_LAST = 1, TB_LOGITS_ALL = 2 };

void *tb_alloc(size_t bytes);   /* 64-byte aligned, zeroed; NULL when out of memory */
void tb_free(void *p);
int tb_fail(char *err, size_t n, int code, const char *format, ...);

/* Room for positions up to `needed` and for `tokens` tokens per pass with `rows_out` rows of logits. */
int tb_session_reserve(tb_session *s, int32_t needed, int32_t tokens, int32_t rows_out, char *err, size_t n);

/* Puts n tokens at history[at]; TB_OK, or TB_ENOMEM. Room for a drafted block stays behind them. */
int tb_session_keep_history(tb_session *s, int32_t at, const int32_t *tokens, int32_t n);
/* Positions up to `length` are what op computed: they count from now on. */
void tb_session_commit(tb_session *s, int32_t op, int32_t length);

/* Evaluates n tokens at positions [position, position + n) with op's weights; reserve() came first. Logits (fp32, [.., vocab])
 * go to s->s.logits, or to `logits` if not NULL. Does not touch s->length. */
int tb_forward(tb_session *s, int32_t op, const int32_t *tokens, int32_t n, int32_t position, int32_t which, float *logits,
               char *err, size_t err_n);
#endif
