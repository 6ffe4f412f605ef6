/* What operations did, and when. Any thread. */
#ifndef HVDL_RECORDING_H
#define HVDL_RECORDING_H

#include "engine/state.h"

void hvdl_record_event(hvdl_recording *recording, const hvdl_operation *operation, int state,
                       uint64_t time_ns);
/* time_ns 0: now. Operations of the engine's own are not recorded. */
static inline void hvdl_record(hvdl_recording *recording, const hvdl_operation *operation,
                               int state, uint64_t time_ns)
{
    if (atomic_load_explicit(&recording->on, memory_order_relaxed))
        hvdl_record_event(recording, operation, state, time_ns);
}

/* Of the user's tensor on this rank, wherever it lies. */
uint64_t hvdl_tensor_bytes(const hvdl_operation *operation);

void hvdl_recording_free(hvdl_recording *recording);

#endif
