/* Matching sends with receives. The receiver's rank decides alone. A send that arrives takes the oldest
 * receive that waits for it; a receive that is posted takes the oldest send that has arrived for it. Letters
 * of a rank arrive in order, so neither messages nor receives of one source and tag overtake each other.
 * Called by the driver. */
#define _GNU_SOURCE
#include "transfers/transfers.h"

#include <stdio.h>
#include <string.h>

#include "engine/fatal.h"
#include "engine/state.h"
#include "operations/operations.h"
#include "transfers/transfer_texts.h"

/* ---- what waits, by source and tag ---- */

static uint64_t key_of(int source, int tag)
{
    return (uint64_t)(source + 1) << 32 | (uint32_t)tag;
}

static hvdl_pending *find_pending(const hvdl_engine *e, int source, int tag)
{
    hvdl_node *node = hvdl_table_first(&e->transfers.pending, key_of(source, tag));
    return node ? HVDL_CONTAINER(node, hvdl_pending, by_key) : NULL;
}

/* The one there is, or a new one; NULL: no memory. */
static hvdl_pending *make_pending(hvdl_engine *e, int source, int tag)
{
    hvdl_pending *pending = find_pending(e, source, tag);
    if (pending)
        return pending;
    pending = calloc(1, sizeof *pending);
    if (pending &&
        hvdl_table_insert(&e->transfers.pending, &pending->by_key, key_of(source, tag))) {
        free(pending);
        pending = NULL;
    }
    if (!pending)
        hvdl_out_of_memory(e);
    return pending;
}

static void drop_if_empty(hvdl_engine *e, hvdl_pending *pending)
{
    if (pending->first || pending->receives.first)
        return;
    hvdl_table_remove(&e->transfers.pending, &pending->by_key);
    free(pending);
}

static void stop_waiting(hvdl_engine *e, hvdl_transfer *t)
{
    if (!t->line)
        return;
    hvdl_pending *pending = HVDL_CONTAINER(t->line, hvdl_pending, receives);
    hvdl_line_remove(t);
    drop_if_empty(e, pending);
}

static void keep_arrival(hvdl_engine *e, const hvdl_match_header *header, const char *payload)
{
    hvdl_pending *pending = make_pending(e, header->from, header->tag);
    hvdl_arrival *arrival = pending ? malloc(sizeof *arrival + header->payload_bytes) : NULL;
    if (!arrival) {
        hvdl_out_of_memory(e);
        return;
    }
    arrival->next = NULL;
    arrival->number = ++e->transfers.last_arrival;
    arrival->header = *header;
    if (header->payload_bytes)
        memcpy(arrival->payload, payload, header->payload_bytes);
    if (pending->last)
        pending->last->next = arrival;
    else
        pending->first = arrival;
    pending->last = arrival;
}

/* Takes the first one whose send has this number, or, 0: the first one. */
static hvdl_arrival *take_arrival(hvdl_engine *e, hvdl_pending *pending, uint64_t send)
{
    hvdl_arrival *before = NULL, *found = pending->first;
    while (found && send && found->header.send != send) {
        before = found;
        found = found->next;
    }
    if (!found)
        return NULL;
    if (before)
        before->next = found->next;
    else
        pending->first = found->next;
    if (pending->last == found)
        pending->last = before;
    drop_if_empty(e, pending);
    return found;
}

void hvdl_forget_arrivals(hvdl_engine *e, int member)
{
    hvdl_table *table = &e->transfers.pending;
    for (size_t i = 0; i < table->num_slots; i++)
        for (hvdl_node *node = table->slots[i], *next; node; node = next) {
            hvdl_pending *pending = HVDL_CONTAINER(node, hvdl_pending, by_key);
            next = node->next;
            if (member >= 0 && node->hash >> 32 != (uint64_t)member + 1)
                continue;
            for (hvdl_arrival *arrival = pending->first, *later; arrival; arrival = later) {
                later = arrival->next;
                free(arrival);
            }
            pending->first = pending->last = NULL;
            drop_if_empty(e, pending);
        }
}

/* Where the oldest send is that this receive takes, or NULL. */
static hvdl_pending *pending_for(const hvdl_engine *e, const hvdl_transfer *t)
{
    if (t->peer != HVDL_ANY_SOURCE) {
        hvdl_pending *pending = find_pending(e, t->peer, t->tag);
        return pending && pending->first ? pending : NULL;
    }
    hvdl_pending *oldest = NULL;
    for (int member = 0; member < e->config.num_ranks; member++) {
        hvdl_pending *pending = find_pending(e, member, t->tag);
        if (pending && pending->first &&
            (!oldest || pending->first->number < oldest->first->number))
            oldest = pending;
    }
    return oldest;
}

/* The oldest receive that takes this send, or NULL. */
static hvdl_transfer *receive_for(const hvdl_engine *e, const hvdl_match_header *header)
{
    const hvdl_pending *own = find_pending(e, header->from, header->tag);
    const hvdl_pending *any = find_pending(e, HVDL_ANY_SOURCE, header->tag);
    hvdl_transfer *first = own ? own->receives.first : NULL;
    hvdl_transfer *other = any ? any->receives.first : NULL;
    return !first || (other && other->order < first->order) ? other : first;
}

