/* os.h - threads, locks, the clock and aligned memory: the only place that knows the operating system (POSIX, Windows). */
#ifndef TB_OS_H
#define TB_OS_H
#include <stddef.h>
#include <stdint.h>

#ifdef _WIN32
/* windows.h stays in os.c: these are its SRWLOCK, CONDITION_VARIABLE, INIT_ONCE and HANDLE, a pointer each. */
typedef struct tb_thread { void *handle; } tb_thread;
typedef struct tb_mutex { void *m; } tb_mutex;
typedef struct tb_cond { void *c; } tb_cond;
typedef struct tb_once { void *o; } tb_once;
#define TB_ONCE {NULL}
#else
#include <pthread.h>
typedef struct tb_thread { pthread_t id; } tb_thread;
typedef struct tb_mutex { pthread_mutex_t m; } tb_mutex;
typedef struct tb_cond { pthread_cond_t c; } tb_cond;
typedef struct tb_once { pthread_once_t o; } tb_once;
#define TB_ONCE {PTHREAD_ONCE_INIT}
#endif

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

void tb_run_once(tb_once *once, void (*fn)(void));

int64_t tb_clock_ns(void);         /* monotonic */
double tb_clock(void);             /* the same in seconds */
void tb_yield(void);
int tb_forks(void);                /* grows in a forked child: threads started before that number are not there */
int tb_processors(void);           /* that are online, 1 or more */
long tb_switches(void);            /* how often the calling thread lost its processor; 0 where nobody counts */

/* A library of the system by its name; NULL: not there. Once opened it stays. */
void *tb_library_open(const char *name);
void *tb_library_symbol(void *library, const char *name);
void tb_memory_unneeded(const void *p, size_t bytes);   /* mapped from a file: its pages need not stay in RAM */

void *tb_aligned(size_t bytes);    /* on 64 bytes, not zeroed; NULL when out of memory */
void tb_aligned_free(void *p);     /* NULL is fine */

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
