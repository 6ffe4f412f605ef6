/* Ranks that leave. What is matched is ended with them, and what is not can't be any more: it fails, on
 * all ranks of the host at the same entry of the journal. Called by the driver. */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>

#include "engine/state.h"

void hvdl_break_for(hvdl_engine *e, int rank)
{
    e->culprit = rank;
    hvdl_break(e, "rank %d on %s has left while operations were under way",
               hvdl_world_rank(e, rank), e->name_of[rank]);
}

/* No operation that is not matched yet can be any more. */
static void fail_collecting(hvdl_engine *e, const char *text)
{
    if (e->join && e->last_joined < 0) /* else it has succeeded, and ends with what is under way */
        hvdl_finish(e, e->join, text);
    if (e->held_join)
        hvdl_finish(e, e->held_join, text);
    for (size_t i = 0; i < e->meetings.num_slots; i++)
        for (hvdl_node *node = e->meetings.slots[i]; node; node = node->next) {
            hvdl_meeting *meeting = HVDL_CONTAINER(node, hvdl_meeting, by_key);
            if (meeting->operation && hvdl_is_doomed(e, meeting->operation))
                hvdl_finish(e, meeting->operation, text);
        }
    for (size_t i = 0; i < e->plans.num_slots; i++)
        for (hvdl_node *node = e->plans.slots[i]; node; node = node->next) {
            hvdl_plan *plan = HVDL_CONTAINER(node, hvdl_plan, by_id);
            if (plan->collecting && plan->collecting->operation)
                hvdl_finish(e, plan->collecting->operation, text);
        }
}

/* The leader: whom it asked about an operation has left without an answer. */
static void fail_asked(hvdl_engine *e, int host)
{
    for (size_t i = 0; i < e->meetings_by_id.num_slots; i++)
        for (hvdl_node *node = e->meetings_by_id.slots[i]; node;) {
            hvdl_meeting *meeting = HVDL_CONTAINER(node, hvdl_meeting, by_id);
            bool fails = meeting->coordinator == host && meeting->operation;
            if (fails)
                hvdl_finish(e, meeting->operation, e->gone);
            /* With a step of an Adasum ends the whole, whose meeting may be the next one here. */
            node = fails ? e->meetings_by_id.slots[i] : node->next;
        }
}

static void set_gone(hvdl_engine *e, int rank)
{
    char text[HVDL_TEXT_BYTES];
    if (e->gone)
        return;
    e->first_gone = rank;
    snprintf(text, sizeof text,
             "rank %d on %s has left (it called shutdown or ended); an operation needs every rank",
             hvdl_world_rank(e, rank), e->name_of[rank]);
    e->gone = strdup(text);
}

/* What is matched is ended; nothing new is begun. */
static void leave_self(hvdl_engine *e)
{
    char text[HVDL_TEXT_BYTES];
    snprintf(text, sizeof text, "rank %d called shutdown before the operation had ended",
             hvdl_own_number(e));
    set_gone(e, e->config.rank);
    fail_collecting(e, text);
}

void hvdl_read_leave(hvdl_engine *e, int rank, bool clean)
{
    if (rank == e->config.rank) {
        leave_self(e);
        return;
    }
    set_gone(e, rank);
    if (!clean) {
        hvdl_break_for(e, rank);
        return;
    }
    if (e->is_leader && e->config.num_hosts > 1) {
        if (e->host_of[rank] == e->host)
            hvdl_control_leave(e, rank, true);
        hvdl_control_fail_open(e);
    }
    fail_collecting(e, e->gone);
    if (e->is_leader && e->config.num_hosts > 1 && hvdl_control_run_is_lost(e)) {
        hvdl_break_for(e, e->first_gone); /* for whose sake others leave, too */
        return;
    }
    if (rank == e->members[e->host_first[e->host_of[rank]]] && e->host_of[rank] != e->host)
        fail_asked(e, e->host_of[rank]);
}
