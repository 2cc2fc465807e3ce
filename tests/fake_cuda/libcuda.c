/* libcuda.c - stands in for NVIDIA's libcuda.so.1 in tests: what csrc/gpu/cuda.c calls, on the processor, with the plain-C kernels.
 *
 * Streams are as lazy as the real interface allows: an operation runs when something that the caller waits for needs it, and copies
 * read and write the caller's memory then. So a wait that is missing gives wrong bits. FAKE_CUDA=eager runs everything at once instead.
 * Memory is filled with NaN; a copy beyond an allocation, a wrong work group or an object used after its end abort the process. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu/kernels.inc"

typedef void (*kernel_fn)(ARGS);
#define FUNCTION(name, size) name,
#define NAME_OF(name, size) #name,
#define SIZE_OF(name, size) size,
static const kernel_fn kernels[] = {TBG_KERNELS(FUNCTION)};
static const char *const names[] = {TBG_KERNELS(NAME_OF) NULL};
static const int sizes[] = {TBG_KERNELS(SIZE_OF) 0};

enum { STREAMS = 16, EVENTS = 128, OPERATIONS = 1 << 16, BLOCKS = 4096 };
enum { TO_DEVICE, TO_HOST, LAUNCH, WAIT };
enum { INVALID = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, LAUNCH_FAILED = 719 };

typedef struct event {
    int live, stream;
    long at;                    /* operations of the stream that it waits for; 0: never recorded */
} event;

typedef struct operation {
    int kind, kernel, grid[3], stream;
    long at;
    char *to;
    const char *from;
    size_t bytes;
    unsigned long long buffers[8];
    tbg_params params;
} operation;

typedef struct stream {
    int live;
    long queued, done;
    operation *operations;      /* a ring */
} stream;

static stream streams[STREAMS];
static event events[EVENTS];
static struct { char *at; size_t bytes; int host; } blocks[BLOCKS];
static size_t used, memory = (size_t)1 << 34, room = (size_t)1 << 34;
static int lost, live_contexts, major = 8, minor = 6, devices = 1, fail_code, executed_kernels[64];
static long fail_in, waits;
static char fail_name[64];

static void die(const char *what)
{
    fprintf(stderr, "fake CUDA: %s\n", what);
    abort();
}

static int setting(const char *name, int otherwise)
{
    const char *all = getenv("FAKE_CUDA"), *at = all ? strstr(all, name) : NULL;
    return at ? (at[strlen(name)] == '=' ? atoi(at + strlen(name) + 1) : 1) : otherwise;
}

/* The n-th call of a function from now on fails with a code; "execute": the n-th operation on the device. Codes from 700 on stay. */
void fake_fail(const char *name, long n, int code)
{
    snprintf(fail_name, sizeof fail_name, "%s", name);
    fail_in = n;
    fail_code = code;
}

/* Another process would find the device as new. */
void fake_recover(void) { lost = 0; fail_in = 0; }
void fake_room(size_t bytes) { room = bytes; }
int fake_lost(void) { return lost; }
long fake_waits(void) { return waits; }     /* of the caller, for an event or a stream */
int fake_ran(int kernel) { return executed_kernels[kernel]; }

/* What is alive: memory, streams, events, contexts. */
long fake_live(void)
{
    long n = live_contexts;
    for (int i = 0; i < BLOCKS; i++) n += blocks[i].at != NULL;
    for (int i = 0; i < STREAMS; i++) n += streams[i].live;
    for (int i = 0; i < EVENTS; i++) n += events[i].live;
    return n;
}

static int call(const char *name)
{
    if (lost) return lost;
    if (fail_in > 0 && !strcmp(name, fail_name) && --fail_in == 0) {
        if (fail_code >= 700) lost = fail_code;
        return fail_code;
    }
    return 0;
}
#define CALL(name) do { const int code_ = call(name); if (code_) return code_; } while (0)

/* --- memory --- */

static void inside(const char *at, size_t bytes)
{
    for (int i = 0; i < BLOCKS; i++)
        if (blocks[i].at && at >= blocks[i].at && at + bytes <= blocks[i].at + blocks[i].bytes) return;
    die("a copy beyond the device's memory");
}

static char *take(size_t bytes, int host)
{
    for (int i = 0; i < BLOCKS; i++) {
        if (blocks[i].at) continue;
        char *p = aligned_alloc(256, (bytes + 255) / 256 * 256);
        if (!p) return NULL;
        memset(p, 0xff, bytes);
        blocks[i].at = p;
        blocks[i].bytes = bytes;
        blocks[i].host = host;
        used += host ? 0 : bytes;
        return p;
    }
    die("too many allocations");
    return NULL;
}

