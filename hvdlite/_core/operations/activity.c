#define _GNU_SOURCE
#include "operations/activity.h"

#include "engine/state.h"

hvdl_shm_last hvdl_activity_of(const hvdl_operation *op, hvdl_activity activity)
{
    hvdl_shm_last last = {
        .kind = op->desc.kind, .activity = activity, .in_words = op->words != NULL};
    hvdl_copy_name(last.name, sizeof last.name, hvdl_shown(op));
    return last;
}

void hvdl_note_activity(hvdl_engine *e, hvdl_shm_last last)
{
    last.time_ns = hvdl_now_ns();
    hvdl_shm_rank *self = &e->shm.control->ranks[e->placement.local];
    uint32_t sequence = atomic_load_explicit(&self->last_sequence, memory_order_relaxed);
    /* Odd while it is written; a reader that sees a change reads again. */
    atomic_store_explicit(&self->last_sequence, sequence + 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    self->last = last;
    atomic_store_explicit(&self->last_sequence, sequence + 2, memory_order_release);
}

hvdl_shm_last hvdl_last_of(const hvdl_engine *e, int local)
{
    const hvdl_shm_rank *rank = &e->shm.control->ranks[local];
    hvdl_shm_last last;
    for (int tries = 0; tries < 1000; tries++) {
        uint32_t before = atomic_load_explicit(&rank->last_sequence, memory_order_acquire);
        last = rank->last;
        atomic_thread_fence(memory_order_acquire);
        if (!(before & 1) &&
            before == atomic_load_explicit(&rank->last_sequence, memory_order_relaxed))
            return last;
    }
    return (hvdl_shm_last){.activity = HVDL_DID_UNKNOWN}; /* its rank may be stopped there */
}
