/* Join: a rank that has run out of data takes part in the others' allreduces with zeros, until all
 * ranks have joined.
 *
 * Within a host the shared log says which ranks have joined (JOIN). A match is complete when every local rank
 * has posted or joined. Each rank that has joined makes an operation of its own for it, with zeros
 * (what changes nothing, for Min, Max and Product), so that all ranks go through the same phases.
 *
 * Between hosts, a leader tells all others when all ranks of its host have joined (HOST_JOINED). A
 * coordinator takes such a host as one that has posted, and if data is to be exchanged it tells it to
 * take part (ZERO). Plans have no coordinator: a leader that begins a run tells the hosts that have
 * joined (RUN), and of the runs under way each host that joins later. The first one who says so counts,
 * as runs are numbered.
 *
 * A leader that has heard HOST_JOINED of all hosts says so to all (ALL_JOINED). When it has heard that of all,
 * all is over here: messages of a pair of leaders keep their order, so every RUN of the others has come
 * before. Host 0 decides which rank joined last, see hvdl_host_joins.clock.
 *
 * An **epoch** is the time between two such ends; operations of different epochs never meet. A
 * coordinator needs its number, as a posting of the next epoch may come before it has heard the end. */
#define _GNU_SOURCE
#include "matching/join.h"

#include <string.h>

#include "engine/fatal.h"
#include "engine/state.h"
#include "kernels/reduce.h"
#include "matching/announcing.h"
#include "matching/coordinator.h"
#include "matching/messages.h"
#include "operations/facts.h"
#include "operations/operations.h"
#include "operations/plans.h"
#include "operations/queue.h"

/* ---- what a rank that has joined contributes ---- */

hvdl_operation *hvdl_zero_operation(hvdl_engine *e, hvdl_key key, const hvdl_desc *desc)
{
    size_t bytes = hvdl_data_bytes(desc);
    hvdl_posting posting = {.desc = *desc, .name = "of a rank that has joined"};
    char *zeros = calloc(1, bytes ? bytes : 1);
    if (!zeros)
        return NULL;
    posting.input = posting.output = zeros;
    if (bytes)
        hvdl_fill_neutral((hvdl_dtype)desc->dtype, (hvdl_op)desc->op, zeros, (size_t)desc->count);
    hvdl_operation *op = hvdl_adopt_operation(e, &posting, key);
    if (!op) {
        free(zeros);
        return NULL;
    }
    op->zeros = zeros;
    e->join.num_zero_operations++;
    return op;
}

/* ---- this rank's join ---- */

hvdl_err hvdl_join_make(hvdl_engine *e)
{
    e->join.last = -1;
    e->join.joined = calloc((size_t)e->placement.local_size, sizeof *e->join.joined);
    return e->join.joined ? HVDL_OK : HVDL_ENOMEM;
}

void hvdl_join_free(hvdl_engine *e)
{
    free(e->join.joined);
}

void hvdl_join_post(hvdl_engine *e, hvdl_operation *op)
{
    if (e->plans.num_waiting_runs) { /* posted before: they must not be taken for missing */
        e->join.held = op;
        return;
    }
    e->join.held = NULL;
    e->join.operation = op;
    hvdl_announce_join(e, op);
}

void hvdl_join_post_held(hvdl_engine *e)
{
    if (e->join.held)
        hvdl_join_post(e, e->join.held);
}

void hvdl_join_fail(hvdl_engine *e, const char *text)
{
    if (e->join.operation &&
        e->join.last < 0) /* else it has succeeded, and ends with what is under way */
        hvdl_finish(e, e->join.operation, text);
    if (e->join.held)
        hvdl_finish(e, e->join.held, text);
}

/* ---- the ranks of this host that have joined ---- */

/* Not while this rank has something to do for the others: its next operation may be of the same name,
 * or the next run of the same plan. */
static void finish_join(hvdl_engine *e)
{
    hvdl_operation *op = e->join.operation;
    int last = e->join.last;
    if (!op || last < 0 || e->join.num_zero_operations)
        return;
    e->join.last = -1;
    hvdl_set_state(e, op, HVDL_MATCHED);
    hvdl_set_state(e, op, HVDL_RUNNING);
    if (hvdl_say_number(op, last))
        hvdl_out_of_memory(e);
    else
        hvdl_finish(e, op, NULL);
}

/* All ranks have joined, `last` as the last one. */
static void end_epoch(hvdl_engine *e, int last)
{
    memset(e->join.joined, 0, (size_t)e->placement.local_size * sizeof *e->join.joined);
    e->join.num_joined = 0;
    e->join.epoch++;
    hvdl_queue_forget_failures(&e->queue); /* a rank that had joined has counted none */
    e->join.last = last;
    finish_join(e);
}