static void give(char *p, int host)
{
    for (int i = 0; i < STREAMS; i++)
        if (streams[i].live && streams[i].done < streams[i].queued && !lost && host)
            for (long k = streams[i].done; k < streams[i].queued; k++) {
                const operation *o = &streams[i].operations[k % OPERATIONS];
                if ((o->kind == TO_DEVICE && o->from == p) || (o->kind == TO_HOST && o->to == p)) die("memory freed before its copy");
            }
    for (int i = 0; i < BLOCKS; i++)
        if (blocks[i].at == p && blocks[i].host == host) {
            used -= host ? 0 : blocks[i].bytes;
            blocks[i].at = NULL;
            free(p);
            return;
        }
    die("memory freed that is not there");
}

/* --- streams --- */

static void run_until(int s, long at);

static void run(const operation *o)
{
    if (lost) return;
    if (fail_in > 0 && !strcmp(fail_name, "execute") && --fail_in == 0) {
        lost = fail_code;
        return;
    }
    if (o->kind == WAIT) {
        run_until(o->stream, o->at);
    } else if (o->kind == LAUNCH) {
        u8 *b[8];
        for (int i = 0; i < 8; i++) b[i] = (u8 *)(size_t)o->buffers[i];
        executed_kernels[o->kernel]++;
        for (tbg_group[2] = 0; tbg_group[2] < o->grid[2]; tbg_group[2]++)
            for (tbg_group[1] = 0; tbg_group[1] < o->grid[1]; tbg_group[1]++)
                for (tbg_group[0] = 0; tbg_group[0] < o->grid[0]; tbg_group[0]++)
                    kernels[o->kernel](b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7], o->params);
    } else {
        inside(o->kind == TO_DEVICE ? o->to : o->from, o->bytes);
        memcpy(o->to, o->from, o->bytes);
    }
}

static void run_until(int s, long at)
{
    while (streams[s].done < at && !lost) {
        operation o = streams[s].operations[streams[s].done % OPERATIONS];
        streams[s].done++;
        run(&o);
    }
}

static int enqueue(void *handle, const operation *o)
{
    const int s = (int)((size_t)handle - 1);
    if (s < 0 || s >= STREAMS || !streams[s].live) die("a stream that is not there");
    if (streams[s].queued - streams[s].done >= OPERATIONS) run_until(s, streams[s].queued - OPERATIONS / 2);
    streams[s].operations[streams[s].queued++ % OPERATIONS] = *o;
    if (setting("eager", 0)) run_until(s, streams[s].queued);
    return 0;
}

static event *event_of(void *handle)
{
    const int e = (int)((size_t)handle - 1);
    if (e < 0 || e >= EVENTS || !events[e].live) die("an event that is not there");
    return &events[e];
}

/* --- the interface --- */

int cuInit(unsigned flags) { (void)flags; CALL("cuInit"); devices = setting("devices", 1); memory = room = (size_t)setting("megabytes", 16384) << 20; return setting("init", 0); }
int cuDriverGetVersion(int *v) { CALL("cuDriverGetVersion"); *v = setting("driver", 12040); return 0; }
int cuDeviceGetCount(int *n) { CALL("cuDeviceGetCount"); *n = devices; return 0; }
int cuDeviceGet(int *d, int i) { CALL("cuDeviceGet"); *d = i; return i < devices ? 0 : NO_DEVICE; }
int cuDeviceGetName(char *name, int n, int d) { (void)d; CALL("cuDeviceGetName"); snprintf(name, (size_t)n, "Fake GPU"); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int d) { (void)d; CALL("cuDeviceTotalMem_v2"); *bytes = memory; return 0; }

int cuDeviceGetAttribute(int *v, int what, int d)
{
    (void)d;
    CALL("cuDeviceGetAttribute");
    *v = what == 75 ? setting("major", major) : what == 76 ? setting("minor", minor) : what == 18 ? setting("integrated", 0) : -1;
    return 0;
}

int cuDevicePrimaryCtxRetain(void **c, int d) { (void)d; CALL("cuDevicePrimaryCtxRetain"); live_contexts++; *c = (void *)1; return 0; }
int cuDevicePrimaryCtxRelease_v2(int d) { (void)d; live_contexts--; return lost; }
int cuCtxSetCurrent(void *c) { CALL("cuCtxSetCurrent"); if (c != (void *)1) die("a context that is not there"); return 0; }

int cuModuleLoadData(void **m, const void *image)
{
    CALL("cuModuleLoadData");
    const int ptx = !strncmp(image, "// twobit kernels", 17);
    char expected[32];
    snprintf(expected, sizeof expected, "fake sm_%d%d", setting("major", major), setting("minor", minor));
    if (!ptx && strcmp(image, expected)) return 200;       /* INVALID_IMAGE */
    if (ptx && setting("old", 0)) return 222;              /* UNSUPPORTED_PTX_VERSION */
    *m = (void *)(size_t)(ptx ? 1 : 2);
    return 0;
}

int cuModuleUnload(void *m) { (void)m; return lost; }

