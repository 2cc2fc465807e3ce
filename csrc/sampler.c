/* sampler.c - see sampler.h. Logit bias, penalties, temperature, top-k, top-p, min-p, then Gumbel noise and argmax.
 *
 * Tokens are ordered by (logit descending, id ascending), and every filter keeps a prefix of that order, so the tokens that survive
 * are those up to some (logit, id). Probabilities count as floor(2^40 exp((logit - max) / T)): integer sums are exact, so the passes
 * below may skip and reorder as they like and still give the result of sorting the whole vocabulary.
 *
 * Most of a vocabulary is skipped by the maxima of its blocks of 32: each filter first gives a bound below which nothing can
 * survive (or, with noise alone, win), and only what is above it is looked at. */
#include "sampler.h"
#include "ops.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK = 32, RADIX = 2048 };

#define MAX_GUMBEL 22.25f           /* above any noise */

typedef struct scratch {
    uint64_t *bins;                 /* [RADIX] */
    float *logits;                  /* [vocab] where bias or penalties change them */
    float *tops;                    /* [blocks] maxima */
    float *select;                  /* [blocks] */
    float *z, *e;                   /* [vocab] candidates in id order: (logit - max) / T, exp of it */
    int32_t *id;                    /* [vocab] */
} scratch;

static void *take(char **at, size_t bytes)
{
    void *p = *at;
    *at += (bytes + 63) & ~(size_t)63;
    return p;
}

static void layout(scratch *s, int32_t vocab, char *memory)
{
    char *at = memory;
    size_t row = (size_t)vocab * 4, blocks = ((size_t)vocab + BLOCK - 1) / BLOCK * 4;
    s->bins = take(&at, RADIX * sizeof *s->bins);
    s->logits = take(&at, row);
    s->tops = take(&at, blocks);
    s->select = take(&at, blocks);
    s->z = take(&at, row);
    s->e = take(&at, row);
    s->id = take(&at, row);
}

size_t tb_sample_scratch_bytes(int32_t vocab)
{
    size_t row = ((size_t)vocab * 4 + 63) & ~(size_t)63, blocks = (((size_t)vocab + BLOCK - 1) / BLOCK * 4 + 63) & ~(size_t)63;
    return RADIX * sizeof(uint64_t) + 4 * row + 2 * blocks;
}

static int refuse(char *err, size_t err_n, const char *what, double value)
{
    snprintf(err, err_n, "%s (got %g)", what, value);
    return TB_EINVAL;
}

int tb_sample_check(const tb_sampling *s, int32_t vocab, char *err, size_t err_n)
{
    /* Written so that NaN fails every test. */
    if (vocab < 1 || vocab > TB_MAX_VOCAB) return refuse(err, err_n, "vocabulary size must be in 1 .. 2^23", vocab);
    if (!(s->temperature >= 0 && s->temperature < INFINITY)) return refuse(err, err_n, "temperature must be a finite number >= 0", s->temperature);
    if (!(s->top_p >= 0 && s->top_p <= 1)) return refuse(err, err_n, "top_p must be in 0 .. 1", s->top_p);
    if (!(s->min_p >= 0 && s->min_p <= 1)) return refuse(err, err_n, "min_p must be in 0 .. 1", s->min_p);
    if (s->top_k < 0) return refuse(err, err_n, "top_k must be >= 0 (0: off)", s->top_k);
    if (!(s->repeat_penalty > 0 && s->repeat_penalty < INFINITY)) return refuse(err, err_n, "repeat_penalty must be a finite number > 0 (1: off)", s->repeat_penalty);
    if (!isfinite(s->presence_penalty)) return refuse(err, err_n, "presence_penalty must be finite", s->presence_penalty);
    if (!isfinite(s->frequency_penalty)) return refuse(err, err_n, "frequency_penalty must be finite", s->frequency_penalty);
    if (s->repeat_last_n < -1) return refuse(err, err_n, "repeat_last_n must be >= -1 (-1: whole history)", s->repeat_last_n);
    if (s->n_bias < 0 || (s->n_bias > 0 && (!s->bias_ids || !s->bias_values))) return refuse(err, err_n, "logit_bias without ids or values", s->n_bias);
    for (int32_t i = 0; i < s->n_bias; i++) {
        if (s->bias_ids[i] < 0 || s->bias_ids[i] >= vocab) return refuse(err, err_n, "logit_bias names a token outside the vocabulary", s->bias_ids[i]);
        if (!(s->bias_values[i] < INFINITY)) return refuse(err, err_n, "logit_bias must be a number or -inf", (double)s->bias_values[i]);
    }
    return TB_OK;
}

