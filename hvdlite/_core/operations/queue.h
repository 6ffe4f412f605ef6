/* What callers have handed over: operations that are in flight, from their posting until both the caller and
 * the driver are done with them, and plans that were released. Any thread. */
#ifndef HVDL_QUEUE_H
#define HVDL_QUEUE_H

#include "engine/state.h"

/* Hands it to the driver, unless one of its key is in flight (HVDL_EDUP) or the engine is closed. */
hvdl_err hvdl_enqueue(hvdl_engine *engine, hvdl_operation *operation, bool wake);
/* Puts one of the engine's own in flight without queueing it. */
hvdl_err hvdl_queue_adopt(hvdl_engine *engine, hvdl_operation *operation);
/* The number of an operation that ends without the driver. */
uint64_t hvdl_queue_number(hvdl_engine *engine);

/* The sequence number of an operation that the engine only agrees on. */
uint64_t hvdl_next_sequence(hvdl_engine *engine);

/* The driver. All that was queued, as lists; both may be NULL. */
static inline void hvdl_queue_drain(hvdl_queue *queue, hvdl_operation **operations,
                                    hvdl_plan **plans)
{
    pthread_mutex_lock(&queue->lock);
    *operations = queue->first;
    *plans = queue->released_plans;
    queue->first = queue->last = NULL;
    queue->released_plans = NULL;
    atomic_store(&queue->queued, false);
    pthread_mutex_unlock(&queue->lock);
}
/* An operation of this key has failed: on all ranks of this epoch. */
hvdl_err hvdl_queue_count_failure(hvdl_engine *engine, hvdl_key key);
void hvdl_queue_forget_failures(hvdl_queue *queue);
/* It has ended with this state. Afterwards its caller may free it. */
void hvdl_queue_end(hvdl_engine *engine, hvdl_operation *operation, int state);
/* Everything fails. One that is in flight, or NULL; *slot: 0 at first, then where in the table to look on, so
 * that all are found in one round, and what is posted meanwhile in the next. */
hvdl_operation *hvdl_queue_any(hvdl_engine *engine, size_t *slot);
/* The plan's making has ended. */
void hvdl_queue_plan_made(hvdl_engine *engine, hvdl_plan *plan);
/* Hands a released plan to the driver, unless its making or a run is under way, or nobody drives. */
void hvdl_queue_release(hvdl_engine *engine, hvdl_plan *plan);
/* The posting's owner goes back to the caller by hvdl_engine_reap. */
void hvdl_queue_drop_owner(hvdl_engine *engine, hvdl_plan *plan);

/* Nobody drives any more. Returns the plans that were released and not drained. */
hvdl_plan *hvdl_queue_end_driving(hvdl_engine *engine);
/* No operation is taken any more. Returns whether that was so before. */
bool hvdl_queue_close(hvdl_engine *engine);
void hvdl_queue_free(hvdl_queue *queue);

#endif
