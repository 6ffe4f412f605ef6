/* What two ranks tell each other about a message. Within a host a header is an entry of the shared log, which
 * all read and the addressee heeds. Between hosts it goes from rank to rank over MPI, with a tag that is
 * nothing else's; so no rank in between must be awake for it. Either way the headers of one rank to another
 * one arrive in order: that is what keeps messages from overtaking each other.
 *
 * A rank hears a member of another host from its first transfer with that on. What was sent before waits in
 * MPI. (A receive from any source, MPI's own, would do with fewer receives; see hvdl_control for why not.) */
#define _GNU_SOURCE
#include <sched.h>
#include <string.h>
#include <time.h>

#include "base/sizes.h"
#include "engine/fatal.h"
#include "engine/state.h"
#include "matching/announcing.h"
#include "transfers/transfers.h"

#define NUM_FLUSHES 10000

/* What another rank wrote is read with care: a defect there must not write to this rank's memory. */
static bool is_sound(hvdl_engine *e, const hvdl_match_header *header, int from, size_t payload_room)
{
    if (header->from == from && header->to == e->config.rank &&
        header->payload_bytes <= payload_room)
        return true;
    hvdl_fatal(e, "rank %d received a header from rank %d on %s that it can't read",
               hvdl_own_number(e), hvdl_world_rank(e, from), e->placement.name_of[from]);
    return false;
}

static bool is_here(const hvdl_engine *e, int member)
{
    return e->placement.host_of[member] == e->placement.host;
}

/* ---- within the host ---- */

static void announce(hvdl_engine *e, const hvdl_match_header *header, const void *payload)
{
    char body[sizeof *header + HVDL_EAGER_BYTES];
    memcpy(body, header, sizeof *header);
    if (header->payload_bytes)
        memcpy(body + sizeof *header, payload, header->payload_bytes);
    hvdl_announce(e, (hvdl_entry){.type = HVDL_ENTRY_HEADER, .id = (uint64_t)header->to}, body,
                  sizeof *header + header->payload_bytes);
    if (header->type == HVDL_HEADER_CANCEL) /* which may do nothing for a while, and must answer */
        hvdl_shm_ring_idle(&e->shm, e->placement.local_of[header->to]);
}

void hvdl_read_header(hvdl_engine *e, const hvdl_entry *entry)
{
    bool is_own = entry->from == e->placement.local;
    if (entry->id != (uint64_t)e->config.rank && !is_own)
        return;
    hvdl_match_header header = {.from = -1};
    if (entry->body_bytes >= sizeof header)
        memcpy(&header, hvdl_entry_body(entry), sizeof header);
    hvdl_transfer *t =
        is_own && header.type == HVDL_HEADER_GO ? hvdl_transfer_by_id(e, header.receive) : NULL;
    if (t)
        t->is_told = true;
    if (!is_own &&
        is_sound(e, &header, hvdl_rank_of_local(e, entry->from), entry->body_bytes - sizeof header))
        hvdl_on_header(e, &header, (const char *)hvdl_entry_body(entry) + sizeof header);
}

/* ---- between hosts ---- */

static void post(hvdl_engine *e, const hvdl_match_header *header, const void *payload)
{
    hvdl_sending *sending = malloc(sizeof *sending + header->payload_bytes);
    if (!sending) {
        hvdl_out_of_memory(e);
        return;
    }
    sending->header = *header;
    if (header->payload_bytes)
        memcpy(sending->payload, payload, header->payload_bytes);
    hvdl_err err =
        hvdl_wire_send(&e->wire, &sending->header, sizeof *header + header->payload_bytes,
                       header->to, HVDL_TAG_HEADER, &sending->request);
    if (err) {
        free(sending);
        hvdl_fatal_for_wire(e, err);
        return;
    }
    sending->next = e->transfers.sendings;
    e->transfers.sendings = sending;
    e->wire.control_messages++;
}

static bool free_sent(hvdl_engine *e)
{
    bool any = false;
    for (hvdl_sending **at = &e->transfers.sendings; *at;) {
        hvdl_sending *sending = *at;
        if (sending->request.active) {
            at = &sending->next;
            continue;
        }
        *at = sending->next;
        free(sending);
        any = true;
    }
    return any;
}

static void post_receive(hvdl_engine *e, hvdl_channel *channel)
{
    hvdl_err err = hvdl_wire_recv(&e->wire, &channel->received, sizeof channel->received,
                                  channel->peer, HVDL_TAG_HEADER, &channel->header);
    if (err)
        hvdl_fatal_for_wire(e, err);
}

static void open_channel(hvdl_engine *e, int member)
{
    hvdl_channel *channel = calloc(1, sizeof *channel);
    if (!channel) {
        hvdl_out_of_memory(e);
        return;
    }
    channel->peer = member;
    e->transfers.channels[member] = channel;
    e->transfers.open[e->transfers.num_open++] = member;
    post_receive(e, channel);
}

void hvdl_hear_member(hvdl_engine *e, int member)
{
    int first = member, last = member;
    if (e->config.num_hosts == 1)
        return;
    if (member == HVDL_ANY_SOURCE) {
        first = 0;
        last = e->config.num_ranks - 1;
    }
    for (int m = first; m <= last && !e->failure.broken; m++)
        if (!is_here(e, m) && !e->transfers.channels[m])
            open_channel(e, m);
}

static bool hear(hvdl_engine *e, hvdl_channel *channel)
{
    if (!channel->header.ended)
        return false;
    channel->header.ended = false;
    if (is_sound(e, &channel->received.header, channel->peer, sizeof channel->received.payload))
        hvdl_on_header(e, &channel->received.header, channel->received.payload);
    if (!e->failure.broken)
        post_receive(e, channel);
    return true;
}

bool hvdl_headers_step(hvdl_engine *e)
{
    bool any = e->transfers.sendings && free_sent(e);
    for (int i = 0; i < e->transfers.num_open && !e->failure.broken; i++)
        any |= hear(e, e->transfers.channels[e->transfers.open[i]]);
    return any;
}

/* ---- both ---- */

void hvdl_send_header(hvdl_engine *e, hvdl_match_header header, const void *payload)
{
    header.from = e->config.rank;
    if (header.to == header.from)
        hvdl_on_header(e, &header, payload);
    else if (is_here(e, header.to))
        announce(e, &header, payload);
    else
        post(e, &header, payload);
}

/* ---- the end ---- */

void hvdl_headers_end(hvdl_engine *e)
{
    struct timespec pause = {0, 100000};
    for (int i = 0; i < NUM_FLUSHES && e->transfers.sendings; i++) {
        hvdl_wire_poll(&e->wire);
        free_sent(e);
        if (i < 100)
            sched_yield();
        else
            nanosleep(&pause, NULL);
    }
    for (int i = 0; i < e->transfers.num_open; i++) {
        int member = e->transfers.open[i];
        /* Else MPI may still write there: it stays for the life of the process. */
        if (hvdl_wire_cancel_recv(&e->wire, &e->transfers.channels[member]->header))
            e->transfers.channels[member]->header.ended = false;
        else
            e->transfers.channels[member] = NULL;
    }
}

void hvdl_headers_free(hvdl_engine *e)
{
    for (int i = 0; i < e->transfers.num_open; i++)
        free(e->transfers.channels[e->transfers.open[i]]);
    free(e->transfers.channels);
    free(e->transfers.open);
}
