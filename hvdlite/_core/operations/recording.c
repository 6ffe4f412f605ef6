/* What operations did, and when: the latest changes of their states, in a ring. Any thread. */
#define _GNU_SOURCE
#include "operations/recording.h"

#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "engine/state.h"

const char *hvdl_state_name(int state)
{
    static const char *const names[] = {"POSTED", "MATCHED", "RUNNING", "DONE", "FAILED"};
    return names[state];
}

uint64_t hvdl_tensor_bytes(const hvdl_operation *op)
{
    const hvdl_desc *desc = &op->desc;
    const hvdl_kind_facts *facts = hvdl_facts_of(desc);
    if (!hvdl_moves_data(facts))
        return 0;
    bool in_rows = facts->rows == HVDL_ROWS_OWN || facts->rows == HVDL_ROWS_SPLITS ||
                   (op->splits && facts->rows == HVDL_ROWS_BOTH);
    return hvdl_desc_bytes(desc) * (in_rows ? (uint64_t)op->rows : 1);
}

void hvdl_record_event(hvdl_recording *recording, const hvdl_operation *op, int state,
                       uint64_t time_ns)
{
    if (op->internal)
        return;
    pthread_mutex_lock(&recording->lock);
    if (recording->capacity) {
        hvdl_event *event = &recording->events[recording->num_events++ % recording->capacity];
        event->time_ns = time_ns ? time_ns : hvdl_now_ns();
        event->operation = op->number;
        event->bytes = hvdl_tensor_bytes(op);
        event->kind = op->desc.kind;
        event->state = state;
        hvdl_copy_name(event->name, sizeof event->name, op->name);
    }
    pthread_mutex_unlock(&recording->lock);
}

hvdl_err hvdl_engine_record(hvdl_engine *e, size_t capacity)
{
    hvdl_event *ring = NULL;
    if (capacity && !(ring = hvdl_new_array(capacity, sizeof *ring)))
        return HVDL_ENOMEM;
    pthread_mutex_lock(&e->recording.lock);
    hvdl_event *former = e->recording.events;
    e->recording.events = ring;
    e->recording.capacity = capacity;
    e->recording.num_events = 0;
    atomic_store_explicit(&e->recording.on, capacity > 0, memory_order_relaxed);
    pthread_mutex_unlock(&e->recording.lock);
    free(former);
    return HVDL_OK;
}

static size_t num_kept(const hvdl_engine *e)
{
    return e->recording.num_events < e->recording.capacity ? (size_t)e->recording.num_events
                                                           : e->recording.capacity;
}

hvdl_err hvdl_engine_events(hvdl_engine *e, hvdl_events *to)
{
    hvdl_err err = HVDL_OK;
    pthread_mutex_lock(&e->recording.lock);
    size_t count = num_kept(e);
    hvdl_event *ring = hvdl_new_array(count, sizeof *ring);
    if (ring) {
        for (size_t i = 0; i < count; i++)
            ring[i] =
                e->recording.events[(e->recording.num_events - count + i) % e->recording.capacity];
        *to = (hvdl_events){.ring = ring, .capacity = count, .count = count};
    } else {
        err = HVDL_ENOMEM;
    }
    pthread_mutex_unlock(&e->recording.lock);
    return err;
}

hvdl_err hvdl_engine_drain_events(hvdl_engine *e, hvdl_events *to)
{
    hvdl_err err = HVDL_OK;
    hvdl_events taken = {0};
    pthread_mutex_lock(&e->recording.lock);
    if (e->recording.num_events) {
        /* Exchanged and not copied: a caller that posts meanwhile waits only for a malloc. */
        hvdl_event *ring = hvdl_new_array(e->recording.capacity, sizeof *ring);
        if (ring) {
            taken.ring = e->recording.events;
            taken.capacity = e->recording.capacity;
            taken.count = num_kept(e);
            taken.lost = e->recording.num_events - taken.count;
            taken.first = (size_t)(taken.lost % taken.capacity);
            e->recording.events = ring;
            e->recording.num_events = 0;
        } else {
            err = HVDL_ENOMEM;
        }
    }
    pthread_mutex_unlock(&e->recording.lock);
    if (!err)
        *to = taken;
    return err;
}

void hvdl_recording_free(hvdl_recording *recording)
{
    free(recording->events);
    pthread_mutex_destroy(&recording->lock);
}
