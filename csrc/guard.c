/* guard.c - guard.h: a handler of SIGBUS for ranges of mapped files. Windows refuses to cut a file that is mapped. */
#ifdef _WIN32

#include "guard.h"
#include "tb.h"

bool tb_guard_broken(void) { return false; }
int tb_guard(const void *p, size_t bytes) { (void)p; (void)bytes; return 0; }
void tb_unguard(const void *p) { (void)p; }

#else

#define _GNU_SOURCE
#define _DARWIN_C_SOURCE
#include "guard.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tb.h"

enum { RANGES = 4096 };            /* more files than any model has; what does not fit is not guarded */

/* The handler only reads; a range counts while its begin is not 0. */
static struct { _Atomic uintptr_t begin; uintptr_t end; } ranges[RANGES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct sigaction before;
static bool installed;
static uintptr_t page;
static atomic_bool broken;

static void on_bus(int number, siginfo_t *info, void *context)
{
    (void)context;
    const uintptr_t at = (uintptr_t)info->si_addr;
    for (int i = 0; i < RANGES; i++) {
        const uintptr_t begin = atomic_load(&ranges[i].begin);
        if (!begin || at < begin || at >= ranges[i].end)
            continue;
        void *start = (void *)(at / page * page);
        if (mmap(start, ranges[i].end - (uintptr_t)start, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED)
            break;
        atomic_store(&broken, true);
        return;
    }
    sigaction(number, &before, NULL);   /* not ours: the instruction runs again, and whoever was there before sees to it */
}

bool tb_guard_broken(void) { return atomic_load_explicit(&broken, memory_order_relaxed); }

int tb_guard(const void *p, size_t bytes)
{
    int found = -1;
    pthread_mutex_lock(&lock);
    if (!installed) {
        page = (uintptr_t)sysconf(_SC_PAGESIZE);
        struct sigaction action = {.sa_sigaction = on_bus, .sa_flags = SA_SIGINFO};
        sigemptyset(&action.sa_mask);
        installed = sigaction(SIGBUS, &action, &before) == 0;
    }
    for (int i = 0; installed && i < RANGES; i++)
        if (!atomic_load(&ranges[i].begin)) {
            ranges[i].end = ((uintptr_t)p + bytes + page - 1) / page * page;
            atomic_store(&ranges[i].begin, (uintptr_t)p);
            found = 0;
            break;
        }
    pthread_mutex_unlock(&lock);
    return found;
}

void tb_unguard(const void *p)
{
    pthread_mutex_lock(&lock);
    for (int i = 0; i < RANGES; i++)
        if (atomic_load(&ranges[i].begin) == (uintptr_t)p) {
            atomic_store(&ranges[i].begin, 0);
            break;
        }
    pthread_mutex_unlock(&lock);
}

#endif
