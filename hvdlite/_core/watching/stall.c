/* The stall check: which ranks wait for which. An operation that some ranks have posted and others have not,
 * for longer than a limit, is reported, with what the missing ranks last did, and again after twice, four times
 * ... the limit; after another limit everything fails.
 *
 * Each rank looks at its own operations. A late one it puts into the journal (REPORTED), where the
 * first entry about it counts: so one rank of a host speaks, and only if the host still waits by then.
 * On one host that rank says the text. Between hosts the leader tells the operation's coordinator
 * (STALLED), which says that it has heard (HEARD), asks the leaders of all hosts (ASK) which of their ranks have
 * not posted it (STATUS), makes one text of the answers, and says it, unless the operation has gone on
 * meanwhile: inquiries.c. The rank that must speak tells its host when it has spoken or asked (TAKEN). If it does
 * not, another one speaks; if a coordinator does not answer, the leader that asked: silence.c. */
#define _GNU_SOURCE
#include "watching/stall.h"

#include <stdio.h>
#include <string.h>

#include "engine/breaking.h"
#include "engine/state.h"
#include "matching/announcing.h"
#include "matching/messages.h"
#include "operations/activity.h"
#include "operations/facts.h"
#include "watching/inquiries.h"
#include "watching/report.h"
#include "watching/silence.h"

#define LOOK_NS 250000000ull /* between two looks */
#define MAX_LATE 512         /* operations found in one look */

/* A description of this host's ranks that is due. */
struct hvdl_due {
    hvdl_due *next;
    hvdl_late what;
    bool speaks; /* this rank says it */
    uint64_t id; /* speaks: of its meeting */
    int host;    /* that asks for it; speaks: that should have spoken and is silent, or -1 */
};

/* ---- this rank speaks: on one host, or where others should have and are silent ---- */

/* Of other hosts and of the leader, all that is known is that they do not answer. Returns whether somebody is silent. */
static bool put_silent(hvdl_engine *e, const hvdl_due *due, const hvdl_meeting *meeting,
                       hvdl_stall_part *all)
{
    hvdl_writer to = {all->missing, sizeof all->missing, strlen(all->missing)};
    const char *comma = to.used ? ", " : "";
    int leader = hvdl_rank_of_local(e, 0);
    if (due->host >= 0)
        hvdl_put(&to, "%s%s, which does not answer", comma, e->config.host_names[due->host]);
    else if (e->config.num_hosts > 1 && meeting->posted_by[0])
        hvdl_put(&to, "%srank %d on %s, which does not answer", comma, hvdl_world_rank(e, leader),
                 e->placement.name_of[leader]);
    else
        return false;
    return true;
}

static void report_here(hvdl_engine *e, const hvdl_due *due)
{
    const hvdl_late *what = &due->what;
    hvdl_meeting *meeting = hvdl_meeting_of(e, what->key, what->run);
    hvdl_stall_part all;
    char text[HVDL_TEXT_BYTES];
    if (!meeting || meeting->id != due->id || hvdl_is_agreed(e, meeting))
        return; /* it has gone on meanwhile */
    hvdl_describe_host(e, what, e->stall.survey, &all);
    bool is_silent = put_silent(e, due, meeting, &all);
    if (!*all.missing)
        return;
    const char *asker = due->host < 0 ? NULL : e->config.host_names[e->placement.host];
    hvdl_describe_late(what, all.posted, all.missing, hvdl_advice_for(&all, is_silent), asker,
                       text);
    if (what->gives_up) {
        hvdl_give_up_everywhere(e, text);
        return;
    }
    hvdl_report(e, text);
    meeting->reporting.said = true;
}

void hvdl_announce_taken(hvdl_engine *e, const hvdl_late *what, uint64_t id)
{
    hvdl_announce(e, (hvdl_entry){.type = HVDL_ENTRY_TAKEN, .id = id}, what, sizeof *what);
}

/* ---- descriptions ---- */

static void make_due(hvdl_engine *e, hvdl_due what)
{
    hvdl_due *due = malloc(sizeof *due);
    if (!due)
        return; /* no report is better than no job */
    *due = what;
    if (e->stall.due)
        e->stall.due_last->next = due;
    else
        e->stall.due = due;
    e->stall.due_last = due;
}

void hvdl_speak_here(hvdl_engine *e, const hvdl_late *what, uint64_t id, int silent_host)
{
    make_due(e, (hvdl_due){.what = *what, .speaks = true, .id = id, .host = silent_host});
}

void hvdl_describe_to(hvdl_engine *e, int host, const hvdl_late *what)
{
    make_due(e, (hvdl_due){.what = *what, .host = host});
}

static hvdl_due *next_due(hvdl_engine *e)
{
    hvdl_due *due = e->stall.due;
    e->stall.due = due->next;
    return due;
}

void hvdl_stall_end(hvdl_engine *e)
{
    while (e->stall.due)
        free(next_due(e));
    hvdl_inquiries_end(e);
    hvdl_silence_end(e);
}

