/* Ranks that leave. What is matched is ended with them, and what is not can't be any more: it fails, on
 * all ranks of the host at the same entry of the shared log. Called by the driver. */
#define _GNU_SOURCE
#include "matching/leaving.h"

#include <stdio.h>
#include <string.h>

#include "engine/fatal.h"
#include "engine/state.h"
#include "matching/coordinator.h"
#include "matching/join.h"
#include "matching/messages.h"
#include "operations/operations.h"
#include "transfers/transfers.h"

/* It left while it was needed. */
static void break_for(hvdl_engine *e, int rank)
{
    hvdl_fatal_because_of(e, rank, "rank %d on %s has left while operations were under way",
                          hvdl_world_rank(e, rank), e->placement.name_of[rank]);
}

void hvdl_look_for_dead(hvdl_engine *e)
{
    if (e->placement.local_size == 1)
        return;
    int dead = hvdl_shm_find_dead(&e->shm);
    if (dead >= 0)
        hvdl_fatal_because_of(e, hvdl_rank_of_local(e, dead), "rank %d on %s has died",
                              hvdl_world_rank(e, hvdl_rank_of_local(e, dead)),
                              e->config.host_names[e->placement.host]);
    for (int r = 0; r < e->placement.local_size; r++) {
        uint32_t left = atomic_load(&e->shm.control->ranks[r].left);
        if (left >= HVDL_LEFT_BROKEN)
            break_for(e, (int)(left - HVDL_LEFT_BROKEN));
    }
}

/* No operation that is not matched yet can be any more. */
static void fail_collecting(hvdl_engine *e, const char *text)
{
    hvdl_join_fail(e, text);
    for (size_t i = 0; i < e->matches.by_key.num_slots; i++)
        for (hvdl_node *node = e->matches.by_key.slots[i]; node; node = node->next) {
            hvdl_match *match = HVDL_CONTAINER(node, hvdl_match, by_key);
            if (match->operation && hvdl_refuses(e, match->operation->internal))
                hvdl_finish(e, match->operation, text);
        }
    for (size_t i = 0; i < e->plans.by_id.num_slots; i++)
        for (hvdl_node *node = e->plans.by_id.slots[i]; node; node = node->next) {
            hvdl_plan *plan = HVDL_CONTAINER(node, hvdl_plan, by_id);
            if (plan->collecting && plan->collecting->operation)
                hvdl_finish(e, plan->collecting->operation, text);
        }
}

/* The leader: the coordinator that it asked about an operation has left without an answer. */
static void fail_asked(hvdl_engine *e, int host)
{
    for (size_t i = 0; i < e->matches.by_id.num_slots; i++)
        for (hvdl_node *node = e->matches.by_id.slots[i]; node;) {
            hvdl_match *match = HVDL_CONTAINER(node, hvdl_match, by_id);
            bool fails = match->coordinator == host && match->operation;
            if (fails)
                hvdl_finish(e, match->operation, e->failure.text);
            /* With a step of an Adasum ends the whole, whose match may be the next one here. */
            node = fails ? e->matches.by_id.slots[i] : node->next;
        }
}

/* What is matched is ended; nothing new is begun. */
static void leave_self(hvdl_engine *e)
{
    char text[HVDL_TEXT_BYTES];
    snprintf(text, sizeof text, "rank %d called shutdown before the operation had ended",
             hvdl_own_number(e));
    hvdl_note_gone(e, e->config.rank);
    hvdl_transfers_leave(e, e->config.rank);
    fail_collecting(e, text);
}

void hvdl_read_leave(hvdl_engine *e, int rank, bool clean)
{
    if (rank == e->config.rank) {
        leave_self(e);
        return;
    }
    hvdl_note_gone(e, rank);
    if (!clean) {
        break_for(e, rank);
        return;
    }
    hvdl_transfers_leave(e, rank);
    if (e->placement.is_leader && e->config.num_hosts > 1) {
        if (e->placement.host_of[rank] == e->placement.host)
            hvdl_control_leave(e, rank, true);
        hvdl_control_fail_open(e);
    }
    fail_collecting(e, e->failure.text);
    if (e->placement.is_leader && e->config.num_hosts > 1 && hvdl_control_run_is_lost(e)) {
        break_for(e, e->failure.first_gone); /* for whose sake others leave, too */
        return;
    }
    if (rank == e->placement.members[e->placement.host_first[e->placement.host_of[rank]]] &&
        e->placement.host_of[rank] != e->placement.host)
        fail_asked(e, e->placement.host_of[rank]);
}
