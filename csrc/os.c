/* os.c - os.h on POSIX. */
#define _POSIX_C_SOURCE 200809L
#include "os.h"

#include <sched.h>
#include <signal.h>
#include <time.h>

int tb_thread_start(tb_thread *t, void *(*fn)(void *), void *arg)
{
    sigset_t all, before;
    sigfillset(&all);
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

int64_t tb_clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

double tb_clock(void) { return (double)tb_clock_ns() * 1e-9; }
void tb_yield(void) { sched_yield(); }

static int forks;
static void forked(void) { forks++; }
static void watch_forks(void) { pthread_atfork(NULL, NULL, forked); }

int tb_forks(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    return forks;
}
