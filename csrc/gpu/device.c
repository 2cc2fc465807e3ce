/* device.c - what all drivers share: choosing one, memory accounts, the cache of compiled kernels. */
#include "device.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../engine.h"

#define TBG_STRING(name, size) #name,
#define TBG_SIZE(name, size) size,
const char *const tbg_kernel_names[] = {TBG_KERNELS(TBG_STRING) NULL};
const int tbg_kernel_sizes[] = {TBG_KERNELS(TBG_SIZE) 0};

tb_gpu *tbg_new(const tbg_driver *driver, void *state)
{
    tb_gpu *g = calloc(1, sizeof *g);
    if (g && tb_mutex_init(&g->lock)) {
        free(g);
        g = NULL;
    }
    if (g) {
        g->driver = driver;
        g->state = state;
        g->limit = SIZE_MAX;
        atomic_init(&g->users, 1);
    }
    return g;
}

void tbg_keep(tb_gpu *g) { atomic_fetch_add(&g->users, 1); }

void tb_gpu_free(tb_gpu *g)
{
    if (!g || atomic_fetch_sub(&g->users, 1) > 1)
        return;
    g->driver->close(g);
    tb_mutex_free(&g->lock);
    free(g);
}

void tbg_lock(tb_gpu *g) { tb_mutex_lock(&g->lock); }
void tbg_unlock(tb_gpu *g) { tb_mutex_unlock(&g->lock); }

int tbg_fail(tb_gpu *g, int code, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    if (!g->lost)       /* the first line says most */
        (void)vsnprintf(g->error, sizeof g->error, format, args);
    va_end(args);
    g->lost = g->lost || code == TB_EDEVICE;
    return g->lost ? TB_EDEVICE : code;
}

int tbg_report(tb_gpu *g, int code, char *err, size_t n)
{
    return code ? tb_fail(err, n, code, "%s: %s", g->name, g->error) : TB_OK;
}

tbg_buffer *tbg_new_buffer(tb_gpu *g, size_t bytes, int place)
{
    tbg_buffer *b = calloc(1, sizeof *b);
    if (!b)
        return NULL;
    b->bytes = ((bytes ? bytes : 1) + 255) / 256 * 256;
    b->place = place;
    if ((place == TBG_DEVICE && (b->bytes > g->limit || g->used > g->limit - b->bytes)) || g->driver->allocate(g, b)) {
        if (!g->lost)
            (void)tbg_fail(g, TB_ENOMEM, "out of memory: %zu MB in use, %zu MB more do not fit", g->used / 1000000, b->bytes / 1000000);
        free(b);
        return NULL;
    }
    if (place == TBG_DEVICE)
        g->used += b->bytes;
    return b;
}

void tbg_free_buffer(tb_gpu *g, tbg_buffer *b)
{
    if (!b)
        return;
    g->driver->release(g, b);
    if (b->place == TBG_DEVICE)
        g->used -= b->bytes;
    free(b);
}

int tbg_upload(tb_gpu *g, tbg_buffer *b, size_t at, const void *from, size_t bytes)
{
    int code = bytes ? g->driver->write(g, TBG_COMPUTE, b, at, from, bytes) : TB_OK;
    return code ? code : g->driver->finish(g, TBG_COMPUTE);
}

int tbg_download(tb_gpu *g, tbg_buffer *b, size_t at, void *to, size_t bytes)
{
    int code = bytes ? g->driver->read(g, TBG_COMPUTE, b, at, to, bytes) : TB_OK;
    return code ? code : g->driver->finish(g, TBG_COMPUTE);
}

/* --- the public face --- */

tb_gpu *tb_gpu_open(const char *kind, const char *cache_dir, const char *ptx, int32_t *absent, char *err, size_t n)
{
    *absent = 0;
    if (!strcmp(kind, "plain"))
        return tbg_open_plain(err, n);
    if (!strcmp(kind, "opencl") || !strcmp(kind, "opencl-gpu"))
        return tbg_open_opencl(kind[6] != 0, cache_dir, absent, err, n);
    if (!strcmp(kind, "cuda"))
        return tbg_open_cuda(cache_dir, ptx, absent, err, n);
    tb_fail(err, n, TB_EINVAL, "no such kind of device: %s", kind);
    return NULL;
}

