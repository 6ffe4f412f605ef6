/* Messages between hosts: their leaders send them to each other, and each puts what concerns its host
 * into its host's journal. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "control.h"

#define TESTS_PER_STEP 8 /* receives looked at in one step, in turn */

/* ---- sending ---- */

void hvdl_send_message(hvdl_engine *e, int host, hvdl_message *head, const void *payload,
                       size_t payload_bytes)
{
    hvdl_control *control = e->control;
    hvdl_sending *message = malloc(sizeof *message + sizeof *head + payload_bytes);
    head->host = e->host;
    head->payload_bytes = (uint32_t)payload_bytes;
    head->num_done = 0;
    hvdl_done_notes *notes = &control->notes[host];
    if (head->type == HVDL_MSG_POSTED || head->type == HVDL_MSG_DONE) {
        head->num_done = notes->count;
        memcpy(head->done, notes->numbers, sizeof head->done);
        notes->count = 0;
    }
    if (!message) {
        hvdl_break(e, "rank %d is out of memory", hvdl_own_number(e));
        return;
    }
    memcpy(message->bytes, head, sizeof *head);
    if (payload_bytes)
        memcpy(message->bytes + sizeof *head, payload, payload_bytes);
    if (hvdl_wire_send(&e->wire, message->bytes, sizeof *head + payload_bytes,
                       hvdl_leader_of(e, host), HVDL_TAG_CONTROL, &message->request)) {
        free(message);
        hvdl_break(e, "rank %d on %s: MPI reported an error", hvdl_own_number(e),
                   e->name_of[e->config.rank]);
        return;
    }
    message->next = control->sendings;
    control->sendings = message;
    e->wire.control_messages++;
}

static bool test_sends(hvdl_engine *e)
{
    bool any = false;
    for (hvdl_sending **at = &e->control->sendings; *at;) {
        hvdl_sending *message = *at;
        bool done = false;
        if (hvdl_wire_test(&e->wire, &message->request, &done) || !done) {
            at = &message->next;
            continue;
        }
        *at = message->next;
        free(message);
        any = true;
    }
    return any;
}

/* ---- receiving ---- */

static void take_runs(hvdl_engine *e, int tag, uint64_t num_runs)
{
    hvdl_plan *plan = hvdl_plan_by_tag(e, tag);
    if (!plan || (plan->ends_elsewhere && plan->num_runs_elsewhere <= num_runs))
        return;
    plan->ends_elsewhere = true;
    plan->num_runs_elsewhere = num_runs;
}

void hvdl_announce_leave(hvdl_engine *e, int rank, bool clean)
{
    hvdl_entry entry = {.type = HVDL_ENTRY_LEAVE, .id = (uint64_t)rank, .arg = clean};
    hvdl_announce(e, entry, NULL, 0);
}

/* Its sender says nothing more: it leaves, or is broken, whoever is the cause. */
static bool is_last(const hvdl_engine *e, const hvdl_message *head)
{
    return head->type == HVDL_MSG_LEFT &&
           (!head->clean || head->rank == hvdl_leader_of(e, head->host));
}

static void take_message(hvdl_engine *e, const char *bytes)
{
    hvdl_message head;
    memcpy(&head, bytes, sizeof head);
    const char *payload = bytes + sizeof head;
    for (int i = 0; i < head.num_done; i++)
        hvdl_take_done(e, head.done[i]);
    switch (head.type) {
    case HVDL_MSG_POSTED: hvdl_take_posted(e, &head, payload); break;
    case HVDL_MSG_MATCHED:
    case HVDL_MSG_RESULT:
    case HVDL_MSG_FAILED: hvdl_take_answer(e, &head, payload); break;
    case HVDL_MSG_JOINED: hvdl_take_joined(e, head.host, head.rank); break;
    case HVDL_MSG_ALL_JOINED: hvdl_take_all_joined(e, head.host, head.rank); break;
    case HVDL_MSG_FREE: hvdl_take_free(e, head.tag); break;
    case HVDL_MSG_ZERO: hvdl_take_zero(e, &head); break;
    case HVDL_MSG_RUN: hvdl_take_run(e, head.tag, head.run); break;
    case HVDL_MSG_RUNS: take_runs(e, head.tag, head.run); break;
    case HVDL_MSG_STALLED: hvdl_take_stalled(e, payload); break;
    case HVDL_MSG_ASK: hvdl_take_ask(e, head.host, head.key, head.run); break;
    case HVDL_MSG_STATUS: hvdl_take_status(e, head.host, head.key, head.run, payload); break;
    case HVDL_MSG_GIVE_UP: hvdl_take_give_up(e, payload); break;
    case HVDL_MSG_ORDER: hvdl_give_turn(e, head.host, head.key); break;
    case HVDL_MSG_TURN: hvdl_take_turn(e, head.key, head.tag); break;
    case HVDL_MSG_LEFT:
        e->control->num_left += is_last(e, &head);
        if (!head.clean || !hvdl_hold_leave(e, head.host, head.rank))
            hvdl_announce_leave(e, head.rank, head.clean);
        break;
    default: break;
    }
}

