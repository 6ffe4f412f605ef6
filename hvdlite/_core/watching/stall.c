/* Each rank looks at its own operations, at most four times a second and only while it drives. Nothing is counted on
 * the way of the data: at each look a rank hashes how far its operations are (its place), and publishes the hash
 * in shared memory, with the time and the rank whose message it waits for. So each rank sees whether its host
 * stands still, and which ranks have stopped looking.
 *
 * A rank that finds an operation late, or still, claims the report in shared memory (claims), asks all hosts
 * (missing_query.c) and says one text. Of several hosts that do so at once, the lowest one speaks. */
#define _GNU_SOURCE
#include "watching/stall.h"

#include <stdlib.h>
#include <string.h>

#include "collectives/pieces.h"
#include "engine/giving_up.h"
#include "engine/state.h"
#include "transfers/transfer_texts.h"
#include "watching/missing.h"
#include "watching/report.h"
#include "watching/missing_query.h"

#define LOOK_NS 250000000ull         /* between two looks */
#define LONGEST_LOOK_NS 500000000ull /* more was no wait: this rank did not run */
#define MAX_LATE 64                  /* operations that are asked about at once */

#define LEAST_STILL_NS 3000000000ull /* by then all ranks that run have looked */
#define AGAIN_NS 1000000000ull       /* after a call that found no missing rank */
#define GOES_ON 255                  /* the report that it does */
#define MAX_NAMED 8                  /* ranks that a caller's text names */
#define OTHER_PARAMETERS                                                                           \
    "do the optimizers of all ranks have the same parameters, with the same requires_grad?"

hvdl_err hvdl_stall_make(hvdl_engine *e)
{
    e->stall.silent = calloc((size_t)e->config.num_hosts, sizeof *e->stall.silent);
    e->stall.lasts = calloc((size_t)e->placement.local_size, sizeof *e->stall.lasts);
    return e->stall.silent && e->stall.lasts ? HVDL_OK : HVDL_ENOMEM;
}

void hvdl_stall_free(hvdl_engine *e)
{
    free(e->stall.silent);
    free(e->stall.lasts);
}

/* ---- how far everything is ---- */

static uint64_t place_of(const hvdl_operation *op)
{
    const hvdl_progress *progress = &op->progress;
    uint64_t place = hvdl_mix(op->number + 1);
    place = hvdl_mix(place + progress->started);
    place = hvdl_mix(place + progress->finished);
    place = hvdl_mix(place + progress->announced);
    for (int i = 0; i < HVDL_PIECE_SLOTS; i++)
        place = hvdl_mix(place + (uint64_t)progress->pieces[i].num_ready);
    return place;
}

static bool is_under_way(const hvdl_operation *op)
{
    int state = atomic_load_explicit(&op->state, memory_order_relaxed);
    return (state == HVDL_MATCHED || state == HVDL_RUNNING) && !op->transfer;
}

/* The user's before the engine's own, then the oldest. */
static bool comes_first(const hvdl_operation *op, const hvdl_operation *other)
{
    if (!other || op->internal != other->internal)
        return !other || other->internal;
    return op->posted_ns < other->posted_ns;
}

/* The operation to speak of; NULL: none is under way. *place: of this rank. */
static hvdl_operation *first_under_way(hvdl_engine *e, uint64_t *place)
{
    hvdl_operation *first = NULL;
    *place = hvdl_exchanges_headway(e, NULL).done;
    for (int stage = 0; stage < HVDL_NUM_STAGES; stage++)
        *place = hvdl_mix(*place + e->pipeline.blocks[stage]);
    /* What is in flight is ended by the driver alone, which this is. */
    pthread_mutex_lock(&e->queue.lock);
    for (size_t i = 0; i < e->queue.in_flight.num_slots; i++)
        for (hvdl_node *node = e->queue.in_flight.slots[i]; node; node = node->next) {
            hvdl_operation *op = HVDL_CONTAINER(node, hvdl_operation, by_key);
            if (!is_under_way(op))
                continue;
            *place += place_of(op);
            if (comes_first(op, first))
                first = op;
        }
    pthread_mutex_unlock(&e->queue.lock);
    return first;
}

