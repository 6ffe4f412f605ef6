/* How this host stands: which of its ranks the others wait for; and the texts of that. See standstill.c. */
#define _GNU_SOURCE
#include "watching/standing.h"

#include <stdlib.h>
#include <string.h>

#include "courses/pieces.h"
#include "engine/state.h"
#include "matching/messages.h"
#include "operations/plans.h"
#include "watching/report.h"

/* A rank that has not looked for so long does not run; one that is idle looks every 2 s. */
#define QUIET_NS 2800000000ull

uint64_t hvdl_quiet_ns(const hvdl_engine *e, int local)
{
    uint64_t looked =
        atomic_load_explicit(&e->shm.control->ranks[local].looked_ns, memory_order_relaxed);
    uint64_t now = hvdl_now_ns(), quiet = looked && now > looked ? now - looked : 0;
    return quiet > QUIET_NS && quiet > e->standstill.still_ns / 2 ? quiet : 0;
}

/* ---- whose part is missing ---- */

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
    missing->count = hvdl_conveyor_behind(&e->shm, missing->ranks, &stage);
    missing->what = what[stage];
}

/* An Adasum goes on when the operation that works for it does. */
static void find_not_posted(const hvdl_engine *e, const hvdl_operation *op, missing_ranks *missing)
{
    const hvdl_meeting *meeting = op->child ? op->child->meeting : NULL;
    missing->what = "posted its next step";
    for (int r = 0; meeting && meeting->collecting && r < e->placement.local_size; r++)
        if (!meeting->posted_by[r] && !e->join.joined[r])
            add_missing(missing, r);
}

