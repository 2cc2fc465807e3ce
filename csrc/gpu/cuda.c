/* cuda.c - the CUDA driver. libcuda and NVRTC are opened at run time, so their declarations are here: what is used, no more.
 *
 * The kernels come as machine code from NVRTC (kept in the cache), or where that is missing from the PTX of the package, which the
 * driver compiles for the device. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../engine.h"
#include "device.h"

typedef int cu_result;
typedef struct cu_object *cu_object;    /* contexts, modules, functions, streams, events, NVRTC programs */
typedef uint64_t cu_pointer;
#ifdef _WIN32
#define CU_CALL __stdcall
#else
#define CU_CALL
#endif

enum { CU_CC_MAJOR = 75, CU_CC_MINOR = 76, CU_INTEGRATED = 18, CU_OUT_OF_MEMORY = 2, CU_NON_BLOCKING = 1, CU_NO_TIMING = 2,
       CU_HOST_PORTABLE = 1, CU_HOST_MAPPED = 2 };

#define CU_FUNCTIONS(X) \
    X(cu_result, Init, "cuInit", (unsigned)) \
    X(cu_result, DriverGetVersion, "cuDriverGetVersion", (int *)) \
    X(cu_result, DeviceGetCount, "cuDeviceGetCount", (int *)) \
    X(cu_result, DeviceGet, "cuDeviceGet", (int *, int)) \
    X(cu_result, DeviceGetName, "cuDeviceGetName", (char *, int, int)) \
    X(cu_result, DeviceTotalMem, "cuDeviceTotalMem_v2", (size_t *, int)) \
    X(cu_result, DeviceGetAttribute, "cuDeviceGetAttribute", (int *, int, int)) \
    X(cu_result, CtxRetain, "cuDevicePrimaryCtxRetain", (cu_object *, int)) \
    X(cu_result, CtxRelease, "cuDevicePrimaryCtxRelease_v2", (int)) \
    X(cu_result, CtxSetCurrent, "cuCtxSetCurrent", (cu_object)) \
    X(cu_result, ModuleLoadData, "cuModuleLoadData", (cu_object *, const void *)) \
    X(cu_result, ModuleUnload, "cuModuleUnload", (cu_object)) \
    X(cu_result, ModuleGetFunction, "cuModuleGetFunction", (cu_object *, cu_object, const char *)) \
    X(cu_result, MemAlloc, "cuMemAlloc_v2", (cu_pointer *, size_t)) \
    X(cu_result, MemFree, "cuMemFree_v2", (cu_pointer)) \
    X(cu_result, MemHostAlloc, "cuMemHostAlloc", (void **, size_t, unsigned)) \
    X(cu_result, MemFreeHost, "cuMemFreeHost", (void *)) \
    X(cu_result, MemHostGetDevicePointer, "cuMemHostGetDevicePointer_v2", (cu_pointer *, void *, unsigned)) \
    X(cu_result, MemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2", (cu_pointer, const void *, size_t, cu_object)) \
    X(cu_result, MemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2", (void *, cu_pointer, size_t, cu_object)) \
    X(cu_result, StreamCreate, "cuStreamCreate", (cu_object *, unsigned)) \
    X(cu_result, StreamDestroy, "cuStreamDestroy_v2", (cu_object)) \
    X(cu_result, StreamSynchronize, "cuStreamSynchronize", (cu_object)) \
    X(cu_result, StreamWaitEvent, "cuStreamWaitEvent", (cu_object, cu_object, unsigned)) \
    X(cu_result, EventCreate, "cuEventCreate", (cu_object *, unsigned)) \
    X(cu_result, EventDestroy, "cuEventDestroy_v2", (cu_object)) \
    X(cu_result, EventRecord, "cuEventRecord", (cu_object, cu_object)) \
    X(cu_result, EventSynchronize, "cuEventSynchronize", (cu_object)) \
    X(cu_result, LaunchKernel, "cuLaunchKernel", (cu_object, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, cu_object, void **, \
                                                  void **)) \
    X(cu_result, GetErrorName, "cuGetErrorName", (cu_result, const char **))