void hvdl_zero_operation_ended(hvdl_engine *e)
{
    e->join.num_zero_operations--;
    finish_join(e);
}

bool hvdl_join_add(hvdl_engine *e, int local)
{
    if (e->join.joined[local])
        return false;
    e->join.joined[local] = true;
    e->join.num_joined++;
    return true;
}

void hvdl_join_added(hvdl_engine *e, int local)
{
    if (e->join.num_joined < e->placement.local_size)
        return;
    int last = hvdl_rank_of_local(e, local);
    if (e->config.num_hosts == 1)
        end_epoch(e, last);
    else if (e->placement.is_leader)
        hvdl_control_joined(e, last);
}

void hvdl_read_all_joined(hvdl_engine *e, int last)
{
    end_epoch(e, last);
}

/* ---- between hosts ---- */

/* All ranks of this host have joined; the others do something. */
void hvdl_on_zero(hvdl_engine *e, const hvdl_message *head)
{
    hvdl_post_body body = {head->key, head->variants.variants[0].desc};
    hvdl_announce(e, (hvdl_entry){.type = HVDL_ENTRY_ZERO, .arg = (uint64_t)head->tag}, &body,
                  sizeof body);
}

static void send_run(hvdl_engine *e, int host, const hvdl_plan *plan)
{
    hvdl_message head = {.type = HVDL_MSG_RUN, .tag = plan->tag, .run = plan->num_runs - 1};
    hvdl_send_message(e, host, &head, NULL, 0);
}

hvdl_err hvdl_host_joins_make(hvdl_engine *e)
{
    hvdl_host_joins *joins = &e->control->joins;
    size_t hosts = (size_t)e->config.num_hosts;
    joins->own_join = -1;
    joins->by_host = calloc(hosts, sizeof *joins->by_host);
    joins->heard = calloc(hosts, sizeof *joins->heard);
    return joins->by_host && joins->heard ? HVDL_OK : HVDL_ENOMEM;
}

static void free_early_runs(hvdl_host_joins *joins)
{
    while (joins->early_runs) {
        hvdl_early_run *next = joins->early_runs->next;
        free(joins->early_runs);
        joins->early_runs = next;
    }
}

void hvdl_host_joins_free(hvdl_host_joins *joins)
{
    free_early_runs(joins);
    while (joins->held_leaves) {
        hvdl_held_leave *next = joins->held_leaves->next;
        free(joins->held_leaves);
        joins->held_leaves = next;
    }
    free(joins->by_host);
    free(joins->heard);
}

void hvdl_hear_clock(hvdl_engine *e, uint64_t clock)
{
    hvdl_host_joins *joins = &e->control->joins;
    joins->clock = clock > joins->clock ? clock : joins->clock;
}

static uint64_t least(const hvdl_engine *e, const uint64_t *by_host)
{
    uint64_t fewest = by_host[0];
    for (int h = 1; h < e->config.num_hosts; h++)
        fewest = by_host[h] < fewest ? by_host[h] : fewest;
    return fewest;
}

/* If all have said that all have joined, and all runs of the epoch are in the shared log. Messages of two
 * hosts come in any order: one that has heard the end may leave before this one has heard it. */
static void end_epoch_between_hosts(hvdl_engine *e)
{
    hvdl_control *control = e->control;
    if (least(e, control->joins.heard) == control->joins.num_epochs ||
        control->joins.num_early_zero_runs)
        return;
    control->joins.num_epochs++;
    free_early_runs(&control->joins);
    hvdl_announce(
        e, (hvdl_entry){.type = HVDL_ENTRY_ALL_JOINED, .arg = (uint64_t)control->joins.last_joined},
        NULL, 0);
    for (hvdl_held_leave *held; (held = control->joins.held_leaves);) {
        control->joins.held_leaves = held->next;
        hvdl_announce_leave(e, held->rank, true);
        free(held);
    }
}

/* Runs that have begun before this leader knew that `host` has joined. */
static void send_runs_under_way(hvdl_engine *e, int host)
{
    for (size_t i = 0; i < e->matches.by_id.num_slots; i++)
        for (hvdl_node *node = e->matches.by_id.slots[i]; node; node = node->next) {
            const hvdl_match *match = HVDL_CONTAINER(node, hvdl_match, by_id);
            if (match->plan && e->control->joins.by_host[host] > match->epoch)
                send_run(e, host, match->plan);
        }
}

void hvdl_control_run(hvdl_engine *e, const hvdl_plan *plan)
{
    for (int h = 0; h < e->config.num_hosts; h++)
        if (h != e->placement.host && e->control->joins.by_host[h] > e->join.epoch)
            send_run(e, h, plan);
}

