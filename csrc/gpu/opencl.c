/* opencl.c - the OpenCL 1.2 driver. The library is opened at run time, so its declarations are here: what is used, no more. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../engine.h"
#include "device.h"

typedef int32_t cl_int;
typedef uint32_t cl_uint;
typedef uint64_t cl_ulong;
typedef struct object *cl_object;    /* platforms, devices, contexts, queues, programs, kernels, buffers, events */
#ifdef _WIN32
#define CL_CALL __stdcall
#else
#define CL_CALL
#endif

enum {
    CL_DEVICE_TYPE_CPU = 2, CL_DEVICE_TYPE_GPU = 4, CL_DEVICE_TYPE_ALL = -1, CL_DEVICE_NAME = 0x102B, CL_DRIVER_VERSION = 0x102D, CL_DEVICE_VERSION = 0x102F,
    CL_DEVICE_TYPE_INFO = 0x1000, CL_DEVICE_GLOBAL_MEM_SIZE = 0x101F, CL_DEVICE_HOST_UNIFIED_MEMORY = 0x1035, CL_DEVICE_SINGLE_FP_CONFIG = 0x101B,
    CL_DEVICE_MAX_WORK_GROUP_SIZE = 0x1004, CL_DEVICE_LOCAL_MEM_SIZE = 0x1023, CL_DEVICE_ENDIAN_LITTLE = 0x1026,
    CL_FP_INF_NAN = 2, CL_FP_ROUND_TO_NEAREST = 4, CL_FP_FMA = 32, CL_FP_CORRECTLY_ROUNDED_DIVIDE_SQRT = 128,
    CL_MEM_READ_WRITE = 1, CL_MEM_ALLOC_HOST_PTR = 16, CL_MAP_READ = 1, CL_MAP_WRITE = 2,
    CL_PROGRAM_BUILD_LOG = 0x1183, CL_PROGRAM_BINARY_SIZES = 0x1165, CL_PROGRAM_BINARIES = 0x1166
};

#define CL_FUNCTIONS(X) \
    X(cl_int, GetPlatformIDs, (cl_uint, cl_object *, cl_uint *)) \
    X(cl_int, GetDeviceIDs, (cl_object, cl_ulong, cl_uint, cl_object *, cl_uint *)) \
    X(cl_int, GetDeviceInfo, (cl_object, cl_uint, size_t, void *, size_t *)) \
    X(cl_object, CreateContext, (const void *, cl_uint, const cl_object *, void *, void *, cl_int *)) \
    X(cl_int, ReleaseContext, (cl_object)) \
    X(cl_object, CreateCommandQueue, (cl_object, cl_object, cl_ulong, cl_int *)) \
    X(cl_int, ReleaseCommandQueue, (cl_object)) \
    X(cl_object, CreateProgramWithSource, (cl_object, cl_uint, const char **, const size_t *, cl_int *)) \
    X(cl_object, CreateProgramWithBinary, (cl_object, cl_uint, const cl_object *, const size_t *, const unsigned char **, cl_int *, cl_int *)) \
    X(cl_int, BuildProgram, (cl_object, cl_uint, const cl_object *, const char *, void *, void *)) \
    X(cl_int, GetProgramBuildInfo, (cl_object, cl_object, cl_uint, size_t, void *, size_t *)) \
    X(cl_int, GetProgramInfo, (cl_object, cl_uint, size_t, void *, size_t *)) \
    X(cl_int, ReleaseProgram, (cl_object)) \
    X(cl_object, CreateKernel, (cl_object, const char *, cl_int *)) \
    X(cl_int, ReleaseKernel, (cl_object)) \
    X(cl_int, SetKernelArg, (cl_object, cl_uint, size_t, const void *)) \
    X(cl_object, CreateBuffer, (cl_object, cl_ulong, size_t, void *, cl_int *)) \
    X(cl_int, ReleaseMemObject, (cl_object)) \
    X(void *, EnqueueMapBuffer, (cl_object, cl_object, cl_uint, cl_ulong, size_t, size_t, cl_uint, const cl_object *, cl_object *, cl_int *)) \
    X(cl_int, EnqueueUnmapMemObject, (cl_object, cl_object, void *, cl_uint, const cl_object *, cl_object *)) \
    X(cl_int, EnqueueWriteBuffer, (cl_object, cl_object, cl_uint, size_t, size_t, const void *, cl_uint, const cl_object *, cl_object *)) \
    X(cl_int, EnqueueReadBuffer, (cl_object, cl_object, cl_uint, size_t, size_t, void *, cl_uint, const cl_object *, cl_object *)) \
    X(cl_int, EnqueueNDRangeKernel, (cl_object, cl_object, cl_uint, const size_t *, const size_t *, const size_t *, cl_uint, const cl_object *, \
                                     cl_object *)) \
    X(cl_int, EnqueueMarkerWithWaitList, (cl_object, cl_uint, const cl_object *, cl_object *)) \
    X(cl_int, EnqueueBarrierWithWaitList, (cl_object, cl_uint, const cl_object *, cl_object *)) \
    X(cl_int, WaitForEvents, (cl_uint, const cl_object *)) \
    X(cl_int, ReleaseEvent, (cl_object)) \
    X(cl_int, Flush, (cl_object)) \
    X(cl_int, Finish, (cl_object))

