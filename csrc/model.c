/* model.c - a model is a checked copy of its description plus the kernels to run it with. The planes stay the caller's. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"
#include "gpu/hybrid.h"
#include "os.h"

int tb_fail(char *err, size_t n, int code, const char *format, ...)
{
    if (err && n) {
        va_list args;
        va_start(args, format);
        (void)vsnprintf(err, n, format, args);
        va_end(args);
    }
    return code;
}

/* The block's true start lies just below the aligned address that is handed out. */
void *tb_alloc(size_t bytes)
{
    if (bytes > SIZE_MAX / 2)
        return NULL;
    char *block = calloc(1, bytes + 64 + sizeof(void *));
    if (!block)
        return NULL;
    uintptr_t aligned = ((uintptr_t)block + sizeof(void *) + 63) & ~(uintptr_t)63;
    ((void **)aligned)[-1] = block;
    return (void *)aligned;
}

void tb_free(void *p)
{
    if (p)
        free(((void **)p)[-1]);
}

static int32_t max32(int32_t a, int32_t b) { return a > b ? a : b; }

static bool matrix_ok(const tb_matrix *w, int32_t cols)
{
    if (w->rows < 1 || w->cols != cols || w->draft_bits < 2 || w->draft_bits > 4)
        return false;
    if (w->residual_bits) {
        const int kind = 10 * w->draft_bits + w->residual_bits;    /* the kinds of FORMAT.md and their ranges */
        const int wide = kind == 28 || kind == 38 || kind == 46;
        if ((!wide && kind != 26 && kind != 36 && kind != 44) || w->wide != wide)
            return false;
        if (!w->residual_codes || !w->residual_scales || (w->residual_group != 16 && w->residual_group != 32))
            return false;
    }
    return w->draft_codes && w->draft_scales && w->row_scale && w->row_a && w->row_b;
}

static const char *layer_fault(const tb_model_desc *d, const tb_layer *l)
{
    if (l->n_heads < 1 || l->n_kv_heads < 1 || l->n_heads % l->n_kv_heads || l->head_dim < 2)
        return "head counts";
    int32_t q = l->n_heads * l->head_dim, kv = l->n_kv_heads * l->head_dim;
    if (!matrix_ok(&l->q, d->hidden) || l->q.rows != q)
        return "q_proj";
    if (!matrix_ok(&l->k, d->hidden) || l->k.rows != kv)
        return "k_proj";
    if (l->v.rows && (!matrix_ok(&l->v, d->hidden) || l->v.rows != kv))
        return "v_proj";
    if (!matrix_ok(&l->o, q) || l->o.rows != d->hidden)
        return "o_proj";
    if (!matrix_ok(&l->gate, d->hidden) || l->gate.rows > d->intermediate_max)
        return "gate_proj";
    if (!matrix_ok(&l->up, d->hidden) || l->up.rows != l->gate.rows)
        return "up_proj";
    if (!matrix_ok(&l->down, l->gate.rows) || l->down.rows != d->hidden)
        return "down_proj";
    if (l->window < 0 || l->rope < -1 || l->rope >= d->n_ropes)
        return "window or rope";
    if (l->rope >= 0 && (d->ropes[l->rope].dim > l->head_dim || d->ropes[l->rope].dim % 2 || d->ropes[l->rope].dim < 2))
        return "rotary dimensions";
    return NULL;
}