/* Bias and penalties on l; the counts are zeroed where they are used, before and after. */
static int adjust(float *l, int32_t *count, int32_t vocab, const int32_t *history, int32_t n, const tb_sampling *s)
{
    for (int32_t i = 0; i < s->n_bias; i++) l[s->bias_ids[i]] += s->bias_values[i];
    for (int32_t i = 0; i < n; i++) {
        if (history[i] < 0 || history[i] >= vocab) return TB_EINVAL;
        count[history[i]] = 0;
    }
    for (int32_t i = 0; i < n; i++) count[history[i]]++;
    for (int32_t i = 0; i < n; i++) {
        int32_t t = history[i];
        if (!count[t]) continue;
        l[t] = l[t] > 0 ? l[t] / s->repeat_penalty : l[t] * s->repeat_penalty;
        l[t] -= (float)count[t] * s->frequency_penalty + s->presence_penalty;
        count[t] = 0;
    }
    return TB_OK;
}

/* The k-th largest of x[n], k <= n; reorders x. */
static float kth_largest(float *x, int32_t n, int32_t k)
{
    for (int32_t lo = 0, hi = n - 1, want = k - 1;;) {
        if (lo >= hi) return x[want];
        float pivot = x[lo + (hi - lo) / 2];
        int32_t i = lo, j = hi;
        while (i <= j) {
            while (x[i] > pivot) i++;
            while (x[j] < pivot) j--;
            if (i <= j) {
                float t = x[i];
                x[i++] = x[j];
                x[j--] = t;
            }
        }
        if (want <= j) hi = j;
        else if (want >= i) lo = i;
        else return pivot;
    }
}

/* Grows as z <= 0 falls. */
static uint32_t order(float z)
{
    uint32_t bits;
    z = z < 0 ? z : -0.0f;
    memcpy(&bits, &z, 4);
    return bits & 0x7fffffff;
}

static uint64_t weight(float e) { return (uint64_t)(int64_t)(e * 0x1p40f); }

static void keep(scratch *s, int32_t to, int32_t from)
{
    s->z[to] = s->z[from];
    s->e[to] = s->e[from];
    s->id[to] = s->id[from];
}

/* Keeps the shortest prefix, in order of (z descending, id), whose weights reach `target` >= 1 (all, if they do not); where
 * by_count, each weighs 1. Three passes narrow order(z) down to one value, 11 + 11 + 9 bits; ties then count in id order. */
static int32_t keep_prefix(scratch *s, int32_t n, uint64_t target, int by_count)
{
    static const int shift[3] = {20, 9, 0};
    uint32_t prefix = 0;
    uint64_t before = 0;
    for (int pass = 0; pass < 3; pass++) {
        int above = pass ? shift[pass - 1] : 31;
        memset(s->bins, 0, RADIX * sizeof *s->bins);
        for (int32_t i = 0; i < n; i++) {
            uint32_t o = order(s->z[i]);
            if ((uint64_t)o >> above == prefix) s->bins[o >> shift[pass] & ((1u << (above - shift[pass])) - 1)] += by_count ? 1 : weight(s->e[i]);
        }
        uint32_t bin = 0, last = (1u << (above - shift[pass])) - 1;
        while (before + s->bins[bin] < target) {
            before += s->bins[bin];
            if (bin++ == last) return n;
        }
        prefix = prefix << (above - shift[pass]) | bin;
    }
    int32_t kept = 0;
    for (int32_t i = 0; i < n; i++) {
        uint32_t o = order(s->z[i]);
        if (o > prefix) continue;
        if (o == prefix) {
            if (before >= target) continue;
            before += by_count ? 1 : weight(s->e[i]);
        }
        keep(s, kept++, i);
    }
    return kept;
}