#define CL_POINTER(type, name, parameters) type(CL_CALL *name) parameters;
typedef struct cl_api { CL_FUNCTIONS(CL_POINTER) } cl_api;

typedef struct opencl {
    cl_api cl;
    cl_object device, context, program, queues[TBG_QUEUES], kernels[TBG_N_KERNELS], events[TBG_EVENTS];
} opencl;

/* What a code says about the device: out of memory, or lost for us. */
static int failed(tb_gpu *g, const char *what, cl_int code)
{
    if (code == -4 || code == -6)       /* MEM_OBJECT_ALLOCATION_FAILURE, OUT_OF_HOST_MEMORY */
        return tbg_fail(g, TB_ENOMEM, "out of memory (%s, OpenCL error %d)", what, (int)code);
    return tbg_fail(g, TB_EDEVICE, "the device failed (%s, OpenCL error %d); start again, or use --device cpu", what, (int)code);
}

static void opencl_close(tb_gpu *g)
{
    opencl *o = g->state;
    for (int i = 0; i < TBG_EVENTS; i++)
        if (o->events[i]) o->cl.ReleaseEvent(o->events[i]);
    for (int i = 0; i < TBG_N_KERNELS; i++)
        if (o->kernels[i]) o->cl.ReleaseKernel(o->kernels[i]);
    if (o->program) o->cl.ReleaseProgram(o->program);
    for (int i = 0; i < TBG_QUEUES; i++)
        if (o->queues[i]) o->cl.ReleaseCommandQueue(o->queues[i]);
    if (o->context) o->cl.ReleaseContext(o->context);
    free(o);
}

static int opencl_allocate(tb_gpu *g, tbg_buffer *b)
{
    opencl *o = g->state;
    cl_int code;
    if (g->lost) return TB_EDEVICE;
    b->object = o->cl.CreateBuffer(o->context, b->place == TBG_DEVICE ? CL_MEM_READ_WRITE : CL_MEM_READ_WRITE | CL_MEM_ALLOC_HOST_PTR, b->bytes, NULL,
                                   &code);
    if (code) return TB_ENOMEM;
    if (b->place != TBG_STAGING) return TB_OK;
    b->host = o->cl.EnqueueMapBuffer(o->queues[0], b->object, 1, CL_MAP_READ | CL_MAP_WRITE, 0, b->bytes, 0, NULL, NULL, &code);
    if (!code) return TB_OK;
    o->cl.ReleaseMemObject(b->object);
    return TB_ENOMEM;
}

static void opencl_release(tb_gpu *g, tbg_buffer *b)
{
    opencl *o = g->state;
    if (b->place == TBG_STAGING && !o->cl.EnqueueUnmapMemObject(o->queues[0], b->object, b->host, 0, NULL, NULL)) o->cl.Finish(o->queues[0]);
    o->cl.ReleaseMemObject(b->object);
}

