/* What callers have posted and released. The driver. */
#ifndef HVDL_DRAIN_H
#define HVDL_DRAIN_H

#include "engine/state.h"

/* Hands it to the parts that it concerns. Returns whether there was anything. */
bool hvdl_drain_queue(hvdl_engine *engine);

#endif