/* NULL: something moves. */
static hvdl_operation *find_still(hvdl_engine *e, uint64_t now, uint64_t gap_ns)
{
    hvdl_shm_rank *ranks = e->shm.control->ranks, *self = &ranks[e->placement.local];
    uint64_t own_place, place = 0;
    hvdl_operation *op = first_under_way(e, &own_place);
    int peer = op ? hvdl_exchanges_headway(e, op).peer : -1;
    atomic_store_explicit(&self->place, own_place, memory_order_relaxed);
    atomic_store_explicit(&self->awaits, (uint32_t)(peer + 1), memory_order_relaxed);
    atomic_store_explicit(&self->looked_ns, now, memory_order_relaxed);
    for (int r = 0; r < e->placement.local_size; r++)
        place = hvdl_mix(place + atomic_load_explicit(&ranks[r].place, memory_order_relaxed));
    if (op && place == e->stall.place) {
        e->stall.still_ns += gap_ns;
        return op;
    }
    e->stall.place = place;
    e->stall.still_ns = 0;
    e->stall.num_still = 0;
    return NULL;
}

/* ---- texts ---- */

static const char no_rank[] = "a rank that can't be found";

static void put_title(const hvdl_operation *op, hvdl_writer *to)
{
    char name[128], title[HVDL_TITLE_BYTES];
    hvdl_copy_name(name, sizeof name, hvdl_shown(op));
    hvdl_put_title(title, sizeof title, hvdl_kind_name(op->desc.kind), op->words, name);
    hvdl_put(to, "%s", title);
}

static void put_ranks(const hvdl_engine *e, const uint8_t *presence, hvdl_writer *to)
{
    int first = -1, last = -1;
    for (int rank = 0; rank <= e->config.num_ranks; rank++) {
        bool has_posted = rank < e->config.num_ranks && presence[rank] == HVDL_HAS_POSTED;
        int number = has_posted ? hvdl_world_rank(e, rank) : -1;
        if (first >= 0 && number != last + 1) {
            hvdl_put(to, "%s%d", to->used ? ", " : "", first);
            if (last > first)
                hvdl_put(to, last > first + 1 ? "-%d" : ", %d", last);
            first = -1;
        }
        if (has_posted && first < 0)
            first = number;
        last = number;
    }
}

/* In a failure only what tells of a likely cause. */
static void put_question(const hvdl_engine *e, const hvdl_missing_query *call, hvdl_writer *to)
{
    const hvdl_operation *op = call->operation;
    bool gives_up = call->question.gives_up;
    const char *before = gives_up ? "; " : "";
    bool is_elsewhere = call->num_missing && call->num_elsewhere == call->num_missing;
    if (!call->num_missing && !gives_up)
        hvdl_put(to, "is that host cut off, or are its processes stopped?");
    if (!call->num_missing && !gives_up && call->num_silent)
        hvdl_put(to, " Or is the link between it and %s slow?",
                 e->config.host_names[e->placement.host]);
    if (!call->num_missing)
        return;
    if (hvdl_makes_plan(op))
        hvdl_put(to, "%s" OTHER_PARAMETERS, before);
    else if (hvdl_comes_again(e, op) && !is_elsewhere)
        hvdl_put(to, "%s%s", before, hvdl_uneven);
    else if (!gives_up)
        hvdl_put(to, "do all ranks take the same path through the program?");
}

static void describe_late(const hvdl_engine *e, const hvdl_missing_query *call, double age_s,
                          char text[HVDL_TEXT_BYTES])
{
    const hvdl_question *asked = &call->question;
    char posted[128], site[HVDL_SITE_BYTES];
    hvdl_writer to = {text, HVDL_TEXT_BYTES, 0}, ranks = {posted, sizeof posted, 0};
    *posted = '\0';
    if (asked->kind == HVDL_CALL_HELD)
        hvdl_put(&ranks, "%d", hvdl_own_number(e));
    else
        put_ranks(e, call->presence, &ranks);
    put_title(call->operation, &to);
    if (call->operation->site) {
        hvdl_copy_plain_name(site, sizeof site, call->operation->site);
        hvdl_put(&to, " (%s)", site);
    }
    hvdl_put(&to,
             asked->report && !asked->gives_up
                 ? " still waits, after %.0f s, for %s; called by rank%s %s; "
                 : " has waited %.0f s for %s; called by rank%s %s; ",
             age_s, call->missing.used ? call->text : no_rank, strpbrk(posted, ",-") ? "s" : "",
             posted);
    if (asked->gives_up)
        hvdl_put(&to, "all operations fail now (HVDLITE_STALL_SHUTDOWN_TIME_SECONDS)");
    put_question(e, call, &to);
}

