/* pool.h - a pool of threads that all run one function: parallel_for(pool, fn, arg), the caller is thread 0.
 *
 * Workers wait for the next section by spinning for some 50 microseconds and sleep after that, so that the
 * hundreds of sections of a token cost well under a microsecond each and an idle pool costs nothing. */
#ifndef TB_POOL_H
#define TB_POOL_H
#include <stdint.h>

typedef struct tb_pool tb_pool;
typedef void (*tb_task)(void *arg, int ith, int nth);

/* `threads` >= 1 threads, the caller included; `cores`: how many may run at once (tb_cpu_threads()). With more threads than
 * cores, or after waiting long, threads give way instead of spinning. NULL: out of memory or threads. */
tb_pool *tb_pool_new(int threads, int cores);
void tb_pool_free(tb_pool *p);      /* NULL is fine; also in a forked child, where the workers do not exist */
int tb_pool_threads(const tb_pool *p);

/* Runs fn(arg, ith, nth) for every ith < nth at the same time and returns when all have. Not from inside fn, and from one
 * thread at a time. In a forked child the parts run one after another: fn must not wait for another part. */
void tb_parallel_for(tb_pool *p, tb_task fn, void *arg);

/* Inside a section: the next chunk nobody has taken, 0 .. n_chunks - 1, then -1. One count per section. */
int32_t tb_pool_next(tb_pool *p, int32_t n_chunks);
#endif
