/* os.c - os.h on POSIX, and on Windows (Vista or later). */
#ifdef _WIN32

#define WIN32_LEAN_AND_MEAN
#include <windows.h>

#include <malloc.h>
#include <process.h>
#include <stdlib.h>

#include "os.h"
#include "tb.h"

_Static_assert(sizeof(tb_mutex) == sizeof(SRWLOCK) && sizeof(tb_cond) == sizeof(CONDITION_VARIABLE) && sizeof(tb_once) == sizeof(INIT_ONCE),
               "os.h declares each of them as one pointer");

typedef struct start { void *(*fn)(void *); void *arg; } start;

static unsigned __stdcall enter(void *arg)
{
    const start s = *(start *)arg;
    free(arg);
    s.fn(s.arg);
    return 0;
}

int tb_thread_start(tb_thread *t, void *(*fn)(void *), void *arg)
{
    start *s = malloc(sizeof *s);
    if (!s) return -1;
    *s = (start){fn, arg};
    t->handle = (void *)_beginthreadex(NULL, 0, enter, s, 0, NULL);
    if (t->handle) return 0;
    free(s);
    return -1;
}

void tb_thread_join(tb_thread *t)
{
    WaitForSingleObject(t->handle, INFINITE);
    CloseHandle(t->handle);
}

int tb_mutex_init(tb_mutex *m) { InitializeSRWLock((SRWLOCK *)m); return 0; }
void tb_mutex_free(tb_mutex *m) { (void)m; }
void tb_mutex_lock(tb_mutex *m) { AcquireSRWLockExclusive((SRWLOCK *)m); }
void tb_mutex_unlock(tb_mutex *m) { ReleaseSRWLockExclusive((SRWLOCK *)m); }

int tb_cond_init(tb_cond *c) { InitializeConditionVariable((CONDITION_VARIABLE *)c); return 0; }
void tb_cond_free(tb_cond *c) { (void)c; }
void tb_cond_wait(tb_cond *c, tb_mutex *m) { SleepConditionVariableSRW((CONDITION_VARIABLE *)c, (SRWLOCK *)m, INFINITE, 0); }
void tb_cond_wake_all(tb_cond *c) { WakeAllConditionVariable((CONDITION_VARIABLE *)c); }

static BOOL CALLBACK run(PINIT_ONCE once, PVOID fn, PVOID *context)
{
    (void)once;
    (void)context;
    (*(void (**)(void))fn)();
    return TRUE;
}

void tb_run_once(tb_once *once, void (*fn)(void)) { InitOnceExecuteOnce((INIT_ONCE *)once, run, &fn, NULL); }

int64_t tb_clock_ns(void)
{
    LARGE_INTEGER now, frequency;
    QueryPerformanceFrequency(&frequency);
    QueryPerformanceCounter(&now);
    const int64_t f = frequency.QuadPart;
    return now.QuadPart / f * 1000000000 + now.QuadPart % f * 1000000000 / f;
}

void tb_yield(void) { SwitchToThread(); }
int tb_forks(void) { return 0; }

int tb_processors(void)
{
    const DWORD n = GetActiveProcessorCount(ALL_PROCESSOR_GROUPS);
    return n < 1 ? 1 : (int)n;
}

long tb_switches(void) { return 0; }

int tb_lock_memory(const void *p, size_t bytes) { return VirtualLock((void *)(uintptr_t)p, bytes) ? 0 : -1; }

void *tb_library_open(const char *name) { return (void *)LoadLibraryA(name); }
void *tb_library_symbol(void *library, const char *name) { return (void *)(uintptr_t)GetProcAddress((HMODULE)library, name); }
void tb_memory_unneeded(const void *p, size_t bytes) { VirtualUnlock((void *)(uintptr_t)p, bytes); }    /* of pages not locked: leaves the working set */

void *tb_aligned(size_t bytes) { return _aligned_malloc((bytes + 63) / 64 * 64, 64); }
void tb_aligned_free(void *p) { _aligned_free(p); }

#else

#define _GNU_SOURCE
#define _DARWIN_C_SOURCE
#include "os.h"
#include "tb.h"

#include <dlfcn.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

int tb_thread_start(tb_thread *t, void *(*fn)(void *), void *arg)
{
    sigset_t all, before;
    sigfillset(&all);
    sigdelset(&all, SIGBUS);    /* guard.c handles it where it happens; blocked, it would end the process */
    if (pthread_sigmask(SIG_SETMASK, &all, &before) != 0) return -1;
    int failed = pthread_create(&t->id, NULL, fn, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return failed ? -1 : 0;
}

void tb_thread_join(tb_thread *t) { pthread_join(t->id, NULL); }

int tb_mutex_init(tb_mutex *m) { return pthread_mutex_init(&m->m, NULL) ? -1 : 0; }
void tb_mutex_free(tb_mutex *m) { pthread_mutex_destroy(&m->m); }
void tb_mutex_lock(tb_mutex *m) { pthread_mutex_lock(&m->m); }
void tb_mutex_unlock(tb_mutex *m) { pthread_mutex_unlock(&m->m); }

int tb_cond_init(tb_cond *c) { return pthread_cond_init(&c->c, NULL) ? -1 : 0; }
void tb_cond_free(tb_cond *c) { pthread_cond_destroy(&c->c); }
void tb_cond_wait(tb_cond *c, tb_mutex *m) { pthread_cond_wait(&c->c, &m->m); }
void tb_cond_wake_all(tb_cond *c) { pthread_cond_broadcast(&c->c); }

void tb_run_once(tb_once *once, void (*fn)(void)) { pthread_once(&once->o, fn); }

int64_t tb_clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

void tb_yield(void) { sched_yield(); }

static int forks;
static void forked(void) { forks++; }
static void watch_forks(void) { pthread_atfork(NULL, NULL, forked); }

int tb_forks(void)
{
    static tb_once once = TB_ONCE;
    tb_run_once(&once, watch_forks);
    return forks;
}

int tb_processors(void)
{
    const long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n < 1 ? 1 : (int)n;
}

long tb_switches(void)
{
#ifdef RUSAGE_THREAD
    struct rusage u;
    if (!getrusage(RUSAGE_THREAD, &u)) return u.ru_nivcsw;
#endif
    return 0;
}

int tb_lock_memory(const void *p, size_t bytes) { return mlock(p, bytes) ? -1 : 0; }

void *tb_library_open(const char *name) { return dlopen(name, RTLD_NOW | RTLD_LOCAL); }
void *tb_library_symbol(void *library, const char *name) { return dlsym(library, name); }

void tb_memory_unneeded(const void *p, size_t bytes)
{
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), at = ((uintptr_t)p + page - 1) / page * page, end = ((uintptr_t)p + bytes) / page * page;
#ifdef MADV_PAGEOUT     /* unlike MADV_DONTNEED it never loses what is not in a file */
    if (end > at) (void)madvise((void *)at, end - at, MADV_PAGEOUT);
#else
    (void)at;
    (void)end;
#endif
}

void *tb_aligned(size_t bytes) { return aligned_alloc(64, (bytes + 63) / 64 * 64); }
void tb_aligned_free(void *p) { free(p); }

#endif

double tb_clock(void) { return (double)tb_clock_ns() * 1e-9; }