static int opencl_write(tb_gpu *g, int queue, tbg_buffer *b, size_t at, const void *from, size_t bytes)
{
    opencl *o = g->state;
    const cl_int code = g->lost ? -1 : o->cl.EnqueueWriteBuffer(o->queues[queue], b->object, 0, at, bytes, from, 0, NULL, NULL);
    return code ? failed(g, "write", code) : TB_OK;
}

static int opencl_read(tb_gpu *g, int queue, tbg_buffer *b, size_t at, void *to, size_t bytes)
{
    opencl *o = g->state;
    const cl_int code = g->lost ? -1 : o->cl.EnqueueReadBuffer(o->queues[queue], b->object, 0, at, bytes, to, 0, NULL, NULL);
    return code ? failed(g, "read", code) : TB_OK;
}

static int opencl_launch(tb_gpu *g, int queue, int kernel, const int groups[3], tbg_buffer *const *buffers, const tbg_params *p)
{
    opencl *o = g->state;
    cl_int code = 0;
    if (g->lost) return TB_EDEVICE;
    if (!o->kernels[kernel]) {
        o->kernels[kernel] = o->cl.CreateKernel(o->program, tbg_kernel_names[kernel], &code);
        if (code) return failed(g, tbg_kernel_names[kernel], code);
    }
    for (cl_uint i = 0; i < TBG_BUFFERS && !code; i++) {
        cl_object object = buffers[i] ? buffers[i]->object : NULL;
        code = o->cl.SetKernelArg(o->kernels[kernel], i, sizeof object, &object);
    }
    if (!code) code = o->cl.SetKernelArg(o->kernels[kernel], TBG_BUFFERS, sizeof *p, p);
    const size_t local[3] = {(size_t)tbg_kernel_sizes[kernel], 1, 1};
    const size_t global[3] = {(size_t)groups[0] * local[0], (size_t)groups[1], (size_t)groups[2]};
    if (!code) code = o->cl.EnqueueNDRangeKernel(o->queues[queue], o->kernels[kernel], 3, NULL, global, local, 0, NULL, NULL);
    return code ? failed(g, tbg_kernel_names[kernel], code) : TB_OK;
}

static int opencl_mark(tb_gpu *g, int queue, int event)
{
    opencl *o = g->state;
    if (g->lost) return TB_EDEVICE;
    if (o->events[event]) o->cl.ReleaseEvent(o->events[event]);
    o->events[event] = NULL;
    cl_int code = o->cl.EnqueueMarkerWithWaitList(o->queues[queue], 0, NULL, &o->events[event]);
    if (!code) code = o->cl.Flush(o->queues[queue]);
    return code ? failed(g, "event", code) : TB_OK;
}

static int opencl_wait(tb_gpu *g, int event)
{
    opencl *o = g->state;
    if (g->lost) return TB_EDEVICE;
    const cl_int code = o->events[event] ? o->cl.WaitForEvents(1, &o->events[event]) : 0;
    return code ? failed(g, "wait", code) : TB_OK;
}

static int opencl_after(tb_gpu *g, int queue, int event)
{
    opencl *o = g->state;
    if (g->lost) return TB_EDEVICE;
    const cl_int code = o->events[event] ? o->cl.EnqueueBarrierWithWaitList(o->queues[queue], 1, &o->events[event], NULL) : 0;
    return code ? failed(g, "barrier", code) : TB_OK;
}

static int opencl_finish(tb_gpu *g, int queue)
{
    opencl *o = g->state;
    if (g->lost) return TB_EDEVICE;
    const cl_int code = o->cl.Finish(o->queues[queue]);
    return code ? failed(g, "finish", code) : TB_OK;
}

static const tbg_driver opencl_driver = {
    "opencl", opencl_close, opencl_allocate, opencl_release, opencl_write, opencl_read, opencl_launch, opencl_mark, opencl_wait, opencl_after,
    opencl_finish,
};

/* --- opening --- */

