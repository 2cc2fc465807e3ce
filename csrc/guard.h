/* guard.h - mapped files that become shorter while they are in use.
 *
 * Reading past the new end raises SIGBUS, which would end the process. Inside a guarded range zeros take the place of what is gone,
 * and tb_guard_broken tells whoever computes that its results are worth nothing. */
#ifndef TB_GUARD_H
#define TB_GUARD_H
#include <stdbool.h>

bool tb_guard_broken(void);        /* a guarded file was cut short; stays so */
#endif
