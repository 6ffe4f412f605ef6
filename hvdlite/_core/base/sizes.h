/* Checked arithmetic for sizes that are products of knobs, counts and numbers of ranks: each factor may
 * be within its range and the product still overflow. */
#ifndef HVDL_SIZES_H
#define HVDL_SIZES_H

#include <stdlib.h>

#include "base/types.h"

/* HVDL_ENOMEM: more than can be addressed. */
static inline hvdl_err hvdl_multiply(size_t a, size_t b, size_t *product)
{
    size_t result;
    if (__builtin_mul_overflow(a, b, &result))
        return HVDL_ENOMEM;
    *product = result;
    return HVDL_OK;
}

static inline hvdl_err hvdl_add(size_t a, size_t b, size_t *sum)
{
    size_t result;
    if (__builtin_add_overflow(a, b, &result))
        return HVDL_ENOMEM;
    *sum = result;
    return HVDL_OK;
}

/* Memory that is not zeroed; not NULL if count is 0. NULL: no memory, or more than can be addressed. */
static inline void *hvdl_new_array(size_t count, size_t bytes)
{
    size_t all;
    return hvdl_multiply(count, bytes, &all) ? NULL : malloc(all ? all : 1);
}

#endif
