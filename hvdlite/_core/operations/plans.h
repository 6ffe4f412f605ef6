/* Plans. */
#ifndef HVDL_PLANS_H
#define HVDL_PLANS_H

#include "engine/state.h"

/* Are its runs matched one by one, and the plan itself is known to this rank only? So it is where a rank
 * that has joined can't take part: only an operation that the ranks agree on can be refused. */
static inline bool hvdl_plan_is_posted(const hvdl_plan *plan)
{
    return !hvdl_facts_of(&plan->posting.desc)->joined_takes_part;
}

static inline hvdl_plan *hvdl_plan_by_id(const hvdl_plans *plans, uint64_t id)
{
    hvdl_node *node = hvdl_table_first(&plans->by_id, id);
    return node ? HVDL_CONTAINER(node, hvdl_plan, by_id) : NULL;
}
hvdl_plan *hvdl_plan_by_tag(const hvdl_engine *engine, int tag);
hvdl_plan *hvdl_plan_by_key(const hvdl_engine *engine, hvdl_key key);

/* The driver. A run was posted before its plan is made. */
void hvdl_plan_wait(hvdl_engine *engine, hvdl_operation *run);
/* Everything fails, and with it this run, if it waits. */
void hvdl_plan_forget_waiting(hvdl_engine *engine, hvdl_operation *run);
/* All ranks have posted its making. Between hosts the leader tells the joins (hvdl_control_plan_made). */
hvdl_err hvdl_plan_add(hvdl_engine *engine, hvdl_plan *plan, uint64_t id, int tag);
/* Its making has ended; error NULL: well. Its release may wait for that (hvdl_queue_release). */
void hvdl_plan_made(hvdl_engine *engine, hvdl_plan *plan, const char *error);
/* A run has ended here, or a local rank has freed it. If this host needs the plan no more, it is freed where there
 * is one host. Between hosts the others may still call this one to runs, if it has joined: then this returns true,
 * once, and its leader says that the plan's tag is done; FREE says when it can go. */
bool hvdl_plan_settle(hvdl_engine *engine, hvdl_plan *plan);
/* All hosts have. */
void hvdl_plan_remove(hvdl_engine *engine, hvdl_plan *plan);
/* Its buffers can be handed back, too. */
void hvdl_plan_free(hvdl_engine *engine, hvdl_plan *plan);
/* The engine is closed: no plan runs any more, so that their buffers can be handed back. Those that
 * were made are freed with the engine, the others when they are released. */
void hvdl_plans_end(hvdl_engine *engine);
void hvdl_plans_free(hvdl_engine *engine);

#endif