tb_model *tb_model_new(const tb_model_desc *d, char *err, size_t n)
{
    const tb_kernels *kernels = tb_kernels_get();
    if (!kernels) {
        tb_fail(err, n, TB_EUNSUPPORTED, "%s", tb_cpu_error());
        return NULL;
    }
    if (d->n_layers < 1 || d->hidden < 1 || d->vocab < 1 || d->n_ropes < 0 || !d->final_norm || !matrix_ok(&d->head, d->hidden) ||
        d->head.rows != d->vocab || (d->embedding_codes && !d->embedding_scales)) {
        tb_fail(err, n, TB_EINVAL, "the model's sizes, final norm, head or embedding are inconsistent");
        return NULL;
    }
    for (int32_t i = 0; i < d->n_layers; i++) {
        const char *fault = layer_fault(d, &d->layers[i]);
        if (fault) {
            tb_fail(err, n, TB_EINVAL, "layer %d: %s does not fit the rest of the model", (int)i, fault);
            return NULL;
        }
    }
    tb_model *m = calloc(1, sizeof *m);
    tb_layer *layers = malloc((size_t)d->n_layers * sizeof *layers);
    tb_rope *ropes = malloc((size_t)max32(d->n_ropes, 1) * sizeof *ropes);
    if (!m || !layers || !ropes) {
        free(m);
        free(layers);
        free(ropes);
        tb_fail(err, n, TB_ENOMEM, "out of memory for the model's description");
        return NULL;
    }
    atomic_init(&m->users, 1);
    m->d = *d;
    m->d.layers = m->layers = memcpy(layers, d->layers, (size_t)d->n_layers * sizeof *layers);
    m->d.ropes = m->ropes = ropes;
    for (int32_t i = 0; i < d->n_ropes; i++) {
        ropes[i] = d->ropes[i];
        m->rope_half += ropes[i].dim / 2;
    }
    m->kernels = kernels;
    m->ops = tb_ops_get();
    m->cols_max = d->hidden;
    for (int32_t i = 0; i < d->n_layers; i++) {
        const tb_layer *l = &layers[i];
        m->q_max = max32(m->q_max, l->q.rows);
        m->kv_max = max32(m->kv_max, l->k.rows);
        m->cols_max = max32(m->cols_max, max32(l->o.cols, l->down.cols));
        m->head_dim_max = max32(m->head_dim_max, l->head_dim);
        m->group_max = max32(m->group_max, l->n_heads / l->n_kv_heads);
    }
    return m;
}

void tb_model_free(tb_model *m)
{
    if (!m || atomic_fetch_sub(&m->users, 1) > 1)
        return;
    tbg_model_free(m->gpu);
    free(m->layers);
    free(m->ropes);
    free(m);
}

/* --- one product on its own, for tests and benchmarks --- */

typedef struct product {
    const tb_kernels *k;
    const tb_matrix *w;
    tb_act *act;
    tb_pool *pool;
    float *y;
    char *scratch;
    size_t scratch_n;
    int32_t op;
} product;

static void product_part(void *arg, int ith, int nth)
{
    product *p = arg;
    (void)nth;
    int32_t blocks = (p->w->rows + 15) / 16, step = 4;
    for (int32_t c; (c = tb_pool_next(p->pool, (blocks + step - 1) / step)) >= 0;)
        p->k->matmul(p->w, p->op, p->act, p->y, p->w->rows, c * step, c * step + step < blocks ? c * step + step : blocks,
                     p->scratch + (size_t)ith * p->scratch_n);
}

int tb_matmul(const tb_matrix *w, int32_t op, const float *x, int32_t m, float *y, int32_t threads, int32_t repeat, double *seconds,
              char *err, size_t n)
{
    const tb_kernels *k = tb_kernels_get();
    if (!k)
        return tb_fail(err, n, TB_EUNSUPPORTED, "%s", tb_cpu_error());
    if (!matrix_ok(w, w->cols) || m < 1 || threads < 1 || (op != TB_DRAFT && (op != TB_VERIFY || !w->residual_bits)))
        return tb_fail(err, n, TB_EINVAL, "this product is not possible");
    int32_t kind = tb_act_kind(w, op);
    void *memory = tb_alloc(tb_act_bytes(kind, m, w->cols));
    tb_pool *pool = tb_pool_new(threads, tb_cpu_threads());
    size_t scratch_n = tb_kernel_scratch_bytes(w->cols);
    char *scratch = tb_alloc(scratch_n * (size_t)threads);
    int code = TB_OK;
    if (memory && pool && scratch) {
        tb_act act;
        tb_act_layout(&act, kind, m, w->cols, memory);
        product p = {k, w, &act, pool, y, scratch, scratch_n, op};
        for (int32_t i = 0; i < (repeat > 1 ? repeat : 1) && !code; i++) {
            double t0 = tb_clock();
            if (k->quantize(&act, x, w->cols, 0, m))
                code = tb_fail(err, n, TB_ENONFINITE, "an input is not finite");
            else
                tb_parallel_for(pool, product_part, &p);
            if (seconds)
                seconds[i] = tb_clock() - t0;
        }
    } else {
        code = tb_fail(err, n, TB_ENOMEM, "out of memory");
    }
    tb_free(memory);
    tb_free(scratch);
    tb_pool_free(pool);
    return code;
}
