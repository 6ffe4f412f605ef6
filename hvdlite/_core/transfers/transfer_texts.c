/* The texts about sends and receives, with the stall check's reports of those that wait for their
 * other side. Each rank reports its own: no other one knows of them. */
#define _GNU_SOURCE
#include "transfers/transfer_texts.h"

#include <stdio.h>
#include <string.h>

#include "engine/giving_up.h"
#include "engine/state.h"
#include "transfers/transfers.h"
#include "watching/report.h"
#include "watching/missing_query.h"

void hvdl_name_transfer(bool is_send, int peer, int tag, char *to, size_t room)
{
    if (peer < 0)
        snprintf(to, room, "from any rank with tag %d", tag);
    else
        snprintf(to, room, "%s rank %d with tag %d", is_send ? "to" : "from", peer, tag);
}

void hvdl_describe_sizes(const hvdl_engine *e, const hvdl_transfer *t, int sender, int receiver,
                         size_t sent_bytes, size_t received_bytes, char text[HVDL_TEXT_BYTES])
{
    snprintf(text, HVDL_TEXT_BYTES,
             "send from rank %d on %s to rank %d on %s with tag %d: the sender's tensor has %zu "
             "bytes, the receiver's %zu; make them the same",
             hvdl_world_rank(e, sender), e->placement.name_of[sender], hvdl_world_rank(e, receiver),
             e->placement.name_of[receiver], t->tag, sent_bytes, received_bytes);
}

void hvdl_describe_gone(const hvdl_engine *e, const hvdl_transfer *t, char text[HVDL_TEXT_BYTES])
{
    const char *kind = hvdl_kind_name(t->operation->desc.kind), *name = t->operation->name;
    if (t->peer == HVDL_ANY_SOURCE)
        snprintf(text, HVDL_TEXT_BYTES,
                 "all other ranks have left (they called shutdown or ended): %s %s can't end", kind,
                 name);
    else
        snprintf(text, HVDL_TEXT_BYTES,
                 "rank %d on %s has left (it called shutdown or ended): %s %s can't end",
                 hvdl_world_rank(e, t->peer), e->placement.name_of[t->peer], kind, name);
}

/* Who has not called it. peer: HVDL_ANY_SOURCE: none has. */
static void put_awaited(const hvdl_engine *e, const hvdl_transfer *t, int peer, hvdl_writer *to)
{
    if (peer == HVDL_ANY_SOURCE)
        hvdl_put(to, "no rank");
    else
        hvdl_put(to, "rank %d on %s", hvdl_world_rank(e, peer), e->placement.name_of[peer]);
    hvdl_put(to, " has %scalled %s %s rank %d with this tag", peer == HVDL_ANY_SOURCE ? "" : "not ",
             t->is_send ? "recv" : "send", t->is_send ? "from" : "to", hvdl_own_number(e));
}

/* ---- limits ---- */

void hvdl_describe_transfer_timeout(const hvdl_engine *e, const hvdl_transfer *t, double seconds,
                                    char text[HVDL_TEXT_BYTES])
{
    const hvdl_operation *op = t->operation;
    hvdl_writer to = {text, HVDL_TEXT_BYTES, 0};
    hvdl_put(&to, "%s %s", hvdl_kind_name(op->desc.kind), op->name);
    if (op->site)
        hvdl_put(&to, " (%s)", op->site);
    hvdl_put(&to, " has not ended within %g s: ", seconds);
    if (!atomic_load_explicit(&t->matched, memory_order_acquire))
        put_awaited(e, t, t->posted_peer, &to);
    else /* so that its peer stays */
        hvdl_put(&to,
                 "rank %d on %s has called %s, and not all data has moved; is a process stopped, "
                 "or a host cut off?",
                 hvdl_world_rank(e, t->peer), e->placement.name_of[t->peer],
                 t->is_send ? "recv" : "send");
}

/* ---- the stall check ---- */