int cuModuleGetFunction(void **f, void *m, const char *name)
{
    CALL("cuModuleGetFunction");
    if (!m) die("a module that is not there");
    for (size_t i = 0; names[i]; i++)
        if (!strcmp(names[i], name)) {
            *f = (void *)(i + 1);
            return 0;
        }
    return 500;
}

int cuMemAlloc_v2(unsigned long long *p, size_t bytes)
{
    CALL("cuMemAlloc_v2");
    if (used + bytes > room) return OUT_OF_MEMORY;
    *p = (unsigned long long)(size_t)take(bytes, 0);
    return *p ? 0 : OUT_OF_MEMORY;
}

int cuMemFree_v2(unsigned long long p) { give((char *)(size_t)p, 0); return lost; }
int cuMemHostAlloc(void **p, size_t bytes, unsigned flags) { (void)flags; CALL("cuMemHostAlloc"); return (*p = take(bytes, 1)) ? 0 : OUT_OF_MEMORY; }
int cuMemFreeHost(void *p) { give(p, 1); return lost; }
int cuMemHostGetDevicePointer_v2(unsigned long long *d, void *p, unsigned flags) { (void)flags; CALL("cuMemHostGetDevicePointer_v2"); *d = (size_t)p; return 0; }

int cuMemcpyHtoDAsync_v2(unsigned long long to, const void *from, size_t bytes, void *s)
{
    CALL("cuMemcpyHtoDAsync_v2");
    return enqueue(s, &(operation){.kind = TO_DEVICE, .to = (char *)(size_t)to, .from = from, .bytes = bytes});
}

int cuMemcpyDtoHAsync_v2(void *to, unsigned long long from, size_t bytes, void *s)
{
    CALL("cuMemcpyDtoHAsync_v2");
    return enqueue(s, &(operation){.kind = TO_HOST, .to = to, .from = (const char *)(size_t)from, .bytes = bytes});
}

int cuStreamCreate(void **s, unsigned flags)
{
    CALL("cuStreamCreate");
    if (flags != 1) die("a stream that waits for the default stream");
    for (int i = 0; i < STREAMS; i++)
        if (!streams[i].live) {
            streams[i] = (stream){.live = 1, .operations = malloc(OPERATIONS * sizeof(operation))};
            *s = (void *)(size_t)(i + 1);
            return 0;
        }
    return OUT_OF_MEMORY;
}

int cuStreamDestroy_v2(void *s)
{
    stream *at = &streams[(size_t)s - 1];
    free(at->operations);
    at->live = 0;
    return lost;
}

int cuStreamSynchronize(void *s) { CALL("cuStreamSynchronize"); waits++; run_until((int)((size_t)s - 1), streams[(size_t)s - 1].queued); return lost; }

int cuStreamWaitEvent(void *s, void *e, unsigned flags)
{
    (void)flags;
    CALL("cuStreamWaitEvent");
    const event *found = event_of(e);
    return enqueue(s, &(operation){.kind = WAIT, .stream = found->stream, .at = found->at});
}

int cuEventCreate(void **e, unsigned flags)
{
    CALL("cuEventCreate");
    if (flags != 2) die("an event with times");
    for (int i = 0; i < EVENTS; i++)
        if (!events[i].live) {
            events[i] = (event){.live = 1};
            *e = (void *)(size_t)(i + 1);
            return 0;
        }
    return OUT_OF_MEMORY;
}

int cuEventDestroy_v2(void *e) { event_of(e)->live = 0; return lost; }

int cuEventRecord(void *e, void *s)
{
    CALL("cuEventRecord");
    event *found = event_of(e);
    found->stream = (int)((size_t)s - 1);
    found->at = streams[found->stream].queued;
    return 0;
}

int cuEventSynchronize(void *e) { CALL("cuEventSynchronize"); waits++; const event *found = event_of(e); run_until(found->stream, found->at); return lost; }

int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *s, void **arguments,
                   void **extra)
{
    CALL("cuLaunchKernel");
    const size_t k = (size_t)f - 1;
    if (k >= sizeof sizes / sizeof *sizes - 1 || shared || extra || (int)bx != sizes[k] || by != 1 || bz != 1) die("a launch of another kind");
    if (!gx || !gy || !gz || gx > 2147483647u || gy > 65535 || gz > 65535) return INVALID;
    operation o = {.kind = LAUNCH, .kernel = (int)k, .grid = {(int)gx, (int)gy, (int)gz}};
    for (int i = 0; i < 8; i++) memcpy(&o.buffers[i], arguments[i], 8);
    memcpy(&o.params, arguments[8], sizeof o.params);
    return enqueue(s, &o);
}

#ifndef WITHOUT_ERROR_NAMES     /* a driver that is older than what is needed */
int cuGetErrorName(int code, const char **name)
{
    *name = code == LAUNCH_FAILED ? "CUDA_ERROR_LAUNCH_FAILED" : code == 999 ? "CUDA_ERROR_UNKNOWN" : "CUDA_ERROR";
    return 0;
}
#endif
