/* The stall check: which ranks wait for which. An operation that some ranks have posted and others have not,
 * for longer than a limit, is reported once, with what the missing ranks last did; after another limit
 * everything fails.
 *
 * Each rank looks at its own operations. A late one it puts into the journal (REPORTED), where the
 * first entry about it counts: so one rank of a host speaks, and only if the host still waits by then.
 * On one host that rank says the text. Between hosts the leader tells the operation's coordinator
 * (STALLED), which asks the leaders of all hosts (ASK) which of their ranks have not posted it (STATUS), makes
 * one text of the answers, and says it, unless the operation has gone on meanwhile. */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>

#include "engine/control.h"
#include "engine/report.h"

#define LOOK_NS 250000000ull    /* between two looks */
#define ANSWER_NS 5000000000ull /* how long a host may take to answer */
#define MAX_LATE 512            /* operations found in one look */
#define MAX_ASKING 16           /* that a coordinator asks about at once */

/* A description of this host's ranks that is due. */
struct hvdl_due {
    hvdl_due *next;
    hvdl_late what;
    uint64_t id; /* one host: of its meeting */
    int host;    /* that asks for it */
};

/* The coordinator's: a late operation about which it asks, until that ends. */
struct hvdl_inquiry {
    struct hvdl_inquiry *next;
    hvdl_late what;
    uint64_t heard_ns, begun_ns; /* begun_ns 0: it waits until others are concluded */
    int num_answers;
    bool *answered; /* by host; NULL, as the next: not begun yet, or concluded */
    hvdl_stall_part *answers;
    hvdl_writer posted, missing;
    bool over; /* nobody waits any more: the next one of this name is another */
};

static void say(const hvdl_engine *e, const char *text)
{
    char line[HVDL_TEXT_BYTES + 32];
    snprintf(line, sizeof line, "hvdlite: %s\n", text);
    e->config.say(line);
}

static void give_up(hvdl_engine *e, const char *text)
{
    hvdl_announce(e, (hvdl_entry){.type = HVDL_ENTRY_GIVE_UP}, text, strlen(text) + 1);
}

/* ---- one host ---- */

static void report_here(hvdl_engine *e, const hvdl_due *due)
{
    const hvdl_late *what = &due->what;
    const hvdl_meeting *meeting = hvdl_meeting_of(e, what->key, what->run);
    hvdl_stall_part all;
    char text[HVDL_TEXT_BYTES];
    if (!meeting || meeting->id != due->id)
        return; /* it has gone on meanwhile */
    hvdl_describe_host(e, what, e->stall.survey, &all);
    if (!*all.missing)
        return;
    hvdl_describe_late(what, all.posted, all.missing, text);
    if (what->gives_up)
        give_up(e, text);
    else
        say(e, text);
}

/* ---- descriptions ---- */

static void make_due(hvdl_engine *e, int host, hvdl_late what, uint64_t id)
{
    hvdl_due *due = malloc(sizeof *due);
    if (!due)
        return; /* no report is better than no job */
    *due = (hvdl_due){.what = what, .id = id, .host = host};
    if (e->stall.due)
        e->stall.due_last->next = due;
    else
        e->stall.due = due;
    e->stall.due_last = due;
}

static hvdl_due *next_due(hvdl_engine *e)
{
    hvdl_due *due = e->stall.due;
    e->stall.due = due->next;
    return due;
}

/* ---- between hosts: the coordinator ---- */

static void free_answers(hvdl_engine *e, hvdl_inquiry *inquiry)
{
    e->stall.num_asking -= inquiry->answered != NULL;
    free(inquiry->answered);
    free(inquiry->answers);
    inquiry->answered = NULL;
    inquiry->answers = NULL;
}

static void free_inquiry(hvdl_engine *e, hvdl_inquiry *inquiry)
{
    free_answers(e, inquiry);
    free(inquiry);
}