static void describe_still(const hvdl_engine *e, hvdl_missing_query *call,
                           char text[HVDL_TEXT_BYTES])
{
    const hvdl_progress *progress = &call->operation->progress;
    hvdl_headway headway = hvdl_exchanges_headway(e, call->operation);
    hvdl_writer to = {text, HVDL_TEXT_BYTES, 0};
    bool is_between = headway.total || call->awaits >= 0;
    put_title(call->operation, &to);
    hvdl_put(&to, " has made no progress for %.0f s, after %llu of %llu pieces",
             (double)e->stall.still_ns / 1e9, (unsigned long long)progress->finished,
             (unsigned long long)progress->num_pieces);
    if (headway.total)
        hvdl_put(&to, " and %llu of %llu messages of the next", (unsigned long long)headway.done,
                 (unsigned long long)headway.total);
    if (!call->missing.used && call->awaits >= 0)
        hvdl_put(&call->missing, "a message of rank %d on %s", hvdl_world_rank(e, call->awaits),
                 e->placement.name_of[call->awaits]);
    hvdl_put(&to, "; it waits %s for %s; %s", is_between ? "between the hosts" : "within the host",
             call->missing.used ? call->text : no_rank,
             call->question.gives_up
                 ? "all operations fail now (HVDLITE_STALL_SHUTDOWN_TIME_SECONDS)"
                 : "all ranks have called it: is a process stopped, or a host cut off?");
}

/* For a caller. */
static char *describe_absent(const hvdl_engine *e, const hvdl_missing_query *call)
{
    char text[HVDL_TEXT_BYTES];
    hvdl_writer to = {text, sizeof text, 0};
    int count = 0;
    *text = '\0';
    for (int rank = 0; rank < e->config.num_ranks; rank++)
        if (!call->goes_on && call->presence[rank] == HVDL_HAS_NOT_POSTED && count++ < MAX_NAMED)
            hvdl_put(&to, "%srank %d on %s", count > 1 ? ", " : "", hvdl_world_rank(e, rank),
                     e->placement.name_of[rank]);
    if (count > MAX_NAMED)
        hvdl_put(&to, " and %d more", count - MAX_NAMED);
    if (count)
        hvdl_put(&to, count > 1 ? " have not called it" : " has not called it");
    for (int h = 0; call->num_silent && h < e->config.num_hosts; h++)
        if (!call->answered[h])
            hvdl_put(&to, "%s%s does not answer", to.used ? "; " : "", e->config.host_names[h]);
    if (!to.used)
        hvdl_put(&to, "all ranks have called it; is a process stopped, or a host cut off?");
    return strdup(text);
}

/* ---- what follows from the answers ---- */

/* It has not ended anything. One that does not listen has claimed nothing. */
static void unclaim(hvdl_engine *e, const hvdl_question *asked)
{
    if (asked->gives_up && !asked->is_alone && !asked->is_overdue)
        hvdl_unclaim_end(e);
}

static void say_late(hvdl_engine *e, hvdl_missing_query *call)
{
    hvdl_operation *op = call->operation;
    const hvdl_question *asked = &call->question;
    uint64_t now = hvdl_now_ns();
    char text[HVDL_TEXT_BYTES];
    bool is_still = asked->kind == HVDL_CALL_STILL, is_over = call->goes_on;
    bool listens = !asked->is_alone && !asked->is_overdue;
    if (is_still) /* hosts agree on no run: one that is silent may not have begun it, which is then late */
        is_over |= !e->stall.still_ns || (call->num_silent && asked->is_run && !op->internal);
    else
        is_over |= (!call->missing.used && !asked->is_alone) ||
                   (op->match && hvdl_is_agreed(e, op->match));
    if (is_still && is_over)
        e->stall.still_ns = 0; /* from now on */
    if (is_over || (call->is_told && listens)) {
        op->stall.next_ns = asked->gives_up ? now + AGAIN_NS : op->stall.next_ns;
        unclaim(e, asked);
        return;
    }
    if (is_still)
        describe_still(e, call, text);
    else
        describe_late(e, call, (double)(now - op->posted_ns) / 1e9, text);
    if (asked->gives_up) {
        hvdl_announce_give_up(e, text, !listens);
        return;
    }
    hvdl_report(e, text);
    hvdl_note_told(e, call);
    op->stall.told = true;
}

static void answer_caller(hvdl_engine *e, const hvdl_missing_query *call)
{
    hvdl_operation *op = call->operation;
    char *answer = describe_absent(e, call);
    pthread_mutex_lock(&e->stall.lock);
    free(op->stall.answer);
    op->stall.answer = answer;
    pthread_mutex_unlock(&e->stall.lock);
    atomic_store(&op->stall.wanted, false);
}

