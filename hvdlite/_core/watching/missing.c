#define _GNU_SOURCE
#include "watching/missing.h"

#include <stdlib.h>
#include <string.h>

#include "engine/state.h"
#include "matching/coordinator.h"
#include "matching/matches.h"
#include "matching/messages.h"
#include "operations/activity.h"
#include "operations/plans.h"
#include "watching/report.h"
#include "watching/missing_query.h"

#define MAX_DETAILED 8     /* ranks of a host that are described one by one */
#define LONGEST_DETAIL 256 /* bytes of such a description */
/* A rank that has not looked for so long does not run; one that is idle looks every 2 s. */
#define QUIET_NS 2800000000ull

uint64_t hvdl_quiet_ns(const hvdl_engine *e, int local)
{
    uint64_t looked =
        atomic_load_explicit(&e->shm.control->ranks[local].looked_ns, memory_order_relaxed);
    uint64_t now = hvdl_now_ns(), quiet = looked && now > looked ? now - looked : 0;
    return quiet > QUIET_NS ? quiet : 0;
}

uint64_t hvdl_run_of(const hvdl_operation *op)
{
    if (!hvdl_is_run(op))
        return 0;
    return op->plan->num_runs - (op->match && !op->match->collecting);
}

bool hvdl_is_agreed(const hvdl_engine *e, const hvdl_match *match)
{
    if (match->collecting)
        return false;
    return e->config.num_hosts == 1 || (!match->plan && match->coordinator < 0);
}

/* ---- which ranks have posted it ---- */

/* That of an operation which has not ended here; NULL: no rank of this host has posted it. */
static hvdl_match *find_match(hvdl_engine *e, const hvdl_question *asked)
{
    hvdl_plan *plan = hvdl_plan_by_key(e, asked->key);
    hvdl_match *match = plan ? plan->collecting : hvdl_match_by_key(e, asked->key);
    if (plan ? asked->run == plan->num_runs : match != NULL)
        return match;
    for (size_t i = 0; i < e->matches.by_id.num_slots; i++)
        for (hvdl_node *node = e->matches.by_id.slots[i]; node; node = node->next) {
            match = HVDL_CONTAINER(node, hvdl_match, by_id);
            if (hvdl_key_equal(match->key, asked->key))
                return match;
        }
    return NULL;
}

/* Only the coordinator knows of an operation that has ended here and not there; a host that has ended it
 * looks as if it had not begun it. */
static bool is_decided(hvdl_engine *e, const hvdl_question *asked)
{
    return asked->is_posted && e->placement.is_leader && e->config.num_hosts > 1 &&
           hvdl_coordinator_of(e, asked->key) == e->placement.host &&
           !hvdl_is_open(e, asked->key, asked->host);
}

void hvdl_survey(hvdl_engine *e)
{
    for (int r = 0; r < e->placement.local_size; r++)
        e->stall.lasts[r] = hvdl_last_of(e, r);
    uint64_t tail = atomic_load_explicit(&e->shm.control->tail, memory_order_acquire);
    e->callbacks->read_log(e);
    for (int r = 0; e->shm.read_position < tail && r < e->placement.local_size; r++)
        e->stall.lasts[r].activity = HVDL_DID_UNKNOWN; /* a rank is just writing to it */
}

/* The host that makes the report for which another one asks; if none did so far, the other one does from now on.
 * what: as in hvdl_claim_report. */
static int told_by(hvdl_engine *e, uint64_t what, const hvdl_question *asked)
{
    if (asked->host == e->placement.host)
        return HVDL_TOLD_BY_NOBODY;
    return asked->gives_up ? hvdl_ending_host(e) : hvdl_claim_report(e, what, asked, asked->host);
}

