/* lookup.c - see lookup.h.
 *
 * The match of the text's end is searched along the chain of its last token, newest first. A text that copies another with changes
 * loses the match at every change: a cursor remembers where it was copying, and matches near it need to be less long. */
#include "lookup.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "ops.h"
#include "sampler.h"

enum { CHAIN = 1024, LONGEST = 32, NEAR = 32, LOST = 24 };

void tb_lookup_free(tb_lookup *l)
{
    free(l->tokens);
    free(l->previous);
    free(l->last);
    memset(l, 0, sizeof *l);
}

size_t tb_lookup_bytes(const tb_lookup *l, int32_t vocab)
{
    return (2 * (size_t)l->room + (l->last ? (size_t)vocab : 0)) * sizeof(int32_t);
}

static int reserve(tb_lookup *l, int32_t n, int32_t vocab)
{
    if (!l->last) {
        l->last = malloc((size_t)vocab * sizeof *l->last);
        if (!l->last)
            return TB_ENOMEM;
        memset(l->last, -1, (size_t)vocab * sizeof *l->last);
        l->cursor = -1;
    }
    if (n > l->room) {
        int32_t room = n + n / 2 + 256;
        int32_t *tokens = realloc(l->tokens, (size_t)room * sizeof *tokens);
        if (tokens)
            l->tokens = tokens;
        int32_t *previous = realloc(l->previous, (size_t)room * sizeof *previous);
        if (previous)
            l->previous = previous;
        if (!tokens || !previous)
            return TB_ENOMEM;
        l->room = room;
    }
    return TB_OK;
}

int tb_lookup_follow(tb_lookup *l, const int32_t *text, int32_t n, int32_t vocab)
{
    if (reserve(l, n, vocab)) {
        tb_lookup_free(l);
        return TB_ENOMEM;
    }
    if (l->n > n || memcmp(l->tokens, text, (size_t)l->n * sizeof *text) != 0) {
        for (int32_t i = 0; i < l->n; i++)
            l->last[l->tokens[i]] = -1;
        l->n = 0;
        l->cursor = -1;
        l->texts++;
    }
    bool goes_on = l->n > 0;
    for (int32_t i = l->n; i < n; i++) {
        int32_t token = text[i];
        if (goes_on && l->cursor >= 0) {
            l->misses = l->tokens[l->cursor] == token ? 0 : l->misses + 1;
            l->cursor = l->misses > LOST || l->cursor + 1 >= i ? -1 : l->cursor + 1;
        }
        l->tokens[i] = token;
        l->previous[i] = l->last[token];
        l->last[token] = i;
    }
    l->n = n;
    return TB_OK;
}

/* Bins 0 .. 7 by the length of the match; 8 .. 15 the same for matches near the cursor, 8: none but the cursor itself. */
static int32_t bin_of(int32_t length, bool near_cursor)
{
    int32_t bin = length < 1 ? 0 : length < 4 ? length - 1 : length < 6 ? 3 : length < 9 ? 4 : length < 14 ? 5 : length < 24 ? 6 : 7;
    return !near_cursor ? bin : length < 1 ? 8 : bin < 7 ? 9 + bin : 15;
}

int32_t tb_lookup_next_bin(int32_t bin)
{
    /* Bins 3 and on are wider than one token; to trust a continuation a little less than its match is long costs nothing. */
    return bin == 7 || bin == 15 || bin % 8 >= 3 ? bin : bin + 1;
}

int32_t tb_lookup_find(tb_lookup *l, int32_t *bin)
{
    int32_t best = -1, best_score = 0, steps = 0;
    bool sure = false;
    if (l->n < 2)
        return -1;
    for (int32_t at = l->previous[l->n - 1]; at >= 0 && steps < CHAIN; at = l->previous[at], steps++) {
        int32_t length = 1;
        while (length < LONGEST && length <= at && l->tokens[at - length] == l->tokens[l->n - 1 - length])
            length++;
        int32_t away = l->cursor < 0 ? NEAR + 1 : abs(at + 1 - l->cursor);
        int32_t score = 64 * length + (away <= NEAR ? 3 * 64 - away : 0);
        if (score > best_score) {
            best_score = score;
            best = at + 1;
            *bin = bin_of(length, away <= NEAR);
            sure = length >= 3 || away <= NEAR;
        }
        if (length == LONGEST && l->cursor < 0)
            break;
    }
    /* A single word may have been replaced: what followed it may follow. */
    if (l->cursor > 0 && l->misses > 0 && l->misses < 4 && best_score <= 3 * 64) {
        *bin = bin_of(0, true);
        return l->cursor;
    }
    if (sure) {
        l->cursor = best;
        l->misses = 0;
    }
    return best;
}

/* --- recycled successors --- */

void tb_recycled_free(tb_recycled *r)
{
    free(r->ids);
    free(r->below);
    memset(r, 0, sizeof *r);
}

size_t tb_recycled_bytes(const tb_recycled *r, int32_t vocab)
{
    return r->ids ? (size_t)vocab * TB_RECYCLED * (sizeof *r->ids + sizeof *r->below) : 0;
}

int tb_recycled_keep(tb_recycled *r, int32_t vocab, int32_t token, const int32_t *ids, const float *logits)
{
    size_t n = (size_t)vocab * TB_RECYCLED;
    if (!r->ids) {
        r->ids = malloc(n * sizeof *r->ids);
        r->below = malloc(n * sizeof *r->below);
        if (!r->ids || !r->below) {
            tb_recycled_free(r);
            return TB_ENOMEM;
        }
        memset(r->ids, -1, n * sizeof *r->ids);
    }
    for (int32_t i = 0; i < TB_RECYCLED; i++) {
        r->ids[(size_t)token * TB_RECYCLED + (size_t)i] = ids[i];
        r->below[(size_t)token * TB_RECYCLED + (size_t)i] = ids[i] < 0 ? 0 : logits[ids[0]] - logits[ids[i]];
    }
    return TB_OK;
}

int32_t tb_recycled_find(const tb_recycled *r, int32_t token, const tb_sampling *s, int32_t position, int32_t *ids, int32_t *bins)
{
    float score[TB_RECYCLED], sum = 0;
    int32_t n = 0;
    for (size_t i = (size_t)token * TB_RECYCLED; r->ids && n < TB_RECYCLED && r->ids[i] >= 0; i++, n++) {
        float below = r->below[i] < 30 ? r->below[i] : 30, value = -below;
        sum += tb_expf(-below);
        if (s->temperature > 0)
            value = value / s->temperature + tb_gumbel(s->seed, position, r->ids[i]);
        int32_t at = n;
        for (; at > 0 && score[at - 1] < value; at--) {
            score[at] = score[at - 1];
            ids[at] = ids[at - 1];
        }
        score[at] = value;
        ids[at] = r->ids[i];
    }
    /* Four degrees of certainty: the share of the likeliest among the four. */
    int32_t certain = sum > 1.8f ? 0 : sum > 1.3f ? 1 : sum > 1.08f ? 2 : 3;
    for (int32_t i = 0; i < n; i++)
        bins[i] = i * 4 + certain;
    return n;
}