/* The journal is full: ranks have not read it. */
static void find_not_read(const hvdl_engine *e, missing_ranks *missing)
{
    uint64_t slowest = UINT64_MAX;
    if (!e->announcing.deferred)
        return;
    missing->what = "read what the others have written";
    for (int r = 0; r < e->placement.local_size; r++) {
        uint64_t cursor =
            atomic_load_explicit(&e->shm.control->ranks[r].cursor, memory_order_relaxed);
        slowest = cursor < slowest ? cursor : slowest;
    }
    for (int r = 0; r < e->placement.local_size; r++)
        if (atomic_load_explicit(&e->shm.control->ranks[r].cursor, memory_order_relaxed) == slowest)
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

/* The ranks of this host without which the operation can't go on here; none: it waits for another host. */
static void describe_missing(const hvdl_engine *e, const hvdl_operation *op, hvdl_writer *to)
{
    bool *ranks = calloc((size_t)e->placement.local_size, sizeof *ranks);
    missing_ranks missing = {.ranks = ranks};
    if (!ranks)
        return;
    if (e->placement.local_size > 1)
        find_behind(e, &missing);
    if (!missing.count)
        find_not_posted(e, op, &missing);
    if (!missing.count)
        find_not_read(e, &missing);
    if (!missing.count)
        find_quiet(e, &missing);
    if (!missing.count)
        find_not_begun(op, &missing);
    if (!ranks[e->placement.local]) /* else it has just moved */
        put_missing(e, &missing, to);
    free(ranks);
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

/* ---- the text ---- */

static const char no_rank[] = "a rank that can't be found";

static void put_awaited(const hvdl_engine *e, int rank, hvdl_writer *to)
{
    hvdl_put(to, "a message of rank %d on %s", hvdl_world_rank(e, rank),
             e->placement.name_of[rank]);
}

static void put_how_far(const hvdl_engine *e, const hvdl_operation *op, hvdl_writer *to)
{
    const hvdl_progress *progress = &op->progress;
    hvdl_headway headway = hvdl_exchanges_headway(e, op);
    char title[HVDL_TITLE_BYTES];
    hvdl_put_title_of(title, sizeof title, op);
    hvdl_put(to, "%s has made no progress for %.0f s, after %llu of %llu pieces", title,
             (double)e->standstill.still_ns / 1e9, (unsigned long long)progress->finished,
             (unsigned long long)progress->num_pieces);
    if (headway.total)
        hvdl_put(to, " and %llu of %llu messages of the next", (unsigned long long)headway.done,
                 (unsigned long long)headway.total);
    bool between = headway.total || awaited_by_host(e) >= 0;
    hvdl_put(to, "; it waits %s for ", between ? "between the hosts" : "within the host");
}

static void put_end(bool fails, hvdl_writer *to)
{
    hvdl_put(to, fails ? "; all operations fail now (HVDLITE_STALL_SHUTDOWN_TIME_SECONDS)"
                       : "; all ranks have called it: is a process stopped, or a host cut off?");
}

bool hvdl_describe_standing_here(const hvdl_engine *e, const hvdl_operation *op, bool fails,
                                 char text[HVDL_TEXT_BYTES])
{
    char missing[HVDL_MISSING_BYTES] = "";
    hvdl_writer names = {missing, sizeof missing, 0}, to = {text, HVDL_TEXT_BYTES, 0};
    int awaited = awaited_by_host(e);
    describe_missing(e, op, &names);
    if (!names.used && awaited >= 0)
        put_awaited(e, awaited, &names);
    put_how_far(e, op, &to);
    hvdl_put(&to, "%s", names.used ? missing : no_rank);
    put_end(fails, &to);
    return names.used;
}

/* ---- between hosts ---- */

void hvdl_describe_standing(hvdl_engine *e, const hvdl_operation *op, hvdl_standing *to)
{
    *to = (hvdl_standing){.state = HVDL_STANDING_STILL, .awaits = awaited_by_host(e)};
    hvdl_writer missing = {to->missing, sizeof to->missing, 0};
    describe_missing(e, op, &missing);
}

/* This rank's, which all ranks of the host have posted; or NULL. The next operation of this key, which other
 * ranks may have posted by now, is another one; and so is that which made the plan of a run. */
static const hvdl_operation *find_operation(hvdl_engine *e, hvdl_key key, uint64_t run, bool is_run)
{
    const hvdl_operation *found = NULL;
    /* What is in flight is ended by the driver alone, which this is. */
    pthread_mutex_lock(&e->queue.lock);
    for (hvdl_node *node = hvdl_table_first(&e->queue.in_flight, key.lo); node;
         node = hvdl_table_next(node->next, key.lo)) {
        const hvdl_operation *op = HVDL_CONTAINER(node, hvdl_operation, by_key);
        if (hvdl_key_equal(op->key, key) && op->meeting && !op->meeting->collecting &&
            hvdl_is_run(op) == is_run && hvdl_run_of(op) == run)
            found = op;
    }
    pthread_mutex_unlock(&e->queue.lock);
    return found;
}

void hvdl_answer_standing(hvdl_engine *e, hvdl_key key, uint64_t run,
                          const hvdl_standing_question *question, hvdl_standing *to)
{
    const hvdl_operation *op = find_operation(e, key, run, question->is_run);
    const hvdl_plan *plan = hvdl_plan_by_key(e, key);
    *to = (hvdl_standing){.state = HVDL_STANDING_ENDED, .awaits = -1};
    if (op && e->standstill.still_ns < question->still_ns / 2)
        to->state = HVDL_STANDING_MOVING;
    else if (op)
        hvdl_describe_standing(e, op, to);
    else if (question->is_run && plan && plan->num_runs <= run)
        to->state = HVDL_STANDING_NOT_POSTED;
}

void hvdl_describe_standing_everywhere(const hvdl_engine *e, const hvdl_operation *op, bool fails,
                                       char text[HVDL_TEXT_BYTES])
{
    char missing[HVDL_MISSING_BYTES] = "";
    hvdl_writer names = {missing, sizeof missing, 0}, to = {text, HVDL_TEXT_BYTES, 0};
    const hvdl_standing *answers = e->standstill.answers;
    for (int h = 0; h < e->config.num_hosts; h++) {
        const char *comma = names.used ? ", " : "";
        if (answers[h].state == HVDL_STANDING_SILENT)
            hvdl_put(&names, "%srank %d on %s (which does not answer)", comma,
                     hvdl_world_rank(e, hvdl_leader_of(e, h)), e->config.host_names[h]);
        else if (*answers[h].missing)
            hvdl_put(&names, "%s%s", comma, answers[h].missing);
    }
    for (int h = 0; !names.used && h < e->config.num_hosts; h++) {
        int awaits = answers[h].awaits;
        if (answers[h].state == HVDL_STANDING_STILL && awaits >= 0 && awaits < e->config.num_ranks)
            put_awaited(e, awaits, &names);
    }
    put_how_far(e, op, &to);
    hvdl_put(&to, "%s", names.used ? missing : no_rank);
    put_end(fails, &to);
}
