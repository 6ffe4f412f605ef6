/* Roll calls: which ranks have not called an operation. The caller links its call and drives the engine, or
 * waits while another thread does. The driver fills in what this host's journal says. Between hosts it puts
 * the question into the journal (ROLL_CALL); the leader sends it to the other leaders, and puts each answer
 * into the journal (ROLL_ANSWER), where the rank that asked reads it. A host that does not answer in time
 * is left out. */
#define _GNU_SOURCE
#include "watching/roll_call.h"

#include <stdlib.h>
#include <string.h>

#include "engine/placement.h"
#include "engine/state.h"
#include "matching/announcing.h"
#include "matching/coordinator.h"
#include "matching/messages.h"
#include "operations/plans.h"
#include "transfers/transfer_texts.h"
#include "watching/report.h"

#define LONGEST_NS 1000000000ull /* of a call, from the caller's side */
#define LOOK_NS 2000000L         /* how often the caller looks for its end */
#define MAX_NAMED 8              /* ranks that a text names one by one */

struct hvdl_roll_call {
    hvdl_roll_call *next;
    const hvdl_operation *operation;
    uint64_t number; /* 0: not begun */
    int num_answers;
    bool *answered;    /* by host */
    bool *absent;      /* by rank */
    _Atomic bool done; /* all hosts have answered */
};

/* In the journal and between leaders. What another rank wrote is checked before it is used; what is not
 * right is as if it had not come: its host is left out. */
typedef struct {
    hvdl_key key;
    uint64_t run, number;
    int32_t host, local; /* that asks */
    int32_t is_posted;   /* all ranks of that host have posted it, and its coordinator knows so */
} question;

/* `absent` of each local rank follows. */
typedef struct {
    uint64_t number;
    int32_t local; /* that asks */
    int32_t host;  /* that answers */
    int32_t is_decided;
    int32_t num_ranks;
} answer_head;

typedef struct {
    answer_head head;
    uint8_t absent[HVDL_MAX_LOCAL];
} answer;

static size_t answer_bytes(const answer *what)
{
    return sizeof what->head + (size_t)what->head.num_ranks * sizeof *what->absent;
}

/* A question that a rank of `host` asks. */
static bool read_question(const hvdl_engine *e, int host, const void *from, size_t bytes,
                          question *to)
{
    if (bytes != sizeof *to)
        return false;
    memcpy(to, from, sizeof *to);
    return to->host == host && to->local >= 0 && to->local < e->placement.host_sizes[host];
}

/* An answer of any host. */
static bool read_answer(const hvdl_engine *e, const void *from, size_t bytes, answer *to)
{
    if (bytes < sizeof to->head || bytes > sizeof *to)
        return false;
    memcpy(to, from, bytes);
    return to->head.host >= 0 && to->head.host < e->config.num_hosts &&
           to->head.num_ranks == e->placement.host_sizes[to->head.host] &&
           bytes == answer_bytes(to);
}

/* ---- what a host knows ---- */

/* Only the coordinator knows of an operation that has ended here and not there; a host that has ended it
 * looks as if it had not begun it. */
static bool is_decided(hvdl_engine *e, const question *asked)
{
    return asked->is_posted && hvdl_coordinator_of(e, asked->key) == e->placement.host &&
           !hvdl_is_open(e, asked->key, asked->host);
}

static void fill_answer(hvdl_engine *e, const question *asked, answer *to)
{
    const hvdl_meeting *meeting = hvdl_meeting_of(e, asked->key, asked->run);
    const hvdl_plan *plan = hvdl_plan_by_key(e, asked->key);
    bool is_over = meeting ? hvdl_is_agreed(e, meeting) : plan && asked->run < plan->num_runs;
    to->head = (answer_head){.number = asked->number,
                             .local = asked->local,
                             .host = e->placement.host,
                             .num_ranks = e->placement.local_size};
    for (int r = 0; r < e->placement.local_size; r++)
        to->absent[r] = !is_over && !e->join.joined[r] && !(meeting && meeting->posted_by[r]);
    if (e->config.num_hosts > 1 && e->placement.is_leader)
        to->head.is_decided = is_decided(e, asked);
}

