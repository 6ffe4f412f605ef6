/* Plans. */
#ifndef HVDL_PLANS_H
#define HVDL_PLANS_H

#include "base/table.h"
#include "engine/engine.h"
#include "matching/replay.h"

struct hvdl_plan {
    hvdl_node by_id;      /* in engine->plans */
    hvdl_posting posting; /* name and words are copies */
    hvdl_key key;         /* of its runs */
    char *name;
    uint64_t id;
    int tag;
    bool ready;
    char *error;              /* it could not be made */
    hvdl_operation *waiting;  /* a run posted before it was ready */
    hvdl_meeting *collecting; /* of the next run */
    uint64_t num_runs;        /* begun on this host, or, on a host that has joined, about to be */
    uint64_t num_known_runs;  /* the leader: also those of others that wait for the one before */
    bool zero_run_announced;  /* the leader: ZERO_RUN is in the journal, and not read yet */
    bool ends_elsewhere; /* the leader: a host where a rank has left begins these and no more: */
    uint64_t num_runs_elsewhere;
    int num_active;   /* runs that have begun and not ended on this rank */
    bool given_back;  /* all local ranks have freed it, and no run is left */
    int num_released; /* local ranks that have freed it */
    /* written by queue.c, under its lock */
    hvdl_operation *run; /* in flight */
    bool made;           /* its making has ended */
    bool released;       /* by the caller; `next` is then in queue.released_plans */
    bool announced;      /* RELEASE is in the journal */
    hvdl_plan *next;
};

/* Written by plans.c. */
typedef struct {
    hvdl_table by_id;
    int num_waiting_runs; /* for their plans to be made */
} hvdl_plans;

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
/* All ranks have posted its making. */
hvdl_err hvdl_plan_add(hvdl_engine *engine, hvdl_plan *plan, uint64_t id, int tag);
/* Its making has ended; error NULL: well. */
void hvdl_plan_made(hvdl_engine *engine, hvdl_plan *plan, const char *error);
/* A run has ended here. */
void hvdl_plan_run_ended(hvdl_engine *engine, hvdl_plan *plan);
/* A local rank has freed it. */
void hvdl_plan_released(hvdl_engine *engine, hvdl_plan *plan);
/* All hosts have. */
void hvdl_plan_remove(hvdl_engine *engine, hvdl_plan *plan);
/* Its buffers can be handed back, too. */
void hvdl_plan_free(hvdl_engine *engine, hvdl_plan *plan);
/* The engine is closed: no plan runs any more, so that their buffers can be handed back. Those that
 * were made are freed with the engine, the others when they are released. */
void hvdl_plans_end(hvdl_engine *engine);
void hvdl_plans_free(hvdl_engine *engine);

#endif
