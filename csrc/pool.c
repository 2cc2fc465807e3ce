/* pool.c - see pool.h. One generation counter starts a section, one counter of busy workers ends it.
 *
 * Both sides wait the same way: spin, then sleep on a condition variable. A sleeper says so (under the lock) before it looks at
 * the counter for the last time, the other side changes the counter before it looks for sleepers, so no wake-up is lost. */
#include "pool.h"
#include "os.h"

#include <stdatomic.h>
#include <stdlib.h>

enum { YIELD_NS = 4000, GIVE_UP_NS = 50000, GIVE_UP_CROWDED_NS = 5000 };

typedef struct worker { tb_thread thread; tb_pool *pool; int ith; } worker;

struct tb_pool {
    /* Written by thread 0 between sections. */
    tb_task fn;
    void *arg;
    int nth, crowded, forks;
    worker *workers;                /* nth - 1 */
    tb_mutex lock;
    tb_cond start, done;
    /* Apart, so that chunks taken by one thread do not slow down the waiting of another. */
    _Alignas(64) atomic_uint generation;
    atomic_int sleepers, stop;
    _Alignas(64) atomic_int busy;
    atomic_int main_sleeps;
    _Alignas(64) atomic_int next;
};

/* Spins until *generation is another than `old` or, without a generation, *busy is 0; returns 0 when it gives up. After a few
 * microseconds it offers its core to others in between: the thread waited for may be one of them. */
static int spin(const tb_pool *p, atomic_uint *generation, unsigned old, atomic_int *busy)
{
    for (int64_t start = 0, now;;) {
        for (int i = 0; i < 32; i++) {
            if (generation ? atomic_load_explicit(generation, memory_order_acquire) != old : atomic_load_explicit(busy, memory_order_acquire) == 0)
                return 1;
            tb_relax();
        }
        now = tb_clock_ns();
        if (!start) start = now;
        if (now - start > (p->crowded ? GIVE_UP_CROWDED_NS : GIVE_UP_NS)) return 0;
        if (p->crowded || now - start > YIELD_NS) tb_yield();
    }
}

static void *work(void *arg)
{
    worker *w = arg;
    tb_pool *p = w->pool;
    for (unsigned seen = 0;; seen++) {
        if (!spin(p, &p->generation, seen, NULL)) {
            tb_mutex_lock(&p->lock);
            atomic_fetch_add(&p->sleepers, 1);
            while (atomic_load(&p->generation) == seen) tb_cond_wait(&p->start, &p->lock);
            atomic_fetch_sub(&p->sleepers, 1);
            tb_mutex_unlock(&p->lock);
        }
        if (atomic_load(&p->stop)) return NULL;
        p->fn(p->arg, w->ith, p->nth);
        if (atomic_fetch_sub(&p->busy, 1) == 1 && atomic_load(&p->main_sleeps)) {
            tb_mutex_lock(&p->lock);
            tb_cond_wake_all(&p->done);
            tb_mutex_unlock(&p->lock);
        }
    }
}

static void begin(tb_pool *p)
{
    atomic_fetch_add(&p->generation, 1);
    if (atomic_load(&p->sleepers)) {
        tb_mutex_lock(&p->lock);
        tb_cond_wake_all(&p->start);
        tb_mutex_unlock(&p->lock);
    }
}

void tb_parallel_for(tb_pool *p, tb_task fn, void *arg)
{
    atomic_store_explicit(&p->next, 0, memory_order_relaxed);
    if (p->nth == 1) {
        fn(arg, 0, 1);
        return;
    }
    if (p->forks != tb_forks()) {
        for (int i = 0; i < p->nth; i++) fn(arg, i, p->nth);
        return;
    }
    p->fn = fn;
    p->arg = arg;
    atomic_store_explicit(&p->busy, p->nth - 1, memory_order_relaxed);
    begin(p);
    fn(arg, 0, p->nth);
    if (spin(p, NULL, 0, &p->busy)) return;
    tb_mutex_lock(&p->lock);
    atomic_store(&p->main_sleeps, 1);
    while (atomic_load(&p->busy)) tb_cond_wait(&p->done, &p->lock);
    atomic_store(&p->main_sleeps, 0);
    tb_mutex_unlock(&p->lock);
}

int32_t tb_pool_next(tb_pool *p, int32_t n_chunks)
{
    /* Looked at first, so that calls after the end cannot run the counter over. */
    if (atomic_load_explicit(&p->next, memory_order_relaxed) >= n_chunks) return -1;
    int32_t chunk = atomic_fetch_add_explicit(&p->next, 1, memory_order_relaxed);
    return chunk < n_chunks ? chunk : -1;
}

int tb_pool_threads(const tb_pool *p) { return p->nth; }

tb_pool *tb_pool_new(int threads, int cores)
{
    if (threads < 1) return NULL;
    tb_pool *p = tb_aligned(sizeof *p);
    if (!p) return NULL;
    p->nth = 1;
    p->crowded = threads > cores;
    p->forks = tb_forks();
    p->workers = NULL;
    atomic_init(&p->generation, 0);
    atomic_init(&p->sleepers, 0);
    atomic_init(&p->stop, 0);
    atomic_init(&p->busy, 0);
    atomic_init(&p->main_sleeps, 0);
    atomic_init(&p->next, 0);
    if (threads == 1) return p;
    p->workers = calloc((size_t)threads - 1, sizeof *p->workers);
    if (!p->workers || tb_mutex_init(&p->lock) != 0) goto no_lock;
    if (tb_cond_init(&p->start) != 0) goto no_start;
    if (tb_cond_init(&p->done) != 0) goto no_done;
    for (int started = 1; started < threads; started++) {
        worker *w = &p->workers[started - 1];
        w->pool = p;
        w->ith = started;
        if (tb_thread_start(&w->thread, work, w) != 0) {
            p->nth = started;
            tb_pool_free(p);
            return NULL;
        }
    }
    p->nth = threads;
    return p;
no_done:
    tb_cond_free(&p->start);
no_start:
    tb_mutex_free(&p->lock);
no_lock:
    free(p->workers);
    tb_aligned_free(p);
    return NULL;
}

void tb_pool_free(tb_pool *p)
{
    if (!p) return;
    if (p->workers && p->forks == tb_forks()) {
        atomic_store(&p->stop, 1);
        begin(p);
        for (int i = 0; i < p->nth - 1; i++) tb_thread_join(&p->workers[i].thread);
        tb_cond_free(&p->done);
        tb_cond_free(&p->start);
        tb_mutex_free(&p->lock);
    }
    free(p->workers);
    tb_aligned_free(p);
}