/* All messages of a run must be posted before those of the next, which have the same tag. Other hosts
 * may be a run ahead of this one, whose ranks do not start its runs themselves. */
void hvdl_next_zero_run(hvdl_engine *e, hvdl_plan *plan)
{
    if (plan->num_known_runs <= plan->num_runs || plan->num_active || plan->zero_run_announced)
        return;
    plan->num_runs++;
    plan->zero_run_announced = true;
    e->control->joins.num_early_zero_runs--;
    hvdl_announce(e, (hvdl_entry){.type = HVDL_ENTRY_ZERO_RUN, .id = plan->id}, NULL, 0);
    end_epoch_between_hosts(e);
}

/* Several hosts may tell of it, or this one may have begun it itself. */
static void learn_of_run(hvdl_engine *e, hvdl_plan *plan, uint64_t run)
{
    if (plan->num_known_runs < plan->num_runs)
        plan->num_known_runs = plan->num_runs;
    if (run < plan->num_known_runs)
        return;
    e->control->joins.num_early_zero_runs += run + 1 - plan->num_known_runs;
    plan->num_known_runs = run + 1;
    hvdl_next_zero_run(e, plan);
}

void hvdl_on_run(hvdl_engine *e, int tag, uint64_t run)
{
    hvdl_plan *plan = hvdl_plan_by_tag(e, tag);
    if (plan) {
        learn_of_run(e, plan, run);
        return;
    }
    /* The coordinator's word that the plan is made is still on its way here. */
    hvdl_early_run *early = malloc(sizeof *early);
    if (!early) {
        hvdl_out_of_memory(e);
        return;
    }
    *early = (hvdl_early_run){e->control->joins.early_runs, tag, run};
    e->control->joins.early_runs = early;
}

void hvdl_control_plan_made(hvdl_engine *e, hvdl_plan *plan)
{
    for (hvdl_early_run **at = &e->control->joins.early_runs; *at;) {
        hvdl_early_run *early = *at;
        if (early->tag != plan->tag) {
            at = &early->next;
            continue;
        }
        *at = early->next;
        learn_of_run(e, plan, early->run);
        free(early);
    }
}

void hvdl_on_all_joined(hvdl_engine *e, int host, int last)
{
    hvdl_control *control = e->control;
    control->joins.heard[host]++;
    if (host == 0)
        control->joins.last_joined = last;
    end_epoch_between_hosts(e);
}

bool hvdl_hold_leave(hvdl_engine *e, int host, int rank)
{
    hvdl_control *control = e->control;
    if (control->joins.heard[host] == control->joins.num_epochs)
        return false;
    hvdl_held_leave *held = malloc(sizeof *held);
    if (!held)
        return false;
    *held = (hvdl_held_leave){control->joins.held_leaves, rank};
    control->joins.held_leaves = held;
    return true;
}

static void tell_all(hvdl_engine *e, int type, int last)
{
    for (int h = 0; h < e->config.num_hosts; h++)
        if (h != e->placement.host) {
            hvdl_message head = {.type = type, .rank = last};
            hvdl_send_message(e, h, &head, NULL, 0);
        }
}

void hvdl_on_host_joined(hvdl_engine *e, int host, int last, uint64_t clock)
{
    hvdl_control *control = e->control;
    control->joins.by_host[host]++;
    /* Messages of different hosts may overtake each other: the order in which they come is not enough. */
    if (clock >= control->joins.latest_clock) {
        control->joins.latest_clock = clock;
        control->joins.latest_joined = last;
    }
    if (host != e->placement.host)
        send_runs_under_way(e, host);
    hvdl_decide_complete(e);
    if (least(e, control->joins.by_host) == control->joins.num_told)
        return;
    control->joins.num_told++;
    tell_all(e, HVDL_MSG_ALL_JOINED, control->joins.latest_joined);
    hvdl_on_all_joined(e, e->placement.host, control->joins.latest_joined);
}

void hvdl_control_joined(hvdl_engine *e, int last)
{
    e->control->joins.own_join = last;
    e->control->joins.own_join_steps = 0;
}

#define QUIET_STEPS 2 /* MPI may tell a look later that something has come */

/* A leader that has not looked for long has others' joins to hear of, which are earlier than its own. */
void hvdl_tell_own_join(hvdl_engine *e, bool heard)
{
    hvdl_control *control = e->control;
    control->joins.own_join_steps = heard ? 0 : control->joins.own_join_steps + 1;
    if (control->joins.own_join_steps < QUIET_STEPS)
        return;
    int last = control->joins.own_join;
    uint64_t clock = ++control->joins.clock;
    control->joins.own_join = -1;
    tell_all(e, HVDL_MSG_HOST_JOINED, last);
    hvdl_on_host_joined(e, e->placement.host, last, clock);
}
