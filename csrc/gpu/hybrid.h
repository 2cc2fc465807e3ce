/* hybrid.h - a model that is partly on a device, and a session on it: the device has the 2-bit part, norms, cache and attention; the
 * residual is multiplied by the CPU, or by the device for layers that have it there or in passes that bring it. */
#ifndef TBG_HYBRID_H
#define TBG_HYBRID_H
#include "../engine.h"
#include "device.h"

enum { TBG_Q, TBG_K, TBG_V, TBG_O, TBG_GATE, TBG_UP, TBG_DOWN, TBG_PARTS };
enum { TBG_INPUT_NORM, TBG_Q_NORM, TBG_K_NORM, TBG_POST_ATTENTION, TBG_PRE_FFN, TBG_POST_FFN, TBG_NORMS };
enum { TBG_TOKENS_MAX = 2048, TBG_HEAD_TOKENS = 16 };

/* The head counts as the layer behind the last, its matrix as part 0. */
typedef struct tbg_layer {
    tbg_buffer *draft, *residual;       /* residual NULL: stays in RAM */
    int norms[TBG_NORMS];               /* in `weights`, floats; -1: none */
} tbg_layer;

typedef struct tbg_model {
    tb_gpu *g;
    tbg_buffer *table, *weights;        /* descriptions; norms and biases, fp32 */
    int *rows;                          /* the descriptions here too: [(n_layers + 1) * TBG_PARTS][TBG_DESC] */
    tbg_layer *layers;                  /* [n_layers + 1] */
    tbg_buffer *embedding_codes, *embedding_scales, *tied_residual;     /* in RAM, read by the device */
    int final_norm, pass_tokens;        /* most tokens of a pass */
    double upload_s, upload_bytes;
    size_t residual_max, head_residual; /* bytes of the largest residual of a linear group; of the head's */
} tbg_model;

void tbg_model_free(tbg_model *gm);
const tb_matrix *tbg_matrix(const tb_model *m, int32_t layer, int part);   /* rows == 0: none */
/* A plane's bytes. */
size_t tbg_codes_bytes(const tb_matrix *w, bool residual);
size_t tbg_scales_bytes(const tb_matrix *w, bool residual);

typedef struct tbg_session tbg_session;
int tbg_session_new(tb_session *s, char *err, size_t n);
void tbg_session_free(tb_session *s);
size_t tbg_session_bytes(const tb_session *s);
int tbg_session_reserve(tb_session *s, int32_t tokens, char *err, size_t n);
int tbg_forward(tb_session *s, int32_t op, const int32_t *tokens, int32_t n, int32_t position, const tb_tree *tree, int32_t which, float *logits,
                char *err, size_t err_n);
/* Tokens of the next pass of a prompt, of which at most n: a few first, where the CPU's speed is not known yet. */
int32_t tbg_next_chunk(const tb_session *s, int32_t n);
/* Whether the device can tell what the sampler would draw from given logits, so that a draft needs the host at its end only. */
bool tbg_ranks(const tb_session *s);
void tbg_compact(tb_session *s, int32_t position, const int32_t *slots, int32_t n);
/* A layer's cache here, as a session without device has it, and with `store` back to the device; between the two s->caches[layer] holds
 * it. The device keeps its line about a failure. */
int tbg_cache_open(tb_session *s, int32_t layer);
int tbg_cache_close(tb_session *s, int32_t layer, bool store);
int tbg_session_fail(tb_session *s, int code, char *err, size_t n);
#endif