static bool post_receive(hvdl_engine *e, int host)
{
    hvdl_control *control = e->control;
    return !hvdl_wire_recv(&e->wire, control->receive_buffers + (size_t)host * control->room,
                           control->room, hvdl_leader_of(e, host), HVDL_TAG_CONTROL,
                           &control->receives[host]);
}

/* Takes the message that has come from a host's leader, if one has. */
static bool receive(hvdl_engine *e, int host)
{
    hvdl_control *control = e->control;
    hvdl_request *request = &control->receives[host];
    bool done = false;
    if (!request->active || hvdl_wire_test(&e->wire, request, &done) || !done)
        return false;
    const char *message = control->receive_buffers + (size_t)host * control->room;
    hvdl_message head;
    memcpy(&head, message, sizeof head);
    bool last = is_last(e, &head);
    take_message(e, message);
    if (!last && !post_receive(e, host))
        hvdl_break(e, "rank %d on %s: MPI reported an error", hvdl_own_number(e),
                   e->name_of[e->config.rank]);
    return true;
}

static bool receive_some(hvdl_engine *e)
{
    hvdl_control *control = e->control;
    bool any = false;
    int hosts = e->config.num_hosts, tests = hosts < TESTS_PER_STEP ? hosts : TESTS_PER_STEP;
    for (int i = 0; i < tests && !e->broken; i++) {
        control->next_receive = (control->next_receive + 1) % hosts;
        any |= receive(e, control->next_receive);
    }
    return any;
}

bool hvdl_control_step(hvdl_engine *e, bool *progressed)
{
    if (e->control->sendings)
        *progressed |= test_sends(e);
    if (e->is_leader)
        *progressed |= receive_some(e);
    return e->control->sendings != NULL;
}

/* A run of a plan begins on each host without asking the others. They must learn which ones this host
 * has begun, and so will end: it begins no more, as a rank of it leaves. */
static void tell_runs(hvdl_engine *e)
{
    e->control->has_told_runs = true;
    for (size_t i = 0; i < e->plans.num_slots; i++)
        for (hvdl_node *node = e->plans.slots[i]; node; node = node->next) {
            const hvdl_plan *plan = HVDL_CONTAINER(node, hvdl_plan, by_id);
            for (int h = 0; h < e->config.num_hosts && !e->broken; h++) {
                hvdl_message head = {
                    .type = HVDL_MSG_RUNS, .tag = plan->tag, .run = plan->num_runs};
                if (h != e->host)
                    hvdl_send_message(e, h, &head, NULL, 0);
            }
        }
}

bool hvdl_control_run_is_lost(const hvdl_engine *e)
{
    for (size_t i = 0; i < e->plans.num_slots; i++)
        for (hvdl_node *node = e->plans.slots[i]; node; node = node->next) {
            const hvdl_plan *plan = HVDL_CONTAINER(node, hvdl_plan, by_id);
            if (plan->ends_elsewhere && plan->num_active &&
                plan->num_runs > plan->num_runs_elsewhere)
                return true;
        }
    return false;
}

void hvdl_control_leave(hvdl_engine *e, int rank, bool clean)
{
    if (!e->is_leader || e->control->has_left)
        return;
    e->control->has_left = !clean || rank == e->config.rank;
    if (clean && !e->control->has_told_runs)
        tell_runs(e);
    for (int h = 0; h < e->config.num_hosts; h++)
        if (h != e->host) {
            hvdl_message head = {.type = HVDL_MSG_LEFT, .rank = rank, .clean = clean};
            hvdl_send_message(e, h, &head, NULL, 0);
        }
}

