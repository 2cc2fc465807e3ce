/* tb.h - the public face of the twobit runtime.
 *
 * Two opaque types: a tb_model (weights, mapped and read-only) and a tb_session (one sequence: KV cache,
 * scratch, threads). The caller validates and maps files and hands over plain pointers and sizes: nothing
 * here parses anything. Every call that can fail returns 0 or a TB_E* code and puts one line in `err`.
 *
 * The part between the cdef marks is also what cffi reads, so it holds declarations only. */
#ifndef TB_H
#define TB_H
#include <stddef.h>
#include <stdint.h>

/* cdef-begin */
enum { TB_OK = 0, TB_EINVAL = 1, TB_ENOMEM = 2, TB_ENONFINITE = 3, TB_ECONTEXT = 4, TB_EABORT = 5, TB_EUNSUPPORTED = 6, TB_EDEVICE = 7 };

/* One bit-sliced matrix W[rows, cols], planes as FORMAT.md lays them out. rows == 0: absent.
 *   draft     q2 = A (s (2c - (2^b - 1))) + B m        w2 = U q2
 *   verifier  q  = q2 + f r                            w  = U q
 * Planes are padded to 16 rows and 16 columns (scale records to 64 columns); bias is [rows] or NULL. */
typedef struct tb_matrix {
    int32_t rows, cols;
    int32_t draft_bits;        /* b: 2, 3 or 4 */
    int32_t residual_bits;     /* R: 4, 6 or 8; 0: no residual plane */
    int32_t residual_group;    /* 16 or 32 columns per f */
    int32_t wide;              /* 0: |q| <= 2047, activations +-8191 in groups of 128; 1: 8191, 4095, 64 */
    const uint8_t *draft_codes, *draft_scales;
    const float *row_scale;    /* U [rows padded] */
    const uint8_t *row_a;      /* A */
    const int8_t *row_b;       /* B */
    const uint8_t *residual_codes, *residual_scales;
    const float *bias;
} tb_matrix;

/* One decoder layer. Norm weights are fp32 with any "1 +" of the family already added; NULL: no such norm.
 *   a = x [+ input_norm];  q, k, v = W a;  q/k/v norms, rope;  h = o(attention) [post_attention_norm];  x += h
 *   a = x [+ pre_ffn_norm];  h = down(act(gate a) * up a) [post_ffn_norm];  x += h;  x *= output_scale */
typedef struct tb_layer {
    tb_matrix q, k, v, o, gate, up, down;    /* v.rows == 0: values are the keys as projected */
    const float *input_norm, *q_norm, *k_norm, *post_attention_norm, *pre_ffn_norm, *post_ffn_norm;
    int32_t n_heads, n_kv_heads, head_dim;
    int32_t qk_norm_whole;     /* q/k norm over the whole projection (olmo2) instead of per head */
    int32_t v_norm;            /* RMS norm without weight on each value head (gemma4) */
    int32_t window;            /* keys visible: the last `window` positions, own one included; 0: all */
    int32_t rope;              /* index into tb_model_desc.ropes; -1: no position encoding */
    float attention_scale, attention_softcap;  /* softcap 0: none */
    float output_scale;        /* 1 where the family has none */
} tb_layer;

/* Rotary embedding: dimension i < dim / 2 of a head turns with i + dim / 2 by angle position * inv_freq[i]. */
typedef struct tb_rope {
    int32_t dim;               /* rotated dimensions of a head (even) */
    float factor;              /* multiplies cos and sin (yarn) */
    const float *inv_freq;     /* [dim / 2] */
} tb_rope;

enum { TB_ACT_SILU = 0, TB_ACT_GELU_TANH = 1, TB_ACT_GELU = 2 };

typedef struct tb_model_desc {
    int32_t n_layers, hidden, intermediate_max, vocab, n_ropes, activation;
    const tb_layer *layers;
    const tb_rope *ropes;
    const float *final_norm;
    tb_matrix head;
    const int8_t *embedding_codes;      /* [vocab, hidden] or NULL: rows of `head` (tied) */
    const uint16_t *embedding_scales;   /* fp16 [vocab, ceil(hidden / 32)] */
    float embedding_scale, norm_eps, final_softcap;  /* softcap 0: none */
} tb_model_desc;

typedef struct tb_model tb_model;
typedef struct tb_session tb_session;

