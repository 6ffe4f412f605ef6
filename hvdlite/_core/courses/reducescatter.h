/* What a reducescatter's ranks get. The driver. */
#ifndef HVDL_REDUCESCATTER_H
#define HVDL_REDUCESCATTER_H

#include "base/schedule.h"
#include "engine/engine.h"

/* Written by reducescatter.c. */
typedef struct {
    size_t *begins; /* by member, and the end: elements */
    size_t unit;    /* elements of each share that a piece takes: piece k those from k * unit on */
} hvdl_shares;

/* Of an operation that is posted with a tensor for each member: what is done in one go has to lie in one. Any
 * thread. */
hvdl_err hvdl_join_inputs(const hvdl_engine *engine, hvdl_operation *operation);

void hvdl_shares_free(hvdl_shares *shares);

#endif
