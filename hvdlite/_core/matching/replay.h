/* The journal's state machine, and the meetings of which it consists. The driver. */
#ifndef HVDL_REPLAY_H
#define HVDL_REPLAY_H

#include "base/descriptors.h"
#include "base/table.h"
#include "engine/engine.h"

/* What the ranks of this host have posted under one key: the same on each of them, because it is made
 * from the journal. In `by_key` until all have posted, in `by_id` until the operation has ended here. */
typedef struct hvdl_meeting {
    hvdl_node by_key, by_id;
    hvdl_key key;
    uint64_t id;
    bool collecting; /* in by_key (or its plan's `collecting`) */
    int posted;
    hvdl_variants variants;
    char *payloads; /* tiny: of each local rank, but those that hvdl_payload_of finds elsewhere */
    const char *last_payload; /* while the entry is read that completes it: in the journal */
    int last_from;            /* its local rank */
    int64_t *rows;            /* as many numbers of rows of each local rank as it posts, or NULL */
    double *weights;          /* weights.c; NULL: those that have posted have none */
    int num_weights;
    hvdl_operation *operation; /* this rank's, once posted */
    hvdl_plan *plan;           /* a run of it */
    uint64_t epoch;            /* of join.c, when it began */
    int coordinator;           /* the host whose leader was asked and has not answered, or -1 */
    bool internal;             /* of the engine's own operations: a joined rank takes part itself */
    bool has_sites;            /* of some of the host's ranks */
    bool posted_by[];          /* by local rank */
} hvdl_meeting;

/* Written by replay.c. */
typedef struct {
    hvdl_table by_key; /* collecting */
    hvdl_table by_id;
} hvdl_meetings;

/* Returns whether there was anything to read. */
bool hvdl_read_journal(hvdl_engine *engine);
hvdl_meeting *hvdl_meeting_by_key(hvdl_engine *engine, hvdl_key key);
hvdl_meeting *hvdl_meeting_by_id(hvdl_engine *engine, uint64_t id);
/* Begins what is complete now that a rank has joined. */
void hvdl_complete_meetings(hvdl_engine *engine);
void hvdl_meeting_free(hvdl_meeting *meeting);
/* Its operation on this rank ends. */
static inline void hvdl_meeting_leave(hvdl_meetings *meetings, hvdl_meeting *meeting)
{
    meeting->operation = NULL;
    if (meeting->collecting)
        return;
    hvdl_table_remove(&meetings->by_id, &meeting->by_id);
    hvdl_meeting_free(meeting);
}
void hvdl_meetings_free(hvdl_engine *engine);

#endif
