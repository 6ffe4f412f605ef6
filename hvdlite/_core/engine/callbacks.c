/* What an operation that ends means to the parts above: the only file that knows them all. */
#define _GNU_SOURCE
#include "engine/callbacks.h"

#include <string.h>

#include "collectives/adasum.h"
#include "engine/fatal.h"
#include "engine/state.h"
#include "matching/join.h"
#include "matching/replay.h"
#include "matching/tags.h"
#include "operations/plans.h"
#include "operations/queue.h"
#include "transfers/transfers.h"
#include "watching/report.h"
#include "watching/stall.h"

/* Its child goes on without it, and takes over the memory that it works on. */
static void leave_child(hvdl_operation *op)
{
    op->child->parent = NULL;
    op->child->adasum = op->adasum;
    op->child = NULL;
    op->adasum = NULL;
}

/* Its text, if it fails: that a rank has left may have a cause in the script. */
static const char *with_cause(hvdl_engine *e, const hvdl_operation *op, const char *text,
                              char room[HVDL_TEXT_BYTES])
{
    bool is_uneven = !e->failure.broken && hvdl_comes_again(e, op) && !hvdl_is_run(op) &&
                     !strcmp(text, e->failure.text);
    return is_uneven ? hvdl_put_uneven(text, room) : text;
}

static const char *ending(hvdl_engine *e, hvdl_operation *op, const char *text,
                          char room[HVDL_TEXT_BYTES])
{
    hvdl_operation *parent = op->parent;
    if (e->failure.broken && !text)
        text = e->failure.text; /* nothing succeeds any more, however far it came in this sweep */
    if (e->stall.told)
        hvdl_stall_ended(e, op, !text);
    if (op->child)
        leave_child(op);
    if (op->transfer)
        hvdl_transfer_end(e, op->transfer);
    if (text)
        text = with_cause(e, op, text, room);
    else if (op->desc.kind == HVDL_ALLREDUCE && !op->internal)
        hvdl_note_reduced(e, op);
    op->parent = NULL;
    if (parent && hvdl_adasum_child_done(e, parent, op, text))
        hvdl_out_of_memory(e);
    hvdl_join_forget(&e->join, op);
    return text;
}

static void settle_plan(hvdl_engine *e, hvdl_plan *plan)
{
    if (hvdl_plan_settle(e, plan) && e->placement.is_leader)
        hvdl_control_tag_done(e, plan->tag);
}

static void ended(hvdl_engine *e, const hvdl_ended *what)
{
    if (what->makes_plan) {
        hvdl_plan_made(e, what->plan, what->text);
        hvdl_join_post_held(e);
        hvdl_queue_release(e, what->plan);
    }
    if (what->counted)
        what->plan->num_active--;
    if (what->counted && !e->failure.broken) { /* else it goes when the engine does */
        if (e->placement.is_leader && e->config.num_hosts > 1)
            hvdl_next_zero_run(e, what->plan);
        settle_plan(e, what->plan);
    }
    if (what->had_zeros)
        hvdl_zero_operation_ended(e);
}

const hvdl_callbacks hvdl_engine_callbacks = {ending, ended, hvdl_read_log};