static bool load(cl_api *cl, char *err, size_t n)
{
    static const char *const names[] = {"libOpenCL.so.1", "OpenCL.dll", "/System/Library/Frameworks/OpenCL.framework/OpenCL"};
    void *library = NULL;
    for (size_t i = 0; i < sizeof names / sizeof *names && !library; i++)
        library = tb_library_open(names[i]);
    if (!library) {
        tb_fail(err, n, TB_EUNSUPPORTED, "OpenCL is not installed (no libOpenCL.so.1)");
        return false;
    }
    bool whole = true;
    void *symbol;
#define CL_LOAD(type, name, parameters) \
    symbol = tb_library_symbol(library, "cl" #name); \
    memcpy(&cl->name, &symbol, sizeof symbol); \
    whole = whole && symbol;
    CL_FUNCTIONS(CL_LOAD)
    if (!whole) tb_fail(err, n, TB_EUNSUPPORTED, "the OpenCL library is older than version 1.2");
    return whole;
}

static cl_ulong number(const opencl *o, cl_object device, cl_uint what, size_t size)
{
    cl_ulong value = 0;
    cl_uint small = 0;
    if (o->cl.GetDeviceInfo(device, what, size, size == 4 ? (void *)&small : (void *)&value, NULL)) return 0;
    return size == 4 ? small : value;
}

/* The first GPU; else, if any will do, the first device. */
static bool choose(opencl *o, bool only_real)
{
    cl_object platforms[16], devices[16];
    cl_uint n = 0;
    if (o->cl.GetPlatformIDs(16, platforms, &n)) return false;
    n = n > 16 ? 16 : n;
    for (int any = 0; any < (only_real ? 1 : 2); any++)
        for (cl_uint i = 0; i < n; i++) {
            cl_uint found = 0;
            const cl_ulong type = any ? 0xFFFFFFFFu : CL_DEVICE_TYPE_GPU;
            if (o->cl.GetDeviceIDs(platforms[i], type, 16, devices, &found)) continue;
            for (cl_uint k = 0; k < found && k < 16; k++)
                if (!only_real || !number(o, devices[k], CL_DEVICE_HOST_UNIFIED_MEMORY, 4)) {
                    o->device = devices[k];
                    return true;
                }
        }
    return false;
}

static int usable(tb_gpu *g)
{
    opencl *o = g->state;
    const cl_ulong need = CL_FP_INF_NAN | CL_FP_ROUND_TO_NEAREST | CL_FP_FMA | CL_FP_CORRECTLY_ROUNDED_DIVIDE_SQRT;
    char version[128] = "";
    if ((number(o, o->device, CL_DEVICE_SINGLE_FP_CONFIG, 8) & need) != need)
        return tbg_fail(g, TB_EUNSUPPORTED, "its single precision lacks what the results rely on (fused multiply-add, rounded division)");
    if (!number(o, o->device, CL_DEVICE_ENDIAN_LITTLE, 4) || number(o, o->device, CL_DEVICE_MAX_WORK_GROUP_SIZE, sizeof(size_t)) < 256 ||
        number(o, o->device, CL_DEVICE_LOCAL_MEM_SIZE, 8) < 16384)
        return tbg_fail(g, TB_EUNSUPPORTED, "it needs work groups of 256 and 16 KB of local memory, little-endian");
    (void)o->cl.GetDeviceInfo(o->device, CL_DEVICE_VERSION, sizeof version - 1, version, NULL);
    if (!strncmp(version, "OpenCL 1.0", 10) || !strncmp(version, "OpenCL 1.1", 10))
        return tbg_fail(g, TB_EUNSUPPORTED, "it speaks %.40s, and 1.2 is needed", version);
    return TB_OK;
}

static int build(tb_gpu *g, const char *cache_dir)
{
    opencl *o = g->state;
    char options[96] = "-cl-std=CL1.2 -cl-fp32-correctly-rounded-divide-sqrt";
    if (number(o, o->device, CL_DEVICE_TYPE_INFO, 8) & CL_DEVICE_TYPE_CPU) strcat(options, " -DTBG_CPU");
    char driver[256] = "", version[256] = "", name[64];
    cl_int code, loaded;
    (void)o->cl.GetDeviceInfo(o->device, CL_DRIVER_VERSION, sizeof driver - 1, driver, NULL);
    (void)o->cl.GetDeviceInfo(o->device, CL_DEVICE_VERSION, sizeof version - 1, version, NULL);
    uint64_t h = tbg_hash(0, tbg_source, tbg_source_bytes);
    h = tbg_hash(h, options, sizeof options);
    h = tbg_hash(h, g->name, sizeof g->name);
    h = tbg_hash(h, driver, sizeof driver);
    h = tbg_hash(h, version, sizeof version);
    (void)snprintf(name, sizeof name, "opencl-%016llx.bin", (unsigned long long)h);
    size_t bytes = 0;
    char *binary = tbg_cache_read(cache_dir, name, &bytes);
    if (binary) {
        const unsigned char *data = (const unsigned char *)binary;
        o->program = o->cl.CreateProgramWithBinary(o->context, 1, &o->device, &bytes, &data, &loaded, &code);
        free(binary);
        if (!code && !loaded && !o->cl.BuildProgram(o->program, 1, &o->device, options, NULL, NULL)) return TB_OK;
        if (!code && o->program) o->cl.ReleaseProgram(o->program);
        o->program = NULL;
    }
    const char *source = tbg_source;
    bytes = tbg_source_bytes;
    o->program = o->cl.CreateProgramWithSource(o->context, 1, &source, &bytes, &code);
    if (!code) code = o->cl.BuildProgram(o->program, 1, &o->device, options, NULL, NULL);
    if (code) {
        char log[160] = "";
        if (o->program) (void)o->cl.GetProgramBuildInfo(o->program, o->device, CL_PROGRAM_BUILD_LOG, sizeof log - 1, log, NULL);
        return tbg_fail(g, TB_EUNSUPPORTED, "its compiler refuses the kernels (OpenCL error %d): %.120s", (int)code, log);
    }
    if (cache_dir && !o->cl.GetProgramInfo(o->program, CL_PROGRAM_BINARY_SIZES, sizeof bytes, &bytes, NULL) && bytes && (binary = malloc(bytes))) {
        unsigned char *data = (unsigned char *)binary;
        if (!o->cl.GetProgramInfo(o->program, CL_PROGRAM_BINARIES, sizeof data, &data, NULL)) tbg_cache_write(cache_dir, name, binary, bytes);
        free(binary);
    }
    return TB_OK;
}

tb_gpu *tbg_open_opencl(bool only_real, const char *cache_dir, int32_t *absent, char *err, size_t n)
{
    opencl *o = calloc(1, sizeof *o);
    tb_gpu *g = o ? tbg_new(&opencl_driver, o) : NULL;
    if (!g) {
        free(o);
        tb_fail(err, n, TB_ENOMEM, "out of memory");
        return NULL;
    }
    if (!load(&o->cl, err, n)) {
        *absent = 1;
        tb_gpu_free(g);
        return NULL;
    }
    if (!choose(o, only_real)) {
        *absent = 1;
        tb_fail(err, n, TB_EUNSUPPORTED, "OpenCL finds no %s", only_real ? "GPU with memory of its own" : "device");
        tb_gpu_free(g);
        return NULL;
    }
    cl_int code = o->cl.GetDeviceInfo(o->device, CL_DEVICE_NAME, sizeof g->name - 1, g->name, NULL);
    g->memory = (size_t)number(o, o->device, CL_DEVICE_GLOBAL_MEM_SIZE, 8);
    g->real = (number(o, o->device, CL_DEVICE_TYPE_INFO, 8) & CL_DEVICE_TYPE_GPU) && !number(o, o->device, CL_DEVICE_HOST_UNIFIED_MEMORY, 4);
    int failure = code ? failed(g, "device", code) : usable(g);
    if (!failure) {
        o->context = o->cl.CreateContext(NULL, 1, &o->device, NULL, NULL, &code);
        for (int i = 0; i < TBG_QUEUES && !code; i++)
            o->queues[i] = o->cl.CreateCommandQueue(o->context, o->device, 0, &code);
        failure = code ? failed(g, "context", code) : build(g, cache_dir);
    }
    if (failure) {
        tbg_report(g, failure, err, n);
        tb_gpu_free(g);
        return NULL;
    }
    return g;
}