static void describe_posted(hvdl_engine *e, const hvdl_question *asked, hvdl_answer *to,
                            uint8_t *presence)
{
    hvdl_writer missing = {to->missing, sizeof to->missing, 0};
    int num_detailed = 0, num_more = 0;
    const hvdl_match *match = find_match(e, asked);
    const hvdl_plan *plan = hvdl_plan_by_key(e, asked->key);
    bool all = match ? hvdl_is_agreed(e, match) : plan && asked->run < plan->num_runs;
    to->goes_on = is_decided(e, asked);
    for (int r = 0; r < e->placement.local_size; r++) {
        bool has_posted = all || (match && match->posted_by[r]);
        if (!has_posted && e->join.joined[r])
            continue; /* it takes part all the same */
        presence[r] = has_posted ? HVDL_HAS_POSTED : HVDL_HAS_NOT_POSTED;
        if (has_posted)
            continue;
        const hvdl_shm_last *last = &e->stall.lasts[r];
        to->num_elsewhere += last->activity == HVDL_DID_POST || last->activity == HVDL_DID_FAIL;
        if (num_detailed == MAX_DETAILED || missing.used + LONGEST_DETAIL > missing.room) {
            num_more++;
        } else {
            hvdl_put_rank(e, &missing, r, last);
            num_detailed++;
        }
    }
    if (num_more)
        hvdl_put(&missing, " and %d more on %s", num_more, e->config.host_names[e->placement.host]);
    if (asked->gives_up || (match && asked->kind == HVDL_CALL_LATE))
        to->told_by = told_by(e, match ? match->id : 0, asked);
}

/* ---- whose part of the data is missing ---- */

typedef struct {
    bool *ranks; /* by local rank */
    int count;
    const char *what; /* they have not done */
} missing_ranks;

static void add_missing(missing_ranks *missing, int local)
{
    missing->count += !missing->ranks[local];
    missing->ranks[local] = true;
}

static void find_behind(const hvdl_engine *e, missing_ranks *missing)
{
    static const char *const what[HVDL_NUM_STAGES] = {[HVDL_STAGE_IN] = "put in its part",
                                                      [HVDL_STAGE_REDUCED] = "added up its part",
                                                      [HVDL_STAGE_OUT] = "taken out its part"};
    hvdl_stage stage;
    missing->count = hvdl_pipeline_behind(&e->shm, missing->ranks, &stage);
    missing->what = what[stage];
}

/* An Adasum goes on when the operation that works for it does. */
static void find_not_posted(const hvdl_engine *e, const hvdl_operation *op, missing_ranks *missing)
{
    const hvdl_match *match = op->child ? op->child->match : NULL;
    missing->what = "posted its next step";
    for (int r = 0; match && match->collecting && r < e->placement.local_size; r++)
        if (!match->posted_by[r] && !e->join.joined[r])
            add_missing(missing, r);
}

/* The shared log is full: ranks have not read it. */
static void find_not_read(const hvdl_engine *e, missing_ranks *missing)
{
    uint64_t cursors[e->placement.local_size], slowest = UINT64_MAX;
    missing->what = "read what the others have written";
    for (int r = 0; r < e->placement.local_size; r++) {
        cursors[r] = atomic_load_explicit(&e->shm.control->ranks[r].cursor, memory_order_relaxed);
        slowest = cursors[r] < slowest ? cursors[r] : slowest;
    }
    for (int r = 0; e->announcing.deferred && r < e->placement.local_size; r++)
        if (cursors[r] == slowest)
            add_missing(missing, r);
}

static void find_quiet(const hvdl_engine *e, missing_ranks *missing)
{
    missing->what = "moved";
    for (int r = 0; e->config.progress_thread && r < e->placement.local_size; r++)
        if (r != e->placement.local && hvdl_quiet_ns(e, r))
            add_missing(missing, r);
}

/* Only the leader begins pieces. */
static void find_not_begun(const hvdl_operation *op, missing_ranks *missing)
{
    missing->what = "begun the next piece";
    if (op->progress.started < op->progress.num_pieces &&
        op->progress.started == op->progress.finished)
        add_missing(missing, 0);
}

