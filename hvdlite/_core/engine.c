#define _GNU_SOURCE
#include "engine.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "state.h"

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* ---- small facts ---- */

bool hvdl_is_tiny(const hvdl_engine *e, const hvdl_desc *desc, bool is_run)
{
    if (desc->kind == HVDL_BARRIER)
        return true;
    if (desc->kind != HVDL_ALLREDUCE && desc->kind != HVDL_BROADCAST)
        return false;
    /* Between hosts a tiny operation costs a message to its coordinator and back; a plan's run does
     * without, since nothing is left to agree on. */
    if (is_run && e->config.num_hosts > 1)
        return desc->count == 0;
    return hvdl_desc_bytes(desc) <= e->config.inline_bytes;
}

hvdl_scale hvdl_final_scale(const hvdl_engine *e, const hvdl_desc *desc)
{
    return (hvdl_scale){desc->op == HVDL_AVERAGE ? e->config.num_ranks : 1, desc->postscale};
}

static int rank_of_local(const hvdl_engine *e, int local)
{
    return e->members[e->host_first[e->host] + local];
}

static uint64_t mix(uint64_t h)
{
    h = (h ^ h >> 33) * 0xff51afd7ed558ccdull;
    h = (h ^ h >> 33) * 0xc4ceb9fe1a85ec53ull;
    return h ^ h >> 33;
}

static hvdl_key make_key(int process_set, int kind, const char *name)
{
    hvdl_key key = {0xcbf29ce484222325ull, 0x84222325cbf29ce4ull};
    uint64_t tag = (uint64_t)(uint32_t)process_set << 8 | (uint64_t)kind;
    key.lo ^= mix(tag + 1);
    key.hi ^= mix(tag + 0x9e3779b97f4a7c15ull);
    for (const unsigned char *c = (const unsigned char *)name; *c; c++) {
        key.lo = (key.lo ^ *c) * 0x100000001b3ull;
        key.hi = (key.hi ^ *c) * 0x9e3779b97f4a7c15ull;
        key.hi ^= key.hi >> 29;
    }
    return (hvdl_key){mix(key.lo), mix(key.hi)};
}

void hvdl_record(hvdl_engine *e, const char *name, const char *what, uint64_t time_ns)
{
    if (!e->config.event_capacity)
        return;
    pthread_mutex_lock(&e->queue_lock);
    hvdl_event *event = &e->events[e->num_events++ % e->config.event_capacity];
    event->time_ns = time_ns ? time_ns : now_ns();
    event->what = what;
    snprintf(event->name, sizeof event->name, "%s", name);
    pthread_mutex_unlock(&e->queue_lock);
}

void hvdl_set_state(hvdl_engine *e, hvdl_operation *op, hvdl_state state)
{
    static const char *const names[] = {"POSTED", "MATCHED", "RUNNING", "DONE", "FAILED"};
    hvdl_record(e, op->name, names[state], 0);
    atomic_store_explicit(&op->state, (int)state, memory_order_release);
}

/* ---- waking ---- */

static void wake_thread(hvdl_engine *e)
{
    hvdl_shm_rank *self = &e->shm.control->ranks[e->local];
    if (e->has_thread && atomic_load(&e->thread_idle)) {
        atomic_fetch_add(&self->idle_bell, 1);
        hvdl_futex_wake(&self->idle_bell);
    }
}

static void wake_waiting(hvdl_engine *e)
{
    atomic_fetch_add(&e->done_count, 1);
    if (atomic_load(&e->num_sleeping))
        hvdl_futex_wake(&e->done_count);
}

/* ---- operations: making and ending ---- */

static void free_operation(hvdl_operation *op)
{
    free(op->name);
    free(op->error);
    free(op->all_rows);
    free(op->places);
    free(op->host_places);
    free(op->work);
    free(op);
}

static hvdl_operation *new_operation(const hvdl_posting *posting)
{
    hvdl_operation *op = calloc(1, sizeof *op);
    char *name = strdup(posting->name);
    if (!op || !name) {
        free(op);
        free(name);
        return NULL;
    }
    op->name = name;
    op->desc = posting->desc;
    op->input = posting->input;
    op->output = posting->output;
    op->rows = posting->rows;
    op->owner = posting->owner;
    op->key = make_key(posting->process_set, posting->unnamed ? 255 : posting->desc.kind, name);
    op->posted_ns = now_ns();
    return op;
}

