/* Driving the engine: by its progress thread, or by a caller that waits. */
#ifndef HVDL_DRIVE_H
#define HVDL_DRIVE_H

#include "engine/state.h"

/* How often a rank that does nothing looks for what others want of it, and how long one that leaves
 * helps to end what is under way: longer, so that those have looked meanwhile. */
#define HVDL_IDLE_LOOK_NS 2000000000
#define HVDL_DRAIN_NS 2400000000
/* A leader: more often, as other hosts take one that does not answer (missing_query.h) for stopped. */
#define HVDL_LEADER_IDLE_LOOK_NS 500000000

hvdl_err hvdl_driving_start(hvdl_engine *engine);
/* Ends the thread, and keeps callers that wait from driving. */
void hvdl_driving_stop(hvdl_engine *engine);

/* Moves everything as far as it can go now. Returns whether anything moved. */
bool hvdl_sweep(hvdl_engine *engine);
/* The same, for a caller that does not look again soon: Open MPI moves messages when asked which have ended and
 * none had, and reports those only when asked again. */
bool hvdl_sweep_twice(hvdl_engine *engine);
/* Nothing moved: looks again soon, lets others run, or sleeps, the longer it lasts.
 * wanted: whether somebody else wants to drive. */
void hvdl_pause(hvdl_engine *engine, bool (*wanted)(hvdl_engine *));
bool hvdl_nobody(hvdl_engine *engine);

#endif
