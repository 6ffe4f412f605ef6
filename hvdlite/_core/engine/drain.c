/* What callers have posted and released, handed to the parts that it concerns. */
#define _GNU_SOURCE
#include "engine/drain.h"

#include "engine/state.h"
#include "matching/announcing.h"
#include "matching/join.h"
#include "operations/black_box.h"
#include "operations/operations.h"
#include "operations/plans.h"
#include "operations/queue.h"
#include "operations/recording.h"
#include "transfers/transfers.h"

bool hvdl_drain_queue(hvdl_engine *e)
{
    if (!atomic_load_explicit(&e->queue.queued, memory_order_relaxed))
        return false;
    hvdl_operation *op, *next_op;
    hvdl_plan *plan, *next_plan;
    hvdl_queue_drain(&e->queue, &op, &plan);
    for (; op; op = next_op) {
        next_op = op->next;
        op->next = NULL;
        if (e->black_box.memory && !op->internal)
            hvdl_box_write_posted(e, op);
        hvdl_record(&e->recording, op, HVDL_POSTED, op->posted_ns);
        if (op->transfer)
            hvdl_transfer_begin(e, op->transfer);
        else if (hvdl_refuses(e, op->internal))
            hvdl_finish(e, op, e->failure.text);
        else if (op->desc.kind == HVDL_JOIN)
            hvdl_join_post(e, op);
        else if (!hvdl_is_run(op))
            hvdl_announce_post(e, op);
        else if (op->plan->error)
            hvdl_finish(e, op, op->plan->error);
        else if (op->plan->ready)
            hvdl_announce_run(e, op);
        else
            hvdl_plan_wait(e, op);
    }
    if (e->transfers.num_withdrawals)
        hvdl_transfers_withdraw(e);
    for (; plan; plan = next_plan) {
        next_plan = plan->next;
        if (plan->ready)
            hvdl_announce(e, (hvdl_entry){.type = HVDL_ENTRY_RELEASE, .id = plan->id}, NULL, 0);
        else
            hvdl_plan_free(e, plan); /* its making failed: no other rank has it */
    }
    return true;
}
