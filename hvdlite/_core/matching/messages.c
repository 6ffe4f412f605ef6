/* Messages between hosts, on their way: what is said to a host's leader leaves in packets; and the last that
 * this host says. */
#define _GNU_SOURCE
#include "matching/messages.h"

#include <sched.h>
#include <string.h>
#include <time.h>

#include "engine/fatal.h"
#include "engine/state.h"

static uint16_t last_site_bytes(const hvdl_variants *variants)
{
    if (!variants->count)
        return 0;
    return (uint16_t)(strlen(variants->variants[variants->count - 1].site) + 1);
}

static void send_packet(hvdl_engine *e, int host)
{
    hvdl_control *control = e->control;
    hvdl_packet *packet = control->packets[host];
    control->packets[host] = NULL;
    control->num_packets--;
    hvdl_err err = hvdl_wire_send(&e->wire, &packet->head, packet->bytes_used,
                                  hvdl_leader_of(e, host), HVDL_TAG_CONTROL, &packet->request);
    if (err) {
        free(packet);
        hvdl_fatal_for_wire(e, err);
        return;
    }
    packet->next = control->sendings;
    control->sendings = packet;
    e->wire.control_messages++;
}

void hvdl_control_flush(hvdl_engine *e)
{
    for (int h = 0; h < e->config.num_hosts && e->control->num_packets; h++)
        if (e->control->packets[h])
            send_packet(e, h);
}

/* The host's packet, with room for so much more; NULL: no memory. */
static hvdl_packet *packet_for(hvdl_engine *e, int host, size_t bytes)
{
    hvdl_control *control = e->control;
    hvdl_packet *packet = control->packets[host];
    if (packet && packet->bytes_used + bytes > control->room) {
        send_packet(e, host);
        packet = NULL;
    }
    if (packet)
        return packet;
    packet = malloc(sizeof *packet + control->room);
    if (!packet)
        return NULL;
    packet->bytes_used = sizeof packet->head;
    packet->head.num_messages = 0;
    control->packets[host] = packet;
    control->num_packets++;
    return packet;
}

void hvdl_send_message(hvdl_engine *e, int host, hvdl_message *message, const void *payload,
                       size_t payload_bytes)
{
    message->site_bytes = last_site_bytes(&message->variants);
    size_t bytes = hvdl_padded(hvdl_message_bytes(message)), more = hvdl_padded(payload_bytes);
    if (e->control->has_left)
        return; /* the others receive nothing more from this leader */
    hvdl_packet *packet = packet_for(e, host, bytes + more);
    if (!packet) {
        hvdl_out_of_memory(e);
        return;
    }
    message->host = e->placement.host;
    message->clock = e->control->joins.clock;
    message->payload_bytes = (uint32_t)payload_bytes;
    message->num_done = 0;
    hvdl_done_notes *notes = &e->control->tags.notes[host];
    if (message->type == HVDL_MSG_POSTED || message->type == HVDL_MSG_DONE) {
        message->num_done = notes->count;
        memcpy(message->done, notes->numbers, sizeof message->done);
        notes->count = 0;
    }
    char *at = (char *)&packet->head + packet->bytes_used;
    memcpy(at, message, hvdl_message_bytes(message));
    if (payload_bytes)
        memcpy(at + bytes, payload, payload_bytes);
    packet->bytes_used += bytes + more;
    packet->head.num_messages++;
}

bool hvdl_free_sent_messages(hvdl_engine *e)
{
    bool any = false;
    for (hvdl_packet **at = &e->control->sendings; *at;) {
        hvdl_packet *packet = *at;
        if (packet->request.active) {
            at = &packet->next;
            continue;
        }
        *at = packet->next;
        free(packet);
        any = true;
    }
    return any;
}

/* ---- leaving ---- */

bool hvdl_control_busy(const hvdl_engine *e)
{
    return e->control->sendings != NULL;
}

/* A run of a plan begins on each host without asking the others. They must learn which ones this host
 * has begun, and so will end: it begins no more, as a rank of it leaves. */
static void tell_runs(hvdl_engine *e)
{
    e->control->has_told_runs = true;
    for (size_t i = 0; i < e->plans.by_id.num_slots; i++)
        for (hvdl_node *node = e->plans.by_id.slots[i]; node; node = node->next) {
            const hvdl_plan *plan = HVDL_CONTAINER(node, hvdl_plan, by_id);
            for (int h = 0; h < e->config.num_hosts; h++) {
                hvdl_message head = {
                    .type = HVDL_MSG_RUNS, .tag = plan->tag, .run = plan->num_runs};
                if (h != e->placement.host)
                    hvdl_send_message(e, h, &head, NULL, 0);
            }
        }
}

bool hvdl_control_run_is_lost(const hvdl_engine *e)
{
    for (size_t i = 0; i < e->plans.by_id.num_slots; i++)
        for (hvdl_node *node = e->plans.by_id.slots[i]; node; node = node->next) {
            const hvdl_plan *plan = HVDL_CONTAINER(node, hvdl_plan, by_id);
            if (plan->ends_elsewhere && plan->num_active &&
                plan->num_runs > plan->num_runs_elsewhere)
                return true;
        }
    return false;
}

void hvdl_control_leave(hvdl_engine *e, int rank, bool clean)
{
    if (!e->placement.is_leader || e->control->has_left)
        return;
    if (clean && !e->control->has_told_runs)
        tell_runs(e);
    for (int h = 0; h < e->config.num_hosts; h++)
        if (h != e->placement.host) {
            hvdl_message head = {.type = HVDL_MSG_LEFT, .rank = rank, .clean = clean};
            hvdl_send_message(e, h, &head, NULL, 0);
        }
    e->control->has_left = !clean || rank == e->config.rank;
    hvdl_control_flush(e);
}

bool hvdl_control_all_left(const hvdl_engine *e)
{
    return e->control->num_left == e->config.num_hosts - 1;
}

void hvdl_await_sent_messages(hvdl_engine *e)
{
    struct timespec pause = {0, 100000};
    hvdl_control_flush(e);
    for (int i = 0; i < 10000 && e->control->sendings; i++) {
        hvdl_err err = hvdl_wire_poll(&e->wire);
        hvdl_free_sent_messages(e);
        if (err || !e->control->sendings)
            return;
        if (i < 100)
            sched_yield();
        else
            nanosleep(&pause, NULL);
    }
}
