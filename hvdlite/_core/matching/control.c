/* Messages between hosts: their leaders send them to each other, and each puts what concerns its host
 * into its host's shared log. */
#define _GNU_SOURCE
#include "matching/control.h"

#include <string.h>

#include "base/sizes.h"
#include "engine/fatal.h"
#include "engine/giving_up.h"
#include "engine/state.h"
#include "matching/announcing.h"
#include "matching/coordinator.h"
#include "matching/join.h"
#include "matching/messages.h"
#include "matching/soundness.h"
#include "matching/tags.h"
#include "operations/plans.h"
#include "watching/missing_query.h"

#define PACKET_BYTES 61440 /* as a segment; a packet may hold more if one message needs it */

/* ---- receiving ---- */

static void on_runs(hvdl_engine *e, int tag, uint64_t num_runs)
{
    hvdl_plan *plan = hvdl_plan_by_tag(e, tag);
    if (!plan || (plan->ends_elsewhere && plan->num_runs_elsewhere <= num_runs))
        return;
    plan->ends_elsewhere = true;
    plan->num_runs_elsewhere = num_runs;
}

/* Its sender says nothing more: it leaves, or is broken, whichever rank is the cause. */
static bool is_last(const hvdl_engine *e, const hvdl_message *head)
{
    return head->type == HVDL_MSG_LEFT &&
           (!head->clean || head->rank == hvdl_leader_of(e, head->host));
}

/* Reads the message at *at, and moves on behind its payload, which it returns; NULL: it is none, or does not
 * end before `end`. */
static const char *next_message(const char **at, const char *end, hvdl_message *message)
{
    size_t fixed = offsetof(hvdl_message, variants.variants);
    *message = (hvdl_message){.type = 0};
    if ((size_t)(end - *at) < fixed)
        return NULL;
    memcpy(message, *at, fixed);
    if (!hvdl_message_fits(message, *at, end))
        return NULL;
    memcpy((char *)message + fixed, *at + fixed, hvdl_message_bytes(message) - fixed);
    const char *payload = *at + hvdl_padded(hvdl_message_bytes(message));
    *at = payload + hvdl_padded(message->payload_bytes);
    return payload;
}

static void on_message(hvdl_engine *e, const hvdl_message *message, const char *payload)
{
    for (int i = 0; i < message->num_done; i++)
        hvdl_on_done(e, message->done[i]);
    hvdl_hear_clock(e, message->clock);
    switch (message->type) {
    case HVDL_MSG_POSTED: hvdl_on_posted(e, message, payload); break;
    case HVDL_MSG_START:
    case HVDL_MSG_RESULT:
    case HVDL_MSG_FAILED: hvdl_on_answer(e, message, payload); break;
    case HVDL_MSG_HOST_JOINED:
        hvdl_on_host_joined(e, message->host, message->rank, message->clock);
        break;
    case HVDL_MSG_ALL_JOINED: hvdl_on_all_joined(e, message->host, message->rank); break;
    case HVDL_MSG_FREE: hvdl_on_free(e, message->tag); break;
    case HVDL_MSG_SHORT: hvdl_on_short(e, message->host); break;
    case HVDL_MSG_ZERO: hvdl_on_zero(e, message); break;
    case HVDL_MSG_RUN: hvdl_on_run(e, message->tag, message->run); break;
    case HVDL_MSG_RUNS: on_runs(e, message->tag, message->run); break;
    case HVDL_MSG_GIVE_UP: hvdl_on_give_up(e, payload, message->payload_bytes); break;
    case HVDL_MSG_MISSING_QUERY:
        hvdl_on_missing_query(e, message->host, payload, message->payload_bytes);
        break;
    case HVDL_MSG_MISSING_ANSWER:
        hvdl_on_roll_answer(e, message->host, payload, message->payload_bytes);
        break;
    case HVDL_MSG_ORDER: hvdl_on_order(e, message->host, message->key); break;
    case HVDL_MSG_SEQUENCE: hvdl_on_sequence(e, message->key, message->tag); break;
    case HVDL_MSG_LEFT:
        e->control->num_left += is_last(e, message);
        if (!message->clean || !hvdl_hold_leave(e, message->host, message->rank))
            hvdl_announce_leave(e, message->rank, message->clean);
        break;
    default: break;
    }
}

static hvdl_err post_receive(hvdl_engine *e, int host)
{
    hvdl_control *control = e->control;
    return hvdl_wire_recv(&e->wire, control->receive_buffers + (size_t)host * control->room,
                          control->room, hvdl_leader_of(e, host), HVDL_TAG_CONTROL,
                          &control->receives[host]);
}

/* Takes the packet that has come from a host's leader, if one has. After a break no message is read, as no
 * entry is: what it is about may be half made. */
