/* plain.c - the kernels in plain C on the calling thread: what the other drivers are tested against, and a device for tests. */
#include "device.h"

#include <stdlib.h>
#include <string.h>

#include "../engine.h"

/* The kernels' text is shared with the devices' compilers, whose rules for conversions and names are their own. */
#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wconversion"
#pragma GCC diagnostic ignored "-Wsign-conversion"
#pragma GCC diagnostic ignored "-Wshadow"
#pragma GCC diagnostic ignored "-Wunused-parameter"
#pragma GCC diagnostic ignored "-Wunused-function"
#pragma GCC diagnostic ignored "-Wunused-variable"
#endif
#include "kernels.inc"

typedef void (*kernel_fn)(ARGS);
#define TBG_FUNCTION(name, size) name,
static const kernel_fn functions[] = {TBG_KERNELS(TBG_FUNCTION)};

static void plain_close(tb_gpu *g) { (void)g; }

static int plain_allocate(tb_gpu *g, tbg_buffer *b)
{
    (void)g;
    b->host = b->object = tb_alloc(b->bytes);
    return b->object ? TB_OK : TB_ENOMEM;
}

static void plain_release(tb_gpu *g, tbg_buffer *b)
{
    (void)g;
    tb_free(b->object);
}

static int plain_write(tb_gpu *g, int queue, tbg_buffer *b, size_t at, const void *from, size_t bytes)
{
    (void)queue;
    if (at > b->bytes || bytes > b->bytes - at)
        return tbg_fail(g, TB_EINVAL, "a copy beyond its buffer");
    memcpy((char *)b->object + at, from, bytes);
    return TB_OK;
}

static int plain_read(tb_gpu *g, int queue, tbg_buffer *b, size_t at, void *to, size_t bytes)
{
    (void)queue;
    if (at > b->bytes || bytes > b->bytes - at)
        return tbg_fail(g, TB_EINVAL, "a copy beyond its buffer");
    memcpy(to, (char *)b->object + at, bytes);
    return TB_OK;
}

static int plain_launch(tb_gpu *g, int queue, int kernel, const int groups[3], tbg_buffer *const *buffers, const tbg_params *p)
{
    u8 *b[TBG_BUFFERS];
    (void)g;
    (void)queue;
    for (int i = 0; i < TBG_BUFFERS; i++)
        b[i] = buffers[i] ? buffers[i]->object : NULL;
    for (tbg_group[2] = 0; tbg_group[2] < groups[2]; tbg_group[2]++)
        for (tbg_group[1] = 0; tbg_group[1] < groups[1]; tbg_group[1]++)
            for (tbg_group[0] = 0; tbg_group[0] < groups[0]; tbg_group[0]++)
                functions[kernel](b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7], *p);
    return TB_OK;
}

static int plain_event(tb_gpu *g, int queue, int event)
{
    (void)g;
    (void)queue;
    (void)event;
    return TB_OK;
}

static int plain_wait(tb_gpu *g, int event) { return plain_event(g, 0, event); }

static const tbg_driver plain_driver = {
    "plain", plain_close, plain_allocate, plain_release, plain_write, plain_read, plain_launch, plain_event, plain_wait, plain_event, plain_wait,
};

tb_gpu *tbg_open_plain(char *err, size_t n)
{
    tb_gpu *g = tbg_new(&plain_driver, NULL);
    if (!g) {
        tb_fail(err, n, TB_ENOMEM, "out of memory");
        return NULL;
    }
    strcpy(g->name, "plain C");
    g->memory = (size_t)1 << 40;
    return g;
}
