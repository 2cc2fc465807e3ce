/* os.h - threads, locks and the clock: the only place that knows the operating system (POSIX). */
#ifndef TB_OS_H
#define TB_OS_H
#include <pthread.h>
#include <stdint.h>

typedef struct tb_thread { pthread_t id; } tb_thread;
typedef struct tb_mutex { pthread_mutex_t m; } tb_mutex;
typedef struct tb_cond { pthread_cond_t c; } tb_cond;

/* 0, or -1. The thread takes no signals: they belong to the program's own threads. */
int tb_thread_start(tb_thread *t, void *(*fn)(void *), void *arg);
void tb_thread_join(tb_thread *t);

int tb_mutex_init(tb_mutex *m);
void tb_mutex_free(tb_mutex *m);
void tb_mutex_lock(tb_mutex *m);
void tb_mutex_unlock(tb_mutex *m);

int tb_cond_init(tb_cond *c);
void tb_cond_free(tb_cond *c);
void tb_cond_wait(tb_cond *c, tb_mutex *m);
void tb_cond_wake_all(tb_cond *c);

int64_t tb_clock_ns(void);         /* monotonic */
double tb_clock(void);             /* the same in seconds */
void tb_yield(void);
int tb_forks(void);                /* grows in a forked child: threads started before that number are not there */

/* Tells the core that this is a wait loop. */
static inline void tb_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}
#endif