static void free_meeting(hvdl_meeting *meeting)
{
    free(meeting->payloads);
    free(meeting->rows);
    free(meeting);
}

static void plan_made(hvdl_engine *e, hvdl_plan *plan, const char *error);
static void note_release(hvdl_engine *e, hvdl_plan *plan);

void hvdl_finish(hvdl_engine *e, hvdl_operation *op, const char *text)
{
    hvdl_meeting *meeting = op->meeting;
    if (meeting) {
        meeting->operation = NULL;
        if (!meeting->collecting) {
            hvdl_table_remove(&e->meetings_by_id, &meeting->by_id);
            free_meeting(meeting);
        }
        op->meeting = NULL;
    }
    if (text)
        op->error = strdup(text);
    hvdl_plan *plan = op->plan;
    bool makes_plan = op->desc.kind == HVDL_PLAN;
    hvdl_record(e, op->name, text ? "FAILED" : "DONE", 0);

    pthread_mutex_lock(&e->queue_lock);
    hvdl_table_remove(&e->in_flight, &op->by_key);
    if (plan && !makes_plan)
        plan->run = NULL;
    op->finished = true;
    if (op->released && !op->pinned) {
        op->next = e->orphans;
        e->orphans = op;
    }
    bool release = plan && !makes_plan && plan->released && !plan->announced;
    atomic_store_explicit(&op->state, text ? HVDL_FAILED : HVDL_DONE, memory_order_release);
    atomic_fetch_sub(&e->num_in_flight, 1);
    pthread_mutex_unlock(&e->queue_lock);
    /* From here on `op` may be freed by its caller. */
    if (release)
        note_release(e, plan);
    if (makes_plan)
        plan_made(e, plan, text);
    wake_waiting(e);
}

/* A world of one: nothing to agree on. */
static hvdl_err finish_alone(hvdl_operation *op)
{
    const hvdl_desc *desc = &op->desc;
    size_t bytes = hvdl_desc_bytes(desc);
    const void *input = op->input;
    switch (desc->kind) {
    case HVDL_ALLREDUCE: {
        hvdl_scale pre = {1, desc->prescale}, post = {1, desc->postscale};
        hvdl_reduce(desc->dtype, HVDL_SUM, op->output, &input, 1, (size_t)desc->count, &pre);
        input = op->output;
        if (!hvdl_scale_is_one(&post))
            hvdl_reduce(desc->dtype, HVDL_SUM, op->output, &input, 1, (size_t)desc->count, &post);
        break;
    }
    case HVDL_BROADCAST:
        if (op->output != op->input && bytes)
            memcpy(op->output, op->input, bytes);
        break;
    case HVDL_ALLGATHER:
        op->all_rows = malloc(sizeof *op->all_rows);
        bytes *= (size_t)op->rows;
        if (!op->all_rows || posix_memalign((void **)&op->work, 64, bytes ? bytes : 1))
            return HVDL_ENOMEM;
        op->all_rows[0] = op->rows;
        if (bytes)
            memcpy(op->work, op->input, bytes);
        break;
    default: break;
    }
    op->finished = true;
    atomic_store_explicit(&op->state, HVDL_DONE, memory_order_release);
    return HVDL_OK;
}

/* ---- posting: any thread ---- */

static hvdl_err enqueue(hvdl_engine *e, hvdl_operation *op, bool wake)
{
    hvdl_err err = HVDL_OK;
    pthread_mutex_lock(&e->queue_lock);
    hvdl_node *other = hvdl_table_first(&e->in_flight, op->key.lo);
    while (other && !hvdl_key_equal(HVDL_CONTAINER(other, hvdl_operation, by_key)->key, op->key))
        other = hvdl_table_next(other->next, op->key.lo);
    if (e->closed)
        err = HVDL_ECLOSED;
    else if (other)
        err = HVDL_EDUP;
    else
        err = hvdl_table_insert(&e->in_flight, &op->by_key, op->key.lo);
    if (!err) {
        if (e->queue_last)
            e->queue_last->next = op;
        else
            e->queue_first = op;
        e->queue_last = op;
        e->num_operations++;
        if (op->plan && op->desc.kind != HVDL_PLAN)
            op->plan->run = op;
        atomic_fetch_add(&e->num_in_flight, 1);
        atomic_store(&e->queued, true);
    }
    pthread_mutex_unlock(&e->queue_lock);
    if (!err && wake) {
        hvdl_shm_kick(&e->shm);
        wake_thread(e);
    }
    return err;
}