void hvdl_stall_step(hvdl_engine *e)
{
    uint64_t now = hvdl_now_ns(), gap = now - e->stall.looked_ns;
    e->stall.looked_ns = now;
    e->stall.ran_ns += gap < LONGEST_LOOK_NS ? gap : LONGEST_LOOK_NS;
    bool any = false;
    for (const hvdl_missing_query *call = e->stall.calls; call && !any; call = call->next)
        any = hvdl_roll_is_complete(e, call);
    if (!any)
        return;
    hvdl_survey(e); /* operations may end, and with them their calls */
    if (e->failure.broken)
        return;
    for (hvdl_missing_query *call = e->stall.calls, *next; call; call = next) {
        hvdl_operation *op = call->operation;
        next = call->next;
        if (!hvdl_roll_is_complete(e, call))
            continue;
        op->stall.call = NULL;
        hvdl_close_roll(e, call);
        if (atomic_load(&op->stall.wanted) && call->question.kind <= HVDL_CALL_LATE)
            answer_caller(e, call);
        if (call->question.kind != HVDL_CALL_CALLER)
            say_late(e, call);
        hvdl_end_missing_query(e, call);
    }
}

void hvdl_stall_ended(hvdl_engine *e, hvdl_operation *op, bool ok)
{
    char text[HVDL_TEXT_BYTES];
    hvdl_writer to = {text, sizeof text, 0};
    hvdl_question goes_on = {.report = GOES_ON};
    if (op->stall.call) {
        unclaim(e, &op->stall.call->question);
        hvdl_end_missing_query(e, op->stall.call);
    }
    op->stall.call = NULL;
    if (!ok || !op->stall.told || !op->match ||
        hvdl_claim_report(e, op->match->id, &goes_on, e->placement.host) != HVDL_TOLD_BY_NOBODY)
        return;
    put_title(op, &to);
    hvdl_put(&to, " goes on after %.0f s", (double)(hvdl_now_ns() - op->posted_ns) / 1e9);
    hvdl_say(e, text);
}

/* ---- beginning ---- */

static hvdl_question question_about(const hvdl_operation *op, hvdl_call_kind kind)
{
    const hvdl_match *match = op->match;
    return (hvdl_question){.key = op->key,
                           .run = hvdl_run_of(op),
                           .kind = (int32_t)kind,
                           .is_run = hvdl_is_run(op),
                           .is_posted = match && !match->collecting && !match->plan,
                           .is_alone = kind == HVDL_CALL_HELD};
}

/* No report waits for a call that only a caller wants. */
static bool is_asked_about(const hvdl_operation *op)
{
    return op->stall.call && op->stall.call->question.kind != HVDL_CALL_CALLER;
}

static void begin(hvdl_engine *e, hvdl_operation *op, const hvdl_question *how, uint64_t what)
{
    e->stall.told = true;
    if (op->stall.call) { /* a caller's, which asks again if this one does not answer it */
        hvdl_end_missing_query(e, op->stall.call);
        atomic_store(&e->stall.wanted, true);
        atomic_store(&e->driving.has_more, true);
    }
    op->stall.call = hvdl_call_roll(e, op, how, what);
    if (!op->stall.call)
        unclaim(e, how);
}

static bool is_overdue(const hvdl_engine *e)
{
    const hvdl_missing_query *call = e->stall.calls;
    while (call && !call->question.is_overdue)
        call = call->next;
    return call != NULL;
}

/* Asks the hosts if a report is due of what has waited for so long, unless another rank makes it. */
static void begin_report(hvdl_engine *e, hvdl_operation *op, hvdl_call_kind kind, uint64_t age_ns)
{
    hvdl_question how = question_about(op, kind);
    bool is_still = kind == HVDL_CALL_STILL;
    uint64_t least = kind == HVDL_CALL_LATE ? 0 : LEAST_STILL_NS;
    uint64_t first = e->config.stall_warning_ns, last = e->config.stall_shutdown_ns;
    uint64_t place = op->match ? op->match->id : e->shm.read_position;
    uint64_t what = is_still ? e->stall.place : place;
    int *count = is_still ? &e->stall.num_still : &op->stall.num_reports;
    first = first && first < least ? least : first;
    last = last && last < least ? least : last;
    how.still_ns = is_still ? age_ns : 0;
    how.report = *count;
    how.gives_up = last && age_ns > last;
    how.is_overdue = last && age_ns > last + HVDL_OVERDUE_NS;
    if (!how.gives_up && !hvdl_report_is_due(first, age_ns, *count))
        return;
    while (!how.gives_up && hvdl_report_is_due(first, age_ns, *count))
        ++*count;
    if (how.is_overdue && is_overdue(e)) /* one call is enough */
        return;
    bool is_unheard = how.gives_up && how.is_alone; /* the others can't read of it either */
    if (is_unheard || how.is_overdue ||
        hvdl_claim_report(e, what, &how, e->placement.host) == HVDL_TOLD_BY_NOBODY)
        begin(e, op, &how, what);
}

