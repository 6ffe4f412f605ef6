#define _GNU_SOURCE
#include "watching/missing_query.h"

#include <stdlib.h>
#include <string.h>

#include "engine/placement.h"
#include "engine/state.h"
#include "matching/announcing.h"
#include "matching/messages.h"
#include "watching/missing.h"
#include "watching/report.h"

#define CALLERS_PATIENCE_NS 1000000000ull
#define MAX_REPORTS 256 /* of one operation; there are 21 at most */
#define ROOM_BEHIND 32  /* of a text, for a comma and how many ranks are not in it */

typedef struct {
    hvdl_answer head;
    uint8_t presence[HVDL_MAX_LOCAL];
} whole_answer;

static size_t answer_bytes(const whole_answer *answer)
{
    return sizeof answer->head + (size_t)answer->head.num_ranks;
}

/* ---- what another rank wrote is checked before it is used; if it is not right, it is as if it had not come ---- */

static bool read_question(const hvdl_engine *e, int host, const void *from, size_t bytes,
                          hvdl_question *to)
{
    if (bytes != sizeof *to)
        return false;
    memcpy(to, from, sizeof *to);
    return to->host == host && to->local >= 0 && to->local < e->placement.host_sizes[host] &&
           to->report >= 0 && to->report < MAX_REPORTS;
}

static bool read_answer(const hvdl_engine *e, const void *from, size_t bytes, whole_answer *to)
{
    const hvdl_answer *head = &to->head;
    if (bytes < sizeof *head || bytes > sizeof *to)
        return false;
    memcpy(to, from, bytes);
    return head->host >= 0 && head->host < e->config.num_hosts &&
           head->num_ranks == e->placement.host_sizes[head->host] && bytes == answer_bytes(to) &&
           head->awaits < e->config.num_ranks && memchr(head->missing, 0, sizeof head->missing);
}

/* ---- one report for all who wait ---- */

/* A claim, from the highest bits on: what it is about, the report's number, whether this host has made it, the
 * host that makes it. */
#define CLAIM_HOST_BITS 16
#define CLAIM_TOLD ((uint64_t)1 << 15)
#define CLAIM_HOST (CLAIM_TOLD - 1)
#define CLAIM_WHAT_BITS 24                      /* below it */
#define ENDING ((uint64_t)1 << CLAIM_WHAT_BITS) /* of the one that ends everything */
#define PROBES 8

/* Where this claim stands, or has room: an old one goes if there is none. */
static _Atomic uint64_t *find_claim(hvdl_engine *e, uint64_t claim)
{
    _Atomic uint64_t *claims = e->shm.control->claims, *room = NULL;
    if (claim == ENDING)
        return &claims[0];
    size_t slot = 1 + (claim >> CLAIM_WHAT_BITS) % (HVDL_NUM_CLAIMS - PROBES);
    for (size_t i = slot; i < slot + PROBES; i++) {
        uint64_t found = atomic_load(&claims[i]);
        if (found >> CLAIM_HOST_BITS == claim >> CLAIM_HOST_BITS)
            return &claims[i];
        if (!found && !room)
            room = &claims[i];
    }
    return room ? room : &claims[slot];
}

/* Of no host. */
static uint64_t claim_of(uint64_t what, const hvdl_question *asked)
{
    uint64_t about = hvdl_mix(what + (uint64_t)asked->kind) >> CLAIM_WHAT_BITS;
    if (asked->gives_up)
        return ENDING;
    return about << CLAIM_WHAT_BITS | (uint64_t)(asked->report & 255) << CLAIM_HOST_BITS;
}

int hvdl_claim_report(hvdl_engine *e, uint64_t what, const hvdl_question *asked, int host)
{
    uint64_t claim = claim_of(what, asked);
    for (;;) {
        _Atomic uint64_t *word = find_claim(e, claim);
        uint64_t old = atomic_load(word);
        bool is_held = old >> CLAIM_HOST_BITS == claim >> CLAIM_HOST_BITS;
        int holder = is_held ? (int)(old & CLAIM_HOST) : HVDL_TOLD_BY_NOBODY;
        if (is_held && old & CLAIM_TOLD)
            return HVDL_TOLD_ALREADY;
        if (is_held && (holder <= host || host == e->placement.host))
            return holder;
        if (atomic_compare_exchange_strong(word, &old, claim | (uint64_t)host))
            return holder;
    }
}

