#define _GNU_SOURCE
#include "watching/silence.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/state.h"
#include "matching/messages.h"
#include "watching/inquiries.h"
#include "watching/report.h"

#define ASK_AGAIN_NS 1000000000ull /* about what gives up: is the host still there? */

/* What another host's leader must speak about. If it gives up, that ends only with the operation: so this
 * leader asks again and again, whether the other one lives. */
struct hvdl_question {
    struct hvdl_question *next;
    hvdl_late what;
    uint64_t id; /* of its meeting */
    int host;
    uint64_t asked_ns;
    bool heard; /* the other one has said that it knows */
};

static uint64_t latest(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* ---- life ---- */

hvdl_err hvdl_silence_make(hvdl_engine *e)
{
    hvdl_silence *silence = &e->silence;
    silence->hosts = calloc((size_t)e->config.num_hosts, sizeof *silence->hosts);
    silence->ranks_heard_ns =
        calloc((size_t)e->placement.local_size, sizeof *silence->ranks_heard_ns);
    return silence->hosts && silence->ranks_heard_ns ? HVDL_OK : HVDL_ENOMEM;
}

void hvdl_silence_end(hvdl_engine *e)
{
    while (e->silence.questions) {
        hvdl_question *next = e->silence.questions->next;
        free(e->silence.questions);
        e->silence.questions = next;
    }
}

void hvdl_silence_free(hvdl_engine *e)
{
    hvdl_silence_end(e);
    free(e->silence.hosts);
    free(e->silence.ranks_heard_ns);
}

/* A rank that was stopped itself, or had nothing to look for, first hears what has come meanwhile. */
static void note_look(hvdl_engine *e, uint64_t now)
{
    if (now > e->silence.looked_ns + HVDL_PATIENCE_NS / 2)
        e->silence.awake_ns = now;
    e->silence.looked_ns = now;
}

/* ---- ranks of this host ---- */

void hvdl_heard_rank(hvdl_engine *e, int local)
{
    e->silence.ranks_heard_ns[local] = hvdl_now_ns();
}

bool hvdl_speaker_is_silent(const hvdl_engine *e, const hvdl_reporting *reporting, uint64_t now)
{
    if (reporting->speaker == e->placement.local || (reporting->taken && !reporting->given_up))
        return false;
    uint64_t heard = latest(reporting->since_ns, e->silence.ranks_heard_ns[reporting->speaker]);
    return now > latest(heard, e->silence.awake_ns) + HVDL_PATIENCE_NS;
}

/* ---- hosts ---- */

void hvdl_heard_host(hvdl_engine *e, int host)
{
    e->silence.hosts[host] = (hvdl_host_signs){.heard_ns = hvdl_now_ns()};
}

bool hvdl_host_is_silent(const hvdl_engine *e, int host, uint64_t since_ns, uint64_t now)
{
    const hvdl_host_signs *signs = &e->silence.hosts[host];
    uint64_t heard = latest(latest(since_ns, signs->heard_ns), e->silence.awake_ns);
    return signs->silent || now > heard + HVDL_PATIENCE_NS;
}

void hvdl_found_silent(hvdl_engine *e, int host)
{
    e->silence.hosts[host].silent = true;
}

/* ---- the leader: what another host must speak about ---- */

static void ask(hvdl_engine *e, hvdl_question *question)
{
    hvdl_late what = question->what;
    what.age_ns += hvdl_now_ns() - question->asked_ns;
    question->what.age_ns = what.age_ns;
    question->asked_ns = hvdl_now_ns();
    question->heard = question->host == e->placement.host;
    if (question->heard) {
        hvdl_on_stalled(e, question->host, &what);
        return;
    }
    hvdl_message message = {.type = HVDL_MSG_STALLED, .key = what.key};
    hvdl_send_message(e, question->host, &message, &what, sizeof what);
}

void hvdl_ask_to_speak(hvdl_engine *e, int host, const hvdl_late *what, uint64_t id)
{
    hvdl_question *question = malloc(sizeof *question);
    if (!question)
        return; /* no report is better than no job */
    *question = (hvdl_question){.what = *what, .id = id, .host = host, .asked_ns = hvdl_now_ns()};
    question->next = e->silence.questions;
    e->silence.questions = question;
    ask(e, question);
}

/* When that host goes on, it need not speak any more. */
static void tell_spoken(hvdl_engine *e, int host, const hvdl_late *what)
{
    hvdl_message message = {
        .type = HVDL_MSG_SPOKEN, .key = what->key, .run = what->run, .tag = what->report};
    if (host == e->placement.host)
        hvdl_on_spoken(e, what->key, what->run, what->report);
    else
        hvdl_send_message(e, host, &message, NULL, 0);
}

void hvdl_take_back_question(hvdl_engine *e, const hvdl_late *what)
{
    if (!what->gives_up)
        tell_spoken(e, hvdl_coordinator_of(e, what->key), what);
    for (hvdl_question **at = &e->silence.questions; *at;) {
        hvdl_question *question = *at;
        if (!hvdl_key_equal(question->what.key, what->key) || question->what.run != what->run) {
            at = &question->next;
            continue;
        }
        *at = question->next;
        free(question);
    }
}

void hvdl_on_heard(hvdl_engine *e, const hvdl_message *message)
{
    hvdl_heard_host(e, message->host);
    for (hvdl_question *question = e->silence.questions; question; question = question->next)
        if (question->host == message->host && question->what.gives_up == message->tag &&
            hvdl_key_equal(question->what.key, message->key) && question->what.run == message->run)
            question->heard = true;
}

/* Whether it is over. */
static bool follow(hvdl_engine *e, hvdl_question *question, uint64_t now)
{
    hvdl_late *what = &question->what;
    const hvdl_meeting *meeting = hvdl_meeting_of(e, what->key, what->run);
    if (!meeting || meeting->id != question->id || hvdl_is_agreed(e, meeting) ||
        (question->heard && !what->gives_up))
        return true;
    if (question->heard) {
        if (now > question->asked_ns + ASK_AGAIN_NS) {
            ask(e, question);
            hvdl_announce_taken(e, what, question->id);
        }
        return false;
    }
    if (!hvdl_host_is_silent(e, question->host, question->asked_ns, now))
        return false;
    hvdl_found_silent(e, question->host);
    what->age_ns += now - question->asked_ns;
    hvdl_speak_here(e, what, question->id, question->host);
    if (!what->gives_up)
        tell_spoken(e, question->host, what);
    return true;
}

static void follow_questions(hvdl_engine *e, uint64_t now)
{
    for (hvdl_question **at = &e->silence.questions; *at;) {
        hvdl_question *question = *at;
        if (!follow(e, question, now)) {
            at = &question->next;
            continue;
        }
        *at = question->next;
        free(question);
    }
}

/* ---- a journal that stands still ---- */

/* A rank that is stopped can hold up the whole host: the journal is full when it has not read for long, and no rank
 * reads on where it has begun an entry and not written it. Then no rank hears of a report, and each that waits
 * reports for itself; `spoken` in shared memory lets one do so. */
static bool stands_still(hvdl_engine *e, uint64_t now)
{
    hvdl_silence *silence = &e->silence;
    uint64_t tail = atomic_load_explicit(&e->shm.control->tail, memory_order_acquire);
    uint64_t at = e->shm.read_position;
    if (e->placement.local_size == 1)
        return false;
    if ((at >= tail && !e->announcing.deferred) || at != silence->standing_at) {
        silence->standing_at = at;
        silence->standing_from_ns = now;
        silence->num_standing_reports = 0;
        return false;
    }
    return now > latest(silence->standing_from_ns, silence->awake_ns) + HVDL_PATIENCE_NS;
}

/* The one that has waited longest, or NULL. */
static hvdl_operation *oldest(hvdl_engine *e)
{
    hvdl_operation *found = NULL;
    pthread_mutex_lock(&e->queue.lock);
    for (size_t i = 0; i < e->queue.in_flight.num_slots; i++)
        for (hvdl_node *node = e->queue.in_flight.slots[i]; node; node = node->next) {
            hvdl_operation *op = HVDL_CONTAINER(node, hvdl_operation, by_key);
            bool waits = !op->internal && op->desc.kind != HVDL_JOIN &&
                         !(op->meeting && hvdl_is_agreed(e, op->meeting));
            if (waits && (!found || op->posted_ns < found->posted_ns))
                found = op;
        }
    pthread_mutex_unlock(&e->queue.lock);
    return found;
}

/* Puts the ranks that may hold up the journal. */
static void put_suspects(hvdl_engine *e, hvdl_writer *to)
{
    uint64_t tail = atomic_load_explicit(&e->shm.control->tail, memory_order_acquire);
    bool is_full = e->shm.read_position >= tail;
    for (int r = 0; r < e->placement.local_size; r++) {
        uint64_t cursor = atomic_load(&e->shm.control->ranks[r].cursor);
        if (r != e->placement.local && (!is_full || cursor < e->shm.read_position))
            hvdl_put_rank(e, to, r);
    }
    if (!is_full && e->placement.local_size > 2)
        hvdl_put(to, ", one of which stopped while it wrote to the memory they share");
    else
        hvdl_put(to, ", which does not answer");
}

/* Whether this rank is the one that says this report. */
static bool is_first_to_say(hvdl_engine *e, int report)
{
    _Atomic uint64_t *spoken = &e->shm.control->spoken;
    uint64_t own = e->shm.read_position + (uint64_t)report + 1, /* positions are multiples of 64 */
        last = atomic_load(spoken);
    return last < own && atomic_compare_exchange_strong(spoken, &last, own);
}

static void report_standstill(hvdl_engine *e, uint64_t now)
{
    hvdl_silence *silence = &e->silence;
    hvdl_operation *op = oldest(e);
    if (!op)
        return;
    uint64_t age = now > op->posted_ns ? now - op->posted_ns : 0;
    int report = silence->num_standing_reports;
    hvdl_late what = hvdl_late_of(e, op, now);
    what.gives_up = e->config.stall_shutdown_ns && age > e->config.stall_shutdown_ns;
    what.report = report;
    if (!what.gives_up && !hvdl_report_is_due(e, age, report))
        return;
    silence->num_standing_reports++;
    if (!what.gives_up && !is_first_to_say(e, report))
        return;
    char text[HVDL_TEXT_BYTES], missing[HVDL_MISSING_BYTES], posted[HVDL_POSTED_BYTES];
    hvdl_writer to = {missing, sizeof missing, 0};
    put_suspects(e, &to);
    snprintf(posted, sizeof posted, "%d", hvdl_own_number(e));
    hvdl_describe_late(&what, posted, missing, HVDL_ASK_HOST, NULL, text);
    hvdl_say_standstill(e, op, text, what.gives_up);
}

/* ---- looking ---- */

void hvdl_silence_look(hvdl_engine *e, uint64_t now)
{
    note_look(e, now);
    follow_questions(e, now);
    if (stands_still(e, now))
        report_standstill(e, now);
}