/* Sampling is a pure function of (logits, history, these, position). */
typedef struct tb_sampling {
    float temperature, top_p, min_p, repeat_penalty, presence_penalty, frequency_penalty;
    int32_t top_k;             /* 0: off */
    int32_t repeat_last_n;     /* 0: penalties off, -1: whole history */
    uint64_t seed;
    int32_t n_bias;            /* logit bias: ids and what is added */
    const int32_t *bias_ids;
    const float *bias_values;
} tb_sampling;

/* What may propose tokens and how, for tb_step_options.use; switches only speed. */
enum {
    TB_USE_LOOKUP = 1,         /* what followed the longest match of the text's end in prompt and output */
    TB_USE_DRAFT = 2,          /* the 2-bit weights */
    TB_USE_RECYCLED = 4,       /* what the full model found likely after the same token before */
    TB_USE_TREE = 8,           /* several continuations at once */
    TB_USE_SHORT_HEAD = 16,    /* the draft computes a part of the vocabulary's logits */
    TB_USE_OVERLAP = 32,       /* hybrid: the draft goes on while the CPU verifies */
    TB_USE_CHAIN = 64,         /* hybrid: draft passes that the device starts from what it has found itself */
    TB_USE_ALL = 127
};

typedef struct tb_step_options {
    int32_t draft_max;         /* most proposed tokens per step; 0: plain decoding */
    int32_t draft_fixed;       /* 0: as many as measured cost says; 1: a chain of draft_max from the 2-bit weights; 2: a tree of draft_max */
    int32_t draft_full;        /* hybrid, layers with their residual on the device draft with it: 1 always, -1 never, 0 as cost says, of a fixed draft never */
    int32_t use;               /* TB_USE_ flags */
    int32_t draft_vocab;       /* rows of the short head, the vocabulary's first; 0: chosen from its size */
    int32_t budget;            /* emit at most this many tokens */
    int32_t draft_only;        /* 1: the 2-bit shard alone decodes (lossy) */
    int32_t logprobs;          /* log probabilities of so many likeliest tokens, 0 .. TB_MAX_LOGPROBS; -1: none, not even the token's own */
    int32_t n_eos;
    const int32_t *eos;
} tb_step_options;

enum { TB_MAX_DRAFT = 63, TB_MAX_LOGPROBS = 20, TB_KINDS = 4, TB_BINS = 16 };
enum { TB_KIND_LOOKUP = 0, TB_KIND_DRAFT = 1, TB_KIND_SIBLING = 2, TB_KIND_RECYCLED = 3 };   /* sibling: not the draft's first choice */

typedef struct tb_step_result {
    int32_t n_tokens;          /* tokens emitted, 1 or more, in order; an EOS is the last */
    int32_t tokens[64];
    int32_t drafted, accepted; /* proposed tokens that were verified; those of them among the emitted */
    int32_t depth;             /* the longest path that was proposed */
    int32_t drafted_by_kind[4], accepted_by_kind[4];
    int32_t draft_passes, draft_tokens, chained;    /* chained: of draft_passes, without the host */
    int32_t overlapped_passes;          /* draft passes that ran while this step's tokens were verified */
    int32_t full;                       /* 1: layers drafted with their residual */
    int32_t early, early_accepted;      /* of `drafted` and `accepted`: drafted while the step before was verified */
    int32_t hit_eos;
    double draft_s, verify_s, sample_s;
    double bytes;              /* of weights read */
    /* Natural logarithms of the model's own probabilities: before bias, penalties and temperature. */
    float logprob[64];
    const int32_t *top_ids;    /* [n_tokens, logprobs], likeliest first; valid until the next step */
    const float *top_logprobs;
} tb_step_result;

/* What a session has come to believe about its speed. Costs are in units of one plain step; 0: not measured yet. */
typedef struct tb_belief_view {
    double plain_s;            /* seconds of a plain step */
    double draft[64], verify[65];              /* [M]: a pass over M tokens */
    double overlap;            /* what a draft pass adds to the verification that it runs in */
    double promise[2];         /* tokens per plain step of drafting alone, with 2 bits, and at full precision where the device has it; 0: not known */
    double rate;               /* tokens per plain step, as of late */
    double spent;              /* what all steps so far cost by these costs, in plain steps */
    double accept[4][16], seen[4][16];         /* chance that a proposal is accepted, by kind and confidence; how many were seen */
    int32_t head_rows;         /* vocabulary rows that the draft computes */
} tb_belief_view;