void hvdl_stall_free(hvdl_engine *e)
{
    hvdl_stall_end(e);
    free(e->stall.survey);
}

/* If this rank has reported it, that is over. */
static void withdraw(hvdl_engine *e, hvdl_operation *op)
{
    bool said = op->stall.said || (op->meeting && op->meeting->reporting.said);
    op->stall.said = false;
    if (op->meeting)
        op->meeting->reporting.said = false;
    if (said)
        hvdl_say_going_on(e, hvdl_late_of(e, op, hvdl_now_ns()));
}

void hvdl_stall_ended(hvdl_engine *e, hvdl_operation *op, bool ok)
{
    hvdl_inquiries_forget(e, op->key, hvdl_run_of(op), ok);
    if (ok)
        withdraw(e, op);
}

/* ---- within a host ---- */

static void tell(hvdl_engine *e, const hvdl_due *due)
{
    hvdl_message message = {.type = HVDL_MSG_STATUS, .key = due->what.key, .run = due->what.run};
    hvdl_stall_part answer;
    if (due->speaks) {
        report_here(e, due);
        hvdl_announce_taken(e, &due->what, due->id);
        return;
    }
    hvdl_describe_host(e, &due->what, e->stall.survey, &answer);
    if (due->host == e->placement.host)
        hvdl_on_status(e, e->placement.host, message.key, message.run, &answer);
    else
        hvdl_send_message(e, due->host, &message, &answer, sizeof answer);
}

/* Reads first what each rank last did, then the journal as far as it went at that time: so no report calls a
 * rank missing and says as well that it is in the operation, or has ended it. False: a rank is just writing
 * to the journal. */
static bool survey(hvdl_engine *e, bool (*read_journal)(hvdl_engine *), bool *progressed)
{
    size_t bytes = (size_t)e->placement.local_size * sizeof *e->stall.survey;
    if (!e->stall.survey && !(e->stall.survey = malloc(bytes)))
        return false;
    for (int r = 0; r < e->placement.local_size; r++)
        e->stall.survey[r] = hvdl_last_of(e, r);
    uint64_t tail = atomic_load_explicit(&e->shm.control->tail, memory_order_acquire);
    *progressed |= read_journal(e);
    return e->shm.read_position >= tail;
}

/* One by one, as printing a text may take long. */
void hvdl_stall_tell(hvdl_engine *e, bool (*read_journal)(hvdl_engine *), bool *progressed)
{
    while (e->stall.due && survey(e, read_journal, progressed)) {
        hvdl_due *due = next_due(e);
        tell(e, due);
        free(due);
        *progressed = true;
    }
}

/* Whether this entry counts: the first about a report, or the first after the rank that should have spoken did
 * not. All ranks of the host decide alike. */
static bool counts(const hvdl_reporting *reporting, const hvdl_late *what)
{
    if (what->attempt)
        return what->attempt == reporting->attempt + 1 && what->gives_up == reporting->given_up &&
               (what->gives_up ||
                (what->report == reporting->num_reports - 1 && !reporting->taken));
    if (reporting->given_up)
        return false;
    return what->gives_up || what->report == reporting->num_reports;
}

void hvdl_read_reported(hvdl_engine *e, const hvdl_entry *entry)
{
    hvdl_late what;
    memcpy(&what, hvdl_entry_body(entry), sizeof what);
    hvdl_meeting *meeting = hvdl_meeting_of(e, what.key, what.run);
    e->stall.told = true;
    hvdl_heard_rank(e, entry->from);
    if (!meeting || meeting->id != entry->id)
        return;
    if (entry->from == e->placement.local && meeting->operation)
        meeting->operation->stall.announced = false;
    hvdl_reporting *reporting = &meeting->reporting;
    if (hvdl_is_agreed(e, meeting) || !counts(reporting, &what))
        return;
    bool speaks_itself = e->config.num_hosts == 1 || what.attempt;
    reporting->num_reports += !what.gives_up && !what.attempt;
    reporting->given_up |= what.gives_up;
    reporting->attempt = what.attempt;
    reporting->speaker = speaks_itself ? entry->from : 0;
    reporting->taken = false;
    reporting->since_ns = hvdl_now_ns();
    if (what.attempt && e->config.num_hosts > 1 && e->placement.is_leader)
        hvdl_take_back_question(e, &what);
    if (reporting->speaker != e->placement.local)
        return;
    if (speaks_itself) {
        hvdl_speak_here(e, &what, entry->id, -1);
        return;
    }
    what.is_asked = !meeting->collecting && !meeting->plan;
    /* One host decides that all fails, as the text must be the same for everybody. */
    hvdl_ask_to_speak(e, what.gives_up ? 0 : hvdl_coordinator_of(e, what.key), &what, entry->id);
    hvdl_announce_taken(e, &what, entry->id);
}