/* ---- both sides ---- */

hvdl_transfer *hvdl_transfer_by_id(const hvdl_engine *e, uint64_t id)
{
    hvdl_node *node = hvdl_table_first(&e->transfers.by_id, id);
    return node ? HVDL_CONTAINER(node, hvdl_transfer, by_id) : NULL;
}

static void set_matched(hvdl_engine *e, hvdl_transfer *t, uint64_t partner)
{
    t->partner = partner;
    hvdl_transfer_goes_on(e, t);
    t->num_reports = 0;
    hvdl_set_state(e, t->operation, HVDL_MATCHED);
    atomic_store_explicit(&t->matched, true, memory_order_release);
}

void hvdl_transfer_done(hvdl_engine *e, hvdl_transfer *t)
{
    hvdl_operation *op = t->operation;
    if (!t->is_send) {
        op->all_rows = malloc(2 * sizeof *op->all_rows);
        if (!op->all_rows) {
            hvdl_out_of_memory(e);
            return;
        }
        op->num_rows = 2;
        op->all_rows[0] = t->peer;
        op->all_rows[1] = (int64_t)t->bytes;
    }
    hvdl_finish(e, op, NULL);
}

void hvdl_transfer_end(hvdl_engine *e, hvdl_transfer *t)
{
    if (!t->order)
        return; /* it has not begun */
    hvdl_table_remove(&e->transfers.by_id, &t->by_id);
    if (hvdl_is_matched(t))
        hvdl_stop_moving(e, t);
    else
        stop_waiting(e, t);
}

/* Of a message whose receive is this one. */
static void fail_sizes(hvdl_engine *e, hvdl_transfer *t, int sender, int receiver,
                       size_t sent_bytes, size_t received_bytes)
{
    char text[HVDL_TEXT_BYTES];
    hvdl_describe_sizes(e, t, sender, receiver, sent_bytes, received_bytes, text);
    hvdl_finish(e, t->operation, text);
}

/* A receive has found its send. */
static void match(hvdl_engine *e, hvdl_transfer *t, const hvdl_match_header *header,
                  const char *payload)
{
    hvdl_match_header answer = {.type = HVDL_HEADER_GO,
                                .to = header->from,
                                .tag = header->tag,
                                .send = header->send,
                                .receive = t->id,
                                .bytes = t->bytes};
    stop_waiting(e, t);
    t->peer = header->from;
    set_matched(e, t, header->send);
    if (header->bytes != t->bytes)
        answer.type = HVDL_HEADER_REFUSE;
    else if (header->payload_bytes == header->bytes)
        answer.type = HVDL_HEADER_TAKEN;
    if (answer.type == HVDL_HEADER_TAKEN) {
        hvdl_set_state(e, t->operation, HVDL_RUNNING);
        if (t->bytes)
            memcpy(t->memory, payload, t->bytes);
    }
    hvdl_send_header(e, answer, NULL);
    if (answer.type == HVDL_HEADER_GO)
        hvdl_move(e, t);
    else if (answer.type == HVDL_HEADER_TAKEN)
        hvdl_transfer_done(e, t);
    else
        fail_sizes(e, t, header->from, e->config.rank, header->bytes, t->bytes);
}

/* ---- the beginning ---- */

static void begin_send(hvdl_engine *e, hvdl_transfer *t)
{
    hvdl_match_header header = {
        .type = HVDL_HEADER_SEND, .to = t->peer, .tag = t->tag, .send = t->id, .bytes = t->bytes};
    if (t->bytes <= HVDL_EAGER_BYTES && t->bytes <= e->config.inline_bytes)
        header.payload_bytes = t->bytes;
    hvdl_send_header(e, header, t->memory);
}

static void begin_receive(hvdl_engine *e, hvdl_transfer *t)
{
    hvdl_pending *pending = pending_for(e, t);
    if (pending) {
        hvdl_arrival *arrival = take_arrival(e, pending, 0);
        match(e, t, &arrival->header, arrival->payload);
        free(arrival);
    } else if ((pending = make_pending(e, t->peer, t->tag))) {
        hvdl_line_append(&pending->receives, t);
    }
}

void hvdl_transfer_begin(hvdl_engine *e, hvdl_transfer *t)
{
    if (e->failure.broken || e->transfers.leaves) {
        hvdl_finish(e, t->operation, e->failure.text);
        return;
    }
    if (hvdl_table_insert(&e->transfers.by_id, &t->by_id, t->id)) {
        hvdl_out_of_memory(e);
        return;
    }
    t->order = ++e->transfers.last_order;
    e->transfers.used = true;
    atomic_store(&e->driving.has_more, true);
    hvdl_hear_member(e, t->peer);
    if (hvdl_is_alone(e, t))
        hvdl_fail_alone(e, t);
    else if (t->is_send)
        begin_send(e, t);
    else
        begin_receive(e, t);
}

/* ---- headers ---- */