#define RTC_FUNCTIONS(X) \
    X(cu_result, Version, "nvrtcVersion", (int *, int *)) \
    X(cu_result, CreateProgram, "nvrtcCreateProgram", (cu_object *, const char *, const char *, int, const char *const *, const char *const *)) \
    X(cu_result, CompileProgram, "nvrtcCompileProgram", (cu_object, int, const char *const *)) \
    X(cu_result, GetCUBINSize, "nvrtcGetCUBINSize", (cu_object, size_t *)) \
    X(cu_result, GetCUBIN, "nvrtcGetCUBIN", (cu_object, char *)) \
    X(cu_result, DestroyProgram, "nvrtcDestroyProgram", (cu_object *))

#define CU_POINTER(type, name, symbol, parameters) type(CU_CALL *name) parameters;
typedef struct cu_api { CU_FUNCTIONS(CU_POINTER) } cu_api;
typedef struct rtc_api { RTC_FUNCTIONS(CU_POINTER) } rtc_api;

typedef struct cuda {
    cu_api cu;
    int device, cc;
    cu_object context, module, streams[TBG_QUEUES], events[TBG_EVENTS], functions[TBG_N_KERNELS];
} cuda;

static int failed(tb_gpu *g, const char *what, cu_result code)
{
    cuda *c = g->state;
    const char *name = NULL;
    if (code == CU_OUT_OF_MEMORY) return tbg_fail(g, TB_ENOMEM, "out of memory (%s)", what);
    if (c->cu.GetErrorName) (void)c->cu.GetErrorName(code, &name);
    return tbg_fail(g, TB_EDEVICE, "the device failed (%s, %s, CUDA error %d); start again, or use --device cpu", what, name ? name : "unknown", code);
}

static int enter(tb_gpu *g)
{
    cuda *c = g->state;
    if (g->lost) return TB_EDEVICE;
    const cu_result code = c->cu.CtxSetCurrent(c->context);
    return code ? failed(g, "context", code) : TB_OK;
}

static void cuda_close(tb_gpu *g)
{
    cuda *c = g->state;
    if (c->context) {
        (void)c->cu.CtxSetCurrent(c->context);
        for (int i = 0; i < TBG_EVENTS; i++)
            if (c->events[i]) (void)c->cu.EventDestroy(c->events[i]);
        for (int i = 0; i < TBG_QUEUES; i++)
            if (c->streams[i]) (void)c->cu.StreamDestroy(c->streams[i]);
        if (c->module) (void)c->cu.ModuleUnload(c->module);
        (void)c->cu.CtxRelease(c->device);
    }
    free(c);
}

static int cuda_allocate(tb_gpu *g, tbg_buffer *b)
{
    cuda *c = g->state;
    const int code = enter(g);
    if (code) return code;
    if (b->place == TBG_DEVICE) return c->cu.MemAlloc(&b->address, b->bytes) ? TB_ENOMEM : TB_OK;
    if (c->cu.MemHostAlloc(&b->object, b->bytes, CU_HOST_PORTABLE | CU_HOST_MAPPED)) return TB_ENOMEM;
    b->host = b->object;
    if (!c->cu.MemHostGetDevicePointer(&b->address, b->object, 0)) return TB_OK;
    (void)c->cu.MemFreeHost(b->object);
    return TB_ENOMEM;
}

static void cuda_release(tb_gpu *g, tbg_buffer *b)
{
    cuda *c = g->state;
    (void)c->cu.CtxSetCurrent(c->context);
    if (b->place == TBG_DEVICE) (void)c->cu.MemFree(b->address);
    else (void)c->cu.MemFreeHost(b->object);
}

static int cuda_write(tb_gpu *g, int queue, tbg_buffer *b, size_t at, const void *from, size_t bytes)
{
    cuda *c = g->state;
    const int error = enter(g);
    if (error) return error;
    const cu_result code = c->cu.MemcpyHtoDAsync(b->address + at, from, bytes, c->streams[queue]);
    return code ? failed(g, "write", code) : TB_OK;
}

static int cuda_read(tb_gpu *g, int queue, tbg_buffer *b, size_t at, void *to, size_t bytes)
{
    cuda *c = g->state;
    const int error = enter(g);
    if (error) return error;
    const cu_result code = c->cu.MemcpyDtoHAsync(to, b->address + at, bytes, c->streams[queue]);
    return code ? failed(g, "read", code) : TB_OK;
}

