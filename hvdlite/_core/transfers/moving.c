/* The data of messages that are too large for a header. Where they go is known, so nothing waits for a
 * partner here.
 *
 * To a rank of this host: through blocks of this rank's mailbox, each message in turn. To one of another host:
 * as messages of MPI, a few at once, from memory to memory; both ends take the transfers between them in the
 * order of the GO headers, so one tag is enough. To this rank itself: a copy. In each sweep a little moves, so
 * that operations are not held up. */
#define _GNU_SOURCE
#include <string.h>

#include "engine/fatal.h"
#include "engine/state.h"
#include "host/mailbox.h"
#include "operations/operations.h"
#include "transfers/transfers.h"

#define OWN_STEP_BYTES (1 << 20)
/* A message of a few blocks is cut, so that both ranks copy at the same time; but not finer. */
#define LEAST_BLOCK_BYTES 16384
#define CUTS 4
/* What a cache does not hold until it is used is written past it, and not read first; and the sender's cache
 * does not hold it either. */
#define PAST_CACHE_FROM_BYTES (16 << 20)

static bool is_here(const hvdl_engine *e, int member)
{
    return e->placement.host_of[member] == e->placement.host;
}

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

void hvdl_move(hvdl_engine *e, hvdl_transfer *t)
{
    hvdl_transfers *all = &e->transfers;
    hvdl_set_state(e, t->operation, HVDL_RUNNING);
    if (t->peer == e->config.rank) {
        if (!t->is_send)
            hvdl_line_append(&all->own, t);
    } else if (is_here(e, t->peer)) {
        hvdl_line_append(t->is_send ? &all->outgoing : &all->incoming, t);
        all->num_incoming[e->placement.local_of[t->peer]] += !t->is_send;
    } else {
        hvdl_channel *channel = all->channels[t->peer];
        hvdl_line_append(t->is_send ? &channel->sends : &channel->receives, t);
        all->num_on_wire++;
    }
}

/* ---- this rank itself ---- */

static bool step_own(hvdl_engine *e)
{
    hvdl_transfer *to = e->transfers.own.first;
    hvdl_transfer *from = hvdl_transfer_by_id(e, to->partner);
    if (!from) /* everything fails */
        return false;
    size_t bytes = least(OWN_STEP_BYTES, to->bytes - to->done);
    memmove(to->memory + to->done, from->memory + to->done, bytes);
    to->done += bytes;
    e->transfers.moves[to->peer]++;
    if (to->done == to->bytes) {
        hvdl_transfer_done(e, from);
        hvdl_transfer_done(e, to);
    }
    return true;
}

/* ---- within the host ---- */

static bool is_large(const hvdl_transfer *t)
{
    return t->bytes >= PAST_CACHE_FROM_BYTES;
}

static bool step_outgoing(hvdl_engine *e)
{
    hvdl_transfer *t = e->transfers.outgoing.first;
    int block = hvdl_mail_find_free(&e->shm);
    if (block < 0)
        return false;
    size_t cut = t->bytes / CUTS < LEAST_BLOCK_BYTES ? LEAST_BLOCK_BYTES : t->bytes / CUTS;
    size_t bytes = least(least(cut, hvdl_mail_block_bytes(e->shm.block_bytes)), t->bytes - t->done);
    bool times = hvdl_pipeline_times_copies(&e->pipeline);
    hvdl_timed copied = {0, 0};
    hvdl_mail_fill(&e->shm, block, e->placement.local_of[t->peer], t->partner, t->done,
                   t->memory + t->done, bytes, is_large(t), times ? &copied : NULL);
    if (copied.bytes)
        hvdl_pipeline_note_copy(&e->pipeline, copied);
    t->done += bytes;
    e->transfers.moves[t->peer]++;
    if (t->done == t->bytes) {
        hvdl_transfer_done(e, t);
    } else if (t->next) { /* the others' turn */
        hvdl_line_remove(t);
        hvdl_line_append(&e->transfers.outgoing, t);
    }
    return true;
}