static int32_t collect(scratch *s, const float *x, int32_t vocab, float top, float temperature, float bound)
{
    int32_t n = 0;
    for (int32_t start = 0; start < vocab; start += BLOCK) {
        if ((s->tops[start / BLOCK] - top) / temperature < bound) continue;
        int32_t end = vocab - start < BLOCK ? vocab : start + BLOCK;
        for (int32_t i = start; i < end; i++) {
            float z = (x[i] - top) / temperature;
            s->z[n] = z;
            s->id[n] = i;
            n += z >= bound;
        }
    }
    return n;
}

static uint64_t total(const scratch *s, int32_t n)
{
    uint64_t sum = 0;
    for (int32_t i = 0; i < n; i++) sum += weight(s->e[i]);
    return sum;
}

static float probability(float e, uint64_t sum) { return (float)((double)e * 0x1p40 / (double)sum); }

static uint64_t top_p_target(float top_p, uint64_t sum)
{
    uint64_t target = (uint64_t)((double)top_p * (double)sum);
    return target < 1 ? 1 : target < sum ? target : sum;
}

/* The candidate with the largest z + noise, the lower id where two are equal; returns its index. */
static int32_t draw(const scratch *s, const tb_ops *ops, int32_t n, uint64_t seed, int32_t position)
{
    float best = -INFINITY;
    int32_t token = -1, index = 0;
    for (int32_t i = 0; i < n;) {
        float z[BLOCK], top = -INFINITY;
        int32_t block = s->id[i] / BLOCK, end = (block + 1) * BLOCK;
        for (int j = 0; j < BLOCK; j++) z[j] = -INFINITY;
        for (; i < n && s->id[i] < end; i++) {
            z[s->id[i] & (BLOCK - 1)] = s->z[i];
            top = s->z[i] > top ? s->z[i] : top;
        }
        if (top + MAX_GUMBEL > best) ops->gumbel_best(z, seed, position, block, &best, &token);
    }
    while (s->id[index] != token) index++;
    return index;
}

/* The same over the whole vocabulary; returns the token. */
static int32_t draw_from_all(const scratch *s, const tb_ops *ops, const float *x, int32_t vocab, float top, float temperature, uint64_t seed, int32_t position)
{
    float best = -INFINITY;
    int32_t token = -1;
    for (int32_t start = 0; start < vocab; start += BLOCK) {
        float z[BLOCK];
        if ((s->tops[start / BLOCK] - top) / temperature + MAX_GUMBEL <= best) continue;
        if (vocab - start >= BLOCK)
            for (int j = 0; j < BLOCK; j++) z[j] = (x[start + j] - top) / temperature;
        else
            for (int j = 0; j < BLOCK; j++) z[j] = start + j < vocab ? (x[start + j] - top) / temperature : -INFINITY;
        ops->gumbel_best(z, seed, position, start / BLOCK, &best, &token);
    }
    return token;
}

/* Collects the candidates and applies top-k, top-p and min-p, in this order; returns how many survive, 1 or more. */
static int32_t filter(scratch *s, const tb_ops *ops, const float *x, int32_t vocab, float top, const tb_sampling *sampling)
{
    const float temperature = sampling->temperature;
    const int32_t k = sampling->top_k < vocab ? sampling->top_k : 0, blocks = (vocab + BLOCK - 1) / BLOCK;
    const int use_p = sampling->top_p < 1, use_min = sampling->min_p > 0;

    /* A bound for each filter; the margins cover the rounding of exp and log. */
    uint64_t target = 0;
    float bound = -INFINITY;
    if (k) {
        /* k blocks reach their k-th largest maximum, so at least k tokens do. */
        if (k <= blocks) {
            memcpy(s->select, s->tops, (size_t)blocks * sizeof *s->select);
            bound = (kth_largest(s->select, blocks, k) - top) / temperature;
        }
    } else {
        if (use_p) {
            uint64_t sum = ops->mass(x, vocab, top, temperature);
            /* Tokens lighter than an even share of what may be left out cannot be needed, all together. */
            target = top_p_target(sampling->top_p, sum);
            float share = (float)((double)(sum - target) / (double)vocab) * 0x1p-40f;
            if (share > 1e-30f) bound = tb_logf(share) - 1e-3f;
        }
        if (use_min) {
            float lowest = sampling->min_p > 1e-30f ? tb_logf(sampling->min_p) - 1e-3f : -INFINITY;
            bound = lowest > bound ? lowest : bound;
        }
    }
    int32_t n = collect(s, x, vocab, top, temperature, bound);
    ops->exps(s->e, s->z, n);
    if (k) n = keep_prefix(s, n, (uint64_t)k, 1);
    if (use_p) {
        if (k) target = top_p_target(sampling->top_p, total(s, n));
        n = keep_prefix(s, n, target, 0);
    }
    if (use_min) {
        int32_t kept = 0;
        for (int32_t i = 0; i < n; i++)
            if (s->e[i] >= sampling->min_p) keep(s, kept++, i);
        n = kept;
    }
    return n;
}

