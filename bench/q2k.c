/* q2k.c - llama.cpp's Q2_K rounding of a matrix, for bench/quality.py: fp32 on stdin, its bytes on stdout.
 *
 *     q2k ROWS COLS < (COLS importances, then ROWS x COLS weights, fp32) > (ROWS x COLS / 256 blocks of 84 bytes)
 *
 * COLS is a multiple of 256. Built against ggml.h and libggml-base.a of scripts/peers.py. */
#include "ggml.h"

#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    const int64_t rows = atoll(argv[1]), cols = atoll(argv[2]);
    const size_t bytes = ggml_row_size(GGML_TYPE_Q2_K, cols) * (size_t)rows;
    float *importance = malloc(sizeof(float) * (size_t)cols), *weights = malloc(sizeof(float) * (size_t)(rows * cols));
    void *out = malloc(bytes);
    if (!importance || !weights || !out) return 1;
    if (fread(importance, sizeof(float), (size_t)cols, stdin) != (size_t)cols) return 1;
    if (fread(weights, sizeof(float), (size_t)(rows * cols), stdin) != (size_t)(rows * cols)) return 1;
    if (ggml_quantize_chunk(GGML_TYPE_Q2_K, weights, out, 0, rows, cols, importance) != bytes) return 1;
    return fwrite(out, 1, bytes, stdout) == bytes ? 0 : 1;
}
