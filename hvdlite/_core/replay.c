/* The journal: what this rank appends to it, and the state machine that every rank of the host runs
 * over it alike, so that all come to the same decisions. Called by the driver. */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>

#include "state.h"

/* ---- announcing: the driver ---- */

void hvdl_announce(hvdl_engine *e, hvdl_entry head, const void *body, size_t bytes)
{
    if (!e->deferred && !hvdl_journal_append(&e->shm, head, body, bytes, NULL, 0))
        return;
    hvdl_deferred *entry = malloc(sizeof *entry + bytes);
    if (!entry) {
        hvdl_break(e, "rank %d is out of memory", e->config.rank);
        return;
    }
    *entry = (hvdl_deferred){.head = head, .body_bytes = bytes};
    if (bytes)
        memcpy(entry->body, body, bytes);
    if (e->deferred)
        e->deferred_last->next = entry;
    else
        e->deferred = entry;
    e->deferred_last = entry;
}

bool hvdl_append_deferred(hvdl_engine *e)
{
    bool any = false;
    while (e->deferred) {
        hvdl_deferred *entry = e->deferred;
        if (hvdl_journal_append(&e->shm, entry->head, entry->body, entry->body_bytes, NULL, 0))
            break;
        e->deferred = entry->next;
        free(entry);
        any = true;
    }
    return any;
}

/* This rank's contribution to a tiny operation; returns its size. */
static size_t put_payload(const hvdl_engine *e, const hvdl_operation *op, void *to)
{
    const hvdl_desc *desc = &op->desc;
    size_t bytes = hvdl_desc_bytes(desc);
    const void *input = op->input;
    hvdl_scale scale = {1, desc->prescale};
    if (desc->kind == HVDL_BARRIER || !bytes ||
        (desc->kind == HVDL_BROADCAST && desc->root != e->config.rank))
        return 0;
    if (desc->kind == HVDL_ALLREDUCE && !hvdl_scale_is_one(&scale))
        hvdl_reduce(desc->dtype, HVDL_SUM, to, &input, 1, (size_t)desc->count, &scale);
    else
        memcpy(to, input, bytes);
    return bytes;
}

static void announce_post(hvdl_engine *e, hvdl_operation *op)
{
    hvdl_entry head = {.type = HVDL_ENTRY_POST, .rows = op->rows};
    hvdl_post_body *body = (hvdl_post_body *)e->scratch;
    size_t payload_bytes = 0;
    *body = (hvdl_post_body){op->key, op->desc};
    if (hvdl_is_tiny(e, &op->desc, false))
        payload_bytes = put_payload(e, op, body + 1);
    op->next = NULL;
    if (e->announced)
        e->announced_last->next = op;
    else
        e->announced = op;
    e->announced_last = op;
    hvdl_announce(e, head, body, sizeof *body + payload_bytes);
}

static void announce_run(hvdl_engine *e, hvdl_operation *op)
{
    hvdl_entry head = {.type = HVDL_ENTRY_RUN, .id = op->plan->id};
    size_t payload_bytes = 0;
    if (hvdl_is_tiny(e, &op->desc, true))
        payload_bytes = put_payload(e, op, e->scratch);
    hvdl_announce(e, head, e->scratch, payload_bytes);
}

bool hvdl_take_queue(hvdl_engine *e)
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
        hvdl_record(e, op->name, "POSTED", op->posted_ns);
        if (e->gone)
            hvdl_finish(e, op, e->gone);
        else if (!op->plan || op->desc.kind == HVDL_PLAN)
            announce_post(e, op);
        else if (op->plan->error)
            hvdl_finish(e, op, op->plan->error);
        else if (op->plan->ready)
            announce_run(e, op);
        else
            op->plan->waiting = op;
    }
    for (; plan; plan = next_plan) {
        next_plan = plan->next;
        if (plan->ready)
            hvdl_announce(e, (hvdl_entry){.type = HVDL_ENTRY_RELEASE, .id = plan->id}, NULL, 0);
        else
            hvdl_plan_free(e, plan); /* its making failed: hvdl_nobody else knows it */
    }
    return true;
}

/* ---- the journal: every rank of the host does the same here ---- */