static int cuda_launch(tb_gpu *g, int queue, int kernel, const int groups[3], tbg_buffer *const *buffers, const tbg_params *p)
{
    cuda *c = g->state;
    const int error = enter(g);
    if (error) return error;
    cu_result code = 0;
    if (!c->functions[kernel]) code = c->cu.ModuleGetFunction(&c->functions[kernel], c->module, tbg_kernel_names[kernel]);
    if (code) return failed(g, tbg_kernel_names[kernel], code);
    cu_pointer pointers[TBG_BUFFERS];
    tbg_params params = *p;
    void *arguments[TBG_BUFFERS + 1];
    for (int i = 0; i < TBG_BUFFERS; i++) {
        pointers[i] = buffers[i] ? buffers[i]->address : 0;
        arguments[i] = &pointers[i];
    }
    arguments[TBG_BUFFERS] = &params;
    code = c->cu.LaunchKernel(c->functions[kernel], (unsigned)groups[0], (unsigned)groups[1], (unsigned)groups[2],
                              (unsigned)tbg_kernel_sizes[kernel], 1, 1, 0, c->streams[queue], arguments, NULL);
    return code ? failed(g, tbg_kernel_names[kernel], code) : TB_OK;
}

static int cuda_mark(tb_gpu *g, int queue, int event)
{
    cuda *c = g->state;
    const int error = enter(g);
    if (error) return error;
    cu_result code = 0;
    if (!c->events[event]) code = c->cu.EventCreate(&c->events[event], CU_NO_TIMING);
    if (!code) code = c->cu.EventRecord(c->events[event], c->streams[queue]);
    return code ? failed(g, "event", code) : TB_OK;
}

static int cuda_wait(tb_gpu *g, int event)
{
    cuda *c = g->state;
    const int error = enter(g);
    if (error) return error;
    const cu_result code = c->events[event] ? c->cu.EventSynchronize(c->events[event]) : 0;
    return code ? failed(g, "wait", code) : TB_OK;
}

static int cuda_after(tb_gpu *g, int queue, int event)
{
    cuda *c = g->state;
    const int error = enter(g);
    if (error) return error;
    const cu_result code = c->events[event] ? c->cu.StreamWaitEvent(c->streams[queue], c->events[event], 0) : 0;
    return code ? failed(g, "wait", code) : TB_OK;
}

static int cuda_finish(tb_gpu *g, int queue)
{
    cuda *c = g->state;
    const int error = enter(g);
    if (error) return error;
    const cu_result code = c->cu.StreamSynchronize(c->streams[queue]);
    return code ? failed(g, "finish", code) : TB_OK;
}

static const tbg_driver cuda_driver = {
    "cuda", cuda_close, cuda_allocate, cuda_release, cuda_write, cuda_read, cuda_launch, cuda_mark, cuda_wait, cuda_after, cuda_finish,
};

/* --- opening --- */

#define CU_LOAD(type, name, symbol_name, parameters) \
    symbol = tb_library_symbol(library, symbol_name); \
    memcpy(&api->name, &symbol, sizeof symbol); \
    whole = whole && symbol;

static bool load_driver(cu_api *api)
{
    void *library = tb_library_open("libcuda.so.1"), *symbol;
    bool whole = true;
    if (!library) library = tb_library_open("nvcuda.dll");
    if (!library) return false;
    CU_FUNCTIONS(CU_LOAD)
    return whole;
}

static bool load_compiler(rtc_api *api)
{
    static const char *const names[] = {"libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2", "nvrtc64_130_0.dll", "nvrtc64_120_0.dll"};
    void *library = NULL, *symbol;
    bool whole = true;
    for (size_t i = 0; i < sizeof names / sizeof *names && !library; i++)
        library = tb_library_open(names[i]);
    if (!library) return false;
    RTC_FUNCTIONS(CU_LOAD)
    return whole;
}

