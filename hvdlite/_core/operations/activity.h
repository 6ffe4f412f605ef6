/* What each rank of a host last did, in memory that all of them read. Written by the driver. */
#ifndef HVDL_ACTIVITY_H
#define HVDL_ACTIVITY_H

#include "engine/state.h"

/* But for the time. */
void hvdl_put_activity(hvdl_shm_last *to, const hvdl_operation *operation, hvdl_activity activity);
/* For the other ranks of the host to read. */
void hvdl_note_operation(hvdl_engine *engine, const hvdl_operation *operation,
                         hvdl_activity activity);
/* The same, of one that may have ended since; it happens now. */
void hvdl_note_activity(hvdl_engine *engine, const hvdl_shm_last *last);
/* What a rank of this host last did. */
hvdl_shm_last hvdl_last_of(const hvdl_engine *engine, int local);

#endif