void hvdl_read_taken(hvdl_engine *e, const hvdl_entry *entry)
{
    hvdl_late what;
    memcpy(&what, hvdl_entry_body(entry), sizeof what);
    hvdl_meeting *meeting = hvdl_meeting_of(e, what.key, what.run);
    hvdl_heard_rank(e, entry->from);
    if (meeting && meeting->id == entry->id && meeting->reporting.speaker == entry->from)
        meeting->reporting.taken = true;
}

/* A journal that stands still has no meeting of it, and carries no failure to the other ranks. */
void hvdl_say_standstill(hvdl_engine *e, hvdl_operation *op, const char *text, bool gives_up)
{
    e->stall.told = true;
    if (gives_up) {
        hvdl_give_up_everywhere(e, text);
        hvdl_break_on_all(e, text);
        return;
    }
    hvdl_report(e, text);
    op->stall.said = true;
}

/* ---- looking ---- */

/* All unnamed ones are of one kind. */
static uint64_t reduced_key(const hvdl_operation *op)
{
    return op->unnamed ? HVDL_KEY_OF_UNNAMED : op->key.lo;
}

void hvdl_note_reduced(hvdl_engine *e, const hvdl_operation *op)
{
    uint64_t key = reduced_key(op);
    e->stall.reduced[key % HVDL_NUM_REDUCED] = key;
}

bool hvdl_comes_again(const hvdl_engine *e, const hvdl_operation *op)
{
    uint64_t key = reduced_key(op);
    if (op->desc.kind != HVDL_ALLREDUCE || (op->unnamed && !hvdl_is_number(op->name)))
        return hvdl_is_run(op);
    return hvdl_is_run(op) || e->stall.reduced[key % HVDL_NUM_REDUCED] == key;
}

hvdl_late hvdl_late_of(const hvdl_engine *e, const hvdl_operation *op, uint64_t now)
{
    hvdl_late what = {.key = op->key, .run = hvdl_run_of(op), .kind = op->desc.kind};
    what.comes_again = hvdl_comes_again(e, op);
    what.age_ns = now > op->posted_ns ? now - op->posted_ns : 0;
    what.in_words = op->words != NULL;
    hvdl_copy_plain_name(what.name, sizeof what.name, hvdl_shown(op));
    if (op->site)
        hvdl_copy_plain_name(what.site, sizeof what.site, op->site);
    return what;
}

/* Whether it must be reported now: *what gets the number of the report, and why. */
static bool is_late(const hvdl_engine *e, const hvdl_operation *op, uint64_t now, hvdl_late *what)
{
    uint64_t age = now > op->posted_ns ? now - op->posted_ns : 0;
    const hvdl_meeting *meeting = op->meeting;
    if (op->internal || !meeting || op->stall.announced || hvdl_is_agreed(e, meeting))
        return false; /* without a meeting: not in the journal yet, or its plan is not made */
    const hvdl_reporting *reporting = &meeting->reporting;
    bool gives_up = e->config.stall_shutdown_ns && age > e->config.stall_shutdown_ns;
    what->report = reporting->num_reports;
    what->gives_up = gives_up || reporting->given_up;
    what->attempt = 0;
    if (!reporting->given_up && (gives_up || hvdl_report_is_due(e, age, reporting->num_reports)))
        return true;
    what->report = reporting->num_reports - 1;
    what->attempt = reporting->attempt + 1;
    return (reporting->num_reports || reporting->given_up) &&
           hvdl_speaker_is_silent(e, reporting, now);
}

bool hvdl_stall_look(hvdl_engine *e)
{
    hvdl_operation *found[MAX_LATE];
    hvdl_late how;
    int count = 0;
    uint64_t now = hvdl_now_ns();
    if ((!e->config.stall_warning_ns && !e->config.stall_shutdown_ns) ||
        now < e->stall.next_look_ns)
        return false;
    e->stall.next_look_ns = now + LOOK_NS;
    hvdl_silence_look(e, now);
    hvdl_inquiries_look(e, now);
    /* What is in flight is ended by the driver alone, which this is. */
    pthread_mutex_lock(&e->queue.lock);
    for (size_t i = 0; i < e->queue.in_flight.num_slots && count < MAX_LATE; i++)
        for (hvdl_node *node = e->queue.in_flight.slots[i]; node && count < MAX_LATE;
             node = node->next) {
            hvdl_operation *op = HVDL_CONTAINER(node, hvdl_operation, by_key);
            if (is_late(e, op, now, &how))
                found[count++] = op;
        }
    pthread_mutex_unlock(&e->queue.lock);
    for (int i = 0; i < count; i++) {
        hvdl_operation *op = found[i];
        hvdl_late what = hvdl_late_of(e, op, now);
        is_late(e, op, now, &what);
        op->stall.announced = true;
        hvdl_entry entry = {.type = HVDL_ENTRY_REPORTED, .id = op->meeting->id};
        hvdl_announce(e, entry, &what, sizeof what);
    }
    return true;
}
