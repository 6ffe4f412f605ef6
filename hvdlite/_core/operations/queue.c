#define _GNU_SOURCE
#include "operations/queue.h"

#include <stdlib.h>

#include "engine/state.h"
#include "engine/waking.h"
#include "operations/facts.h"
#include "operations/operations.h"
#include "operations/plans.h"

/* ---- callers ---- */

/* What a rank that has joined does for the others is not the caller's. */
static bool is_same(const hvdl_operation *other, const hvdl_operation *op)
{
    return hvdl_key_equal(other->key, op->key) && !other->zeros;
}

hvdl_err hvdl_enqueue(hvdl_engine *e, hvdl_operation *op, bool wake)
{
    hvdl_queue *queue = &e->queue;
    hvdl_err err = HVDL_OK;
    if (e->config.num_ranks == 1 && !op->transfer)
        return hvdl_run_alone(e, op);
    pthread_mutex_lock(&queue->lock);
    hvdl_node *other = hvdl_table_first(&queue->in_flight, op->key.lo);
    while (other && !is_same(HVDL_CONTAINER(other, hvdl_operation, by_key), op))
        other = hvdl_table_next(other->next, op->key.lo);
    if (queue->closed && !op->internal)
        err = HVDL_ECLOSED;
    else if (other)
        err = HVDL_EDUP;
    else
        err = hvdl_table_insert(&queue->in_flight, &op->by_key, op->key.lo);
    if (!err) {
        if (queue->last)
            queue->last->next = op;
        else
            queue->first = op;
        queue->last = op;
        queue->num_operations += !op->internal;
        op->number = ++queue->last_number;
        if (hvdl_is_run(op))
            op->plan->run = op;
        atomic_fetch_add(&queue->num_in_flight, 1);
        atomic_store(&queue->queued, true);
    }
    pthread_mutex_unlock(&queue->lock);
    if (!err && wake) {
        hvdl_shm_kick(&e->shm);
        hvdl_wake_thread(e);
    }
    return err;
}

hvdl_err hvdl_queue_adopt(hvdl_engine *e, hvdl_operation *op)
{
    pthread_mutex_lock(&e->queue.lock);
    hvdl_err err = hvdl_table_insert(&e->queue.in_flight, &op->by_key, op->key.lo);
    if (!err)
        atomic_fetch_add(&e->queue.num_in_flight, 1);
    pthread_mutex_unlock(&e->queue.lock);
    return err;
}

uint64_t hvdl_queue_number(hvdl_engine *e)
{
    pthread_mutex_lock(&e->queue.lock);
    uint64_t number = ++e->queue.last_number;
    pthread_mutex_unlock(&e->queue.lock);
    return number;
}

uint64_t hvdl_next_sequence(hvdl_engine *e)
{
    pthread_mutex_lock(&e->queue.lock);
    uint64_t sequence = e->queue.next_sequence++;
    pthread_mutex_unlock(&e->queue.lock);
    return sequence;
}

void *hvdl_operation_release(hvdl_engine *e, hvdl_operation *op)
{
    pthread_mutex_lock(&e->queue.lock);
    bool free_now = op->finished && !op->pinned;
    op->released = true;
    pthread_mutex_unlock(&e->queue.lock);
    if (!free_now)
        return NULL;
    void *owner = op->owner;
    hvdl_operation_free(op);
    return owner;
}

void *hvdl_engine_reap(hvdl_engine *e)
{
    hvdl_queue *queue = &e->queue;
    void *owner = NULL;
    while (!owner && atomic_load_explicit(&queue->has_dead, memory_order_relaxed)) {
        pthread_mutex_lock(&queue->lock);
        hvdl_operation *op = queue->orphans;
        if (op)
            queue->orphans = op->next;
        else if (queue->num_dead_owners)
            owner = queue->dead_owners[--queue->num_dead_owners];
        atomic_store_explicit(&queue->has_dead, queue->orphans || queue->num_dead_owners,
                              memory_order_relaxed);
        pthread_mutex_unlock(&queue->lock);
        if (!op)
            break;
        owner = op->owner;
        hvdl_operation_free(op);
    }
    return owner;
}

/* ---- failures ---- */

typedef struct {
    hvdl_node by_key;
    uint64_t count;
} failed_key;

/* Half of a key is enough: two keys may share a count. */
static failed_key *failed_key_locked(const hvdl_queue *queue, hvdl_key key)
{
    hvdl_node *node = hvdl_table_first(&queue->failed_keys, key.lo);
    return node ? HVDL_CONTAINER(node, failed_key, by_key) : NULL;
}

uint64_t hvdl_engine_failures(hvdl_engine *e, int kind, const char *name)
{
    pthread_mutex_lock(&e->queue.lock);
    const failed_key *failed = failed_key_locked(&e->queue, hvdl_make_key(kind, name));
    uint64_t count = failed ? failed->count : 0;
    pthread_mutex_unlock(&e->queue.lock);
    return count;
}

hvdl_err hvdl_queue_count_failure(hvdl_engine *e, hvdl_key key)
{
    hvdl_err err = HVDL_OK;
    pthread_mutex_lock(&e->queue.lock);
    failed_key *failed = failed_key_locked(&e->queue, key);
    if (!failed) {
        failed = calloc(1, sizeof *failed);
        err = failed ? hvdl_table_insert(&e->queue.failed_keys, &failed->by_key, key.lo)
                     : HVDL_ENOMEM;
    }
    if (err)
        free(failed);
    else
        failed->count++;
    pthread_mutex_unlock(&e->queue.lock);
    return err;
}

