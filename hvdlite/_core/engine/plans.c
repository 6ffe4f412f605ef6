/* Plans as their callers see them: made, started and released by any thread, freed when the runs of all
 * ranks have ended. */
#define _GNU_SOURCE
#include <string.h>

#include "engine/state.h"

hvdl_err hvdl_plan_create(hvdl_engine *e, const hvdl_posting *posting, hvdl_plan **out)
{
    hvdl_plan *plan = calloc(1, sizeof *plan);
    hvdl_posting making = *posting;
    making.desc.kind = HVDL_PLAN;
    making.owner = NULL;
    hvdl_operation *op = plan ? hvdl_operation_new(&making) : NULL;
    char *name = strdup(posting->name);
    if (!op || !name) {
        free(plan);
        free(name);
        if (op)
            hvdl_operation_free(op);
        return HVDL_ENOMEM;
    }
    plan->posting = *posting;
    plan->posting.name = plan->name = name;
    plan->key = hvdl_make_key(HVDL_KEY_OF_PLAN, name);
    if (e->config.num_ranks == 1) {
        plan->ready = plan->made = true;
        hvdl_operation_free(op);
        *out = plan;
        return HVDL_OK;
    }
    op->plan = plan;
    op->released = true; /* no caller waits for it */
    hvdl_err err = hvdl_enqueue(e, op, true);
    if (err) {
        hvdl_operation_free(op);
        free(name);
        free(plan);
        return err;
    }
    *out = plan;
    return HVDL_OK;
}

hvdl_err hvdl_plan_start(hvdl_engine *e, hvdl_plan *plan, void *owner, hvdl_operation **out)
{
    hvdl_posting posting = plan->posting;
    posting.owner = owner;
    hvdl_operation *op = hvdl_operation_new(&posting);
    if (!op)
        return HVDL_ENOMEM;
    op->key = plan->key;
    op->plan = plan;
    hvdl_err err;
    if (e->config.num_ranks == 1) {
        op->plan = NULL;
        err = e->closed ? HVDL_ECLOSED : hvdl_finish_alone(e, op);
    } else {
        err = hvdl_enqueue(e, op, true);
    }
    if (err)
        hvdl_operation_free(op);
    else
        *out = op;
    return err;
}

static hvdl_err keep_dead_owner_locked(hvdl_engine *e, void *owner)
{
    if (!owner)
        return HVDL_OK;
    if (e->num_dead_owners == e->room_dead_owners) {
        size_t room = 2 * e->room_dead_owners + 16;
        void **larger = realloc(e->dead_owners, room * sizeof *larger);
        if (!larger)
            return HVDL_ENOMEM;
        e->dead_owners = larger;
        e->room_dead_owners = room;
    }
    e->dead_owners[e->num_dead_owners++] = owner;
    return HVDL_OK;
}

void hvdl_plan_drop_owner(hvdl_engine *e, hvdl_plan *plan)
{
    pthread_mutex_lock(&e->queue_lock);
    if (!keep_dead_owner_locked(e, plan->posting.owner))
        plan->posting.owner = NULL;
    pthread_mutex_unlock(&e->queue_lock);
}

void hvdl_plan_free(hvdl_engine *e, hvdl_plan *plan)
{
    hvdl_plan_drop_owner(e, plan);
    free(plan->name);
    free(plan->error);
    free(plan);
}

void hvdl_plans_end(hvdl_engine *e)
{
    pthread_mutex_lock(&e->queue_lock);
    hvdl_plan *released = e->released_plans, *next;
    e->released_plans = NULL;
    e->undriven = true;
    for (size_t i = 0; i < e->plans.num_slots && !e->pinned; i++)
        for (hvdl_node *node = e->plans.slots[i]; node; node = node->next) {
            hvdl_plan *plan = HVDL_CONTAINER(node, hvdl_plan, by_id);
            if (!keep_dead_owner_locked(e, plan->posting.owner))
                plan->posting.owner = NULL;
        }
    pthread_mutex_unlock(&e->queue_lock);
    for (; released; released = next) {
        next = released->next;
        if (!released->ready)
            hvdl_plan_free(e, released);
    }
}

void hvdl_plan_release(hvdl_engine *e, hvdl_plan *plan)
{
    if (e->config.num_ranks == 1) {
        hvdl_plan_free(e, plan);
        return;
    }
    pthread_mutex_lock(&e->queue_lock);
    plan->released = true;
    bool is_last = e->undriven && !plan->ready; /* it is in no table */
    bool now = plan->made && !plan->run && !plan->announced && !e->undriven;
    if (now) {
        plan->announced = true;
        plan->next = e->released_plans;
        e->released_plans = plan;
        atomic_store(&e->queued, true);
    }
    pthread_mutex_unlock(&e->queue_lock);
    if (is_last)
        hvdl_plan_free(e, plan);
    if (now)
        hvdl_wake_thread(e);
}

/* The driver: a plan was released while its making or a run was under way, which has now ended. */
void hvdl_plan_note_release(hvdl_engine *e, hvdl_plan *plan)
{
    pthread_mutex_lock(&e->queue_lock);
    if (plan->released && plan->made && !plan->run && !plan->announced) {
        plan->announced = true;
        plan->next = e->released_plans;
        e->released_plans = plan;
        atomic_store(&e->queued, true);
    }
    pthread_mutex_unlock(&e->queue_lock);
}