/* ---- the rank that asks ---- */

static void add_answer(hvdl_engine *e, hvdl_roll_call *call, const answer *what)
{
    int host = what->head.host;
    if (what->head.is_decided) {
        memset(call->absent, 0, (size_t)e->config.num_ranks * sizeof *call->absent);
        atomic_store(&call->done, true);
    }
    if (call->answered[host] || atomic_load(&call->done))
        return;
    call->answered[host] = true;
    for (int r = 0; r < e->placement.host_sizes[host]; r++)
        call->absent[hvdl_member_of_host(&e->placement, host, r)] = what->absent[r];
    if (++call->num_answers == e->config.num_hosts)
        atomic_store(&call->done, true);
}

/* False: this host does not know the operation yet. */
static bool begin(hvdl_engine *e, hvdl_roll_call *call)
{
    const hvdl_operation *op = call->operation;
    const hvdl_meeting *meeting = op->meeting;
    answer own;
    if (hvdl_operation_done(op)) {
        atomic_store(&call->done, true);
        return true;
    }
    if (!meeting)
        return false;
    call->number = ++e->roll_calls.last_number;
    question asked = {.key = op->key, .run = hvdl_run_of(op), .number = call->number};
    asked.host = e->placement.host;
    asked.local = e->placement.local;
    asked.is_posted = !meeting->collecting && !meeting->plan;
    fill_answer(e, &asked, &own);
    own.head.is_decided |= hvdl_is_agreed(e, meeting);
    add_answer(e, call, &own);
    if (!atomic_load(&call->done))
        hvdl_announce(e, (hvdl_entry){.type = HVDL_ENTRY_ROLL_CALL}, &asked, sizeof asked);
    return true;
}

bool hvdl_roll_calls_step(hvdl_engine *e)
{
    bool waiting = false, any = false;
    pthread_mutex_lock(&e->roll_calls.lock);
    for (hvdl_roll_call *call = e->roll_calls.calls; call; call = call->next)
        if (!call->number && !atomic_load(&call->done)) {
            bool begun = begin(e, call);
            any |= begun;
            waiting |= !begun;
        }
    atomic_store(&e->roll_calls.waiting, waiting);
    if (waiting)
        atomic_store(&e->driving.has_more, true);
    pthread_mutex_unlock(&e->roll_calls.lock);
    return any;
}

void hvdl_read_roll_answer(hvdl_engine *e, const hvdl_entry *entry)
{
    answer what;
    if (!read_answer(e, hvdl_entry_body(entry), entry->body_bytes, &what) ||
        what.head.local != e->placement.local)
        return;
    pthread_mutex_lock(&e->roll_calls.lock);
    for (hvdl_roll_call *call = e->roll_calls.calls; call; call = call->next)
        if (call->number == what.head.number)
            add_answer(e, call, &what);
    pthread_mutex_unlock(&e->roll_calls.lock);
}

/* ---- the leaders ---- */

static void announce_answer(hvdl_engine *e, const answer *what)
{
    hvdl_announce(e, (hvdl_entry){.type = HVDL_ENTRY_ROLL_ANSWER}, what, answer_bytes(what));
}

void hvdl_read_roll_call(hvdl_engine *e, const hvdl_entry *entry)
{
    question asked;
    answer own;
    if (!e->placement.is_leader ||
        !read_question(e, e->placement.host, hvdl_entry_body(entry), entry->body_bytes, &asked))
        return;
    if (is_decided(e, &asked)) {
        fill_answer(e, &asked, &own);
        announce_answer(e, &own);
        return;
    }
    for (int h = 0; h < e->config.num_hosts; h++)
        if (h != e->placement.host) {
            hvdl_message message = {.type = HVDL_MSG_ROLL_CALL};
            hvdl_send_message(e, h, &message, &asked, sizeof asked);
        }
}

void hvdl_on_roll_call(hvdl_engine *e, int host, const void *payload, size_t bytes)
{
    hvdl_message message = {.type = HVDL_MSG_ROLL_ANSWER};
    question asked;
    answer own;
    if (!read_question(e, host, payload, bytes, &asked))
        return;
    fill_answer(e, &asked, &own);
    hvdl_send_message(e, host, &message, &own, answer_bytes(&own));
}

