/* The shared log's state machine. The driver. */
#ifndef HVDL_REPLAY_H
#define HVDL_REPLAY_H

#include "engine/state.h"

/* Returns whether there was anything to read. */
bool hvdl_read_log(hvdl_engine *engine);

#endif