hvdl_meeting *hvdl_meeting_by_key(hvdl_engine *e, hvdl_key key)
{
    hvdl_node *node = hvdl_table_first(&e->meetings, key.lo);
    for (; node; node = hvdl_table_next(node->next, key.lo)) {
        hvdl_meeting *meeting = HVDL_CONTAINER(node, hvdl_meeting, by_key);
        if (hvdl_key_equal(meeting->key, key))
            return meeting;
    }
    return NULL;
}

hvdl_meeting *hvdl_meeting_by_id(hvdl_engine *e, uint64_t id)
{
    hvdl_node *node = hvdl_table_first(&e->meetings_by_id, id);
    return node ? HVDL_CONTAINER(node, hvdl_meeting, by_id) : NULL;
}

static hvdl_plan *plan_by_id(hvdl_engine *e, uint64_t id)
{
    hvdl_node *node = hvdl_table_first(&e->plans, id);
    return node ? HVDL_CONTAINER(node, hvdl_plan, by_id) : NULL;
}

static hvdl_meeting *new_meeting(uint64_t id)
{
    hvdl_meeting *meeting = calloc(1, sizeof *meeting);
    if (meeting) {
        meeting->id = id;
        meeting->collecting = true;
        meeting->coordinator = -1;
    }
    return meeting;
}

/* Keeps what a rank of this host posted with its operation. */
static hvdl_err keep_payload(hvdl_engine *e, hvdl_meeting *meeting, const hvdl_entry *entry,
                             const hvdl_desc *desc, const void *payload, size_t bytes)
{
    if (desc->kind == HVDL_ALLGATHER && !meeting->rows) {
        meeting->rows = calloc((size_t)e->local_size, sizeof *meeting->rows);
        if (!meeting->rows)
            return HVDL_ENOMEM;
    }
    if (meeting->rows)
        meeting->rows[entry->from] = entry->rows;
    if (!bytes || meeting->variants.count > 1)
        return HVDL_OK;
    if (!meeting->payloads) {
        meeting->payloads = malloc((size_t)e->local_size * bytes);
        if (!meeting->payloads)
            return HVDL_ENOMEM;
    }
    memcpy(meeting->payloads + entry->from * bytes, payload, bytes);
    return HVDL_OK;
}

/* One host, tiny: all the data is here. */
static void complete_tiny(hvdl_engine *e, hvdl_meeting *meeting)
{
    hvdl_operation *op = meeting->operation;
    const hvdl_desc *desc = &op->desc;
    size_t bytes = hvdl_desc_bytes(desc);
    hvdl_set_state(e, op, HVDL_RUNNING);
    if (desc->kind == HVDL_ALLREDUCE && bytes) {
        const void *inputs[HVDL_MAX_LOCAL];
        hvdl_scale scale = hvdl_final_scale(e, desc);
        for (int r = 0; r < e->local_size; r++)
            inputs[r] = meeting->payloads + (size_t)r * bytes;
        hvdl_reduce(desc->dtype, desc->op, op->output, inputs, e->local_size, (size_t)desc->count,
                    &scale);
    } else if (desc->kind == HVDL_BROADCAST && bytes) {
        memcpy(op->output, meeting->payloads + (size_t)e->local_of[desc->root] * bytes, bytes);
    }
    hvdl_finish(e, op, NULL);
}

void hvdl_plan_made(hvdl_engine *e, hvdl_plan *plan, const char *error)
{
    hvdl_operation *waiting = plan->waiting;
    plan->waiting = NULL;
    if (error)
        plan->error = strdup(error);
    pthread_mutex_lock(&e->queue_lock);
    plan->made = true;
    pthread_mutex_unlock(&e->queue_lock);
    if (waiting && error)
        hvdl_finish(e, waiting, error);
    else if (waiting)
        announce_run(e, waiting);
    hvdl_plan_note_release(e, plan);
}

static void make_plan(hvdl_engine *e, hvdl_operation *op, uint64_t id, int tag)
{
    hvdl_plan *plan = op->plan;
    plan->id = id;
    plan->tag = tag;
    if (hvdl_table_insert(&e->plans, &plan->by_id, id)) {
        hvdl_break(e, "rank %d is out of memory", e->config.rank);
        return;
    }
    plan->ready = true;
    hvdl_finish(e, op, NULL);
}