static bool receive(hvdl_engine *e, int host)
{
    hvdl_control *control = e->control;
    if (!control->receives[host].ended)
        return false;
    control->receives[host].ended = false;
    const char *at = control->receive_buffers + (size_t)host * control->room;
    const char *end = at + control->room;
    uint64_t num_messages;
    bool last = false;
    memcpy(&num_messages, at, sizeof num_messages);
    at += sizeof num_messages;
    for (uint64_t i = 0; i < num_messages && !e->failure.broken; i++) {
        hvdl_message message;
        const char *payload = next_message(&at, end, &message);
        if (!payload || !hvdl_message_is_sound(e, host, &message, payload)) {
            int leader = hvdl_leader_of(e, host);
            hvdl_fatal_because_of(
                e, leader,
                "rank %d on %s sent a control message that is damaged (type %d, %d "
                "variants, %u bytes): its memory, or the network, is not in order",
                e->config.world_ranks[leader], e->placement.name_of[leader], (int)message.type,
                (int)message.variants.count, (unsigned)message.payload_bytes);
            break;
        }
        last |= is_last(e, &message);
        on_message(e, &message, payload);
    }
    hvdl_err err = last ? HVDL_OK : post_receive(e, host);
    if (err)
        hvdl_fatal_for_wire(e, err);
    return true;
}

static bool receive_all(hvdl_engine *e)
{
    bool any = false;
    for (int h = 0; h < e->config.num_hosts && !e->failure.broken; h++)
        any |= receive(e, h);
    return any;
}

void hvdl_control_step(hvdl_engine *e, bool *progressed)
{
    if (e->control->sendings)
        *progressed |= hvdl_free_sent_messages(e);
    if (!e->placement.is_leader || e->failure.broken)
        return;
    bool heard = receive_all(e);
    *progressed |= heard || e->control->joins.own_join >= 0;
    if (e->control->joins.own_join >= 0 && !e->failure.broken)
        hvdl_tell_own_join(e, heard);
}

/* ---- life ---- */

/* The longest payload of a posting, or of a message between hosts. */
static hvdl_err largest_payload(const hvdl_engine_config *config, size_t *bytes)
{
    size_t most = config->inline_bytes > HVDL_TEXT_BYTES ? config->inline_bytes : HVDL_TEXT_BYTES;
    for (int h = 0; h < config->num_hosts; h++) {
        size_t rows = 2 * (size_t)config->host_sizes[h] * sizeof(int64_t);
        hvdl_err err = hvdl_multiply(rows, (size_t)config->num_ranks, &rows);
        if (err)
            return err;
        most = rows > most ? rows : most;
    }
    *bytes = most;
    return HVDL_OK;
}

hvdl_err hvdl_control_create(hvdl_engine *e)
{
    hvdl_control *control = calloc(1, sizeof *control);
    if (!control)
        return HVDL_ENOMEM;
    e->control = control;
    size_t hosts = (size_t)e->config.num_hosts, payload;
    size_t largest = sizeof(uint64_t) + sizeof(hvdl_message);
    hvdl_err err = hvdl_tags_make(e);
    if (!err)
        err = largest_payload(&e->config, &payload);
    if (!err)
        err = hvdl_coordinator_make(e, payload);
    if (!err)
        err = hvdl_host_joins_make(e);
    if (err)
        return err;
    if (hvdl_add(payload, largest + 63, &control->room) || control->room > HVDL_MAX_MESSAGE_BYTES)
        return HVDL_ENOMEM;
    control->room = (control->room > PACKET_BYTES ? control->room : PACKET_BYTES) / 64 * 64;
    control->packets = calloc(hosts, sizeof *control->packets);
    control->receives = calloc(hosts, sizeof *control->receives);
    control->receive_buffers = hvdl_new_array(e->placement.is_leader ? hosts : 0, control->room);
    if (!control->packets || !control->receives || !control->receive_buffers)
        return HVDL_ENOMEM;
    for (int h = 0; !err && e->placement.is_leader && h < e->config.num_hosts; h++)
        if (h != e->placement.host)
            err = post_receive(e, h);
    return err;
}

void hvdl_control_destroy(hvdl_engine *e)
{
    hvdl_control *control = e->control;
    if (!control)
        return;
    bool ended = true;
    if (control->packets)
        hvdl_await_sent_messages(e);
    for (int h = 0; control->receives && h < e->config.num_hosts; h++)
        ended &= hvdl_wire_cancel_recv(&e->wire, &control->receives[h]);
    if (ended) { /* else MPI may still write into them */
        free(control->receive_buffers);
        free(control->receives);
    }
    /* Sends that have not left are MPI's to read for the life of the process. */
    for (int h = 0; control->packets && h < e->config.num_hosts; h++)
        free(control->packets[h]);
    free(control->packets);
    hvdl_coordinator_free(&control->coordinator);
    hvdl_tags_free(&control->tags);
    hvdl_host_joins_free(&control->joins);
    free(control);
    e->control = NULL;
}