/* Machine code by NVRTC, from the cache where it is there; NULL: no compiler, or it refuses. malloc'd. */
static char *compile(const tb_gpu *g, const char *cache_dir, int driver)
{
    const cuda *c = g->state;
    rtc_api rtc;
    int major = 0, minor = 0;
    if (!load_compiler(&rtc) || rtc.Version(&major, &minor)) return NULL;
    char arch[48], name[64], *binary = NULL;
    (void)snprintf(arch, sizeof arch, "--gpu-architecture=sm_%d", c->cc);
    const int version[3] = {driver, major, minor};
    uint64_t h = tbg_hash(0, tbg_source, tbg_source_bytes);
    h = tbg_hash(h, g->name, sizeof g->name);
    h = tbg_hash(h, arch, strlen(arch));
    h = tbg_hash(h, version, sizeof version);
    (void)snprintf(name, sizeof name, "cuda-%016llx.cubin", (unsigned long long)h);
    size_t bytes = 0;
    if ((binary = tbg_cache_read(cache_dir, name, &bytes))) return binary;
    const char *const options[] = {arch, "--fmad=false"};
    cu_object program = NULL;
    if (!rtc.CreateProgram(&program, tbg_source, "twobit.cu", 0, NULL, NULL)) {
        if (!rtc.CompileProgram(program, 2, options) && !rtc.GetCUBINSize(program, &bytes) && bytes && (binary = malloc(bytes))) {
            if (rtc.GetCUBIN(program, binary)) {
                free(binary);
                binary = NULL;
            } else {
                tbg_cache_write(cache_dir, name, binary, bytes);
            }
        }
        (void)rtc.DestroyProgram(&program);
    }
    return binary;
}

static int prepare(tb_gpu *g, const char *cache_dir, const char *ptx)
{
    cuda *c = g->state;
    int major = 0, minor = 0, integrated = 0, driver = 0;
    (void)c->cu.DriverGetVersion(&driver);
    (void)c->cu.DeviceGetName(g->name, sizeof g->name - 1, c->device);
    (void)c->cu.DeviceTotalMem(&g->memory, c->device);
    (void)c->cu.DeviceGetAttribute(&major, CU_CC_MAJOR, c->device);
    (void)c->cu.DeviceGetAttribute(&minor, CU_CC_MINOR, c->device);
    (void)c->cu.DeviceGetAttribute(&integrated, CU_INTEGRATED, c->device);
    c->cc = 10 * major + minor;
    g->real = !integrated;
    if (c->cc < 75) return tbg_fail(g, TB_EUNSUPPORTED, "its compute capability is %d.%d, and 7.5 is the least", major, minor);
    cu_result code = c->cu.CtxRetain(&c->context, c->device);
    if (!code) code = c->cu.CtxSetCurrent(c->context);
    for (int i = 0; i < TBG_QUEUES && !code; i++)
        code = c->cu.StreamCreate(&c->streams[i], CU_NON_BLOCKING);
    if (code) return failed(g, "context", code);
    char *binary = compile(g, cache_dir, driver);
    code = binary ? c->cu.ModuleLoadData(&c->module, binary) : -1;
    free(binary);
    if (code && ptx) code = c->cu.ModuleLoadData(&c->module, ptx);
    return code ? tbg_fail(g, TB_EUNSUPPORTED, "its driver takes neither compiled kernels nor the PTX of the package (CUDA error %d)", code) : TB_OK;
}

tb_gpu *tbg_open_cuda(const char *cache_dir, const char *ptx, int32_t *absent, char *err, size_t n)
{
    cuda *c = calloc(1, sizeof *c);
    tb_gpu *g = c ? tbg_new(&cuda_driver, c) : NULL;
    int count = 0;
    if (!g) {
        free(c);
        tb_fail(err, n, TB_ENOMEM, "out of memory");
        return NULL;
    }
    cu_result code = 0;
    int failure = TB_OK;
    *absent = 1;
    if (!load_driver(&c->cu)) failure = tb_fail(err, n, TB_EUNSUPPORTED, "no CUDA driver is installed (no usable libcuda.so.1)");
    else if ((code = c->cu.Init(0)) || (code = c->cu.DeviceGetCount(&count)) || !count || (code = c->cu.DeviceGet(&c->device, 0)))
        failure = tb_fail(err, n, TB_EUNSUPPORTED, "CUDA finds no device (CUDA error %d)", code);
    else {
        *absent = 0;
        failure = tbg_report(g, prepare(g, cache_dir, ptx), err, n);
    }
    if (!failure) return g;
    tb_gpu_free(g);
    return NULL;
}