hvdl_err hvdl_engine_post(hvdl_engine *e, const hvdl_posting *posting, bool wake,
                          hvdl_operation **out)
{
    hvdl_operation *op = new_operation(posting);
    if (!op)
        return HVDL_ENOMEM;
    hvdl_err err;
    if (e->config.num_ranks == 1) {
        err = e->closed ? HVDL_ECLOSED : finish_alone(op);
        if (!err) {
            hvdl_record(e, op->name, "POSTED", op->posted_ns);
            hvdl_record(e, op->name, "DONE", 0);
            e->num_operations++;
        }
    } else {
        err = enqueue(e, op, wake);
    }
    if (err)
        free_operation(op);
    else
        *out = op;
    return err;
}

hvdl_err hvdl_plan_create(hvdl_engine *e, const hvdl_posting *posting, hvdl_plan **out)
{
    hvdl_plan *plan = calloc(1, sizeof *plan);
    hvdl_posting making = *posting;
    making.desc.kind = HVDL_PLAN;
    making.owner = NULL;
    hvdl_operation *op = plan ? new_operation(&making) : NULL;
    char *name = strdup(posting->name);
    if (!op || !name) {
        free(plan);
        free(name);
        if (op)
            free_operation(op);
        return HVDL_ENOMEM;
    }
    plan->posting = *posting;
    plan->posting.name = plan->name = name;
    plan->key = make_key(posting->process_set, 254, name);
    if (e->config.num_ranks == 1) {
        plan->ready = plan->made = true;
        free_operation(op);
        *out = plan;
        return HVDL_OK;
    }
    op->plan = plan;
    op->released = true; /* no caller waits for it */
    hvdl_err err = enqueue(e, op, true);
    if (err) {
        free_operation(op);
        free(name);
        free(plan);
        return err;
    }
    *out = plan;
    return HVDL_OK;
}

hvdl_err hvdl_plan_start(hvdl_engine *e, hvdl_plan *plan, void *owner, hvdl_operation **out)
{
    hvdl_posting posting = plan->posting;
    posting.owner = owner;
    hvdl_operation *op = new_operation(&posting);
    if (!op)
        return HVDL_ENOMEM;
    op->key = plan->key;
    op->plan = plan;
    hvdl_err err;
    if (e->config.num_ranks == 1) {
        op->plan = NULL;
        err = e->closed ? HVDL_ECLOSED : finish_alone(op);
    } else {
        err = enqueue(e, op, true);
    }
    if (err)
        free_operation(op);
    else
        *out = op;
    return err;
}

static hvdl_err keep_dead_owner_locked(hvdl_engine *e, void *owner)
{
    if (!owner)
        return HVDL_OK;
    if (e->num_dead_owners == e->room_dead_owners) {
        size_t room = 2 * e->room_dead_owners + 16;
        void **larger = realloc(e->dead_owners, room * sizeof *larger);
        if (!larger)
            return HVDL_ENOMEM;
        e->dead_owners = larger;
        e->room_dead_owners = room;
    }
    e->dead_owners[e->num_dead_owners++] = owner;
    return HVDL_OK;
}

static void free_plan(hvdl_engine *e, hvdl_plan *plan)
{
    pthread_mutex_lock(&e->queue_lock);
    keep_dead_owner_locked(e, plan->posting.owner);
    pthread_mutex_unlock(&e->queue_lock);
    free(plan->name);
    free(plan->error);
    free(plan);
}

void hvdl_plan_release(hvdl_engine *e, hvdl_plan *plan)
{
    if (e->config.num_ranks == 1) {
        free_plan(e, plan);
        return;
    }
    pthread_mutex_lock(&e->queue_lock);
    plan->released = true;
    bool now = plan->made && !plan->run && !plan->announced;
    if (now) {
        plan->announced = true;
        plan->next = e->released_plans;
        e->released_plans = plan;
        atomic_store(&e->queued, true);
    }
    pthread_mutex_unlock(&e->queue_lock);
    if (now)
        wake_thread(e);
}

