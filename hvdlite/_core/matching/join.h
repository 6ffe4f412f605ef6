/* Ranks that have run out of data. Called by the driver. */
#ifndef HVDL_JOIN_H
#define HVDL_JOIN_H

#include "base/types.h"
#include "engine/engine.h"
#include "matching/replay.h"

/* Within this host; between hosts see control.h. Written by join.c. */
typedef struct {
    bool *joined; /* by local rank */
    int num_joined;
    uint64_t epoch;            /* how often all have joined */
    hvdl_operation *operation; /* this rank's, in the journal */
    hvdl_operation *held;      /* it waits until all runs posted before are in the journal */
    int num_zero_operations;   /* of this rank, in flight */
    int last;                  /* once all have joined, while zero operations are left; else -1 */
} hvdl_join;

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

/* Have all ranks of this host posted, or joined? */
bool hvdl_meeting_complete(const hvdl_engine *engine, const hvdl_meeting *meeting);
/* A rank of this host that has not posted, or -1. */
int hvdl_meeting_absent(const hvdl_engine *engine, const hvdl_meeting *meeting);
/* Does a rank that has joined take part in such an operation? */
bool hvdl_can_be_joined(const hvdl_desc *desc);
/* The text for an operation in which a rank that has joined takes no part. */
void hvdl_describe_absent(const hvdl_engine *engine, const hvdl_desc *desc, int rank,
                          char text[HVDL_TEXT_BYTES]);
/* What a rank that has joined takes part with; NULL: no memory. */
hvdl_operation *hvdl_zero_operation(hvdl_engine *engine, hvdl_key key, const hvdl_desc *desc);
/* One of those has ended. */
void hvdl_zero_operation_ended(hvdl_engine *engine);
void hvdl_read_join(hvdl_engine *engine, int local);
void hvdl_read_all_joined(hvdl_engine *engine, int last);
/* The leader: a run of the plan has ended here, or its beginning was read, and others may wait. */
void hvdl_next_zero_run(hvdl_engine *engine, hvdl_plan *plan);

#endif