const char *tb_cpu_level(void);                 /* kernels in use: "generic", "avx2", ... ; NULL: TB_EUNSUPPORTED, see tb_cpu_error */
const char *tb_cpu_error(void);
int tb_lock_memory(const void *p, size_t bytes);  /* keeps it in RAM; 0, or -1 where the system refuses */
/* Mapped file memory [p, p + bytes), p at a page: where the file becomes shorter, evaluation fails instead of the process. 0, or -1. */
int tb_guard(const void *p, size_t bytes);
void tb_unguard(const void *p);                 /* before it is unmapped */
int tb_cpu_threads(void);                       /* usable cores: affinity mask and cgroup quota */

tb_model *tb_model_new(const tb_model_desc *desc, char *err, size_t err_n);
void tb_model_free(tb_model *m);

/* A session keeps its model alive: tb_model_free may come first. */
tb_session *tb_session_new(tb_model *m, int32_t max_context, int32_t threads, char *err, size_t err_n);
void tb_session_free(tb_session *s);

/* Appends n tokens with the full model, `chunk` at a time. logits: [n, vocab] if every, else [vocab] of the last, or NULL. */
int tb_session_eval(tb_session *s, const int32_t *tokens, int32_t n, int32_t chunk, int32_t every, float *logits, char *err, size_t err_n);
/* The same with the 2-bit weights, over whatever the cache holds; the written positions are then not the verifier's. */
int tb_session_eval_draft(tb_session *s, const int32_t *tokens, int32_t n, int32_t every, float *logits, char *err, size_t err_n);
int32_t tb_session_length(const tb_session *s);
/* Forgets the positions from `length` on; TB_ECONTEXT where a sliding-window ring no longer holds what is needed. */
int tb_session_rewind(tb_session *s, int32_t length, char *err, size_t err_n);
/* Goes back to the longest prefix that the cache shares with tokens[n] and can go back to; returns its length. */
int32_t tb_session_keep(tb_session *s, const int32_t *tokens, int32_t n);
const int32_t *tb_session_tokens(const tb_session *s);   /* what was evaluated, [length] */
int32_t tb_session_high(const tb_session *s);            /* past the highest position ever written, a multiple of 8 */
/* The cache as bytes, for saving. `state_bytes`: 0 where no session of this model and context can have that length and high. A state
 * that is set must come from a session of the same model: only its size and its token ids are checked. */
size_t tb_session_state_bytes(tb_session *s, int32_t length, int32_t high);
int tb_session_state_get(tb_session *s, uint8_t *state, size_t bytes, char *err, size_t err_n);
int tb_session_state_set(tb_session *s, const int32_t *tokens, int32_t length, int32_t high, uint8_t *state, size_t bytes, char *err, size_t err_n);
size_t tb_session_bytes(const tb_session *s);   /* cache and scratch */
double tb_session_product_seconds(const tb_session *s);   /* spent in matrix products since the session was made */

/* One speculative step. `history` holds prompt and output so far, [n_history]; its last token is not evaluated yet,
 * the cache holds the n_history - 1 before it. */
int tb_session_step(tb_session *s, const int32_t *history, int32_t n_history, const tb_sampling *sampling,
                    const tb_step_options *options, tb_step_result *result, char *err, size_t err_n);
void tb_session_belief(const tb_session *s, tb_belief_view *view);
/* Decisions by given costs instead of the clock, so that they can be repeated: draft[64], verify[65], by M as in the view. */
void tb_session_pin_costs(tb_session *s, const double *draft, const double *verify);
void tb_session_abort(tb_session *s, int32_t on);   /* from another thread or a signal handler; polled between layers */

/* The sampler on its own: the token for `position` given fp32 logits [vocab] (not changed). */
int tb_sample(const float *logits, int32_t vocab, const int32_t *history, int32_t n_history, const tb_sampling *sampling,
              int32_t position, int32_t *token, char *err, size_t err_n);