/* The driver: a plan was released while its making or a run was under way, which has now ended. */
static void note_release(hvdl_engine *e, hvdl_plan *plan)
{
    pthread_mutex_lock(&e->queue_lock);
    if (plan->released && plan->made && !plan->run && !plan->announced) {
        plan->announced = true;
        plan->next = e->released_plans;
        e->released_plans = plan;
        atomic_store(&e->queued, true);
    }
    pthread_mutex_unlock(&e->queue_lock);
}

/* ---- announcing: the driver ---- */

typedef struct {
    hvdl_key key;
    hvdl_desc desc;
} post_body;

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

static bool append_deferred(hvdl_engine *e)
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
    post_body *body = (post_body *)e->scratch;
    size_t payload_bytes = 0;
    *body = (post_body){op->key, op->desc};
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

static bool take_queue(hvdl_engine *e)
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
            free_plan(e, plan); /* its making failed: nobody else knows it */
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

static void plan_made(hvdl_engine *e, hvdl_plan *plan, const char *error)
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
    note_release(e, plan);
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
        free_meeting(meeting);
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
    post_body body;
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
    hvdl_variants_add(&meeting->variants, &body.desc, rank_of_local(e, entry->from));
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
    free_plan(e, plan);
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
    fail_collecting(e);
    if (e->is_leader && e->config.num_hosts > 1)
        hvdl_control_fail_open(e);
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

/* ---- failing everything ---- */

static void fail_all(hvdl_engine *e, const char *text)
{
    hvdl_abandon_all(e);
    e->announced = NULL;
    for (;;) {
        hvdl_operation *op = NULL;
        pthread_mutex_lock(&e->queue_lock);
        e->queue_first = e->queue_last = NULL; /* what is queued is in flight, and ends here too */
        for (size_t i = 0; i < e->in_flight.num_slots && !op; i++)
            if (e->in_flight.slots[i])
                op = HVDL_CONTAINER(e->in_flight.slots[i], hvdl_operation, by_key);
        pthread_mutex_unlock(&e->queue_lock);
        if (!op)
            return;
        if (op->plan && op->plan->waiting == op)
            op->plan->waiting = NULL;
        hvdl_finish(e, op, text);
    }
}

