/* What a reducescatter's ranks get. The driver. */
#ifndef HVDL_REDUCESCATTER_H
#define HVDL_REDUCESCATTER_H

#include "engine/state.h"

/* Of an operation that is posted with a tensor for each member: what is done in one go has to lie in one. Any
 * thread. */
hvdl_err hvdl_join_inputs(const hvdl_engine *engine, hvdl_operation *operation);

/* What a rank of a reducescatter gets. */
hvdl_range hvdl_own_elems(const hvdl_engine *engine, const hvdl_operation *operation);

#endif
