/* Ranks that have run out of data. Called by the driver. */
#ifndef HVDL_JOIN_H
#define HVDL_JOIN_H

#include "matching/messages.h"

hvdl_err hvdl_join_make(hvdl_engine *engine);
void hvdl_join_free(hvdl_engine *engine);

/* This rank joins, once no run waits for its plan. */
void hvdl_join_post(hvdl_engine *engine, hvdl_operation *operation);
/* A run no longer waits for its plan. */
void hvdl_join_post_held(hvdl_engine *engine);
/* An operation has ended, which may be this rank's join. */
static inline void hvdl_join_forget(hvdl_join *join, const hvdl_operation *operation)
{
    if (operation == join->operation)
        join->operation = NULL;
    if (operation == join->held)
        join->held = NULL;
}
/* A rank has left: what is not over fails. */
void hvdl_join_fail(hvdl_engine *engine, const char *text);

/* What a rank that has joined takes part with; NULL: no memory. */
hvdl_operation *hvdl_zero_operation(hvdl_engine *engine, hvdl_key key, const hvdl_desc *desc);
/* One of those has ended. */
void hvdl_zero_operation_ended(hvdl_engine *engine);
/* A rank of this host has joined. False: that is known. */
bool hvdl_join_add(hvdl_engine *engine, int local);
/* What is complete with it has begun: is it the last one? */
void hvdl_join_added(hvdl_engine *engine, int local);
void hvdl_read_all_joined(hvdl_engine *engine, int last);
/* The leader: a run of the plan has ended here, or its beginning was read, and others may wait. */
void hvdl_next_zero_run(hvdl_engine *engine, hvdl_plan *plan);

/* ---- between hosts: the leaders ---- */

/* The leader: all ranks of this host have joined, `last` as the last one. */
void hvdl_control_joined(hvdl_engine *engine, int last);
/* The leader: a run of a plan has begun here, to which hosts that have joined must come. */
void hvdl_control_run(hvdl_engine *engine, const hvdl_plan *plan);
/* The leader: a plan is made, of which others may have told a run already. */
void hvdl_control_plan_made(hvdl_engine *engine, hvdl_plan *plan);
void hvdl_on_host_joined(hvdl_engine *engine, int host, int last, uint64_t clock);
/* After a step of the control messages, while own_join is set: `heard` something in it. */
void hvdl_tell_own_join(hvdl_engine *engine, bool heard);
void hvdl_on_all_joined(hvdl_engine *engine, int host, int last);
/* A message came that was sent at this time of Lamport's clock. */
void hvdl_hear_clock(hvdl_engine *engine, uint64_t clock);
hvdl_err hvdl_host_joins_make(hvdl_engine *engine);
void hvdl_host_joins_free(hvdl_host_joins *joins);
/* A rank of `host` leaves in good order. True: that is told after the end of the epoch. */
bool hvdl_hold_leave(hvdl_engine *engine, int host, int rank);
/* All ranks of this host have joined, and the others do something. */
void hvdl_on_zero(hvdl_engine *engine, const hvdl_message *message);
void hvdl_on_run(hvdl_engine *engine, int tag, uint64_t run);

#endif
