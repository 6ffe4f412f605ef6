/* Failing everything, once the engine is broken. The driver. */
#ifndef HVDL_FAILING_H
#define HVDL_FAILING_H

#include "engine/state.h"

/* Fails all operations, if the engine was broken since the last call. After a sweep, and after anything
 * else that a driver did: when it stops driving, nothing of this is left to do. */
void hvdl_end_broken(hvdl_engine *engine);
/* Fails all operations; the engine must be broken. */
void hvdl_fail_all(hvdl_engine *engine, const char *text);

#endif
