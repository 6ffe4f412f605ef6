#define _GNU_SOURCE
#include "operations/activity.h"

#include "engine/state.h"
#include "operations/black_box.h"

void hvdl_put_activity(hvdl_shm_last *to, const hvdl_operation *op, hvdl_activity activity)
{
    to->kind = op->desc.kind;
    to->activity = activity;
    to->in_words = op->words != NULL;
    hvdl_copy_name(to->name, sizeof to->name, hvdl_shown(op));
}

/* Odd while it is written; a reader that sees a change reads again. */
static hvdl_shm_rank *begin_note(hvdl_engine *e)
{
    hvdl_shm_rank *self = &e->shm.control->ranks[e->placement.local];
    uint32_t sequence = atomic_load_explicit(&self->last_sequence, memory_order_relaxed);
    atomic_store_explicit(&self->last_sequence, sequence + 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    return self;
}

static void end_note(hvdl_shm_rank *self, uint64_t time_ns)
{
    uint32_t sequence = atomic_load_explicit(&self->last_sequence, memory_order_relaxed);
    self->last.time_ns = time_ns;
    atomic_store_explicit(&self->last_sequence, sequence + 1, memory_order_release);
}

void hvdl_note_activity(hvdl_engine *e, const hvdl_shm_last *last)
{
    hvdl_shm_rank *self = begin_note(e);
    self->last = *last;
    end_note(self, hvdl_now_ns());
}

void hvdl_note_operation(hvdl_engine *e, const hvdl_operation *op, hvdl_activity activity)
{
    hvdl_shm_rank *self = begin_note(e);
    hvdl_put_activity(&self->last, op, activity);
    uint64_t time_ns = activity == HVDL_DID_POST  ? op->posted_ns
                       : activity == HVDL_DID_END ? hvdl_box_now(&e->black_box)
                                                  : hvdl_now_ns(); /* long after the last sweep */
    end_note(self, time_ns);
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
