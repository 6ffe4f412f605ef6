/* What the ranks of this host have posted under one key. The driver. */
#ifndef HVDL_MEETINGS_H
#define HVDL_MEETINGS_H

#include "engine/state.h"

/* One that collects; NULL: no memory. */
hvdl_meeting *hvdl_meeting_new(const hvdl_engine *engine, uint64_t id);
hvdl_meeting *hvdl_meeting_by_key(hvdl_engine *engine, hvdl_key key);
hvdl_meeting *hvdl_meeting_by_id(hvdl_engine *engine, uint64_t id);
void hvdl_meeting_free(hvdl_meeting *meeting);
void hvdl_meetings_free(hvdl_engine *engine);
/* Have all ranks of this host posted, or joined? */
bool hvdl_meeting_complete(const hvdl_engine *engine, const hvdl_meeting *meeting);
/* A rank of this host that has not posted, or -1. */
int hvdl_meeting_absent(const hvdl_engine *engine, const hvdl_meeting *meeting);
/* Its operation on this rank ends. */
static inline void hvdl_meeting_leave(hvdl_meetings *meetings, hvdl_meeting *meeting)
{
    meeting->operation = NULL;
    if (meeting->collecting)
        return;
    hvdl_table_remove(&meetings->by_id, &meeting->by_id);
    hvdl_meeting_free(meeting);
}

#endif
