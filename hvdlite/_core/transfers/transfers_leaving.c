/* What happens to sends and receives when a rank leaves. Called by the driver. */
#define _GNU_SOURCE
#include <stdio.h>

#include "engine/fatal.h"
#include "engine/state.h"
#include "operations/operations.h"
#include "transfers/transfer_texts.h"
#include "transfers/transfers.h"

/* Of members of other hosts that have left: headers and data of theirs may still be on their way. */
#define GRACE_NS 2000000000ull

bool hvdl_is_alone(const hvdl_engine *e, const hvdl_transfer *t)
{
    if (t->peer != HVDL_ANY_SOURCE)
        return e->transfers.gone[t->peer];
    bool alone = e->config.num_ranks > 1;
    for (int member = 0; member < e->config.num_ranks; member++)
        alone &= e->transfers.gone[member] || member == e->config.rank;
    return alone;
}

void hvdl_fail_alone(hvdl_engine *e, hvdl_transfer *t)
{
    char text[HVDL_TEXT_BYTES];
    hvdl_describe_gone(e, t, text);
    hvdl_finish(e, t->operation, text);
}

typedef bool fails(const hvdl_engine *, const hvdl_transfer *);

static bool is_far(const hvdl_engine *e, const hvdl_transfer *t)
{
    return e->placement.host_of[t->peer] != e->placement.host;
}

static bool is_waiting(const hvdl_engine *e, const hvdl_transfer *t)
{
    (void)e;
    return !hvdl_is_matched(t);
}

/* A GO that comes behind the sender's LEAVE in the shared log finds no send. Sends to members of other hosts are
 * given some time: what those have taken may be told by a header that is still on its way, while their departure
 * is known through the leaders. */
static bool fails_at_once(const hvdl_engine *e, const hvdl_transfer *t)
{
    if (!hvdl_is_alone(e, t))
        return false;
    if (t->peer != HVDL_ANY_SOURCE && is_far(e, t))
        return !t->is_send && !hvdl_is_matched(t);
    return !hvdl_is_matched(t) || (!t->is_send && !t->is_told);
}

/* Also a receive whose GO came when its sender had failed. */
static bool fails_later(const hvdl_engine *e, const hvdl_transfer *t)
{
    if (!hvdl_is_alone(e, t))
        return false;
    return !hvdl_is_matched(t) ||
           (is_far(e, t) && hvdl_now_ns() > e->transfers.channels[t->peer]->moved_ns + GRACE_NS);
}

/* By their numbers: an end may bring others to theirs. */
static void fail_those(hvdl_engine *e, fails *fails, const char *text)
{
    const hvdl_table *by_id = &e->transfers.by_id;
    uint64_t *ids = malloc((by_id->count + 1) * sizeof *ids);
    size_t count = 0;
    if (!ids) {
        hvdl_out_of_memory(e);
        return;
    }
    for (size_t i = 0; i < by_id->num_slots; i++)
        for (hvdl_node *node = by_id->slots[i]; node; node = node->next) {
            const hvdl_transfer *t = HVDL_CONTAINER(node, hvdl_transfer, by_id);
            if (fails(e, t))
                ids[count++] = t->id;
        }
    for (size_t i = 0; i < count; i++) {
        hvdl_transfer *t = hvdl_transfer_by_id(e, ids[i]);
        if (t && text)
            hvdl_finish(e, t->operation, text);
        else if (t)
            hvdl_fail_alone(e, t);
    }
    free(ids);
}

void hvdl_transfers_leave(hvdl_engine *e, int member)
{
    char text[HVDL_TEXT_BYTES];
    if (member == e->config.rank) {
        e->transfers.leaves = true;
        snprintf(text, sizeof text, "rank %d called shutdown before the operation had ended",
                 hvdl_own_number(e));
        fail_those(e, is_waiting, text);
        return;
    }
    e->transfers.gone[member] = true;
    hvdl_forget_arrivals(e, member);
    fail_those(e, fails_at_once, NULL);
    if (e->placement.host_of[member] != e->placement.host && e->transfers.by_id.count)
        e->transfers.grace_ends_ns = hvdl_now_ns() + GRACE_NS;
}

void hvdl_transfers_end_grace(hvdl_engine *e)
{
    if (hvdl_now_ns() <= e->transfers.grace_ends_ns)
        return;
    e->transfers.grace_ends_ns = e->transfers.by_id.count ? hvdl_now_ns() + GRACE_NS : 0;
    fail_those(e, fails_later, NULL);
}