void hvdl_stall_end(hvdl_engine *e)
{
    while (e->stall.due)
        free(next_due(e));
    while (e->stall.inquiries) {
        hvdl_inquiry *next = e->stall.inquiries->next;
        free_inquiry(e, e->stall.inquiries);
        e->stall.inquiries = next;
    }
}

void hvdl_stall_free(hvdl_engine *e)
{
    hvdl_stall_end(e);
    free(e->stall.survey);
}

static bool is_about(const hvdl_late *what, hvdl_key key, uint64_t run)
{
    return hvdl_key_equal(what->key, key) && what->run == run;
}

/* Not while the inquiries are being gone through. */
static void forget_over(hvdl_engine *e)
{
    for (hvdl_inquiry **at = &e->stall.inquiries; *at;) {
        hvdl_inquiry *inquiry = *at;
        if (!inquiry->over) {
            at = &inquiry->next;
            continue;
        }
        *at = inquiry->next;
        free_inquiry(e, inquiry);
    }
}

static void forget(hvdl_engine *e, hvdl_key key, uint64_t run)
{
    for (hvdl_inquiry *inquiry = e->stall.inquiries; inquiry; inquiry = inquiry->next)
        inquiry->over |= is_about(&inquiry->what, key, run);
    forget_over(e);
}

void hvdl_stall_ended(hvdl_engine *e, const hvdl_operation *op)
{
    forget(e, op->key, hvdl_run_of(op));
}

void hvdl_stall_decided(hvdl_engine *e, hvdl_key key)
{
    forget(e, key, 0);
}

static void conclude(hvdl_engine *e, hvdl_inquiry *inquiry)
{
    const hvdl_meeting *meeting = hvdl_meeting_of(e, inquiry->what.key, inquiry->what.run);
    char text[HVDL_TEXT_BYTES];
    for (int h = 0; h < e->config.num_hosts; h++)
        if (!inquiry->answered[h])
            hvdl_put(&inquiry->missing, "%s%s, which does not answer",
                     inquiry->missing.used ? ", " : "", e->config.host_names[h]);
    /* The host that reported it no longer says that it waits, or this host knows that all have posted. */
    bool is_over = !inquiry->posted.used || (meeting && hvdl_is_agreed(e, meeting));
    bool waits = inquiry->missing.used && !is_over;
    hvdl_late what = inquiry->what;
    what.age_ns += hvdl_now_ns() - inquiry->heard_ns;
    if (waits)
        hvdl_describe_late(&what, inquiry->posted.text, inquiry->missing.text, text);
    free_answers(e, inquiry);
    inquiry->over = !waits;
    if (!waits)
        return;
    if (!what.gives_up) {
        say(e, text);
        return;
    }
    for (int h = 0; h < e->config.num_hosts; h++)
        if (h != e->placement.host) {
            hvdl_message message = {.type = HVDL_MSG_GIVE_UP};
            hvdl_send_message(e, h, &message, text, strlen(text) + 1);
        }
    give_up(e, text);
}

static void add_answer(hvdl_engine *e, hvdl_inquiry *inquiry, int host,
                       const hvdl_stall_part *answer)
{
    if (!inquiry->answered || inquiry->answered[host])
        return;
    inquiry->answered[host] = true;
    if (*answer->posted)
        hvdl_put(&inquiry->posted, "%s%s", inquiry->posted.used ? ", " : "", answer->posted);
    if (*answer->missing)
        hvdl_put(&inquiry->missing, "%s%s", inquiry->missing.used ? ", " : "", answer->missing);
    if (++inquiry->num_answers == e->config.num_hosts)
        conclude(e, inquiry);
}