static void on_send(hvdl_engine *e, const hvdl_match_header *header, const char *payload)
{
    if (e->transfers.gone[header->from] || e->transfers.leaves)
        return; /* it has failed there, or will */
    hvdl_transfer *t = receive_for(e, header);
    if (t)
        match(e, t, header, payload);
    else
        keep_arrival(e, header, payload);
}

static void withdrawn(hvdl_engine *e, hvdl_transfer *t)
{
    char text[HVDL_TEXT_BYTES];
    snprintf(text, sizeof text, "%s %s was withdrawn", hvdl_kind_name(t->operation->desc.kind),
             t->operation->name);
    t->withdrawn = true;
    hvdl_finish(e, t->operation, text);
}

/* Nothing is answered where it is matched: that is on its way. */
static void on_cancel(hvdl_engine *e, const hvdl_match_header *header)
{
    hvdl_pending *pending = find_pending(e, header->from, header->tag);
    hvdl_arrival *arrival = pending ? take_arrival(e, pending, header->send) : NULL;
    hvdl_match_header answer = {
        .type = HVDL_HEADER_CANCELLED, .to = header->from, .send = header->send};
    if (!arrival)
        return;
    free(arrival);
    hvdl_send_header(e, answer, NULL);
}

void hvdl_on_header(hvdl_engine *e, const hvdl_match_header *header, const char *payload)
{
    if (header->type == HVDL_HEADER_SEND) {
        on_send(e, header, payload);
        return;
    }
    if (header->type == HVDL_HEADER_CANCEL) {
        on_cancel(e, header);
        return;
    }
    hvdl_transfer *t = hvdl_transfer_by_id(e, header->send);
    if (!t || !t->is_send || t->peer != header->from || hvdl_is_matched(t))
        return; /* it has failed here */
    if (header->type == HVDL_HEADER_CANCELLED) {
        withdrawn(e, t);
        return;
    }
    set_matched(e, t, header->receive);
    if (header->type == HVDL_HEADER_GO) {
        hvdl_move(e, t);
    } else if (header->type == HVDL_HEADER_TAKEN) {
        hvdl_set_state(e, t->operation, HVDL_RUNNING);
        hvdl_transfer_done(e, t);
    } else {
        fail_sizes(e, t, e->config.rank, header->from, t->bytes, header->bytes);
    }
}

/* ---- withdrawing ---- */

static void withdraw(hvdl_engine *e, hvdl_transfer *t)
{
    hvdl_match_header header = {
        .type = HVDL_HEADER_CANCEL, .to = t->peer, .tag = t->tag, .send = t->id};
    if (!t->is_send) {
        withdrawn(e, t);
    } else if (!t->is_asked) {
        t->is_asked = true;
        hvdl_send_header(e, header, NULL);
    }
}

void hvdl_transfers_withdraw(hvdl_engine *e)
{
    hvdl_transfers *all = &e->transfers;
    pthread_mutex_lock(&e->queue.lock);
    uint64_t *ids = all->withdrawals;
    size_t count = all->num_withdrawals;
    all->withdrawals = NULL;
    all->num_withdrawals = 0;
    all->room_withdrawals = 0;
    pthread_mutex_unlock(&e->queue.lock);
    for (size_t i = 0; i < count; i++) {
        hvdl_transfer *t = hvdl_transfer_by_id(e, ids[i]);
        if (t && !hvdl_is_matched(t))
            withdraw(e, t);
    }
    free(ids);
}

bool hvdl_transfers_under_way(const hvdl_engine *e)
{
    const hvdl_transfers *all = &e->transfers;
    return all->own.first || all->outgoing.first || all->incoming.first || all->num_on_wire;
}

bool hvdl_transfers_step(hvdl_engine *e)
{
    if (e->failure.broken)
        return false;
    bool any = hvdl_headers_step(e);
    any |= hvdl_moving_step(e);
    if (e->transfers.grace_ends_ns)
        hvdl_transfers_end_grace(e);
    return any;
}

/* ---- life ---- */

hvdl_err hvdl_transfers_make(hvdl_engine *e)
{
    hvdl_transfers *all = &e->transfers;
    size_t ranks = (size_t)e->config.num_ranks;
    all->gone = calloc(ranks, sizeof *all->gone);
    all->num_incoming = calloc((size_t)e->placement.local_size, sizeof *all->num_incoming);
    all->channels = calloc(ranks, sizeof(hvdl_channel *));
    all->open = calloc(ranks, sizeof *all->open);
    all->moves = calloc(ranks, sizeof *all->moves);
    return all->moves && all->gone && all->num_incoming && all->channels && all->open ? HVDL_OK
                                                                                      : HVDL_ENOMEM;
}

void hvdl_transfers_free(hvdl_engine *e)
{
    hvdl_transfers *all = &e->transfers;
    hvdl_forget_arrivals(e, -1);
    hvdl_headers_free(e);
    free(all->pending.slots);
    free(all->by_id.slots);
    free(all->gone);
    free(all->moves);
    free(all->num_incoming);
    free(all->withdrawals);
}
