/* Ranks that leave. The driver. */
#ifndef HVDL_LEAVING_H
#define HVDL_LEAVING_H

#include "engine/state.h"

void hvdl_read_leave(hvdl_engine *engine, int rank, bool clean);
/* Looks for ranks of this host that have died, or left while they were needed. */
void hvdl_look_for_dead(hvdl_engine *engine);

#endif