void hvdl_note_told(hvdl_engine *e, const hvdl_missing_query *call)
{
    uint64_t claim = claim_of(call->what, &call->question);
    uint64_t told = claim | CLAIM_TOLD | (uint64_t)e->placement.host;
    _Atomic uint64_t *word = find_claim(e, claim);
    uint64_t old = atomic_load(word);
    while (old >> CLAIM_HOST_BITS == claim >> CLAIM_HOST_BITS &&
           !atomic_compare_exchange_strong(word, &old, told))
        ;
}

int hvdl_ending_host(const hvdl_engine *e)
{
    uint64_t ending = atomic_load(&e->shm.control->claims[0]);
    return ending ? (int)(ending & CLAIM_HOST) : HVDL_TOLD_BY_NOBODY;
}

void hvdl_unclaim_end(hvdl_engine *e)
{
    uint64_t own = ENDING | (uint64_t)e->placement.host;
    atomic_compare_exchange_strong(&e->shm.control->claims[0], &own, 0);
}

/* ---- the rank that asks ---- */

/* num_missing: the ranks that it names, which are counted if it has no room; 0: it is cut then. */
static void put_part(hvdl_missing_query *call, const char *text, int num_missing)
{
    hvdl_writer *to = &call->missing;
    bool has_room = !to->used || to->used + strlen(text) + ROOM_BEHIND < to->room;
    if (!has_room && num_missing)
        call->num_cut += num_missing;
    else if (*text)
        hvdl_put(to, "%s%s", to->used ? ", " : "", text);
}

static void add_answer(hvdl_engine *e, hvdl_missing_query *call, const whole_answer *answer)
{
    const hvdl_answer *head = &answer->head;
    if (call->answered[head->host])
        return;
    call->answered[head->host] = true;
    call->num_answers++;
    call->goes_on |= head->goes_on;
    call->is_told |= head->told_by == HVDL_TOLD_ALREADY ||
                     (head->told_by >= 0 && head->told_by < e->placement.host);
    call->num_elsewhere += head->num_elsewhere;
    if (call->awaits < 0)
        call->awaits = head->awaits;
    int num_missing = 0;
    for (int r = 0; r < head->num_ranks; r++) {
        num_missing += answer->presence[r] == HVDL_HAS_NOT_POSTED;
        call->presence[hvdl_member_of_host(&e->placement, head->host, r)] = answer->presence[r];
    }
    call->num_missing += num_missing;
    put_part(call, head->missing, num_missing);
}

static void describe_here(hvdl_engine *e, const hvdl_question *asked, whole_answer *to)
{
    to->head = (hvdl_answer){.number = asked->number,
                             .host = e->placement.host,
                             .local = asked->local,
                             .num_ranks = e->placement.local_size,
                             .awaits = -1,
                             .told_by = HVDL_TOLD_BY_NOBODY};
    memset(to->presence, HVDL_TAKES_NO_PART, sizeof to->presence);
    hvdl_describe_missing(e, asked, &to->head, to->presence);
}

static void ask_hosts(hvdl_engine *e, const hvdl_question *asked)
{
    for (int h = 0; h < e->config.num_hosts; h++)
        if (h != e->placement.host) {
            hvdl_message message = {.type = HVDL_MSG_MISSING_QUERY};
            hvdl_send_message(e, h, &message, asked, sizeof *asked);
        }
}

hvdl_missing_query *hvdl_call_roll(hvdl_engine *e, hvdl_operation *op, const hvdl_question *how,
                                   uint64_t what)
{
    size_t hosts = (size_t)e->config.num_hosts, ranks = (size_t)e->config.num_ranks;
    hvdl_missing_query *call = calloc(1, sizeof *call + hosts * sizeof *call->answered + ranks);
    if (!call)
        return NULL; /* no report is better than no job */
    call->operation = op;
    call->question = *how;
    call->what = what;
    call->question.host = e->placement.host;
    call->question.local = e->placement.local;
    call->question.number = ++e->stall.num_calls;
    call->asked_ns = e->stall.ran_ns;
    call->awaits = -1;
    call->missing = (hvdl_writer){call->text, sizeof call->text, 0};
    call->answered = (bool *)(call + 1);
    call->presence = (uint8_t *)(call->answered + hosts);
    call->next = e->stall.calls;
    e->stall.calls = call;
    if (hosts == 1 || how->is_alone)
        return call;
    if (e->placement.is_leader) /* also where the shared log is full */
        ask_hosts(e, &call->question);
    else
        hvdl_announce(e, (hvdl_entry){.type = HVDL_ENTRY_MISSING_QUERY}, &call->question,
                      sizeof call->question);
    return call;
}

void hvdl_end_missing_query(hvdl_engine *e, hvdl_missing_query *call)
{
    hvdl_missing_query **at = &e->stall.calls;
    while (*at != call)
        at = &(*at)->next;
    *at = call->next;
    free(call);
}

