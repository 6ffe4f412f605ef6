/* Point to point: messages from one member to another one (or to itself), matched by source and tag.
 *
 * A transfer is one side of a message, a send or a receive. It is an operation like any other, but no match:
 * its two ranks alone know of it. See docs/design/point-to-point.md. transfers.c matches, transfers_leaving.c
 * fails what waits for a rank that leaves, match_headers.c carries what the two ranks tell each other, moving.c carries
 * the data. */
#ifndef HVDL_TRANSFERS_H
#define HVDL_TRANSFERS_H

#include "engine/state.h"

/* ---- transfers.c ---- */

hvdl_err hvdl_transfers_make(hvdl_engine *engine);
void hvdl_transfers_free(hvdl_engine *engine);
/* The driver: it was taken from the queue. */
void hvdl_transfer_begin(hvdl_engine *engine, hvdl_transfer *transfer);
/* The driver: its operation ends, however. */
void hvdl_transfer_end(hvdl_engine *engine, hvdl_transfer *transfer);
/* The driver: it has moved all its bytes. */
void hvdl_transfer_done(hvdl_engine *engine, hvdl_transfer *transfer);
hvdl_transfer *hvdl_transfer_by_id(const hvdl_engine *engine, uint64_t id);
/* What a header to this rank asks for. */
void hvdl_on_header(hvdl_engine *engine, const hvdl_match_header *header, const char *payload);
/* The driver: what callers want withdrawn. */
void hvdl_transfers_withdraw(hvdl_engine *engine);
/* A member leaves in good order; it may be this rank. */
void hvdl_transfers_leave(hvdl_engine *engine, int member);
/* transfers.grace_ends_ns is set: fails what has waited too long for members of other hosts that have left. */
void hvdl_transfers_end_grace(hvdl_engine *engine);
/* Nobody is left that this one could be matched with. */
bool hvdl_is_alone(const hvdl_engine *engine, const hvdl_transfer *transfer);
void hvdl_fail_alone(hvdl_engine *engine, hvdl_transfer *transfer);
/* What has arrived from that member, or, -1: from any. */
void hvdl_forget_arrivals(hvdl_engine *engine, int member);
/* Whether matched ones are under way, which this rank ends before it leaves. */
bool hvdl_transfers_under_way(const hvdl_engine *engine);
/* Reports those that wait for their other side. */
void hvdl_transfers_stall_look(hvdl_engine *engine, uint64_t now_ns);

/* Moves headers and data. Each returns whether it did anything; called in each sweep once there was one. */
bool hvdl_transfers_step(hvdl_engine *engine);

/* ---- match_headers.c ---- */

/* Also to this rank itself. */
void hvdl_send_header(hvdl_engine *engine, hvdl_match_header header, const void *payload);
void hvdl_read_header(hvdl_engine *engine, const hvdl_entry *entry);
/* So that headers of that member are heard; it may be of this host, or HVDL_ANY_SOURCE. */
void hvdl_hear_member(hvdl_engine *engine, int member);
bool hvdl_headers_step(hvdl_engine *engine);
/* No header is heard any more; what was written leaves. */
void hvdl_headers_end(hvdl_engine *engine);
void hvdl_headers_free(hvdl_engine *engine);

/* ---- moving.c ---- */

/* It is matched: its data begins to move. */
void hvdl_move(hvdl_engine *engine, hvdl_transfer *transfer);
bool hvdl_moving_step(hvdl_engine *engine);
/* It ends, whether it has moved all or not. */
void hvdl_stop_moving(hvdl_engine *engine, hvdl_transfer *transfer);

/* ---- what all need ---- */

/* The driver. */
static inline bool hvdl_is_matched(const hvdl_transfer *transfer)
{
    return atomic_load_explicit(&transfer->matched, memory_order_relaxed);
}

static inline void hvdl_line_append(hvdl_line *line, hvdl_transfer *transfer)
{
    transfer->line = line;
    transfer->next = NULL;
    transfer->previous = line->last;
    if (line->last)
        line->last->next = transfer;
    else
        line->first = transfer;
    line->last = transfer;
}

static inline void hvdl_line_remove(hvdl_transfer *transfer)
{
    hvdl_line *line = transfer->line;
    if (!line)
        return;
    if (transfer->previous)
        transfer->previous->next = transfer->next;
    else
        line->first = transfer->next;
    if (transfer->next)
        transfer->next->previous = transfer->previous;
    else
        line->last = transfer->previous;
    transfer->line = NULL;
}

#endif
