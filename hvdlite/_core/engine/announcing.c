/* What this rank appends to the journal: what was posted and released here, in that order. Called by
 * the driver. */
#define _GNU_SOURCE
#include <string.h>

#include "engine/state.h"

/* op: that this posts, which is noted when the others can read of it; NULL: none. */
static void announce_both(hvdl_engine *e, const hvdl_operation *op, hvdl_entry head,
                          const void *body, size_t bytes, const void *more, size_t more_bytes)
{
    if (more_bytes >= HVDL_PAST_CACHE_BYTES)
        hvdl_conveyor_untimed(&e->conveyor);
    if (!e->deferred && !hvdl_journal_append(&e->shm, head, body, bytes, more, more_bytes)) {
        if (op && !op->internal)
            hvdl_note_activity(e, hvdl_activity_of(op, HVDL_DID_POST));
        return;
    }
    hvdl_deferred *entry = malloc(sizeof *entry + bytes + more_bytes);
    if (!entry) {
        hvdl_out_of_memory(e);
        return;
    }
    *entry = (hvdl_deferred){.head = head, .body_bytes = bytes + more_bytes};
    if (op && !op->internal)
        entry->posts = hvdl_activity_of(op, HVDL_DID_POST);
    if (bytes)
        memcpy(entry->body, body, bytes);
    if (more_bytes)
        memcpy(entry->body + bytes, more, more_bytes);
    if (e->deferred)
        e->deferred_last->next = entry;
    else
        e->deferred = entry;
    e->deferred_last = entry;
}

void hvdl_announce(hvdl_engine *e, hvdl_entry head, const void *body, size_t bytes)
{
    announce_both(e, NULL, head, body, bytes, NULL, 0);
}

bool hvdl_append_deferred(hvdl_engine *e)
{
    bool any = false;
    while (e->deferred) {
        hvdl_deferred *entry = e->deferred;
        if (hvdl_journal_append(&e->shm, entry->head, entry->body, entry->body_bytes, NULL, 0))
            break;
        if (entry->posts.activity && !e->failure.broken)
            hvdl_note_activity(e, entry->posts);
        e->deferred = entry->next;
        free(entry);
        any = true;
    }
    return any;
}

/* Bytes of its input that this rank contributes to a tiny operation. */
static size_t own_payload(const hvdl_engine *e, const hvdl_desc *desc)
{
    bool is_heard = !hvdl_facts_of(desc)->has_root || desc->root == e->config.rank;
    return is_heard ? hvdl_data_bytes(desc) : 0;
}

static void announce_post(hvdl_engine *e, hvdl_operation *op)
{
    hvdl_entry head = {.type = HVDL_ENTRY_POST, .rows = op->rows, .arg = op->internal};
    hvdl_post_body body = {op->key, op->desc};
    const void *payload = op->input;
    size_t payload_bytes = 0;
    if (hvdl_is_tiny(e, &op->desc, false))
        payload_bytes = own_payload(e, &op->desc);
    if (hvdl_sends_splits(&op->desc)) {
        payload_bytes = (size_t)e->config.num_ranks * sizeof *op->splits;
        payload = op->splits;
    }
    op->next = NULL;
    if (e->announced)
        e->announced_last->next = op;
    else
        e->announced = op;
    e->announced_last = op;
    announce_both(e, op, head, &body, sizeof body, payload, payload_bytes);
}

static void announce_join(hvdl_engine *e, hvdl_operation *op)
{
    if (e->num_waiting_runs) { /* posted before: they must not be taken for missing */
        e->held_join = op;
        return;
    }
    e->held_join = NULL;
    e->join = op;
    announce_both(e, op, (hvdl_entry){.type = HVDL_ENTRY_JOIN}, NULL, 0, NULL, 0);
}

static void announce_run(hvdl_engine *e, hvdl_operation *op)
{
    hvdl_entry head = {.type = HVDL_ENTRY_RUN, .id = op->plan->id};
    size_t payload_bytes = hvdl_is_tiny(e, &op->desc, true) ? own_payload(e, &op->desc) : 0;
    announce_both(e, op, head, NULL, 0, op->input, payload_bytes);
}

static void wait_for_plan(hvdl_engine *e, hvdl_operation *op)
{
    op->plan->waiting = op;
    e->num_waiting_runs++;
}

bool hvdl_drain_queue(hvdl_engine *e)
{
    if (!atomic_load_explicit(&e->queued, memory_order_relaxed))
        return false;
    pthread_mutex_lock(&e->queue_lock);
    hvdl_operation *op = e->queue_first, *next_op;
    hvdl_plan *plan = e->released_plans, *next_plan;
    e->queue_first = e->queue_last = NULL;
    e->released_plans = NULL;
    atomic_store(&e->queued, false);
    pthread_mutex_unlock(&e->queue_lock);
    for (; op; op = next_op) {
        next_op = op->next;
        op->next = NULL;
        hvdl_record(e, op, HVDL_POSTED, op->posted_ns);
        if (hvdl_refuses(e, op->internal))
            hvdl_finish(e, op, e->failure.text);
        else if (op->desc.kind == HVDL_JOIN)
            announce_join(e, op);
        else if (!hvdl_is_run(op))
            announce_post(e, op);
        else if (op->plan->error)
            hvdl_finish(e, op, op->plan->error);
        else if (op->plan->ready)
            announce_run(e, op);
        else
            wait_for_plan(e, op);
    }
    for (; plan; plan = next_plan) {
        next_plan = plan->next;
        if (plan->ready)
            hvdl_announce(e, (hvdl_entry){.type = HVDL_ENTRY_RELEASE, .id = plan->id}, NULL, 0);
        else
            hvdl_plan_free(e, plan); /* its making failed: nobody else knows it */
    }
    return true;
}

void hvdl_plan_made(hvdl_engine *e, hvdl_plan *plan, const char *error)
{
    hvdl_operation *waiting = plan->waiting;
    plan->waiting = NULL;
    e->num_waiting_runs -= waiting != NULL;
    if (error)
        plan->error = strdup(error);
    pthread_mutex_lock(&e->queue_lock);
    plan->made = true;
    pthread_mutex_unlock(&e->queue_lock);
    if (waiting && error)
        hvdl_finish(e, waiting, error);
    else if (waiting)
        announce_run(e, waiting);
    if (e->held_join)
        announce_join(e, e->held_join);
    hvdl_plan_note_release(e, plan);
}
