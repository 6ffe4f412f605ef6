/* Operations that stand still: all ranks have posted them, and no block, message or piece of any operation
 * moves on this host, for longer than the limits of the stall check. The report says how far the operation got,
 * and which rank's part is missing; after the other limit everything fails.
 *
 * Nothing is counted on the way of the data. At each look a rank hashes how far its operations are (its
 * place), and publishes the hash in shared memory with the time and the rank whose message it waits for. So each rank
 * sees whether its host stands still, and which ranks have stopped looking.
 *
 * On one host the first rank that finds it speaks. Between hosts a leader asks all others (STANDS): is this
 * host moving, and which of its ranks is missing (STANDING)? The lowest host that stands still and answers
 * speaks, and tells the others with what everything fails (STOOD). Every rank has a clock of its own: whoever
 * hears nothing decides alone. The text goes through shared memory (the verdict) to the ranks of the host, so
 * that a rank which was stopped finds it when it goes on, before it ends any operation. */
#define _GNU_SOURCE
#include "engine/standstill.h"

#include <stdio.h>
#include <string.h>

#include "engine/control.h"
#include "engine/report.h"

#define LOOK_NS 250000000ull
#define LONGEST_LOOK_NS 500000000ull /* more was no wait: this rank did not run */
#define ANSWER_NS                                                                                  \
    3000000000ull /* how long a host may take to answer; an idle one looks every 2 s */
/* No standstill is shorter: by then all ranks that run have looked. */
#define LEAST_NS 3000000000ull
/* A rank that has not looked for so long does not run; one that is idle looks every 2 s. */
#define QUIET_NS 2800000000ull

/* How a host stands, in a message. */
typedef enum {
    STANDING_SILENT,    /* it has not answered */
    STANDING_MOVING,    /* its operations move */
    STANDING_STILL,     /* the operation stands still there, too */
    STANDING_ENDED,     /* it has ended there */
    STANDING_NOT_POSTED /* a run of a plan: it has not begun there, which stall.c reports */
} standing;

struct hvdl_standing {
    int32_t state;  /* standing */
    int32_t awaits; /* the member whose message it waits for, or -1 */
    char missing[HVDL_MISSING_BYTES];
};

/* ---- how far everything is ---- */

static uint64_t mix(uint64_t h)
{
    h = (h ^ h >> 33) * 0xff51afd7ed558ccdull;
    h = (h ^ h >> 33) * 0xc4ceb9fe1a85ec53ull;
    return h ^ h >> 33;
}

static uint64_t place_of(const hvdl_operation *op)
{
    const hvdl_progress *progress = &op->progress;
    uint64_t place = mix(op->number + 1);
    place = mix(place + progress->started);
    place = mix(place + progress->finished);
    place = mix(place + progress->announced);
    for (int i = 0; i < HVDL_PIECE_SLOTS; i++)
        place = mix(place + (uint64_t)progress->pieces[i].num_ready);
    return place;
}

static bool is_under_way(const hvdl_operation *op)
{
    int state = atomic_load_explicit(&op->state, memory_order_relaxed);
    return state == HVDL_MATCHED || state == HVDL_RUNNING;
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
        *place = mix(*place + e->conveyor.blocks[stage]);
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

static hvdl_shm_rank *local_rank(const hvdl_engine *e, int local)
{
    return &e->shm.control->ranks[local];
}

static void publish(hvdl_engine *e, uint64_t now, uint64_t place, int peer)
{
    hvdl_shm_rank *self = local_rank(e, e->placement.local);
    atomic_store_explicit(&self->place, place, memory_order_relaxed);
    atomic_store_explicit(&self->awaits, (uint32_t)(peer + 1), memory_order_relaxed);
    atomic_store_explicit(&self->looked_ns, now, memory_order_relaxed);
}

static uint64_t place_of_host(const hvdl_engine *e)
{
    uint64_t place = 0;
    for (int r = 0; r < e->placement.local_size; r++)
        place = mix(place + atomic_load_explicit(&local_rank(e, r)->place, memory_order_relaxed));
    return place;
}

/* How long a rank of this host has not looked, if it is too long; else 0. */
static uint64_t quiet_ns(const hvdl_engine *e, int local)
{
    uint64_t looked = atomic_load_explicit(&local_rank(e, local)->looked_ns, memory_order_relaxed);
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
        uint64_t cursor = atomic_load_explicit(&local_rank(e, r)->cursor, memory_order_relaxed);
        slowest = cursor < slowest ? cursor : slowest;
    }
    for (int r = 0; r < e->placement.local_size; r++)
        if (atomic_load_explicit(&local_rank(e, r)->cursor, memory_order_relaxed) == slowest)
            add_missing(missing, r);
}

