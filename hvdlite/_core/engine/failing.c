/* What happens once an engine is broken. */
#define _GNU_SOURCE
#include "engine/failing.h"

#include "collectives/pieces.h"
#include "engine/state.h"
#include "matching/announcing.h"
#include "matching/messages.h"
#include "operations/operations.h"
#include "operations/plans.h"
#include "operations/queue.h"

void hvdl_fail_all(hvdl_engine *e, const char *text)
{
    size_t slot = 0;
    hvdl_operation *op;
    hvdl_abandon_all(e);
    hvdl_forget_announced(e);
    while ((op = hvdl_queue_any(e, &slot))) {
        hvdl_plan_forget_waiting(e, op);
        hvdl_finish(e, op, text);
    }
}

void hvdl_end_broken(hvdl_engine *e)
{
    hvdl_failure *failure = &e->failure;
    if (!failure->broken || failure->ended)
        return;
    failure->ended = true;
    if (failure->tells) {
        /* The others wait for this rank: they must hear of it, since its process lives on. */
        atomic_store(&e->shm.control->ranks[e->placement.local].left,
                     HVDL_LEFT_BROKEN + (uint32_t)failure->culprit);
        hvdl_shm_ring(&e->shm);
        if (e->config.num_hosts > 1)
            hvdl_control_leave(e, failure->culprit, false);
    }
    hvdl_fail_all(e, failure->text);
}
