/* The coordinator's part of the stall check: it asks the hosts about late operations, and says one text about
 * each. See stall.c. */
#define _GNU_SOURCE
#include "watching/inquiries.h"

#include <stdlib.h>
#include <string.h>

#include "engine/giving_up.h"
#include "engine/state.h"
#include "matching/coordinator.h"
#include "matching/messages.h"
#include "watching/report.h"
#include "watching/silence.h"
#include "watching/stall.h"

#define MAX_ASKING 16 /* that a coordinator asks about at once */

/* The coordinator's: a late operation about which it asks, until that ends. */
struct hvdl_inquiry {
    struct hvdl_inquiry *next;
    hvdl_late what;              /* at heard_ns */
    uint64_t heard_ns, begun_ns; /* begun_ns 0: it waits until others are concluded */
    bool said;                   /* a report of it */
    int num_answers;
    bool *answered; /* by host; NULL, as the next: not begun yet, or concluded */
    hvdl_stall_part *answers;
    hvdl_writer posted, missing;
    bool over; /* no rank waits any more: the next one of this name is another */
};

static void free_answers(hvdl_engine *e, hvdl_inquiry *inquiry)
{
    e->inquiries.num_asking -= inquiry->answered != NULL;
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

static bool is_about(const hvdl_late *what, hvdl_key key, uint64_t run)
{
    return hvdl_key_equal(what->key, key) && what->run == run;
}

/* Not while the inquiries are being gone through. */
static void forget_over(hvdl_engine *e)
{
    for (hvdl_inquiry **at = &e->inquiries.first; *at;) {
        hvdl_inquiry *inquiry = *at;
        if (!inquiry->over) {
            at = &inquiry->next;
            continue;
        }
        *at = inquiry->next;
        free_inquiry(e, inquiry);
    }
}

/* At this moment. */
static hvdl_late what_now(const hvdl_inquiry *inquiry)
{
    hvdl_late what = inquiry->what;
    what.age_ns += hvdl_now_ns() - inquiry->heard_ns;
    return what;
}

void hvdl_inquiries_forget(hvdl_engine *e, hvdl_key key, uint64_t run, bool goes_on)
{
    for (hvdl_inquiry *inquiry = e->inquiries.first; inquiry; inquiry = inquiry->next) {
        if (!is_about(&inquiry->what, key, run))
            continue;
        if (inquiry->said && !inquiry->over && goes_on)
            hvdl_say_going_on(e, what_now(inquiry));
        inquiry->over = true;
    }
    forget_over(e);
}

void hvdl_stall_decided(hvdl_engine *e, hvdl_key key, bool goes_on)
{
    hvdl_inquiries_forget(e, key, 0, goes_on);
}

static void conclude(hvdl_engine *e, hvdl_inquiry *inquiry)
{
    const hvdl_meeting *meeting = hvdl_meeting_of(e, inquiry->what.key, inquiry->what.run);
    char text[HVDL_TEXT_BYTES];
    int num_silent = 0;
    for (int h = 0; h < e->config.num_hosts; h++)
        if (!inquiry->answered[h]) {
            hvdl_found_silent(e, h);
            num_silent++;
            hvdl_put(&inquiry->missing, "%s%s, which does not answer",
                     inquiry->missing.used ? ", " : "", e->config.host_names[h]);
        }
    /* The host that reported it no longer says that it waits, or this host knows that all have posted. */
    bool is_over = !inquiry->posted.used || (meeting && hvdl_is_agreed(e, meeting));
    bool waits = inquiry->missing.used && !is_over;
    hvdl_late what = what_now(inquiry);
    what.report = inquiry->said; /* the first one may have taken until the next was due */
    if (waits)
        hvdl_describe_late(&what, inquiry->posted.text, inquiry->missing.text,
                           hvdl_advice_for(inquiry->answers, num_silent),
                           e->config.host_names[e->placement.host], text);
    free_answers(e, inquiry);
    inquiry->over = !waits;
    if (waits && what.gives_up)
        hvdl_give_up_everywhere(e, text);
    else if (waits)
        hvdl_report(e, text);
    inquiry->said |= waits;
}

/* Have all hosts that could answer done so? */
static bool is_answered(const hvdl_engine *e, const hvdl_inquiry *inquiry, uint64_t now)
{
    for (int h = 0; h < e->config.num_hosts; h++)
        if (!inquiry->answered[h] &&
            (h == e->placement.host || !hvdl_host_is_silent(e, h, inquiry->begun_ns, now)))
            return false;
    return true;
}

static void add_answer(hvdl_engine *e, hvdl_inquiry *inquiry, int host,
                       const hvdl_stall_part *answer)
{
    if (!inquiry->answered || inquiry->answered[host])
        return;
    inquiry->answered[host] = true;
    hvdl_put_in_order(&inquiry->posted, answer->posted);
    inquiry->answers->num_missing += answer->num_missing;
    inquiry->answers->num_elsewhere += answer->num_elsewhere;
    inquiry->answers->num_failed += answer->num_failed;
    inquiry->answers->num_users += answer->num_users;
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
    inquiry->num_answers = 0;
    inquiry->posted = (hvdl_writer){answers->posted, sizeof answers->posted, 0};
    inquiry->missing = (hvdl_writer){answers->missing, sizeof answers->missing, 0};
    e->inquiries.num_asking++;
    for (int h = 0; h < e->config.num_hosts; h++)
        if (h != e->placement.host) {
            hvdl_message message = {.type = HVDL_MSG_ASK};
            message.key = inquiry->what.key;
            message.run = inquiry->what.run;
            hvdl_send_message(e, h, &message, NULL, 0);
        }
    hvdl_describe_to(e, e->placement.host, &inquiry->what);
}

/* A few at a time, as thousands may be late at once. */
static void ask_next(hvdl_engine *e)
{
    for (hvdl_inquiry *inquiry = e->inquiries.first;
         inquiry && e->inquiries.num_asking < MAX_ASKING; inquiry = inquiry->next) {
        if (!inquiry->begun_ns)
            ask(e, inquiry);
    }
}

static void say_heard(hvdl_engine *e, int host, const hvdl_late *what)
{
    hvdl_message message = {.type = HVDL_MSG_HEARD, .key = what->key, .run = what->run};
    message.tag = what->gives_up;
    hvdl_heard_host(e, host);
    if (host != e->placement.host)
        hvdl_send_message(e, host, &message, NULL, 0);
}

/* It is reported again, unless another host has asked for that already. */
static void renew(hvdl_inquiry *inquiry, const hvdl_late *what)
{
    if (inquiry->what.report >= what->report)
        return;
    uint64_t age_ns = what_now(inquiry).age_ns;
    inquiry->what.report = what->report;
    inquiry->what.age_ns = age_ns > what->age_ns ? age_ns : what->age_ns;
    inquiry->heard_ns = hvdl_now_ns();
    if (!inquiry->answered)
        inquiry->begun_ns = 0;
}

void hvdl_on_stalled(hvdl_engine *e, int host, const void *payload)
{
    hvdl_late what;
    memcpy(&what, payload, sizeof what);
    e->stall.told = true;
    say_heard(e, host, &what);
    /* Its report and the answer have crossed. */
    if (what.is_asked && !what.gives_up && !hvdl_is_open(e, what.key, host))
        return;
    forget_over(e);
    hvdl_inquiry **at = &e->inquiries.first;
    for (; *at; at = &(*at)->next)
        if (is_about(&(*at)->what, what.key, what.run) && (*at)->what.gives_up == what.gives_up) {
            renew(*at, &what);
            ask_next(e);
            return;
        }
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

void hvdl_on_spoken(hvdl_engine *e, hvdl_key key, uint64_t run, int report)
{
    for (hvdl_inquiry *inquiry = e->inquiries.first; inquiry; inquiry = inquiry->next) {
        if (!is_about(&inquiry->what, key, run) || inquiry->what.gives_up ||
            inquiry->what.report > report)
            continue;
        free_answers(e, inquiry);
        inquiry->begun_ns = hvdl_now_ns();
        inquiry->over = !inquiry->said;
    }
    forget_over(e);
    ask_next(e);
}

void hvdl_on_ask(hvdl_engine *e, int host, hvdl_key key, uint64_t run)
{
    hvdl_heard_host(e, host);
    hvdl_describe_to(e, host, &(hvdl_late){.key = key, .run = run});
}

void hvdl_on_status(hvdl_engine *e, int host, hvdl_key key, uint64_t run, const void *payload)
{
    hvdl_stall_part answer;
    memcpy(&answer, payload, sizeof answer);
    hvdl_heard_host(e, host);
    for (hvdl_inquiry *inquiry = e->inquiries.first; inquiry; inquiry = inquiry->next) {
        if (is_about(&inquiry->what, key, run))
            add_answer(e, inquiry, host, &answer);
    }
    ask_next(e);
}

void hvdl_on_give_up(hvdl_engine *e, const void *reason, size_t bytes)
{
    char text[HVDL_TEXT_BYTES];
    hvdl_copy_reason(text, reason, bytes);
    hvdl_give_up_here(e, text);
}

void hvdl_inquiries_end(hvdl_engine *e)
{
    while (e->inquiries.first) {
        hvdl_inquiry *next = e->inquiries.first->next;
        free_inquiry(e, e->inquiries.first);
        e->inquiries.first = next;
    }
}

void hvdl_inquiries_look(hvdl_engine *e, uint64_t now)
{
    for (hvdl_inquiry *inquiry = e->inquiries.first; inquiry; inquiry = inquiry->next) {
        if (inquiry->answered && is_answered(e, inquiry, now))
            conclude(e, inquiry);
    }
    ask_next(e);
}
