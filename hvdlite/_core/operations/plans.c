/* Plans: made and started by any thread, freed when the runs of all ranks have ended. */
#define _GNU_SOURCE
#include "operations/plans.h"

#include <string.h>

#include "engine/state.h"
#include "matching/announcing.h"
#include "matching/matches.h"
#include "operations/facts.h"
#include "operations/operations.h"
#include "operations/queue.h"

hvdl_err hvdl_plan_create(hvdl_engine *e, const hvdl_posting *posting, hvdl_plan **out)
{
    hvdl_plan *plan = calloc(1, sizeof *plan);
    hvdl_posting making = *posting;
    making.desc.kind = HVDL_PLAN;
    making.desc.runs = posting->desc.kind;
    making.owner = NULL;
    making.extents = (hvdl_extents){0};
    hvdl_operation *op = plan ? hvdl_operation_new(&making) : NULL;
    const char *site, *words;
    char *name = hvdl_keep_texts(posting, &site, &words);
    hvdl_extents extents = {0};
    hvdl_err err = posting->extents.list ? hvdl_extents_copy(posting->extents, &extents) : HVDL_OK;
    if (!op || !name || err) {
        free(plan);
        free(name);
        free(extents.list);
        if (op)
            hvdl_operation_free(op);
        return HVDL_ENOMEM;
    }
    plan->posting = *posting;
    plan->posting.name = plan->name = name;
    plan->posting.words = words;
    plan->posting.extents = extents;
    plan->posting.site = NULL; /* a run is posted elsewhere */
    plan->key = hvdl_make_key(HVDL_KEY_OF_PLAN, name);
    if (hvdl_plan_is_posted(plan)) /* so that it meets the making of another kind of plan */
        plan->key = op->key;
    if (e->config.num_ranks == 1 || hvdl_plan_is_posted(plan)) {
        plan->ready = plan->made = true;
        hvdl_operation_free(op);
        *out = plan;
        return HVDL_OK;
    }
    op->plan = plan;
    op->released = true; /* no caller waits for it */
    err = hvdl_enqueue(e, op, true);
    if (err) {
        hvdl_operation_free(op);
        free(extents.list);
        free(name);
        free(plan);
        return err;
    }
    *out = plan;
    return HVDL_OK;
}

hvdl_err hvdl_plan_start(hvdl_engine *e, hvdl_plan *plan, const hvdl_weight *weight, void *owner,
                         hvdl_operation **out)
{
    hvdl_posting posting = plan->posting;
    posting.owner = owner;
    hvdl_operation *op = hvdl_operation_new(&posting);
    if (!op)
        return HVDL_ENOMEM;
    op->key = plan->key;
    op->plan = hvdl_plan_is_posted(plan) ? NULL : plan;
    op->has_weight = weight != NULL;
    if (weight)
        op->weight = *weight;
    hvdl_err err = hvdl_enqueue(e, op, true);
    if (err)
        hvdl_operation_free(op);
    else
        *out = op;
    return err;
}

/* ---- the driver ---- */

hvdl_plan *hvdl_plan_by_tag(const hvdl_engine *e, int tag)
{
    for (size_t i = 0; i < e->plans.by_id.num_slots; i++)
        for (hvdl_node *node = e->plans.by_id.slots[i]; node; node = node->next) {
            hvdl_plan *plan = HVDL_CONTAINER(node, hvdl_plan, by_id);
            if (plan->tag == tag)
                return plan;
        }
    return NULL;
}

hvdl_plan *hvdl_plan_by_key(const hvdl_engine *e, hvdl_key key)
{
    for (size_t i = 0; i < e->plans.by_id.num_slots; i++)
        for (hvdl_node *node = e->plans.by_id.slots[i]; node; node = node->next) {
            hvdl_plan *plan = HVDL_CONTAINER(node, hvdl_plan, by_id);
            if (hvdl_key_equal(plan->key, key))
                return plan;
        }
    return NULL;
}

void hvdl_plan_wait(hvdl_engine *e, hvdl_operation *run)
{
    run->plan->waiting = run;
    e->plans.num_waiting_runs++;
}

void hvdl_plan_forget_waiting(hvdl_engine *e, hvdl_operation *run)
{
    if (!run->plan || run->plan->waiting != run)
        return;
    run->plan->waiting = NULL;
    e->plans.num_waiting_runs--;
}

hvdl_err hvdl_plan_add(hvdl_engine *e, hvdl_plan *plan, uint64_t id, int tag)
{
    plan->id = id;
    plan->tag = tag;
    if (hvdl_table_insert(&e->plans.by_id, &plan->by_id, id))
        return HVDL_ENOMEM;
    plan->ready = true;
    return HVDL_OK;
}

void hvdl_plan_made(hvdl_engine *e, hvdl_plan *plan, const char *error)
{
    hvdl_operation *waiting = plan->waiting;
    plan->waiting = NULL;
    e->plans.num_waiting_runs -= waiting != NULL;
    if (error)
        plan->error = strdup(error);
    hvdl_queue_plan_made(e, plan);
    if (waiting && error)
        hvdl_finish(e, waiting, error);
    else if (waiting)
        hvdl_announce_run(e, waiting);
}

bool hvdl_plan_settle(hvdl_engine *e, hvdl_plan *plan)
{
    if (plan->num_released < e->placement.local_size || plan->num_active || plan->given_back)
        return false;
    plan->given_back = true;
    if (e->config.num_hosts == 1) {
        hvdl_plan_remove(e, plan);
        return false;
    }
    hvdl_queue_drop_owner(e, plan);
    return true;
}

/* ---- their end ---- */

void hvdl_plan_remove(hvdl_engine *e, hvdl_plan *plan)
{
    hvdl_table_remove(&e->plans.by_id, &plan->by_id);
    hvdl_plan_free(e, plan);
}

static void free_memory(hvdl_plan *plan)
{
    free(plan->posting.extents.list);
    free(plan->name);
    free(plan->error);
    free(plan);
}

void hvdl_plan_free(hvdl_engine *e, hvdl_plan *plan)
{
    hvdl_queue_drop_owner(e, plan);
    free_memory(plan);
}

void hvdl_plans_end(hvdl_engine *e)
{
    hvdl_plan *released = hvdl_queue_end_driving(e), *next;
    for (size_t i = 0; i < e->plans.by_id.num_slots && !e->pieces.pinned; i++)
        for (hvdl_node *node = e->plans.by_id.slots[i]; node; node = node->next)
            hvdl_queue_drop_owner(e, HVDL_CONTAINER(node, hvdl_plan, by_id));
    for (; released; released = next) {
        next = released->next;
        if (!released->ready)
            hvdl_plan_free(e, released);
    }
}

void hvdl_plans_free(hvdl_engine *e)
{
    for (size_t i = 0; i < e->plans.by_id.num_slots; i++)
        for (hvdl_node *node = e->plans.by_id.slots[i], *next; node; node = next) {
            hvdl_plan *plan = HVDL_CONTAINER(node, hvdl_plan, by_id);
            next = node->next;
            if (plan->collecting)
                hvdl_match_free(plan->collecting);
            free_memory(plan);
        }
    free(e->plans.by_id.slots);
}