static void put_silent(hvdl_engine *e, hvdl_missing_query *call)
{
    /* Without its leader a rank hears of no host. */
    int leader = hvdl_rank_of_local(e, 0);
    bool is_cut_off = call->num_answers == 1 && !e->placement.is_leader && hvdl_quiet_ns(e, 0);
    bool is_named = call->question.kind == HVDL_CALL_STILL
                        ? call->missing.used > 0
                        : call->presence[leader] == HVDL_HAS_NOT_POSTED;
    if (is_cut_off && !is_named)
        hvdl_put(&call->missing, "%srank %d on %s, which does not answer",
                 call->missing.used ? ", " : "", hvdl_world_rank(e, leader),
                 e->placement.name_of[leader]);
    for (int h = 0; !is_cut_off && h < e->config.num_hosts; h++)
        if (!call->answered[h]) {
            e->stall.silent[h] |= call->question.kind != HVDL_CALL_CALLER;
            hvdl_put(&call->missing, "%s%s, which does not answer", call->missing.used ? ", " : "",
                     e->config.host_names[h]);
        }
}

void hvdl_close_roll(hvdl_engine *e, hvdl_missing_query *call)
{
    char others[HVDL_MISSING_BYTES];
    int awaits = call->awaits, num_missing = call->num_missing - call->num_cut;
    whole_answer own;
    memcpy(others, call->text, sizeof others);
    *call->text = '\0';
    call->missing.used = 0;
    call->awaits = -1;
    describe_here(e, &call->question, &own);
    add_answer(e, call, &own); /* the first of the text */
    put_part(call, others, num_missing);
    if (call->awaits < 0)
        call->awaits = awaits;
    if (!call->question.is_alone && !call->goes_on)
        call->num_silent = e->config.num_hosts - call->num_answers;
    if (call->num_cut)
        hvdl_put(&call->missing, " and %d more", call->num_cut);
    if (call->num_silent)
        put_silent(e, call);
}

bool hvdl_roll_is_complete(const hvdl_engine *e, const hvdl_missing_query *call)
{
    bool is_for_caller = call->question.kind == HVDL_CALL_CALLER;
    uint64_t patience_ns = is_for_caller ? CALLERS_PATIENCE_NS : HVDL_PATIENCE_NS;
    bool has_time = e->stall.ran_ns < call->asked_ns + patience_ns;
    if (call->question.is_alone || call->goes_on)
        return true;
    for (int h = 0; h < e->config.num_hosts; h++)
        if (h != e->placement.host && !call->answered[h] && !e->stall.silent[h] && has_time)
            return false;
    return true;
}

void hvdl_read_roll_answer(hvdl_engine *e, const hvdl_entry *entry)
{
    whole_answer answer;
    if (!read_answer(e, hvdl_entry_body(entry), entry->body_bytes, &answer) ||
        answer.head.local != e->placement.local)
        return;
    e->stall.silent[answer.head.host] = false;
    for (hvdl_missing_query *call = e->stall.calls; call; call = call->next)
        if (call->question.number == answer.head.number)
            add_answer(e, call, &answer);
}

/* ---- the leaders ---- */

void hvdl_read_missing_query(hvdl_engine *e, const hvdl_entry *entry)
{
    hvdl_question asked;
    if (e->placement.is_leader &&
        read_question(e, e->placement.host, hvdl_entry_body(entry), entry->body_bytes, &asked))
        ask_hosts(e, &asked);
}

void hvdl_on_missing_query(hvdl_engine *e, int host, const void *payload, size_t bytes)
{
    hvdl_message message = {.type = HVDL_MSG_MISSING_ANSWER};
    hvdl_question asked;
    whole_answer own;
    if (!read_question(e, host, payload, bytes, &asked))
        return;
    e->stall.silent[host] = false;
    hvdl_survey(e);
    describe_here(e, &asked, &own);
    hvdl_send_message(e, host, &message, &own, answer_bytes(&own));
}

void hvdl_on_roll_answer(hvdl_engine *e, int host, const void *payload, size_t bytes)
{
    whole_answer answer;
    if (!read_answer(e, payload, bytes, &answer) || answer.head.host != host)
        return;
    e->stall.silent[host] = false;
    if (answer.head.local != e->placement.local) {
        hvdl_announce(e, (hvdl_entry){.type = HVDL_ENTRY_MISSING_ANSWER}, &answer,
                      answer_bytes(&answer));
        return;
    }
    for (hvdl_missing_query *call = e->stall.calls; call; call = call->next)
        if (call->question.number == answer.head.number)
            add_answer(e, call, &answer);
}
