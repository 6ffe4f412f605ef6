#define _GNU_SOURCE
#include "matching/meetings.h"

#include "engine/state.h"

hvdl_meeting *hvdl_meeting_by_key(hvdl_engine *e, hvdl_key key)
{
    hvdl_node *node = hvdl_table_first(&e->meetings.by_key, key.lo);
    for (; node; node = hvdl_table_next(node->next, key.lo)) {
        hvdl_meeting *meeting = HVDL_CONTAINER(node, hvdl_meeting, by_key);
        if (hvdl_key_equal(meeting->key, key))
            return meeting;
    }
    return NULL;
}

hvdl_meeting *hvdl_meeting_by_id(hvdl_engine *e, uint64_t id)
{
    hvdl_node *node = hvdl_table_first(&e->meetings.by_id, id);
    return node ? HVDL_CONTAINER(node, hvdl_meeting, by_id) : NULL;
}

void hvdl_meeting_free(hvdl_meeting *meeting)
{
    free(meeting->payloads);
    free(meeting->rows);
    free(meeting->weights);
    free(meeting);
}

void hvdl_meetings_free(hvdl_engine *e)
{
    for (size_t i = 0; i < e->meetings.by_key.num_slots; i++)
        for (hvdl_node *node = e->meetings.by_key.slots[i], *next; node; node = next) {
            next = node->next;
            hvdl_meeting_free(HVDL_CONTAINER(node, hvdl_meeting, by_key));
        }
    free(e->meetings.by_key.slots);
    free(e->meetings.by_id.slots);
}

hvdl_meeting *hvdl_meeting_new(const hvdl_engine *e, uint64_t id)
{
    size_t ranks = (size_t)e->placement.local_size;
    hvdl_meeting *meeting = calloc(1, sizeof *meeting + ranks * sizeof *meeting->posted_by);
    if (meeting) {
        meeting->id = id;
        meeting->collecting = true;
        meeting->coordinator = -1;
    }
    return meeting;
}

bool hvdl_meeting_complete(const hvdl_engine *e, const hvdl_meeting *meeting)
{
    if (meeting->posted == e->placement.local_size || meeting->internal || !e->join.num_joined)
        return meeting->posted == e->placement.local_size;
    int missing = 0;
    for (int r = 0; r < e->placement.local_size; r++)
        missing += !meeting->posted_by[r] && !e->join.joined[r];
    return meeting->posted > 0 && !missing;
}

int hvdl_meeting_absent(const hvdl_engine *e, const hvdl_meeting *meeting)
{
    for (int r = 0; r < e->placement.local_size; r++)
        if (!meeting->posted_by[r])
            return hvdl_rank_of_local(e, r);
    return -1;
}