/* Bias, penalties and the maxima of blocks; *x: the logits to draw from, *at: the lowest id of the largest. */
static int prepare(scratch *s, const tb_ops *ops, const float *logits, int32_t vocab, const int32_t *history, int32_t n_history,
                   const tb_sampling *sampling, const float **x, int32_t *at)
{
    *x = logits;
    int penalties = sampling->repeat_penalty != 1 || sampling->presence_penalty != 0 || sampling->frequency_penalty != 0;
    int32_t window = !penalties ? 0 : sampling->repeat_last_n < 0 || sampling->repeat_last_n > n_history ? n_history : sampling->repeat_last_n;
    if (window > 0 || sampling->n_bias > 0) {
        memcpy(s->logits, logits, (size_t)vocab * sizeof *logits);
        int rc = adjust(s->logits, s->id, vocab, history + (n_history - window), window, sampling);
        if (rc != TB_OK) return rc;
        *x = s->logits;
    }
    int32_t blocks = (vocab + BLOCK - 1) / BLOCK, block = 0;
    if (ops->block_max(s->tops, *x, vocab)) return TB_ENONFINITE;
    for (int32_t b = 1; b < blocks; b++) block = s->tops[b] > s->tops[block] ? b : block;
    float top = s->tops[block];
    if (!(top > -INFINITY)) return TB_ENONFINITE;
    for (*at = block * BLOCK; (*x)[*at] != top;) ++*at;
    return TB_OK;
}

static int unfiltered(const tb_sampling *s, int32_t vocab)
{
    return (s->top_k == 0 || s->top_k >= vocab) && s->top_p == 1 && s->min_p == 0;
}

int tb_sample_with(const float *logits, int32_t vocab, const int32_t *history, int32_t n_history, const tb_sampling *sampling,
                   int32_t position, int32_t *token, float *confidence, void *memory)
{
    const tb_ops *ops = tb_ops_get();
    if (!ops) return TB_EUNSUPPORTED;
    scratch s;
    layout(&s, vocab, memory);
    const float *x;
    int32_t at;
    int rc = prepare(&s, ops, logits, vocab, history, n_history, sampling, &x, &at);
    if (rc != TB_OK) return rc;

    float top = x[at], temperature = sampling->temperature;
    if (temperature == 0) {
        *token = at;
        if (confidence) *confidence = probability(1.0f, ops->mass(x, vocab, top, 1.0f));
        return TB_OK;
    }

    if (unfiltered(sampling, vocab)) {
        *token = draw_from_all(&s, ops, x, vocab, top, temperature, sampling->seed, position);
        if (confidence) *confidence = probability(tb_expf((x[*token] - top) / temperature), ops->mass(x, vocab, top, temperature));
        return TB_OK;
    }

    int32_t n = filter(&s, ops, x, vocab, top, sampling);
    int32_t drawn = draw(&s, ops, n, sampling->seed, position);
    *token = s.id[drawn];
    if (confidence) *confidence = probability(s.e[drawn], total(&s, n));
    return TB_OK;
}

/* The k largest of x by the maxima of its blocks; returns how many there are. */
static int32_t largest(const scratch *s, const float *x, int32_t vocab, int32_t k, int32_t *ids)
{
    int32_t n = 0;
    for (int32_t start = 0; start < vocab; start += BLOCK) {
        if (n == k && !(s->tops[start / BLOCK] > x[ids[k - 1]])) continue;
        for (int32_t i = start; i < vocab && i < start + BLOCK; i++) {
            if (!(x[i] > -INFINITY) || (n == k && !(x[i] > x[ids[k - 1]]))) continue;
            int32_t at = n < k ? n++ : k - 1;
            for (; at > 0 && x[ids[at - 1]] < x[i]; at--) ids[at] = ids[at - 1];
            ids[at] = i;
        }
    }
    return n;
}