static void put_late(const hvdl_engine *e, const hvdl_transfer *t, uint64_t age_ns, bool again,
                     hvdl_writer *to)
{
    hvdl_put(to, "%s %.0f s%s for ", again ? "still waits, after" : "has waited",
             (double)age_ns / 1e9, again ? "," : "");
    if (t->peer == HVDL_ANY_SOURCE)
        hvdl_put(to, "a rank that calls send to rank %d with this tag", hvdl_own_number(e));
    else
        hvdl_put(to, "rank %d on %s, which has not called %s %s rank %d with this tag",
                 hvdl_world_rank(e, t->peer), e->placement.name_of[t->peer],
                 t->is_send ? "recv" : "send", t->is_send ? "from" : "to", hvdl_own_number(e));
}

/* Its peer has called the other side. */
static void put_standing(const hvdl_engine *e, const hvdl_transfer *t, uint64_t age_ns,
                         hvdl_writer *to)
{
    hvdl_put(to, "has made no progress for %.0f s: rank %d on %s has called %s, and %s no data",
             (double)age_ns / 1e9, hvdl_world_rank(e, t->peer), e->placement.name_of[t->peer],
             t->is_send ? "recv" : "send", t->is_send ? "takes" : "sends");
}

static void describe_late(const hvdl_engine *e, const hvdl_transfer *t, uint64_t age_ns,
                          bool gives_up, char text[HVDL_TEXT_BYTES])
{
    const hvdl_operation *op = t->operation;
    hvdl_writer to = {text, HVDL_TEXT_BYTES, 0};
    hvdl_put(&to, "%s %s ", hvdl_kind_name(op->desc.kind), op->name);
    if (hvdl_is_matched(t))
        put_standing(e, t, age_ns, &to);
    else
        put_late(e, t, age_ns, t->num_reports && !gives_up, &to);
    hvdl_put(&to, "; called by rank %d", hvdl_own_number(e));
    if (op->site)
        hvdl_put(&to, " at %s", op->site);
    if (gives_up)
        hvdl_put(&to, "; all operations fail now (HVDLITE_STALL_SHUTDOWN_TIME_SECONDS)");
    else
        hvdl_put(&to, "; %s",
                 hvdl_is_matched(t) ? "is that process stopped, or its host cut off?"
                                    : "do both ranks name each other, and the same tag?");
}

/* For how long it has waited for its other side or, once it is matched, nothing has moved between the two
 * ranks: messages between two ranks may wait for each other. */
static uint64_t waiting_ns(hvdl_engine *e, hvdl_transfer *t, uint64_t now)
{
    const hvdl_transfers *all = &e->transfers;
    uint64_t posted = t->operation->posted_ns;
    if (!hvdl_is_matched(t))
        return now > posted ? now - posted : 0;
    if (!t->still_since_ns || t->seen_moves != all->moves[t->peer]) {
        hvdl_transfer_goes_on(e, t);
        t->num_reports = 0;
        t->seen_moves = all->moves[t->peer];
        t->still_since_ns = e->stall.ran_ns;
    }
    return e->stall.ran_ns - t->still_since_ns;
}

void hvdl_transfers_stall_look(hvdl_engine *e, uint64_t now)
{
    hvdl_transfers *all = &e->transfers;
    const hvdl_table *by_id = &all->by_id;
    uint64_t limit = e->config.stall_shutdown_ns;
    for (size_t i = 0; i < by_id->num_slots; i++)
        for (hvdl_node *node = by_id->slots[i]; node; node = node->next) {
            hvdl_transfer *t = HVDL_CONTAINER(node, hvdl_transfer, by_id);
            uint64_t age = waiting_ns(e, t, now);
            bool gives_up = limit && age > limit;
            char text[HVDL_TEXT_BYTES];
            if (!gives_up && !hvdl_report_is_due(e->config.stall_warning_ns, age, t->num_reports))
                continue;
            describe_late(e, t, age, gives_up, text);
            if (gives_up) {
                hvdl_announce_give_up(e, text, age > limit + HVDL_OVERDUE_NS);
                return;
            }
            hvdl_report(e, text);
            while (hvdl_report_is_due(e->config.stall_warning_ns, age, t->num_reports))
                t->num_reports++;
        }
}

void hvdl_transfer_goes_on(hvdl_engine *e, hvdl_transfer *t)
{
    char text[HVDL_TEXT_BYTES];
    if (!t->num_reports)
        return;
    snprintf(text, sizeof text, "%s %s goes on", hvdl_kind_name(t->operation->desc.kind),
             t->operation->name);
    hvdl_say(e, text);
}
