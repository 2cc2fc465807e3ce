/* lookup.h - free proposals: what followed the longest earlier match of the text's end, and what the full model found likely
 * after the same token before. */
#ifndef TB_LOOKUP_H
#define TB_LOOKUP_H
#include "tb.h"

/* Every position of a text in chains of equal tokens. */
typedef struct tb_lookup {
    int32_t *tokens, *previous;         /* [room]: the text, and the last position before with the same token or -1 */
    int32_t *last;                      /* [vocab]: the last position of a token or -1 */
    int32_t n, room;
    int32_t texts;                      /* how often another text began */
    int32_t cursor, misses;             /* where the text that is being copied goes on, -1: none; tokens since it last did */
} tb_lookup;

/* Takes up a text that mostly continues the one before. TB_OK, or TB_ENOMEM: then there is nothing to find. */
int tb_lookup_follow(tb_lookup *l, const int32_t *text, int32_t n, int32_t vocab);
/* Where the best continuation of the text starts, or -1; *bin: how far to trust its first token. */
int32_t tb_lookup_find(tb_lookup *l, int32_t *bin);
/* The bin of the next token of a continuation. */
int32_t tb_lookup_next_bin(int32_t bin);
void tb_lookup_free(tb_lookup *l);
size_t tb_lookup_bytes(const tb_lookup *l, int32_t vocab);

enum { TB_RECYCLED = 4 };

/* Per token the likeliest successors when it was last verified, and how far their logits lay below the first. */
typedef struct tb_recycled {
    int32_t *ids;                       /* [vocab, TB_RECYCLED]; -1: none */
    float *below;
} tb_recycled;

int tb_recycled_keep(tb_recycled *r, int32_t vocab, int32_t token, const int32_t *ids, const float *logits);
/* The likeliest successors, by the sampler's measure at `position`; returns how many, with their bins. */
int32_t tb_recycled_find(const tb_recycled *r, int32_t token, const tb_sampling *s, int32_t position, int32_t *ids, int32_t *bins);
void tb_recycled_free(tb_recycled *r);
size_t tb_recycled_bytes(const tb_recycled *r, int32_t vocab);
#endif