static void ask(hvdl_engine *e, hvdl_inquiry *inquiry)
{
    hvdl_stall_part *answers = calloc(1, sizeof *answers);
    bool *answered = calloc((size_t)e->config.num_hosts, sizeof *answered);
    inquiry->begun_ns = hvdl_now_ns();
    if (!answers || !answered) {
        free(answers);
        free(answered);
        return; /* no report is better than no job */
    }
    inquiry->answers = answers;
    inquiry->answered = answered;
    inquiry->posted = (hvdl_writer){answers->posted, sizeof answers->posted, 0};
    inquiry->missing = (hvdl_writer){answers->missing, sizeof answers->missing, 0};
    e->stall.num_asking++;
    for (int h = 0; h < e->config.num_hosts; h++)
        if (h != e->placement.host) {
            hvdl_message message = {.type = HVDL_MSG_ASK};
            message.key = inquiry->what.key;
            message.run = inquiry->what.run;
            hvdl_send_message(e, h, &message, NULL, 0);
        }
    make_due(e, e->placement.host, inquiry->what, 0);
}

/* A few at a time, as thousands may be late at once. */
static void ask_next(hvdl_engine *e)
{
    for (hvdl_inquiry *inquiry = e->stall.inquiries; inquiry && e->stall.num_asking < MAX_ASKING;
         inquiry = inquiry->next) {
        if (!inquiry->begun_ns)
            ask(e, inquiry);
    }
}

void hvdl_on_stalled(hvdl_engine *e, int host, const void *payload)
{
    hvdl_late what;
    memcpy(&what, payload, sizeof what);
    /* Its report and the answer have crossed. */
    if (what.is_asked && !what.gives_up && !hvdl_is_open(e, what.key, host))
        return;
    forget_over(e);
    hvdl_inquiry **at = &e->stall.inquiries;
    for (; *at; at = &(*at)->next)
        if (is_about(&(*at)->what, what.key, what.run) && (*at)->what.gives_up == what.gives_up)
            return;
    hvdl_inquiry *inquiry = calloc(1, sizeof *inquiry);
    if (!inquiry)
        return;
    inquiry->what = what;
    inquiry->heard_ns = hvdl_now_ns();
    *at = inquiry;
    if (what.gives_up)
        ask(e, inquiry);
    else
        ask_next(e);
}

void hvdl_on_ask(hvdl_engine *e, int host, hvdl_key key, uint64_t run)
{
    make_due(e, host, (hvdl_late){.key = key, .run = run}, 0);
}

void hvdl_on_status(hvdl_engine *e, int host, hvdl_key key, uint64_t run, const void *payload)
{
    hvdl_stall_part answer;
    memcpy(&answer, payload, sizeof answer);
    for (hvdl_inquiry *inquiry = e->stall.inquiries; inquiry; inquiry = inquiry->next) {
        if (is_about(&inquiry->what, key, run))
            add_answer(e, inquiry, host, &answer);
    }
    ask_next(e);
}

void hvdl_on_give_up(hvdl_engine *e, const char *text)
{
    give_up(e, text);
}

/* ---- within a host ---- */