static void find_quiet(const hvdl_engine *e, missing_ranks *missing)
{
    missing->what = "moved";
    for (int r = 0; e->config.progress_thread && r < e->placement.local_size; r++)
        if (r != e->placement.local && quiet_ns(e, r))
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
        uint64_t quiet = quiet_ns(e, r);
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
        uint32_t awaits = atomic_load_explicit(&local_rank(e, r)->awaits, memory_order_relaxed);
        if (awaits)
            return (int)awaits - 1;
    }
    return -1;
}

/* ---- the text ---- */

static const char nobody[] = "a rank that can't be found";

static void put_awaited(const hvdl_engine *e, int rank, hvdl_writer *to)
{
    hvdl_put(to, "a message of rank %d on %s", hvdl_world_rank(e, rank),
             e->placement.name_of[rank]);
}

static void put_how_far(const hvdl_engine *e, const hvdl_operation *op, hvdl_writer *to)
{
    const hvdl_progress *progress = &op->progress;
    hvdl_headway headway = hvdl_exchanges_headway(e, op);
    char name[HVDL_NAME_BYTES];
    hvdl_copy_plain_name(name, sizeof name, op->name);
    hvdl_put(to, "%s '%s' has made no progress for %.0f s, after %llu of %llu pieces",
             hvdl_kind_name(op->desc.kind), name, (double)e->standstill.still_ns / 1e9,
             (unsigned long long)progress->finished, (unsigned long long)progress->num_pieces);
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

static void say(const hvdl_engine *e, const char *text)
{
    char line[HVDL_TEXT_BYTES + 32];
    snprintf(line, sizeof line, "hvdlite: %s\n", text);
    e->config.say(line);
}

static void report(hvdl_engine *e, const hvdl_operation *op, const char *text)
{
    hvdl_standstill *still = &e->standstill;
    still->said = true;
    still->said_kind = op->desc.kind;
    hvdl_copy_plain_name(still->said_name, sizeof still->said_name, op->name);
    say(e, text);
}

/* Something moves again. */
static void withdraw_report(hvdl_engine *e)
{
    hvdl_standstill *still = &e->standstill;
    char text[HVDL_TEXT_BYTES];
    if (!still->said)
        return;
    still->said = false;
    snprintf(text, sizeof text, "%s '%s' goes on after %.0f s", hvdl_kind_name(still->said_kind),
             still->said_name, (double)still->still_ns / 1e9);
    say(e, text);
}

/* ---- the verdict ---- */

void hvdl_take_verdict(hvdl_engine *e)
{
    const hvdl_shm_control *control = e->shm.control;
    /* Acquire: pairs with the release in `decide`. */
    if (atomic_load_explicit(&control->verdict, memory_order_acquire) == HVDL_VERDICT)
        hvdl_break_on_all(e, control->verdict_text);
}

/* The first text of this host counts. */
static void decide(hvdl_engine *e, const char *text)
{
    hvdl_shm_control *control = e->shm.control;
    uint32_t none = HVDL_NO_VERDICT;
    if (atomic_compare_exchange_strong(&control->verdict, &none, HVDL_VERDICT_ARISES)) {
        snprintf(control->verdict_text, sizeof control->verdict_text, "%s", text);
        atomic_store_explicit(&control->verdict, HVDL_VERDICT, memory_order_release);
        hvdl_shm_ring(&e->shm);
    }
    hvdl_take_verdict(e);
    /* The rank that writes it was stopped just then. */
    if (e->standstill.still_ns > e->config.stall_shutdown_ns + ANSWER_NS)
        hvdl_break_on_all(e, text);
}

/* ---- without asking other hosts ---- */

/* What is known on this host. False: no rank is to be seen that is missing. */
static bool describe_here(const hvdl_engine *e, const hvdl_operation *op, bool fails, char *text)
{
    char missing[HVDL_MISSING_BYTES] = "";
    hvdl_writer names = {missing, sizeof missing, 0}, to = {text, HVDL_TEXT_BYTES, 0};
    int awaited = awaited_by_host(e);
    describe_missing(e, op, &names);
    if (!names.used && awaited >= 0)
        put_awaited(e, awaited, &names);
    put_how_far(e, op, &to);
    hvdl_put(&to, "%s", names.used ? missing : nobody);
    put_end(fails, &to);
    return names.used;
}

static void speak_alone(hvdl_engine *e, const hvdl_operation *op, bool fails)
{
    char text[HVDL_TEXT_BYTES];
    uint64_t place = e->standstill.place;
    if (!describe_here(e, op, fails, text) && !fails)
        return;
    e->standstill.told = true;
    if (fails)
        decide(e, text);
    else if (atomic_exchange(&e->shm.control->told_place, place) != place)
        report(e, op, text);
}

/* ---- between hosts ---- */

static void end_asking(hvdl_engine *e)
{
    free(e->standstill.answers);
    e->standstill.answers = NULL;
}

static bool fails_now(const hvdl_engine *e)
{
    uint64_t limit = e->config.stall_shutdown_ns;
    return limit && e->standstill.still_ns > (limit > LEAST_NS ? limit : LEAST_NS);
}

static bool is_time_to_tell(const hvdl_engine *e)
{
    uint64_t limit = e->config.stall_warning_ns;
    return limit && !e->standstill.told &&
           e->standstill.still_ns > (limit > LEAST_NS ? limit : LEAST_NS);
}

/* How this host stands, for one whose operation has stood still for so long. */
static void describe_standing(hvdl_engine *e, hvdl_key key, uint64_t run, uint64_t still_ns,
                              hvdl_standing *to)
{
    const hvdl_plan *plan = hvdl_plan_by_key(e, key);
    const hvdl_meeting *meeting = hvdl_meeting_of(e, key, run);
    *to = (hvdl_standing){.awaits = awaited_by_host(e)};
    if (plan && plan->num_runs <= run)
        to->state = STANDING_NOT_POSTED;
    else if (!meeting || meeting->collecting || !meeting->operation)
        to->state = STANDING_ENDED;
    else if (e->standstill.still_ns < still_ns / 2)
        to->state = STANDING_MOVING;
    else
        to->state = STANDING_STILL;
    if (to->state == STANDING_STILL) {
        hvdl_writer missing = {to->missing, sizeof to->missing, 0};
        describe_missing(e, meeting->operation, &missing);
    }
}

static void ask(hvdl_engine *e, const hvdl_operation *op)
{
    hvdl_standstill *still = &e->standstill;
    uint64_t run = hvdl_run_of(op);
    still->answers = calloc((size_t)e->config.num_hosts, sizeof *still->answers);
    if (!still->answers)
        return; /* no report is better than no job */
    still->asked_ns = hvdl_now_ns();
    still->num_asked++;
    still->num_answers = 1;
    describe_standing(e, op->key, run, 0, &still->answers[e->placement.host]);
    for (int h = 0; h < e->config.num_hosts; h++)
        if (h != e->placement.host) {
            hvdl_message message = {.type = HVDL_MSG_STANDS, .key = op->key, .run = run};
            message.tag = still->num_asked;
            hvdl_send_message(e, h, &message, &still->still_ns, sizeof still->still_ns);
        }
}

void hvdl_on_stands(hvdl_engine *e, const hvdl_message *message, const void *payload)
{
    hvdl_message answer = {.type = HVDL_MSG_STANDING, .tag = message->tag};
    hvdl_standing standing;
    uint64_t still_ns;
    memcpy(&still_ns, payload, sizeof still_ns);
    describe_standing(e, message->key, message->run, still_ns, &standing);
    hvdl_send_message(e, message->host, &answer, &standing, sizeof standing);
}

void hvdl_on_standing(hvdl_engine *e, const hvdl_message *message, const void *payload)
{
    hvdl_standing *answers = e->standstill.answers;
    if (!answers || message->tag != e->standstill.num_asked ||
        answers[message->host].state != STANDING_SILENT)
        return; /* to an earlier question */
    memcpy(&answers[message->host], payload, sizeof *answers);
    e->standstill.num_answers++;
}

void hvdl_on_stood(hvdl_engine *e, const char *text)
{
    decide(e, text);
}

static bool has_answered(const hvdl_engine *e, standing state)
{
    for (int h = 0; h < e->config.num_hosts; h++)
        if (e->standstill.answers[h].state == (int32_t)state)
            return true;
    return false;
}

/* The host that speaks: the lowest one that waits and runs. */
static int speaker(const hvdl_engine *e)
{
    int host = 0;
    while (e->standstill.answers[host].state != STANDING_STILL)
        host++; /* this one does */
    return host;
}

static void describe_all(const hvdl_engine *e, const hvdl_operation *op, bool fails, char *text)
{
    char missing[HVDL_MISSING_BYTES] = "";
    hvdl_writer names = {missing, sizeof missing, 0}, to = {text, HVDL_TEXT_BYTES, 0};
    const hvdl_standing *answers = e->standstill.answers;
    for (int h = 0; h < e->config.num_hosts; h++) {
        const char *comma = names.used ? ", " : "";
        if (answers[h].state == STANDING_SILENT)
            hvdl_put(&names, "%srank %d on %s (which does not answer)", comma,
                     hvdl_world_rank(e, hvdl_leader_of(e, h)), e->config.host_names[h]);
        else if (*answers[h].missing)
            hvdl_put(&names, "%s%s", comma, answers[h].missing);
    }
    for (int h = 0; !names.used && h < e->config.num_hosts; h++) {
        int awaits = answers[h].awaits;
        if (answers[h].state == STANDING_STILL && awaits >= 0 && awaits < e->config.num_ranks)
            put_awaited(e, awaits, &names);
    }
    put_how_far(e, op, &to);
    hvdl_put(&to, "%s", names.used ? missing : nobody);
    put_end(fails, &to);
}

static void tell_all_hosts(hvdl_engine *e, const char *text)
{
    for (int h = 0; h < e->config.num_hosts; h++)
        if (h != e->placement.host) {
            hvdl_message message = {.type = HVDL_MSG_STOOD};
            hvdl_send_message(e, h, &message, text, strlen(text) + 1);
        }
    decide(e, text);
}

/* A run of a plan begins without an agreement. So a host that does not answer may not have posted it: stall.c
 * reports that, and ends it. */
static bool may_lack_a_host(const hvdl_operation *op)
{
    return hvdl_is_run(op) && !op->internal;
}

static void conclude(hvdl_engine *e, const hvdl_operation *op)
{
    hvdl_standstill *still = &e->standstill;
    bool fails = fails_now(e), speaks = speaker(e) == e->placement.host;
    bool is_not_ours = has_answered(e, STANDING_MOVING) || has_answered(e, STANDING_NOT_POSTED) ||
                       (has_answered(e, STANDING_SILENT) && may_lack_a_host(op));
    char text[HVDL_TEXT_BYTES];
    if (is_not_ours) {
        still->still_ns = 0; /* from now on */
        end_asking(e);
        return;
    }
    /* The speaker may have stopped meanwhile. */
    if (fails && !speaks && hvdl_now_ns() < still->asked_ns + 3 * ANSWER_NS)
        return;
    if (speaks || fails)
        describe_all(e, op, fails, text);
    if (fails)
        tell_all_hosts(e, text);
    else if (speaks)
        report(e, op, text);
    still->told = true;
    end_asking(e);
}

/* ---- looking ---- */

/* The leader asks; the other ranks leave it to the leader if that runs. */
static void look_between_hosts(hvdl_engine *e, hvdl_operation *op, uint64_t now)
{
    hvdl_standstill *still = &e->standstill;
    bool fails = fails_now(e);
    if (!e->placement.is_leader) {
        if (may_lack_a_host(op))
            return; /* without the leader, nobody of this host can know */
        if (quiet_ns(e, 0) ||
            (fails && still->still_ns > e->config.stall_shutdown_ns + 4 * ANSWER_NS))
            speak_alone(e, op, fails);
    } else if (!still->answers) {
        ask(e, op);
    } else if (still->num_answers == e->config.num_hosts || now > still->asked_ns + ANSWER_NS) {
        conclude(e, op);
    }
}

void hvdl_standstill_look(hvdl_engine *e)
{
    hvdl_standstill *still = &e->standstill;
    uint64_t now = hvdl_now_ns(), gap = now - still->looked_ns, own_place;
    if ((!e->config.stall_warning_ns && !e->config.stall_shutdown_ns) || e->failure.broken ||
        now < still->next_look_ns)
        return;
    still->next_look_ns = now + LOOK_NS;
    still->looked_ns = now;
    hvdl_operation *op = first_under_way(e, &own_place);
    publish(e, now, own_place, op ? hvdl_exchanges_headway(e, op).peer : -1);
    uint64_t place = place_of_host(e);
    if (!op || place != still->place) {
        withdraw_report(e);
        still->place = place;
        still->still_ns = 0;
        still->told = false;
        end_asking(e);
        return;
    }
    still->still_ns += gap < LONGEST_LOOK_NS ? gap : LONGEST_LOOK_NS;
    if (!fails_now(e) && !is_time_to_tell(e))
        return;
    if (e->config.num_hosts > 1)
        look_between_hosts(e, op, now);
    else
        speak_alone(e, op, fails_now(e));
}

void hvdl_standstill_free(hvdl_engine *e)
{
    end_asking(e);
}
