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
 * that a rank which was stopped finds it when it goes on, before it ends any operation.
 *
 * standing.c finds whose part is missing, and writes the texts. */
#define _GNU_SOURCE
#include "watching/standstill.h"

#include <stdio.h>
#include <string.h>

#include "courses/pieces.h"
#include "engine/breaking.h"
#include "engine/state.h"
#include "matching/messages.h"
#include "watching/report.h"
#include "watching/standing.h"

#define LOOK_NS 250000000ull
#define LONGEST_LOOK_NS 500000000ull /* more was no wait: this rank did not run */
#define ANSWER_NS                                                                                  \
    3000000000ull /* how long a host may take to answer; an idle one looks every 2 s */
/* No standstill is shorter: by then all ranks that run have looked. */
#define LEAST_NS 3000000000ull
#define LEAST_PAUSE_NS 4000000000ull /* between two reports */

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
        *place = hvdl_mix(*place + e->conveyor.blocks[stage]);
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

static void publish(hvdl_engine *e, uint64_t now, uint64_t place, int peer)
{
    hvdl_shm_rank *self = &e->shm.control->ranks[e->placement.local];
    atomic_store_explicit(&self->place, place, memory_order_relaxed);
    atomic_store_explicit(&self->awaits, (uint32_t)(peer + 1), memory_order_relaxed);
    atomic_store_explicit(&self->looked_ns, now, memory_order_relaxed);
}

static uint64_t place_of_host(const hvdl_engine *e)
{
    uint64_t place = 0;
    for (int r = 0; r < e->placement.local_size; r++)
        place = hvdl_mix(
            place + atomic_load_explicit(&e->shm.control->ranks[r].place, memory_order_relaxed));
    return place;
}

/* ---- saying it ---- */

static void report(hvdl_engine *e, const hvdl_operation *op, const char *text)
{
    hvdl_standstill *still = &e->standstill;
    still->said = true;
    still->reported = hvdl_late_of(e, op, hvdl_now_ns());
    hvdl_report(e, text);
}

/* Something moves again. */
static void withdraw_report(hvdl_engine *e)
{
    hvdl_standstill *still = &e->standstill;
    if (!still->said)
        return;
    still->said = false;
    still->reported.age_ns = still->still_ns;
    hvdl_say_going_on(e, still->reported);
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

/* ---- when ---- */

static bool fails_now(const hvdl_engine *e)
{
    uint64_t limit = e->config.stall_shutdown_ns;
    return limit && e->standstill.still_ns > (limit > LEAST_NS ? limit : LEAST_NS);
}

static bool is_time_to_tell(const hvdl_engine *e)
{
    uint64_t limit = e->config.stall_warning_ns, still_ns = e->standstill.still_ns;
    return limit && still_ns > (limit > LEAST_NS ? limit : LEAST_NS) &&
           still_ns > e->standstill.next_report_ns;
}

/* A report is made, or is another's to make. */
static void note_told(hvdl_engine *e)
{
    hvdl_standstill *still = &e->standstill;
    uint64_t pause_ns = still->still_ns > LEAST_PAUSE_NS ? still->still_ns : LEAST_PAUSE_NS;
    still->num_reports++;
    still->next_report_ns = still->still_ns + pause_ns;
}

/* ---- without asking other hosts ---- */

static void speak_alone(hvdl_engine *e, const hvdl_operation *op, bool fails)
{
    char text[HVDL_TEXT_BYTES];
    uint64_t report_at = hvdl_mix(e->standstill.place + (uint64_t)e->standstill.num_reports);
    if (!hvdl_describe_standing_here(e, op, fails, text) && !fails)
        return;
    note_told(e);
    if (fails)
        decide(e, text);
    else if (atomic_exchange(&e->shm.control->told_place, report_at) != report_at)
        report(e, op, text);
    else
        e->standstill.said = false; /* another rank has, and withdraws it */
}

/* ---- between hosts ---- */

static void end_asking(hvdl_engine *e)
{
    free(e->standstill.answers);
    e->standstill.answers = NULL;
}

static void ask(hvdl_engine *e, const hvdl_operation *op)
{
    hvdl_standstill *still = &e->standstill;
    hvdl_standing_question question = {.still_ns = still->still_ns, .is_run = hvdl_is_run(op)};
    still->answers = calloc((size_t)e->config.num_hosts, sizeof *still->answers);
    if (!still->answers)
        return; /* no report is better than no job */
    still->asked_ns = hvdl_now_ns();
    still->num_asked++;
    still->num_answers = 1;
    hvdl_describe_standing(e, op, &still->answers[e->placement.host]);
    for (int h = 0; h < e->config.num_hosts; h++)
        if (h != e->placement.host) {
            hvdl_message message = {
                .type = HVDL_MSG_STANDS, .key = op->key, .run = hvdl_run_of(op)};
            message.tag = still->num_asked;
            hvdl_send_message(e, h, &message, &question, sizeof question);
        }
}

void hvdl_on_stands(hvdl_engine *e, const hvdl_message *message, const void *payload)
{
    hvdl_message answer = {.type = HVDL_MSG_STANDING, .tag = message->tag};
    hvdl_standing_question question;
    hvdl_standing standing;
    memcpy(&question, payload, sizeof question);
    hvdl_answer_standing(e, message->key, message->run, &question, &standing);
    hvdl_send_message(e, message->host, &answer, &standing, sizeof standing);
}

void hvdl_on_standing(hvdl_engine *e, const hvdl_message *message, const void *payload)
{
    hvdl_standing *answers = e->standstill.answers;
    if (!answers || message->tag != e->standstill.num_asked ||
        answers[message->host].state != HVDL_STANDING_SILENT)
        return; /* to an earlier question */
    memcpy(&answers[message->host], payload, sizeof *answers);
    e->standstill.num_answers++;
}

void hvdl_on_stood(hvdl_engine *e, const char *text)
{
    decide(e, text);
}

static bool has_answered(const hvdl_engine *e, hvdl_standing_state state)
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
    while (e->standstill.answers[host].state != HVDL_STANDING_STILL)
        host++; /* this one does */
    return host;
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
    bool is_not_ours = has_answered(e, HVDL_STANDING_MOVING) ||
                       has_answered(e, HVDL_STANDING_NOT_POSTED) ||
                       (has_answered(e, HVDL_STANDING_SILENT) && may_lack_a_host(op));
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
        hvdl_describe_standing_everywhere(e, op, fails, text);
    if (fails)
        tell_all_hosts(e, text);
    else if (speaks)
        report(e, op, text);
    else
        still->said = false; /* another host does, and withdraws it */
    note_told(e);
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
        if (hvdl_quiet_ns(e, 0) ||
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
        still->num_reports = 0;
        still->next_report_ns = 0;
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