void hvdl_queue_forget_failures(hvdl_queue *queue)
{
    pthread_mutex_lock(&queue->lock);
    hvdl_table *keys = &queue->failed_keys;
    for (size_t i = 0; i < keys->num_slots; i++)
        for (hvdl_node *node = keys->slots[i], *next; node; node = next) {
            next = node->next;
            free(HVDL_CONTAINER(node, failed_key, by_key));
        }
    free(keys->slots);
    *keys = (hvdl_table){0};
    pthread_mutex_unlock(&queue->lock);
}

/* ---- the driver ---- */

void hvdl_queue_end(hvdl_engine *e, hvdl_operation *op, int state)
{
    hvdl_queue *queue = &e->queue;
    hvdl_plan *plan = op->plan;
    pthread_mutex_lock(&queue->lock);
    hvdl_table_remove(&queue->in_flight, &op->by_key);
    if (plan && plan->run == op)
        plan->run = NULL;
    op->finished = true;
    if (op->released && !op->pinned) {
        op->next = queue->orphans;
        queue->orphans = op;
        atomic_store_explicit(&queue->has_dead, true, memory_order_relaxed);
    }
    bool release = plan && !hvdl_makes_plan(op) && plan->released && !plan->announced;
    atomic_store_explicit(&op->state, state, memory_order_release);
    atomic_fetch_sub(&queue->num_in_flight, 1);
    pthread_mutex_unlock(&queue->lock);
    if (release)
        hvdl_queue_release(e, plan);
}

hvdl_operation *hvdl_queue_any(hvdl_engine *e, size_t *slot)
{
    hvdl_queue *queue = &e->queue;
    const hvdl_table *table = &queue->in_flight;
    pthread_mutex_lock(&queue->lock);
    queue->first = queue->last = NULL; /* what is queued is in flight, and ends here too */
    while (table->count && (*slot >= table->num_slots || !table->slots[*slot]))
        *slot = *slot < table->num_slots ? *slot + 1 : 0;
    hvdl_node *node = table->count ? table->slots[*slot] : NULL;
    pthread_mutex_unlock(&queue->lock);
    return node ? HVDL_CONTAINER(node, hvdl_operation, by_key) : NULL;
}

/* ---- plans ---- */

void hvdl_queue_plan_made(hvdl_engine *e, hvdl_plan *plan)
{
    pthread_mutex_lock(&e->queue.lock);
    plan->made = true;
    pthread_mutex_unlock(&e->queue.lock);
}

/* Whether it is in the queue now. */
static bool release_locked(hvdl_queue *queue, hvdl_plan *plan)
{
    if (!plan->released || !plan->made || plan->run || plan->announced)
        return false;
    plan->announced = true;
    plan->next = queue->released_plans;
    queue->released_plans = plan;
    atomic_store(&queue->queued, true);
    return true;
}

void hvdl_queue_release(hvdl_engine *e, hvdl_plan *plan)
{
    pthread_mutex_lock(&e->queue.lock);
    release_locked(&e->queue, plan);
    pthread_mutex_unlock(&e->queue.lock);
}

void hvdl_plan_release(hvdl_engine *e, hvdl_plan *plan)
{
    if (e->config.num_ranks == 1 || hvdl_plan_is_posted(plan)) {
        hvdl_plan_free(e, plan);
        return;
    }
    pthread_mutex_lock(&e->queue.lock);
    plan->released = true;
    bool is_last = e->queue.undriven && !plan->ready; /* it is in no table */
    bool now = !e->queue.undriven && release_locked(&e->queue, plan);
    pthread_mutex_unlock(&e->queue.lock);
    if (is_last)
        hvdl_plan_free(e, plan);
    if (now)
        hvdl_wake_thread(e);
}

/* No memory: it stays the plan's, and is never handed back. */
static void drop_owner_locked(hvdl_queue *queue, hvdl_plan *plan)
{
    if (!plan->posting.owner)
        return;
    if (queue->num_dead_owners == queue->room_dead_owners) {
        size_t room = 2 * queue->room_dead_owners + 16;
        void **larger = realloc(queue->dead_owners, room * sizeof *larger);
        if (!larger)
            return;
        queue->dead_owners = larger;
        queue->room_dead_owners = room;
    }
    queue->dead_owners[queue->num_dead_owners++] = plan->posting.owner;
    atomic_store_explicit(&queue->has_dead, true, memory_order_relaxed);
    plan->posting.owner = NULL;
}

void hvdl_queue_drop_owner(hvdl_engine *e, hvdl_plan *plan)
{
    pthread_mutex_lock(&e->queue.lock);
    drop_owner_locked(&e->queue, plan);
    pthread_mutex_unlock(&e->queue.lock);
}

hvdl_plan *hvdl_queue_end_driving(hvdl_engine *e)
{
    hvdl_queue *queue = &e->queue;
    pthread_mutex_lock(&queue->lock);
    hvdl_plan *released = queue->released_plans;
    queue->released_plans = NULL;
    queue->undriven = true;
    pthread_mutex_unlock(&queue->lock);
    return released;
}

/* ---- life ---- */

bool hvdl_queue_close(hvdl_engine *e)
{
    pthread_mutex_lock(&e->queue.lock);
    bool was_closed = e->queue.closed;
    e->queue.closed = true;
    pthread_mutex_unlock(&e->queue.lock);
    return was_closed;
}

void hvdl_queue_free(hvdl_queue *queue)
{
    hvdl_queue_forget_failures(queue);
    free(queue->in_flight.slots);
    free(queue->dead_owners);
    pthread_mutex_destroy(&queue->lock);
}
