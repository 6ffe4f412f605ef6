#define _GNU_SOURCE
#include "engine/waking.h"

#include "engine/state.h"

void hvdl_wake_thread(hvdl_engine *e)
{
    hvdl_shm_rank *self = &e->shm.control->ranks[e->placement.local];
    if (e->driving.has_thread && atomic_load(&e->driving.thread_idle)) {
        atomic_fetch_add(&self->idle_doorbell, 1);
        hvdl_futex_wake(&self->idle_doorbell);
    }
}

void hvdl_wake_waiting(hvdl_engine *e)
{
    atomic_fetch_add(&e->driving.done_count, 1);
    if (atomic_load(&e->driving.num_sleeping))
        hvdl_futex_wake(&e->driving.done_count);
}

bool hvdl_operation_done(const hvdl_operation *op)
{
    return atomic_load_explicit(&op->state, memory_order_acquire) >= HVDL_DONE;
}