/* All ranks of this host have posted. */
static void meeting_full(hvdl_engine *e, hvdl_meeting *meeting)
{
    hvdl_operation *op = meeting->operation;
    if (meeting->plan)
        meeting->plan->collecting = NULL;
    else
        hvdl_table_remove(&e->meetings, &meeting->by_key);
    meeting->collecting = false;
    if (!op) { /* it has failed here already */
        hvdl_meeting_free(meeting);
        return;
    }
    if (hvdl_table_insert(&e->meetings_by_id, &meeting->by_id, meeting->id)) {
        hvdl_break(e, "rank %d is out of memory", e->config.rank);
        return;
    }
    if (e->config.num_hosts > 1 && !meeting->plan) {
        if (e->is_leader)
            hvdl_control_posted(e, meeting);
        else
            meeting->coordinator = (int)(meeting->key.hi % (uint64_t)e->config.num_hosts);
        return;
    }
    if (meeting->variants.count > 1) {
        char text[HVDL_TEXT_BYTES];
        hvdl_variants_describe(&meeting->variants, op->name, e->name_of, text);
        hvdl_finish(e, op, text);
        return;
    }
    hvdl_set_state(e, op, HVDL_MATCHED);
    if (op->desc.kind == HVDL_PLAN)
        make_plan(e, op, meeting->id, 0);
    else if (hvdl_is_tiny(e, &op->desc, meeting->plan != NULL))
        complete_tiny(e, meeting);
    else
        hvdl_begin(e, op, meeting->plan ? meeting->plan->tag : 0, meeting->rows);
}

/* Counts a POST or RUN. */
static void meeting_joined(hvdl_engine *e, hvdl_meeting *meeting, hvdl_operation *own)
{
    meeting->posted++;
    if (own) {
        meeting->operation = own;
        own->meeting = meeting;
        if (e->gone)
            hvdl_finish(e, own, e->gone);
    }
    if (meeting->posted == e->local_size)
        meeting_full(e, meeting);
}

static void read_post(hvdl_engine *e, const hvdl_entry *entry)
{
    hvdl_post_body body;
    memcpy(&body, hvdl_entry_body(entry), sizeof body);
    const char *payload = (const char *)hvdl_entry_body(entry) + sizeof body;
    hvdl_meeting *meeting = hvdl_meeting_by_key(e, body.key);
    if (!meeting) {
        meeting = new_meeting(entry->position);
        if (!meeting || hvdl_table_insert(&e->meetings, &meeting->by_key, body.key.lo)) {
            free(meeting);
            hvdl_break(e, "rank %d is out of memory", e->config.rank);
            return;
        }
        meeting->key = body.key;
    }
    hvdl_operation *own = NULL;
    if (entry->from == e->local && e->announced) {
        own = e->announced;
        e->announced = own->next;
        own->next = NULL;
    }
    hvdl_variants_add(&meeting->variants, &body.desc, hvdl_rank_of_local(e, entry->from));
    if (keep_payload(e, meeting, entry, &body.desc, payload, entry->body_bytes - sizeof body)) {
        hvdl_break(e, "rank %d is out of memory", e->config.rank);
        return;
    }
    meeting_joined(e, meeting, own);
}

static void read_run(hvdl_engine *e, const hvdl_entry *entry)
{
    hvdl_plan *plan = plan_by_id(e, entry->id);
    if (!plan)
        return;
    if (!plan->collecting) {
        plan->collecting = new_meeting(entry->position);
        if (!plan->collecting) {
            hvdl_break(e, "rank %d is out of memory", e->config.rank);
            return;
        }
        plan->collecting->plan = plan;
        plan->collecting->variants.count = 1;
    }
    if (keep_payload(e, plan->collecting, entry, &plan->posting.desc, hvdl_entry_body(entry),
                     entry->body_bytes)) {
        hvdl_break(e, "rank %d is out of memory", e->config.rank);
        return;
    }
    meeting_joined(e, plan->collecting, entry->from == e->local ? plan->run : NULL);
}

static void read_start(hvdl_engine *e, hvdl_operation *op, const hvdl_entry *entry)
{
    op->meeting->coordinator = -1; /* it has answered */
    hvdl_set_state(e, op, HVDL_MATCHED);
    if (op->desc.kind == HVDL_PLAN)
        make_plan(e, op, entry->id, (int)entry->arg);
    else
        hvdl_begin(e, op, (int)entry->arg, hvdl_entry_body(entry));
}

static void read_result(hvdl_engine *e, hvdl_operation *op, const hvdl_entry *entry)
{
    hvdl_set_state(e, op, HVDL_RUNNING);
    if (entry->body_bytes)
        memcpy(op->output, hvdl_entry_body(entry), entry->body_bytes);
    hvdl_finish(e, op, NULL);
}