static void tell(hvdl_engine *e, const hvdl_due *due)
{
    hvdl_message message = {.type = HVDL_MSG_STATUS, .key = due->what.key, .run = due->what.run};
    hvdl_stall_part answer;
    if (e->config.num_hosts == 1) {
        report_here(e, due);
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
static bool survey(hvdl_engine *e, bool *progressed)
{
    size_t bytes = (size_t)e->placement.local_size * sizeof *e->stall.survey;
    if (!e->stall.survey && !(e->stall.survey = malloc(bytes)))
        return false;
    for (int r = 0; r < e->placement.local_size; r++)
        e->stall.survey[r] = hvdl_last_of(e, r);
    uint64_t tail = atomic_load_explicit(&e->shm.control->tail, memory_order_acquire);
    *progressed |= hvdl_read_journal(e);
    return e->shm.read_position >= tail;
}

/* One by one, as printing a text may take long. */
void hvdl_stall_tell(hvdl_engine *e, bool *progressed)
{
    while (e->stall.due && survey(e, progressed)) {
        hvdl_due *due = next_due(e);
        tell(e, due);
        free(due);
        *progressed = true;
    }
}

void hvdl_read_reported(hvdl_engine *e, const hvdl_entry *entry)
{
    hvdl_late what;
    memcpy(&what, hvdl_entry_body(entry), sizeof what);
    hvdl_meeting *meeting = hvdl_meeting_of(e, what.key, what.run);
    if (!meeting || meeting->id != entry->id || hvdl_is_agreed(e, meeting) ||
        (what.gives_up ? meeting->given_up : meeting->reported))
        return;
    meeting->reported = true;
    meeting->given_up |= what.gives_up;
    if (e->config.num_hosts == 1) {
        if (entry->from == e->placement.local)
            make_due(e, e->placement.host, what, entry->id);
        return;
    }
    if (!e->placement.is_leader)
        return;
    what.is_asked = !meeting->collecting && !meeting->plan;
    /* One host decides that all fails, as the text must be the same for everybody. */
    int coordinator = what.gives_up ? 0 : hvdl_coordinator_of(e, what.key);
    if (coordinator == e->placement.host) {
        hvdl_on_stalled(e, e->placement.host, &what);
        return;
    }
    hvdl_message message = {.type = HVDL_MSG_STALLED, .key = what.key};
    hvdl_send_message(e, coordinator, &message, &what, sizeof what);
}

/* ---- looking ---- */

static bool is_late(const hvdl_engine *e, const hvdl_operation *op, uint64_t now)
{
    uint64_t age = now > op->posted_ns ? now - op->posted_ns : 0;
    const hvdl_meeting *meeting = op->meeting;
    if (op->internal || !meeting || hvdl_is_agreed(e, meeting))
        return false; /* without a meeting: not in the journal yet, or its plan is not made */
    if (!op->stall.told && !meeting->reported && e->config.stall_warning_ns &&
        age > e->config.stall_warning_ns)
        return true;
    return !op->stall.given_up && !meeting->given_up && e->config.stall_shutdown_ns &&
           age > e->config.stall_shutdown_ns;
}

void hvdl_stall_look(hvdl_engine *e)
{
    hvdl_operation *found[MAX_LATE];
    int count = 0;
    uint64_t now = hvdl_now_ns(), limit = e->config.stall_shutdown_ns;
    if ((!e->config.stall_warning_ns && !limit) || now < e->stall.next_look_ns)
        return;
    e->stall.next_look_ns = now + LOOK_NS;
    for (hvdl_inquiry *inquiry = e->stall.inquiries; inquiry; inquiry = inquiry->next) {
        if (inquiry->answered && now > inquiry->begun_ns + ANSWER_NS)
            conclude(e, inquiry);
    }
    ask_next(e);
    /* What is in flight is ended by the driver alone, which this is. */
    pthread_mutex_lock(&e->queue.lock);
    for (size_t i = 0; i < e->queue.in_flight.num_slots && count < MAX_LATE; i++)
        for (hvdl_node *node = e->queue.in_flight.slots[i]; node && count < MAX_LATE;
             node = node->next) {
            hvdl_operation *op = HVDL_CONTAINER(node, hvdl_operation, by_key);
            if (is_late(e, op, now))
                found[count++] = op;
        }
    pthread_mutex_unlock(&e->queue.lock);
    for (int i = 0; i < count; i++) {
        hvdl_operation *op = found[i];
        hvdl_late what = {.key = op->key, .run = hvdl_run_of(op), .kind = op->desc.kind};
        what.is_run = hvdl_is_run(op);
        what.age_ns = now - op->posted_ns;
        what.gives_up = limit && what.age_ns > limit;
        hvdl_copy_plain_name(what.name, sizeof what.name, op->name);
        op->stall.told = true;
        op->stall.given_up |= what.gives_up;
        hvdl_entry entry = {.type = HVDL_ENTRY_REPORTED, .id = op->meeting->id};
        hvdl_announce(e, entry, &what, sizeof what);
    }
}