int tb_sample_top(const float *logits, int32_t vocab, int32_t k, int32_t *ids, void *memory)
{
    const tb_ops *ops = tb_ops_get();
    if (!ops) return TB_EUNSUPPORTED;
    scratch s;
    layout(&s, vocab, memory);
    if (ops->block_max(s.tops, logits, vocab)) return TB_ENONFINITE;
    for (int32_t n = largest(&s, logits, vocab, k, ids); n < k; n++) ids[n] = -1;
    return TB_OK;
}

double tb_sample_log_sum(const float *logits, int32_t vocab, float top)
{
    return (double)top + (double)tb_logf((float)((double)tb_ops_get()->mass(logits, vocab, top, 1.0f) * 0x1p-40));
}

int tb_sample_ranked(const float *logits, int32_t vocab, const int32_t *history, int32_t n_history, const tb_sampling *sampling,
                     int32_t position, int32_t k, int32_t *tokens, float *confidence, int32_t *found, void *memory)
{
    const tb_ops *ops = tb_ops_get();
    if (!ops) return TB_EUNSUPPORTED;
    scratch s;
    layout(&s, vocab, memory);
    const float *x;
    int32_t at;
    int rc = prepare(&s, ops, logits, vocab, history, n_history, sampling, &x, &at);
    if (rc != TB_OK) return rc;
    float top = x[at], temperature = sampling->temperature;
    if (temperature == 0) {
        *found = largest(&s, x, vocab, k, tokens);
        uint64_t sum = ops->mass(x, vocab, top, 1.0f);
        for (int32_t i = 0; i < *found; i++) confidence[i] = probability(tb_expf(x[tokens[i]] - top), sum);
        return TB_OK;
    }
    /* Two at least, so that the first has something to be compared with. What lies 16 below the top is left out: noise that
     * lifts it above the others is rarer than a wrong draft. */
    int32_t n = unfiltered(sampling, vocab) ? collect(&s, x, vocab, top, temperature, -16.0f) : filter(&s, ops, x, vocab, top, sampling);
    int32_t want = k < 2 ? 2 : k, m = 0;
    float value[TB_RANKED], sum = 0;
    int32_t ids[TB_RANKED];
    for (; m < want && m < n; m++) {
        int32_t drawn = draw(&s, ops, n, sampling->seed, position);
        ids[m] = s.id[drawn];
        value[m] = s.z[drawn] + tb_gumbel(sampling->seed, position, ids[m]);
        s.z[drawn] = -INFINITY;
        sum += tb_expf(value[m] - value[0]);
    }
    *found = m < k ? m : k;
    for (int32_t i = 0; i < *found; i++) {
        tokens[i] = ids[i];
        confidence[i] = tb_expf(value[i] - value[0]) / sum;
    }
    return TB_OK;
}

int tb_sample(const float *logits, int32_t vocab, const int32_t *history, int32_t n_history, const tb_sampling *sampling,
              int32_t position, int32_t *token, char *err, size_t err_n)
{
    int rc = tb_sample_check(sampling, vocab, err, err_n);
    if (rc != TB_OK) return rc;
    char *memory = malloc(tb_sample_scratch_bytes(vocab) + 63), *aligned = memory;
    if (!memory) {
        snprintf(err, err_n, "out of memory for sampling over %d tokens", (int)vocab);
        return TB_ENOMEM;
    }
    aligned += -(uintptr_t)memory & 63;
    rc = tb_sample_with(logits, vocab, history, n_history, sampling, position, token, NULL, aligned);
    free(memory);
    if (rc == TB_ENONFINITE) snprintf(err, err_n, "logits at position %d: NaN, infinite or all masked", (int)position);
    else if (rc == TB_EINVAL) snprintf(err, err_n, "the history holds a token outside the vocabulary of %d", (int)vocab);
    else if (rc == TB_EUNSUPPORTED) snprintf(err, err_n, "%s", tb_cpu_error());
    return rc;
}