static void read_release(hvdl_engine *e, uint64_t id)
{
    hvdl_plan *plan = plan_by_id(e, id);
    if (!plan || ++plan->num_released < e->local_size)
        return;
    hvdl_table_remove(&e->plans, &plan->by_id);
    if (e->is_leader && e->config.num_hosts > 1)
        hvdl_control_tag_done(e, plan->tag);
    hvdl_plan_free(e, plan);
}

/* No operation that is not matched yet can be any more. */
static void fail_collecting(hvdl_engine *e)
{
    for (size_t i = 0; i < e->meetings.num_slots; i++)
        for (hvdl_node *node = e->meetings.slots[i]; node; node = node->next) {
            hvdl_meeting *meeting = HVDL_CONTAINER(node, hvdl_meeting, by_key);
            if (meeting->operation)
                hvdl_finish(e, meeting->operation, e->gone);
        }
    for (size_t i = 0; i < e->plans.num_slots; i++)
        for (hvdl_node *node = e->plans.slots[i]; node; node = node->next) {
            hvdl_plan *plan = HVDL_CONTAINER(node, hvdl_plan, by_id);
            if (plan->collecting && plan->collecting->operation)
                hvdl_finish(e, plan->collecting->operation, e->gone);
        }
}

/* The leader: whom it asked about an operation has left without an answer. */
static void fail_asked(hvdl_engine *e, int host)
{
    for (size_t i = 0; i < e->meetings_by_id.num_slots; i++)
        for (hvdl_node *node = e->meetings_by_id.slots[i], *next; node; node = next) {
            hvdl_meeting *meeting = HVDL_CONTAINER(node, hvdl_meeting, by_id);
            next = node->next;
            if (meeting->coordinator == host && meeting->operation)
                hvdl_finish(e, meeting->operation, e->gone);
        }
}

static void read_leave(hvdl_engine *e, int rank, bool clean)
{
    if (rank == e->config.rank)
        return;
    if (!e->gone) {
        char text[HVDL_TEXT_BYTES];
        snprintf(
            text, sizeof text,
            "rank %d on %s has left (it called shutdown or ended); an operation needs every rank",
            rank, e->name_of[rank]);
        e->gone = strdup(text);
    }
    if (!clean) {
        hvdl_break(e, "rank %d on %s has left while operations were under way", rank,
                   e->name_of[rank]);
        return;
    }
    if (e->is_leader && e->config.num_hosts > 1) {
        if (e->host_of[rank] == e->host)
            hvdl_control_leave(e, rank, true);
        hvdl_control_fail_open(e);
    }
    fail_collecting(e);
    if (rank == e->members[e->host_first[e->host_of[rank]]] && e->host_of[rank] != e->host)
        fail_asked(e, e->host_of[rank]);
}

static void read_entry(hvdl_engine *e, const hvdl_entry *entry)
{
    hvdl_operation *op = NULL;
    if (e->broken)
        return;
    switch (entry->type) {
    case HVDL_ENTRY_POST: read_post(e, entry); return;
    case HVDL_ENTRY_RUN: read_run(e, entry); return;
    case HVDL_ENTRY_RELEASE: read_release(e, entry->id); return;
    case HVDL_ENTRY_LEAVE: read_leave(e, (int)entry->id, entry->arg); return;
    default: break;
    }
    hvdl_meeting *meeting = hvdl_meeting_by_id(e, entry->id);
    if (meeting)
        op = meeting->operation;
    if (!op)
        return; /* it has failed here already */
    switch (entry->type) {
    case HVDL_ENTRY_START: read_start(e, op, entry); break;
    case HVDL_ENTRY_RESULT: read_result(e, op, entry); break;
    case HVDL_ENTRY_FAIL: hvdl_finish(e, op, hvdl_entry_body(entry)); break;
    case HVDL_ENTRY_NEXT: hvdl_piece_next(e, op); break;
    case HVDL_ENTRY_READY: hvdl_piece_ready(e, op, entry->arg); break;
    default: break;
    }
}

bool hvdl_read_journal(hvdl_engine *e)
{
    bool any = false;
    for (const hvdl_entry *entry; (entry = hvdl_journal_next(&e->shm)); any = true) {
        read_entry(e, entry);
        hvdl_journal_advance(&e->shm, entry);
    }
    return any;
}
