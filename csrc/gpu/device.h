/* device.h - one accelerator: buffers, queues, events and the kernels of params.h, whatever drives it.
 *
 * Three drivers: OpenCL and CUDA, whose libraries are opened at run time, and plain C, which runs the same kernels on the calling thread
 * and is there for tests. Calls return TB_OK or a TB_E* code; the device keeps a line about what went wrong. After TB_EDEVICE nothing
 * that the device holds can be trusted, and every later call fails too. One thread at a time: see tbg_lock. */
#ifndef TBG_DEVICE_H
#define TBG_DEVICE_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../os.h"
#include "../tb.h"
#include "params.h"

enum { TBG_QUEUES = 2, TBG_EVENTS = 16, TBG_BUFFERS = 8 };
enum { TBG_COMPUTE = 0, TBG_COPY = 1 };
#define TBG_NAME(name, size) TBG_K_##name,
enum { TBG_KERNELS(TBG_NAME) TBG_N_KERNELS };
#undef TBG_NAME

/* In the device; pinned memory of the host to copy from and to; memory of the host that kernels read. */
enum { TBG_DEVICE = 0, TBG_STAGING = 1, TBG_VISIBLE = 2 };

typedef struct tbg_buffer {
    size_t bytes;
    int place;
    void *host;                 /* TBG_STAGING: its address here */
    void *object;               /* the driver's */
    uint64_t address;
} tbg_buffer;

typedef struct tbg_driver {
    const char *name;
    void (*close)(tb_gpu *g);
    int (*allocate)(tb_gpu *g, tbg_buffer *b);      /* b->bytes at b->place */
    void (*release)(tb_gpu *g, tbg_buffer *b);
    /* Asynchronous, in the order of the queue: memory must stay until an event behind it has come. */
    int (*write)(tb_gpu *g, int queue, tbg_buffer *b, size_t at, const void *from, size_t bytes);
    int (*read)(tb_gpu *g, int queue, tbg_buffer *b, size_t at, void *to, size_t bytes);
    int (*launch)(tb_gpu *g, int queue, int kernel, const int groups[3], tbg_buffer *const *buffers, const tbg_params *p);
    int (*mark)(tb_gpu *g, int queue, int event);   /* the event comes when what is in the queue so far is done */
    int (*wait)(tb_gpu *g, int event);              /* the calling thread waits */
    int (*after)(tb_gpu *g, int queue, int event);  /* the queue waits */
    int (*finish)(tb_gpu *g, int queue);
} tbg_driver;

struct tb_gpu {
    const tbg_driver *driver;
    void *state;                /* the driver's */
    atomic_int users;
    tb_mutex lock;
    char name[160], error[240];
    size_t memory;              /* bytes of the device */
    size_t limit, used;         /* what may be allocated in the device, and is */
    bool real;                  /* a processor of its own, with memory of its own */
    bool lost;
};

extern const char tbg_source[];         /* the kernels' text with everything included */
extern const size_t tbg_source_bytes;
extern const char *const tbg_kernel_names[];
extern const int tbg_kernel_sizes[];    /* work items of a group */

tb_gpu *tbg_open_plain(char *err, size_t n);
tb_gpu *tbg_open_opencl(bool only_real, const char *cache_dir, int32_t *absent, char *err, size_t n);
tb_gpu *tbg_open_cuda(const char *cache_dir, const char *ptx, int32_t *absent, char *err, size_t n);

tb_gpu *tbg_new(const tbg_driver *driver, void *state);     /* NULL: out of memory */
void tbg_keep(tb_gpu *g);
void tbg_lock(tb_gpu *g);
void tbg_unlock(tb_gpu *g);
int tbg_fail(tb_gpu *g, int code, const char *format, ...);
int tbg_report(tb_gpu *g, int code, char *err, size_t n);   /* the device's line into err */

/* NULL: out of memory, of the device or under the limit. */
tbg_buffer *tbg_new_buffer(tb_gpu *g, size_t bytes, int place);
void tbg_free_buffer(tb_gpu *g, tbg_buffer *b);             /* NULL is fine */
/* Copies and waits for it. */
int tbg_upload(tb_gpu *g, tbg_buffer *b, size_t at, const void *from, size_t bytes);
int tbg_download(tb_gpu *g, tbg_buffer *b, size_t at, void *to, size_t bytes);

/* A file of the driver's own compiling, under a name made of everything that it depends on. NULL: there is none. malloc'd. */
char *tbg_cache_read(const char *dir, const char *name, size_t *bytes);
void tbg_cache_write(const char *dir, const char *name, const char *data, size_t bytes);
uint64_t tbg_hash(uint64_t seed, const void *data, size_t bytes);
#endif
