/* Waking those that sleep. Any thread. */
#ifndef HVDL_WAKING_H
#define HVDL_WAKING_H

#include "engine/state.h"

/* The progress thread has something to do. */
void hvdl_wake_thread(hvdl_engine *engine);
/* An operation has ended, or the driver has left: callers that sleep look again. */
void hvdl_wake_waiting(hvdl_engine *engine);

#endif