/* HVDL_CALL_CALLER: it does not wait for ranks. */
static hvdl_call_kind lateness_of(const hvdl_engine *e, const hvdl_operation *op, uint64_t now)
{
    bool has_no_plan = hvdl_is_run(op) && !op->plan->ready;
    if (op->internal || op->desc.kind == HVDL_JOIN || op->transfer || is_asked_about(op) ||
        now < op->stall.next_ns || (op->match && hvdl_is_agreed(e, op->match)))
        return HVDL_CALL_CALLER;
    if (op->match)
        return HVDL_CALL_LATE;
    return has_no_plan ? HVDL_CALL_CALLER : HVDL_CALL_HELD;
}

static int find_late(hvdl_engine *e, uint64_t now, hvdl_operation *found[MAX_LATE])
{
    uint64_t first = e->config.stall_warning_ns, last = e->config.stall_shutdown_ns;
    int count = 0;
    pthread_mutex_lock(&e->queue.lock);
    for (size_t i = 0; i < e->queue.in_flight.num_slots; i++)
        for (hvdl_node *node = e->queue.in_flight.slots[i]; node; node = node->next) {
            hvdl_operation *op = HVDL_CONTAINER(node, hvdl_operation, by_key);
            uint64_t age = now > op->posted_ns ? now - op->posted_ns : 0;
            if (count < MAX_LATE && lateness_of(e, op, now) != HVDL_CALL_CALLER &&
                ((last && age > last) || hvdl_report_is_due(first, age, op->stall.num_reports)))
                found[count++] = op;
        }
    pthread_mutex_unlock(&e->queue.lock);
    return count;
}

bool hvdl_stall_look(hvdl_engine *e)
{
    hvdl_operation *found[MAX_LATE];
    uint64_t now = hvdl_now_ns();
    if ((!e->config.stall_warning_ns && !e->config.stall_shutdown_ns) || e->failure.broken ||
        now < e->stall.next_look_ns)
        return false;
    e->stall.next_look_ns = now + LOOK_NS;
    hvdl_stall_step(e);
    if (e->failure.broken)
        return true;
    hvdl_operation *still = find_still(e, now, e->stall.ran_ns - e->stall.seen_ns);
    e->stall.seen_ns = e->stall.ran_ns; /* which also each step of a call moves on */
    if (still && !is_asked_about(still))
        begin_report(e, still, HVDL_CALL_STILL, e->stall.still_ns);
    if (!find_late(e, now, found))
        return true;
    hvdl_survey(e);
    int count = find_late(e, now, found); /* some may have ended */
    for (int i = 0; i < count && !e->failure.broken; i++)
        begin_report(e, found[i], lateness_of(e, found[i], now), now - found[i]->posted_ns);
    hvdl_stall_step(e);
    return true;
}

/* ---- for callers ---- */

void hvdl_stall_ask_for_callers(hvdl_engine *e)
{
    hvdl_operation *found[MAX_LATE];
    int count = 0;
    bool waiting = false;
    hvdl_stall_step(e);
    hvdl_survey(e);
    pthread_mutex_lock(&e->queue.lock);
    atomic_store(&e->stall.wanted, false);
    for (size_t i = 0; i < e->queue.in_flight.num_slots; i++)
        for (hvdl_node *node = e->queue.in_flight.slots[i]; node; node = node->next) {
            hvdl_operation *op = HVDL_CONTAINER(node, hvdl_operation, by_key);
            if (!atomic_load(&op->stall.wanted))
                continue;
            if (count < MAX_LATE && op->match && !op->stall.call)
                found[count++] = op;
            else /* not in the shared log yet, or there is another call, whose answer it gets */
                waiting |= !op->stall.call || op->stall.call->question.kind != HVDL_CALL_CALLER;
        }
    pthread_mutex_unlock(&e->queue.lock);
    for (int i = 0; i < count; i++) {
        hvdl_question how = question_about(found[i], HVDL_CALL_CALLER);
        begin(e, found[i], &how, 0);
    }
    if (waiting) {
        atomic_store(&e->stall.wanted, true);
        atomic_store(&e->driving.has_more, true);
    }
}