bool hvdl_control_all_left(const hvdl_engine *e)
{
    return e->control->num_left == e->config.num_hosts - 1;
}

/* ---- life ---- */

size_t hvdl_largest_payload(const hvdl_engine_config *config)
{
    size_t most = config->inline_bytes > HVDL_TEXT_BYTES ? config->inline_bytes : HVDL_TEXT_BYTES;
    for (int h = 0; h < config->num_hosts; h++) {
        size_t rows = (size_t)config->num_ranks * (size_t)config->host_sizes[h] * sizeof(int64_t);
        most = rows > most ? rows : most;
    }
    return most;
}

hvdl_err hvdl_control_create(hvdl_engine *e)
{
    hvdl_control *control = calloc(1, sizeof *control);
    if (!control)
        return HVDL_ENOMEM;
    e->control = control;
    int hosts = e->config.num_hosts;
    int numbers = (e->wire.tag_ub - HVDL_TAG_FIRST) / HVDL_TAGS_PER_ID / hosts;
    control->numbers_per_host = numbers < HVDL_MAX_TAG_NUMBERS ? numbers : HVDL_MAX_TAG_NUMBERS;
    if (control->numbers_per_host < 2 * HVDL_MAX_DONE)
        return HVDL_EINVAL; /* notes that are kept back would use up all numbers */
    control->room = (sizeof(hvdl_message) + hvdl_largest_payload(&e->config) + 63) / 64 * 64;
    control->receives = calloc((size_t)hosts, sizeof *control->receives);
    control->receive_buffers = malloc(e->is_leader ? (size_t)hosts * control->room : 1);
    control->joins = calloc((size_t)hosts, sizeof *control->joins);
    control->heard = calloc((size_t)hosts, sizeof *control->heard);
    control->is_plan = calloc((size_t)control->numbers_per_host, sizeof *control->is_plan);
    control->notes = calloc((size_t)hosts, sizeof *control->notes);
    control->num_done = calloc((size_t)control->numbers_per_host, sizeof *control->num_done);
    control->free_numbers = calloc((size_t)control->numbers_per_host, sizeof(int));
    if (!control->joins || !control->heard || !control->is_plan || !control->receives ||
        !control->receive_buffers || !control->notes || !control->num_done ||
        !control->free_numbers)
        return HVDL_ENOMEM;
    for (int number = control->numbers_per_host - 1; number >= 0; number--)
        control->free_numbers[control->num_free++] = number;
    for (int h = 0; e->is_leader && h < hosts; h++)
        if (h != e->host && !post_receive(e, h))
            return HVDL_EMPI;
    return HVDL_OK;
}

/* What was said last (an answer, LEFT) should leave before the process goes on to other things. */
static void flush_sends(hvdl_engine *e)
{
    struct timespec pause = {0, 100000};
    for (int i = 0; i < 10000 && e->control->sendings; i++) {
        test_sends(e);
        if (!e->control->sendings)
            return;
        if (i < 100)
            sched_yield();
        else
            nanosleep(&pause, NULL);
    }
}

void hvdl_control_destroy(hvdl_engine *e)
{
    hvdl_control *control = e->control;
    if (!control)
        return;
    bool ended = true;
    if (control->notes)
        flush_sends(e);
    for (int h = 0; control->receives && h < e->config.num_hosts; h++)
        ended &= hvdl_wire_cancel_recv(&e->wire, &control->receives[h]);
    hvdl_free_agreements(e);
    if (ended) { /* else MPI may still write into them */
        free(control->receive_buffers);
        free(control->receives);
    }
    /* Sends that have not left are MPI's to read for the life of the process. */
    free(control->notes);
    hvdl_free_early_runs(e);
    while (control->held_leaves) {
        hvdl_held_leave *next = control->held_leaves->next;
        free(control->held_leaves);
        control->held_leaves = next;
    }
    free(control->joins);
    free(control->heard);
    free(control->is_plan);
    free(control->num_done);
    free(control->free_numbers);
    free(control);
    e->control = NULL;
}