static bool step_incoming(hvdl_engine *e, int writer)
{
    const char *bytes;
    const hvdl_mail_head *head = hvdl_mail_find_full(&e->shm, writer, &bytes);
    if (!head)
        return false;
    hvdl_transfer *t = hvdl_transfer_by_id(e, head->receive);
    size_t count = head->bytes, at = head->offset;
    bool fits = t && t->line == &e->transfers.incoming && /* else it has failed here */
                e->placement.local_of[t->peer] == writer && at <= t->bytes &&
                count <= t->bytes - at && count <= hvdl_mail_block_bytes(e->shm.block_bytes);
    if (fits) {
        if (is_large(t))
            hvdl_copy_past_cache_fetching(t->memory + at, bytes, count);
        else
            memcpy(t->memory + at, bytes, count);
        t->done += count;
        e->transfers.moves[t->peer]++;
    }
    hvdl_mail_empty(&e->shm, writer, head);
    if (fits && t->done == t->bytes)
        hvdl_transfer_done(e, t);
    return true;
}

/* ---- between hosts ---- */

/* Takes messages off the oldest end, then posts more. Segment s has request s % HVDL_TRANSFER_WINDOW. */
static bool step_stream(hvdl_engine *e, hvdl_channel *channel, hvdl_line *line,
                        hvdl_request *requests)
{
    hvdl_transfer *t = line->first;
    size_t segment = e->config.segment_bytes;
    bool any = false;
    while (t->done < t->begun && !requests[t->done / segment % HVDL_TRANSFER_WINDOW].active) {
        t->done += least(segment, t->bytes - t->done);
        any = true;
    }
    while (t->begun < t->bytes && t->begun / segment - t->done / segment < HVDL_TRANSFER_WINDOW) {
        hvdl_request *request = &requests[t->begun / segment % HVDL_TRANSFER_WINDOW];
        size_t bytes = least(segment, t->bytes - t->begun);
        char *at = t->memory + t->begun;
        hvdl_err err =
            t->is_send ? hvdl_wire_send(&e->wire, at, bytes, channel->peer, HVDL_TAG_DATA, request)
                       : hvdl_wire_recv(&e->wire, at, bytes, channel->peer, HVDL_TAG_DATA, request);
        if (err) {
            hvdl_fatal_for_wire(e, err);
            return true;
        }
        if (t->is_send)
            hvdl_wire_count(&e->wire, channel->peer, bytes);
        t->begun += bytes;
        any = true;
    }
    if (t->done == t->bytes)
        hvdl_transfer_done(e, t);
    return any;
}

static bool step_wire(hvdl_engine *e)
{
    bool any = false;
    for (int i = 0; i < e->transfers.num_open && !e->failure.broken; i++) {
        hvdl_channel *channel = e->transfers.channels[e->transfers.open[i]];
        bool moved = false;
        if (channel->sends.first)
            moved = step_stream(e, channel, &channel->sends, channel->outgoing);
        if (channel->receives.first)
            moved |= step_stream(e, channel, &channel->receives, channel->incoming);
        e->transfers.moves[channel->peer] += moved;
        if (moved && e->transfers.grace_ends_ns)
            channel->moved_ns = hvdl_now_ns();
        any |= moved;
    }
    return any;
}

/* ---- all ---- */

bool hvdl_moving_step(hvdl_engine *e)
{
    hvdl_transfers *all = &e->transfers;
    bool any = all->own.first && step_own(e);
    if (all->outgoing.first)
        any |= step_outgoing(e);
    for (int local = 0; all->incoming.first && local < e->placement.local_size; local++)
        if (all->num_incoming[local])
            any |= step_incoming(e, local);
    if (all->num_on_wire)
        any |= step_wire(e);
    return any;
}

void hvdl_stop_moving(hvdl_engine *e, hvdl_transfer *t)
{
    hvdl_transfers *all = &e->transfers;
    if (!t->line)
        return;
    if (t->line == &all->incoming)
        all->num_incoming[e->placement.local_of[t->peer]]--;
    bool on_wire = t->line != &all->incoming && t->line != &all->outgoing && t->line != &all->own;
    hvdl_line_remove(t);
    if (!on_wire)
        return;
    all->num_on_wire--;
    /* Of what fails, messages may be under way. No MPI ends a large send that is cancelled. */
    hvdl_channel *channel = all->channels[t->peer];
    hvdl_request *requests = t->is_send ? channel->outgoing : channel->incoming;
    for (int i = 0; i < HVDL_TRANSFER_WINDOW && t->done < t->begun; i++)
        if (t->is_send ? requests[i].active : !hvdl_wire_cancel_recv(&e->wire, &requests[i]))
            t->operation->pinned = true;
}