const char *tb_gpu_name(const tb_gpu *g) { return g->name; }
size_t tb_gpu_memory(const tb_gpu *g) { return g->memory; }
size_t tb_gpu_used(const tb_gpu *g) { return g->used; }
int tb_gpu_real(const tb_gpu *g) { return g->real; }
void tb_gpu_limit(tb_gpu *g, size_t bytes) { g->limit = bytes; }

/* --- cache --- */

uint64_t tbg_hash(uint64_t h, const void *data, size_t bytes)
{
    const unsigned char *p = data;
    h = h ? h : 0xcbf29ce484222325u;        /* FNV-1a */
    for (size_t i = 0; i < bytes; i++)
        h = (h ^ p[i]) * 0x100000001b3u;
    return h;
}

char *tbg_cache_read(const char *dir, const char *name, size_t *bytes)
{
    char path[1024], *data = NULL;
    if (!dir || snprintf(path, sizeof path, "%s/%s", dir, name) >= (int)sizeof path)
        return NULL;
    FILE *f = fopen(path, "rb");
    if (!f)
        return NULL;
    long size;
    if (!fseek(f, 0, SEEK_END) && (size = ftell(f)) > 0 && !fseek(f, 0, SEEK_SET) && (data = malloc((size_t)size)) &&
        fread(data, 1, (size_t)size, f) != (size_t)size) {
        free(data);
        data = NULL;
    }
    if (data)
        *bytes = (size_t)size;
    fclose(f);
    return data;
}

/* Under another name first, so that a reader never sees half a file. A cache that cannot be written costs time only. */
void tbg_cache_write(const char *dir, const char *name, const char *data, size_t bytes)
{
    char path[1024], partial[1100];
    if (!dir || snprintf(path, sizeof path, "%s/%s", dir, name) >= (int)sizeof path)
        return;
    (void)snprintf(partial, sizeof partial, "%s.%llx", path, (unsigned long long)tb_clock_ns());
    FILE *f = fopen(partial, "wb");
    if (!f)
        return;
    const bool whole = fwrite(data, 1, bytes, f) == bytes;
    if (fclose(f) || !whole || rename(partial, path))
        (void)remove(partial);
}

int tb_gpu_run(tb_gpu *g, const char *kernel, const int32_t *groups, uint8_t *const *buffers, const size_t *bytes, const void *params,
               int32_t repeat, double *seconds, char *err, size_t n)
{
    tbg_buffer *b[TBG_BUFFERS] = {0};
    tbg_params p;
    int k = 0, code = TB_OK;
    const int by[3] = {groups[0], groups[1], groups[2]};
    while (k < TBG_N_KERNELS && strcmp(tbg_kernel_names[k], kernel))
        k++;
    if (k == TBG_N_KERNELS)
        return tb_fail(err, n, TB_EINVAL, "no such kernel: %s", kernel);
    memcpy(&p, params, sizeof p);
    tbg_lock(g);
    for (int i = 0; i < TBG_BUFFERS && !code; i++) {
        if (!buffers[i])
            continue;
        b[i] = tbg_new_buffer(g, bytes[i], TBG_DEVICE);
        code = b[i] ? tbg_upload(g, b[i], 0, buffers[i], bytes[i]) : TB_ENOMEM;
    }
    const double start = tb_clock();
    for (int32_t i = 0; i < repeat && !code; i++)
        code = g->driver->launch(g, TBG_COMPUTE, k, by, b, &p);
    if (!code)
        code = g->driver->finish(g, TBG_COMPUTE);
    if (seconds)
        *seconds = tb_clock() - start;
    for (int i = 0; i < TBG_BUFFERS && !code; i++)
        if (b[i])
            code = tbg_download(g, b[i], 0, buffers[i], bytes[i]);
    for (int i = 0; i < TBG_BUFFERS; i++)
        tbg_free_buffer(g, b[i]);
    tbg_unlock(g);
    return tbg_report(g, code, err, n);
}
