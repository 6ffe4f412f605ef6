/* What each rank of a host last did, in memory that all of them read. Written by the driver. */
#ifndef HVDL_ACTIVITY_H
#define HVDL_ACTIVITY_H

#include "engine/state.h"

hvdl_shm_last hvdl_activity_of(const hvdl_operation *operation, hvdl_activity activity);
/* For the other ranks of the host to read, with the time. */
void hvdl_note_activity(hvdl_engine *engine, hvdl_shm_last last);
/* What a rank of this host last did. */
hvdl_shm_last hvdl_last_of(const hvdl_engine *engine, int local);

#endif