static void put_missing(const hvdl_engine *e, const missing_ranks *missing, hvdl_writer *to)
{
    for (int r = 0; r < e->placement.local_size; r++) {
        int rank = hvdl_rank_of_local(e, r);
        uint64_t quiet = hvdl_quiet_ns(e, r);
        if (!missing->ranks[r])
            continue;
        hvdl_put(to, "%srank %d on %s (which has not %s", to->used ? ", " : "",
                 hvdl_world_rank(e, rank), e->placement.name_of[rank], missing->what);
        if (quiet)
            hvdl_put(to, " and has not run for %.0f s", (double)quiet / 1e9);
        hvdl_put(to, ")");
    }
}

/* The member whose message this host waits for, or -1. */
static int awaited_by_host(const hvdl_engine *e)
{
    for (int r = 0; r < e->placement.local_size; r++) {
        uint32_t awaits =
            atomic_load_explicit(&e->shm.control->ranks[r].awaits, memory_order_relaxed);
        if (awaits)
            return (int)awaits - 1;
    }
    return -1;
}

/* The ranks of this host without which the operation can't go on here; none: it waits for another host.
 * op: NULL: it is not in the shared log. */
static void describe_held(const hvdl_engine *e, const hvdl_operation *op, hvdl_answer *to)
{
    hvdl_writer writer = {to->missing, sizeof to->missing, 0};
    missing_ranks missing = {.ranks = calloc((size_t)e->placement.local_size, sizeof(bool))};
    if (!missing.ranks)
        return;
    if (op && e->placement.local_size > 1)
        find_behind(e, &missing);
    if (op && !missing.count)
        find_not_posted(e, op, &missing);
    if (!missing.count)
        find_not_read(e, &missing);
    if (!missing.count)
        find_quiet(e, &missing);
    if (op && !missing.count)
        find_not_begun(op, &missing);
    if (!missing.ranks[e->placement.local]) /* else it has just moved */
        put_missing(e, &missing, &writer);
    free(missing.ranks);
}

/* This rank's, which all ranks of the host have posted; or NULL. The next operation of this key, which other
 * ranks may have posted by now, is another one; and so is that which made the plan of a run. */
static const hvdl_operation *find_operation(hvdl_engine *e, const hvdl_question *asked)
{
    const hvdl_operation *found = NULL;
    /* What is in flight is ended by the driver alone, which this is. */
    pthread_mutex_lock(&e->queue.lock);
    for (hvdl_node *node = hvdl_table_first(&e->queue.in_flight, asked->key.lo); node;
         node = hvdl_table_next(node->next, asked->key.lo)) {
        const hvdl_operation *op = HVDL_CONTAINER(node, hvdl_operation, by_key);
        if (hvdl_key_equal(op->key, asked->key) && op->match && !op->match->collecting &&
            hvdl_is_run(op) == asked->is_run && hvdl_run_of(op) == asked->run)
            found = op;
    }
    pthread_mutex_unlock(&e->queue.lock);
    return found;
}

static void describe_still(hvdl_engine *e, const hvdl_question *asked, hvdl_answer *to)
{
    const hvdl_operation *op = find_operation(e, asked);
    const hvdl_plan *plan = hvdl_plan_by_key(e, asked->key);
    bool is_own = asked->host == e->placement.host;
    if (!op) { /* it has ended here; or it has not begun, and is late */
        to->goes_on = asked->is_run && plan && plan->num_runs <= asked->run;
        return;
    }
    to->goes_on = !is_own && e->stall.still_ns < asked->still_ns / 2;
    if (to->goes_on)
        return;
    describe_held(e, op, to);
    to->awaits = awaited_by_host(e);
    to->told_by = told_by(e, e->stall.place, asked);
}

void hvdl_describe_missing(hvdl_engine *e, const hvdl_question *asked, hvdl_answer *to,
                           uint8_t *presence)
{
    if (asked->kind == HVDL_CALL_HELD)
        describe_held(e, NULL, to);
    else if (asked->kind == HVDL_CALL_STILL)
        describe_still(e, asked, to);
    else
        describe_posted(e, asked, to, presence);
}
