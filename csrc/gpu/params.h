/* params.h - what host and kernels agree on: the kernels' names, their parameters, and the table that describes matrices.
 *
 * Every kernel takes eight buffers and one of these structs. Also read by the device's compiler, so: preprocessor and plain structs. */
#ifndef TBG_PARAMS_H
#define TBG_PARAMS_H

/* cdef-begin */
typedef struct tbg_params {
    int m, n;                       /* tokens, and elements of each */
    int first, count;               /* matrices: descriptions [first, first + count) */
    int flags, kind, place;         /* TBG_ADD ..; how activations are rounded; what to report when they are not finite */
    int position, ring, window;     /* of the cache: base position of the pass, slots, visible positions (0: all) */
    int heads, kv_heads, head_dim;
    int rope, rope_skip, angles;    /* half of the rotated dimensions, floats before its angles, floats of angles per token */
    int chunk, chunks, token;       /* attention: first chunk, how many, first token */
    int activation, w0, w1;         /* norm weights, in floats; -1: none */
    int x, a;                       /* offsets of regions, in floats or ints */
    unsigned int seed0, seed1;
    float eps, scale, softcap, temperature;
} tbg_params;

/* A matrix on the device: ints. Planes: offsets in 16 bytes; bias: in floats, -1: none. OUT: rows of the matrices before it that are
 * multiplied with it; their results lie one after the other, each [m, rows]. */
enum {
    TBG_ROWS, TBG_COLS, TBG_BLOCKS, TBG_UNITS, TBG_QUADS, TBG_GROUP_QUADS, TBG_OUT, TBG_BIAS,
    TBG_CODES, TBG_SCALES, TBG_U, TBG_A, TBG_B, TBG_RCODES, TBG_RSCALES, TBG_RGROUP, TBG_DESC
};

enum { TBG_FINISH = 1, TBG_ADD = 2, TBG_GATED = 4, TBG_HAS_H = 8, TBG_TREE = 16, TBG_VALUES_ARE_KEYS = 32, TBG_V_NORM = 64,
       TBG_TIED = 128, TBG_TIED_FULL = 256, TBG_LISTED = 512 };

/* Activations: bytes of a column, by kind (int8; two bytes for the others). */
enum { TBG_KINDS = 3 };

/* FOUND: what top_logits finds in a span, in pairs of ints: the best, then the sum of exponentials. */
enum { TBG_CHUNK = 512, TBG_SPAN = 1024, TBG_BEST = 4, TBG_FOUND = 5, TBG_HEAD_MAX = 512, TBG_AHEAD = 65 };

/* cdef-end */

/* name, work items of a group */
#define TBG_PRODUCT_KERNELS(X) \
    X(draft2_a8_t1, 64) X(draft2_a8_t8, 64) X(draft2_a16_t1, 64) X(draft2_a16_t8, 64) \
    X(draft3_a8_t1, 64) X(draft3_a8_t8, 64) X(draft3_a16_t1, 64) X(draft3_a16_t8, 64) \
    X(draft4_a8_t1, 64) X(draft4_a8_t8, 64) X(draft4_a16_t1, 64) X(draft4_a16_t8, 64) \
    X(residual4_t1, 64) X(residual4_t8, 64) X(residual6_t1, 64) X(residual6_t8, 64) X(residual8_t1, 64) X(residual8_t8, 64)
#define TBG_OTHER_KERNELS(X) \
    X(embed, 64) X(norm_step, 256) X(round_acts, 64) X(sum_parts, 64) X(place_heads, 64) X(attend_chunk, 128) X(attend_join, 64) \
    X(move_slots, 64) X(next_token, 64) X(cap_logits, 64) X(top_logits, 128) X(rank_tokens, 64)
#define TBG_KERNELS(X) TBG_PRODUCT_KERNELS(X) TBG_OTHER_KERNELS(X)
#endif