void hvdl_break(hvdl_engine *e, const char *format, ...)
{
    if (e->broken)
        return;
    char text[HVDL_TEXT_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    free(e->gone);
    e->gone = strdup(text);
    e->broken = true;
    fail_all(e, text);
}

static void look_for_dead(hvdl_engine *e)
{
    if (e->local_size == 1)
        return;
    int dead = hvdl_shm_find_dead(&e->shm);
    if (dead >= 0 && !e->broken)
        hvdl_break(e, "rank %d on %s has died", rank_of_local(e, dead),
                   e->config.host_names[e->host]);
    for (int r = 0; r < e->local_size && !e->broken; r++)
        if (r != e->local && atomic_load(&e->shm.control->ranks[r].left) == 2)
            hvdl_break(e, "rank %d on %s has left while operations were under way",
                       rank_of_local(e, r), e->config.host_names[e->host]);
}

/* ---- driving ---- */

/* Moves everything as far as it can go now. Returns whether anything moved. */
static bool sweep(hvdl_engine *e)
{
    bool progressed = take_queue(e);
    if (e->deferred)
        progressed |= append_deferred(e);
    for (const hvdl_entry *entry; (entry = hvdl_journal_next(&e->shm));) {
        read_entry(e, entry);
        hvdl_journal_advance(&e->shm, entry);
        progressed = true;
    }
    if (e->config.num_hosts > 1) {
        bool busy = hvdl_control_step(e, &progressed);
        hvdl_step_exchanges(e, &progressed);
        atomic_store_explicit(&e->busy, busy || e->deferred, memory_order_relaxed);
    } else {
        atomic_store_explicit(&e->busy, e->deferred != NULL, memory_order_relaxed);
    }
    hvdl_pass *finished;
    progressed |= hvdl_conveyor_step(&e->conveyor, &finished);
    if (finished)
        hvdl_pass_finished(e, finished);
    if (progressed) {
        e->idle_looks = 0;
        e->pause_ns = 0;
    }
    return progressed;
}

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#define LOOKS 32   /* that keep the core */
#define YIELDS 500 /* looks that give up the core, to whoever may need it, before sleeping */
#define FIRST_PAUSE_NS 20000
#define LONGEST_WIRE_PAUSE_NS 1000000 /* MPI can't wake a sleeper */
#define LONGEST_PAUSE_NS 100000000
#define LOOKS_BETWEEN_HEALTH_CHECKS 64

/* Nothing moved: look again soon, let others run, or sleep, the longer it lasts. Gives up the core
 * where there are more ranks than cores, or the wait is long. `wanted`: somebody else wants to drive. */
static void pause_driving(hvdl_engine *e, bool (*wanted)(hvdl_engine *))
{
    int looks = ++e->idle_looks;
    if (looks <= LOOKS) {
        relax();
        return;
    }
    if (looks <= LOOKS + YIELDS) {
        sched_yield();
        return;
    }
    bool on_wire = e->config.num_hosts > 1;
    long longest = on_wire ? LONGEST_WIRE_PAUSE_NS : LONGEST_PAUSE_NS;
    long pause = e->pause_ns ? 2 * e->pause_ns : FIRST_PAUSE_NS;
    pause = pause < longest ? pause : longest;
    uint32_t bell = hvdl_shm_sleep_prepare(&e->shm);
    if (!sweep(e) && !wanted(e)) {
        hvdl_shm_sleep(&e->shm, bell, pause);
        e->pause_ns = pause;
        e->idle_looks = looks;
    }
    hvdl_shm_sleep_done(&e->shm);
    if (pause >= LONGEST_PAUSE_NS || looks % LOOKS_BETWEEN_HEALTH_CHECKS == 0)
        look_for_dead(e);
}

static bool stopping(hvdl_engine *e)
{
    return atomic_load_explicit(&e->stop, memory_order_relaxed);
}

static bool nobody(hvdl_engine *e)
{
    (void)e;
    return false;
}

static bool thread_unwanted(hvdl_engine *e)
{
    return atomic_load(&e->num_waiting) > 0 || stopping(e);
}

static bool has_work(hvdl_engine *e)
{
    return atomic_load(&e->num_in_flight) > 0 || atomic_load(&e->busy) || atomic_load(&e->queued);
}

static void *progress_main(void *argument)
{
    hvdl_engine *e = argument;
    _Atomic uint32_t *bell = &e->shm.control->ranks[e->local].idle_bell;
    while (!stopping(e)) {
        uint32_t seen = atomic_load(bell);
        atomic_store(&e->thread_idle, true);
        if (thread_unwanted(e) || !has_work(e)) {
            /* Idle: one look a second, for what others may want of this rank meanwhile. */
            hvdl_futex_wait(bell, seen, 1000000000L);
            atomic_store(&e->thread_idle, false);
            if (!thread_unwanted(e) && !has_work(e) && !pthread_mutex_trylock(&e->driving)) {
                sweep(e);
                pthread_mutex_unlock(&e->driving);
            }
            continue;
        }
        atomic_store(&e->thread_idle, false);
        pthread_mutex_lock(&e->driving);
        while (!thread_unwanted(e) && has_work(e))
            if (!sweep(e))
                pause_driving(e, thread_unwanted);
        pthread_mutex_unlock(&e->driving);
        wake_waiting(e); /* a caller may drive now */
    }
    return NULL;
}

bool hvdl_operation_done(const hvdl_operation *op)
{
    return atomic_load_explicit(&op->state, memory_order_acquire) >= HVDL_DONE;
}

bool hvdl_operation_wait(hvdl_engine *e, hvdl_operation *op, long timeout_ns)
{
    if (hvdl_operation_done(op))
        return true;
    if (stopping(e)) { /* close is about to end it */
        hvdl_futex_wait(&e->done_count, atomic_load(&e->done_count), 10000000L);
        return hvdl_operation_done(op);
    }
    uint64_t deadline = now_ns() + (uint64_t)timeout_ns;
    atomic_fetch_add(&e->num_waiting, 1);
    while (!hvdl_operation_done(op) && !stopping(e)) {
        uint32_t seen = atomic_load(&e->done_count);
        if (!pthread_mutex_trylock(&e->driving)) {
            int looks = 0;
            while (!hvdl_operation_done(op) && !stopping(e)) {
                if (!sweep(e))
                    pause_driving(e, stopping);
                if (++looks % 64 == 0 || e->pause_ns)
                    if (now_ns() >= deadline)
                        break;
            }
            pthread_mutex_unlock(&e->driving);
            wake_waiting(e);
        } else {
            hvdl_shm_kick(&e->shm); /* the thread makes way for callers */
            atomic_fetch_add(&e->num_sleeping, 1);
            if (!hvdl_operation_done(op))
                hvdl_futex_wait(&e->done_count, seen, 10000000L);
            atomic_fetch_sub(&e->num_sleeping, 1);
        }
        if (now_ns() >= deadline)
            break;
    }
    if (atomic_fetch_sub(&e->num_waiting, 1) == 1 && has_work(e))
        wake_thread(e);
    return hvdl_operation_done(op);
}

void hvdl_engine_poll(hvdl_engine *e)
{
    if (e->has_thread || e->config.num_ranks == 1 || pthread_mutex_trylock(&e->driving))
        return;
    if (!sweep(e))
        look_for_dead(e);
    pthread_mutex_unlock(&e->driving);
}

/* ---- what callers read ---- */

const char *hvdl_operation_error(const hvdl_operation *op)
{
    if (atomic_load_explicit(&op->state, memory_order_acquire) != HVDL_FAILED)
        return NULL;
    return op->error ? op->error : "out of memory";
}

int hvdl_engine_num_ranks(const hvdl_engine *e)
{
    return e->config.num_ranks;
}

size_t hvdl_engine_event_capacity(const hvdl_engine *e)
{
    return e->config.event_capacity;
}

const int64_t *hvdl_operation_rows(const hvdl_operation *op)
{
    return op->all_rows;
}

const hvdl_desc *hvdl_operation_desc(const hvdl_operation *op)
{
    return &op->desc;
}

void *hvdl_operation_take_output(hvdl_operation *op)
{
    void *output = op->work;
    op->work = NULL;
    return output;
}

void *hvdl_operation_release(hvdl_engine *e, hvdl_operation *op)
{
    pthread_mutex_lock(&e->queue_lock);
    bool free_now = op->finished && !op->pinned;
    op->released = true;
    pthread_mutex_unlock(&e->queue_lock);
    if (!free_now)
        return NULL;
    void *owner = op->owner;
    free_operation(op);
    return owner;
}

void *hvdl_engine_reap(hvdl_engine *e)
{
    void *owner = NULL;
    while (!owner) {
        pthread_mutex_lock(&e->queue_lock);
        hvdl_operation *op = e->orphans;
        if (op)
            e->orphans = op->next;
        else if (e->num_dead_owners)
            owner = e->dead_owners[--e->num_dead_owners];
        pthread_mutex_unlock(&e->queue_lock);
        if (!op)
            break;
        owner = op->owner;
        free_operation(op);
    }
    return owner;
}

size_t hvdl_engine_events(hvdl_engine *e, hvdl_event *to, size_t room)
{
    pthread_mutex_lock(&e->queue_lock);
    size_t capacity = e->config.event_capacity;
    size_t count = e->num_events < capacity ? (size_t)e->num_events : capacity;
    count = count < room ? count : room;
    for (size_t i = 0; i < count; i++)
        to[i] = e->events[(e->num_events - count + i) % capacity];
    pthread_mutex_unlock(&e->queue_lock);
    return count;
}

hvdl_counters hvdl_engine_counters(hvdl_engine *e)
{
    hvdl_counters counters = {0};
    pthread_mutex_lock(&e->queue_lock);
    counters.operations = e->num_operations;
    pthread_mutex_unlock(&e->queue_lock);
    counters.control_messages = hvdl_control_messages(e);
    counters.data_messages = e->wire.data_messages;
    counters.data_bytes = e->wire.data_bytes;
    return counters;
}

/* ---- life ---- */

static void free_geometry(hvdl_engine *e)
{
    for (int h = 0; e->host_names && h < e->config.num_hosts; h++)
        free(e->host_names[h]);
    free(e->host_names);
    free(e->name_of);
    free(e->host_sizes);
    free(e->members);
    free(e->host_of);
    free(e->local_of);
    free(e->host_first);
    free(e->rail_peers);
    free(e->events);
    free(e->scratch);
}

static void *copy_of(const void *from, size_t bytes)
{
    void *to = malloc(bytes ? bytes : 1);
    if (to)
        memcpy(to, from, bytes);
    return to;
}

/* Who is where, and who speaks with whom. */
static hvdl_err set_geometry(hvdl_engine *e, const hvdl_engine_config *config)
{
    size_t ranks = (size_t)config->num_ranks, hosts = (size_t)config->num_hosts;
    e->config = *config;
    e->host_sizes = copy_of(config->host_sizes, hosts * sizeof(int));
    e->members = copy_of(config->members, ranks * sizeof(int));
    e->host_of = calloc(ranks, sizeof(int));
    e->local_of = calloc(ranks, sizeof(int));
    e->host_first = calloc(hosts, sizeof(int));
    e->name_of = calloc(ranks, sizeof *e->name_of);
    e->host_names = calloc(hosts, sizeof *e->host_names);
    e->rail_peers = calloc(hosts, sizeof(int));
    e->scratch = malloc(sizeof(post_body) + config->inline_bytes);
    e->events = calloc(config->event_capacity + 1, sizeof *e->events);
    if (!e->host_sizes || !e->members || !e->host_of || !e->local_of || !e->host_first ||
        !e->name_of || !e->host_names || !e->rail_peers || !e->scratch || !e->events)
        return HVDL_ENOMEM;
    e->config.host_sizes = e->host_sizes;
    e->config.members = e->members;
    e->num_rails = config->num_ranks;
    for (int h = 0, first = 0; h < config->num_hosts; first += config->host_sizes[h++]) {
        e->host_first[h] = first;
        e->host_names[h] = strdup(config->host_names[h]);
        if (!e->host_names[h])
            return HVDL_ENOMEM;
        if (config->host_sizes[h] < e->num_rails)
            e->num_rails = config->host_sizes[h];
        if (config->host_sizes[h] > e->max_local_size)
            e->max_local_size = config->host_sizes[h];
        for (int local = 0; local < config->host_sizes[h]; local++) {
            int rank = e->members[first + local];
            e->host_of[rank] = h;
            e->local_of[rank] = local;
            e->name_of[rank] = e->host_names[h];
        }
    }
    e->config.host_names = (const char *const *)e->host_names;
    e->host = e->host_of[config->rank];
    e->local = e->local_of[config->rank];
    e->local_size = e->host_sizes[e->host];
    e->is_leader = e->local == 0;
    for (int h = 0; h < config->num_hosts && e->local < e->num_rails; h++)
        e->rail_peers[h] = e->members[e->host_first[h] + e->local];
    if (config->wire)
        e->wire = *config->wire;
    return HVDL_OK;
}

static hvdl_err start_thread(hvdl_engine *e)
{
    if (!e->config.progress_thread || e->config.num_ranks == 1)
        return HVDL_OK;
    /* Signals are for the user's threads. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&e->thread, NULL, progress_main, e);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed)
        return HVDL_ENOMEM;
    pthread_setname_np(e->thread, "hvdlite");
    e->has_thread = true;
    return HVDL_OK;
}

hvdl_err hvdl_engine_create(hvdl_engine **out, const hvdl_engine_config *config)
{
    hvdl_engine *e = calloc(1, sizeof *e);
    if (!e)
        return HVDL_ENOMEM;
    pthread_mutex_init(&e->queue_lock, NULL);
    pthread_mutex_init(&e->driving, NULL);
    hvdl_err err = set_geometry(e, config);
    if (!err)
        err = hvdl_shm_open(&e->shm, config->memory_fd, e->local_size, e->local,
                            config->inline_bytes, config->block_bytes);
    if (err) {
        free_geometry(e);
        free(e);
        return err;
    }
    hvdl_conveyor_init(&e->conveyor, &e->shm);
    if (config->num_hosts > 1)
        err = hvdl_control_create(e);
    if (!err)
        err = start_thread(e);
    if (err) {
        hvdl_control_destroy(e);
        hvdl_shm_close(&e->shm);
        free_geometry(e);
        free(e);
        return err;
    }
    *out = e;
    return HVDL_OK;
}

#define DRAIN_NS 1000000000ull /* how long a rank that leaves helps to end what is under way */

static void leave(hvdl_engine *e)
{
    hvdl_shm_rank *self = &e->shm.control->ranks[e->local];
    uint64_t deadline = now_ns() + DRAIN_NS;
    hvdl_announce(e,
                  (hvdl_entry){.type = HVDL_ENTRY_LEAVE, .id = (uint64_t)e->config.rank, .arg = 1},
                  NULL, 0);
    sweep(e);
    /* What is matched needs this rank: it ends that first. */
    while ((e->deferred || e->meetings_by_id.count || e->exchanges) && !e->broken &&
           now_ns() < deadline)
        if (!sweep(e))
            pause_driving(e, nobody);
    bool clean = !e->meetings_by_id.count && !e->exchanges && !e->deferred;
    atomic_store(&self->left, clean ? 1 : 2);
    /* The journal need not wait for this rank any more. */
    atomic_store(&self->cursor, UINT64_MAX - 2 * e->shm.ring_bytes);
    if (e->config.num_hosts > 1)
        hvdl_control_leave(e, clean);
}

#define LONGEST_LINGER_PAUSE_NS 20000000L

static void linger_for_others(hvdl_engine *e)
{
    struct timespec pause = {0, 100000};
    while (!e->broken && !hvdl_control_all_left(e)) {
        if (sweep(e))
            continue;
        nanosleep(&pause, NULL);
        if (pause.tv_nsec < LONGEST_LINGER_PAUSE_NS)
            pause.tv_nsec *= 2;
    }
}

void hvdl_engine_close(hvdl_engine *e, bool linger)
{
    pthread_mutex_lock(&e->queue_lock);
    bool was_closed = e->closed;
    e->closed = true;
    pthread_mutex_unlock(&e->queue_lock);
    if (was_closed)
        return;
    atomic_store(&e->stop, true);
    if (e->has_thread) {
        hvdl_shm_kick(&e->shm);
        atomic_fetch_add(&e->shm.control->ranks[e->local].idle_bell, 1);
        hvdl_futex_wake(&e->shm.control->ranks[e->local].idle_bell);
        pthread_join(e->thread, NULL);
        e->has_thread = false;
    }
    if (e->config.num_ranks == 1)
        return;
    hvdl_shm_kick(&e->shm);
    pthread_mutex_lock(&e->driving);
    if (!e->broken) {
        take_queue(e);
        leave(e);
        if (linger && e->config.num_hosts > 1 && e->is_leader)
            linger_for_others(e);
    }
    char text[HVDL_TEXT_BYTES];
    snprintf(text, sizeof text, "rank %d called shutdown before the operation had ended",
             e->config.rank);
    e->broken = true;
    fail_all(e, text);
    hvdl_control_destroy(e);
    pthread_mutex_unlock(&e->driving);
    wake_waiting(e);
}

void hvdl_engine_free(hvdl_engine *e)
{
    hvdl_shm_close(&e->shm);
    for (size_t i = 0; i < e->plans.num_slots; i++)
        for (hvdl_node *node = e->plans.slots[i], *next; node; node = next) {
            hvdl_plan *plan = HVDL_CONTAINER(node, hvdl_plan, by_id);
            next = node->next;
            free(plan->name);
            free(plan->error);
            free(plan);
        }
    for (size_t i = 0; i < e->meetings.num_slots; i++)
        for (hvdl_node *node = e->meetings.slots[i], *next; node; node = next) {
            next = node->next;
            free_meeting(HVDL_CONTAINER(node, hvdl_meeting, by_key));
        }
    while (e->deferred) {
        hvdl_deferred *next = e->deferred->next;
        free(e->deferred);
        e->deferred = next;
    }
    free(e->plans.slots);
    free(e->meetings.slots);
    free(e->meetings_by_id.slots);
    free(e->in_flight.slots);
    free(e->dead_owners);
    free(e->gone);
    pthread_mutex_destroy(&e->queue_lock);
    pthread_mutex_destroy(&e->driving);
    free_geometry(e);
    free(e);
}