/* y[m, rows] = x[m, cols] @ W^T on `threads` threads. op 0: draft (2-bit), 1: verify (2-bit + residual), 2: residual. For tests and bench. */
int tb_matmul(const tb_matrix *w, int32_t op, const float *x, int32_t m, float *y, int32_t threads, int32_t repeat, double *seconds, char *err, size_t err_n);
/* One row of W as fp32 [cols], 2-bit part alone or in full. */
int tb_matrix_row(const tb_matrix *w, int32_t full, int32_t row, float *out);

/* --- accelerators: hybrid mode --- */

/* kind: "cuda", "opencl" (a GPU where there is one), "opencl-gpu" (nothing else), "plain" (the kernels in C, for tests). cache_dir: an
 * existing folder for compiled kernels, or NULL. ptx: the kernels for CUDA where NVRTC is missing, or NULL. NULL: not usable, or
 * (*absent = 1) not there; err says why. */
typedef struct tb_gpu tb_gpu;
tb_gpu *tb_gpu_open(const char *kind, const char *cache_dir, const char *ptx, int32_t *absent, char *err, size_t err_n);
void tb_gpu_free(tb_gpu *g);                    /* models on it keep it alive */
const char *tb_gpu_name(const tb_gpu *g);
int tb_gpu_real(const tb_gpu *g);               /* a processor of its own with memory of its own */
size_t tb_gpu_memory(const tb_gpu *g);          /* bytes of the device */
size_t tb_gpu_used(const tb_gpu *g);            /* allocated here */
void tb_gpu_limit(tb_gpu *g, size_t bytes);     /* allocations beyond fail */
/* Runs one kernel on copies of host memory, `repeat` times, and copies all of it back; absent buffers are NULL. params: a tbg_params.
 * seconds, or NULL: of the runs, without copies. For tests and bench. */
int tb_gpu_run(tb_gpu *g, const char *kernel, const int32_t *groups, uint8_t *const *buffers, const size_t *bytes, const void *params,
               int32_t repeat, double *seconds, char *err, size_t err_n);

/* Puts the 2-bit part, norms and biases of the model on the device, and the residual of the first `residual_layers` layers (one more:
 * the head's too); passes take up to pass_tokens tokens; sessions made from then on are hybrid. Before any session. TB_ENOMEM: does not fit, and nothing is left behind. */
int tb_model_place(tb_model *m, tb_gpu *g, int32_t residual_layers, int32_t pass_tokens, char *err, size_t err_n);
/* Bytes of device memory that a session takes, passes of `pass_tokens` tokens (at most 2048) and streaming included. */
size_t tb_model_session_bytes(const tb_model *m, int32_t max_context, int32_t pass_tokens);
/* Tokens from which a pass brings the residual to the device instead of computing it on the CPU: 0 by what is measured, -1 never. */
void tb_session_stream_from(tb_session *s, int32_t tokens);

enum { TB_BUS_PREFILL = 0, TB_BUS_DRAFT = 1, TB_BUS_VERIFY = 2, TB_BUS_PHASES = 3 };
/* Bytes that crossed the bus in a session, to the device and back, by phase. `weights`: those of them that were weights. */
typedef struct tb_bus {
    double to[3], back[3], weights[3];
} tb_bus;
void tb_session_bus(const tb_session *s, tb_bus *bus);

/* Measurements on threads that stay from call to call. What a time is worth depends on tb_probe_disturbed. */
typedef struct tb_probe tb_probe;
tb_probe *tb_probe_new(int32_t threads, char *err, size_t err_n);
void tb_probe_free(tb_probe *p);
/* Seconds to read `bytes` at `memory` once: each thread its part, in 1, 2 or 4 prefetched streams. */
double tb_probe_read(tb_probe *p, const uint8_t *memory, size_t bytes, int32_t streams);
/* Multiply-accumulates per second, all threads together, of the level's own instructions for op, on registers. */
double tb_probe_multiply(tb_probe *p, int32_t op);
/* Seconds that a parallel section costs when its threads wait for it awake. */
double tb_probe_section(tb_probe *p);
/* Seconds of op on the n matrices w[0..n), one after the other, times m tokens whose rounding is not timed. All have the shape of
 * the first, and no rows beyond those of the model's matrices. */
int tb_probe_matmul(tb_probe *p, const tb_matrix *w, int32_t n, int32_t op, int32_t m, double *seconds, char *err, size_t err_n);
int32_t tb_probe_disturbed(const tb_probe *p);  /* a thread lost its processor while the last measurement ran */
/* cdef-end */
#endif