void hvdl_on_roll_answer(hvdl_engine *e, int host, const void *payload, size_t bytes)
{
    answer what;
    if (read_answer(e, payload, bytes, &what) && what.head.host == host)
        announce_answer(e, &what);
}

/* ---- the caller ---- */

static void link_call(hvdl_engine *e, hvdl_roll_call *call)
{
    pthread_mutex_lock(&e->roll_calls.lock);
    call->next = e->roll_calls.calls;
    e->roll_calls.calls = call;
    atomic_store(&e->roll_calls.waiting, true);
    atomic_store(&e->driving.has_more, true);
    pthread_mutex_unlock(&e->roll_calls.lock);
}

static void unlink_call(hvdl_engine *e, const hvdl_roll_call *call)
{
    pthread_mutex_lock(&e->roll_calls.lock);
    hvdl_roll_call **at = &e->roll_calls.calls;
    while (*at != call)
        at = &(*at)->next;
    *at = call->next;
    pthread_mutex_unlock(&e->roll_calls.lock);
}

hvdl_err hvdl_operation_missing(hvdl_engine *e, hvdl_operation *op, bool *absent, bool *answered)
{
    hvdl_roll_call call = {.operation = op, .absent = absent, .answered = answered};
    memset(absent, 0, (size_t)e->config.num_ranks * sizeof *absent);
    memset(answered, 0, (size_t)e->config.num_hosts * sizeof *answered);
    if (op->transfer)
        return hvdl_transfer_missing(op->transfer, absent);
    uint64_t deadline = hvdl_now_ns() + LONGEST_NS;
    link_call(e, &call);
    while (!atomic_load(&call.done) && hvdl_now_ns() < deadline &&
           !hvdl_operation_wait(e, op, LOOK_NS))
        ;
    unlink_call(e, &call);
    if (!atomic_load(&call.done))
        return hvdl_operation_done(op) ? HVDL_OK : HVDL_EAGAIN;
    return HVDL_OK;
}

/* ---- the text ---- */

static void put_absent(const hvdl_engine *e, const bool *absent, hvdl_writer *to)
{
    int count = 0, named = 0;
    for (int rank = 0; rank < e->config.num_ranks; rank++)
        count += absent[rank];
    for (int rank = 0; rank < e->config.num_ranks && named < MAX_NAMED; rank++)
        if (absent[rank])
            hvdl_put(to, "%srank %d on %s", named++ ? ", " : "", hvdl_world_rank(e, rank),
                     e->placement.name_of[rank]);
    if (count > named)
        hvdl_put(to, " and %d more", count - named);
    hvdl_put(to, count > 1 ? " have not called it" : " has not called it");
}

static void put_silent(const hvdl_engine *e, const bool *answered, hvdl_writer *to)
{
    for (int h = 0; h < e->config.num_hosts; h++)
        if (!answered[h])
            hvdl_put(to, "; %s does not answer", e->config.host_names[h]);
}

void hvdl_describe_timeout(const hvdl_engine *e, const hvdl_operation *op, double seconds,
                           const bool *absent, const bool *answered, bool is_known,
                           char text[HVDL_TEXT_BYTES])
{
    hvdl_writer to = {text, HVDL_TEXT_BYTES, 0};
    char title[HVDL_TITLE_BYTES];
    if (op->transfer) {
        hvdl_describe_transfer_timeout(e, op->transfer, seconds, absent, is_known, text);
        return;
    }
    hvdl_put_title_of(title, sizeof title, op);
    hvdl_put(&to, "%s", title);
    if (op->site)
        hvdl_put(&to, " (%s)", op->site);
    hvdl_put(&to, " has not ended within %g s: ", seconds);
    if (memchr(absent, true, (size_t)e->config.num_ranks))
        put_absent(e, absent, &to);
    else if (is_known)
        hvdl_put(&to, "all ranks have called it; is a process stopped, or a host cut off?");
    else
        hvdl_put(&to, "which ranks have not called it is not known");
    if (!is_known && answered[e->placement.host])
        put_silent(e, answered, &to);
}
