/* sampler.h - the next token as a pure function of (logits, history, options, position); see sampler.c. */
#ifndef TB_SAMPLER_H
#define TB_SAMPLER_H
#include "tb.h"

enum { TB_MAX_VOCAB = 1 << 23 };

/* TB_OK, or TB_EINVAL with one line in err. */
int tb_sample_check(const tb_sampling *sampling, int32_t vocab, char *err, size_t err_n);

size_t tb_sample_scratch_bytes(int32_t vocab);      /* a 64-byte multiple */

/* The token for `position`; no allocation. `sampling` has passed tb_sample_check; scratch is 64-byte aligned, one per thread.
 * confidence (or NULL): the probability of that token in the distribution it was drawn from; greedy: at temperature 1.
 * TB_ENONFINITE: a NaN or +inf among the logits, or no finite one. TB_EINVAL: a history token outside the vocabulary. */
int tb_sample_with(const float *logits, int32_t vocab, const int32_t *history, int32_t n_history, const tb_sampling *sampling,
                   int32_t position, int32_t *token, float *confidence, void *scratch);

/* The k <= TB_RANKED tokens that the sampler would draw first, second, ..., for drafts: where the distribution is nearly flat the last
 * of them are approximate. confidence: greedy, their probability at temperature 1; else their share among those found, noise
 * included. *found: how many, 1 or more. */
enum { TB_RANKED = 8 };
int tb_sample_ranked(const float *logits, int32_t vocab, const int32_t *history, int32_t n_history, const tb_sampling *sampling,
                     int32_t position, int32_t k, int32_t *tokens, float *confidence, int32_t *found, void *scratch);

/* The k tokens of the largest logits, lower ids first where equal; ids [k], -1 where the vocabulary is smaller. */
int tb_sample_top(const float *logits, int32_t vocab, int32_t k, int32_t *ids, void *scratch);
/* log of the sum of exp(logits). */
double tb_sample_log_sum(const float *logits, int32_t vocab, float top);

/* The noise of one token, between -2.9 and 22.2. */
float tb_gumbel(uint64_t seed, int32_t position, int32_t token);
#endif
