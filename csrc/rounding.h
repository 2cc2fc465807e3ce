/* rounding.h - the quantizer's inner loops: weights to codes on the integer lattice, row by row.
 *
 * Every row is rounded on its own, in a fixed order of operations, so any split over threads gives the same bytes.
 * Declared here for cffi too (between the marks). */
#ifndef TB_ROUNDING_H
#define TB_ROUNDING_H
#include <stddef.h>
#include <stdint.h>

/* cdef-begin */
/* cdef-end */
#endif
