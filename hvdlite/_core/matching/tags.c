/* The tags of exchanges between hosts. Coordinator h gives out numbers of its own range. A number is free
 * again when the leaders of all hosts have said DONE, which they add to their next message to that
 * coordinator.
 *
 * MPI promises tags up to 32767 only. Where there are so many hosts that a coordinator would have too few
 * numbers, only the first hosts are coordinators. Notes that are kept back, different ones on each host,
 * may still be of all its numbers. So a coordinator that has none left says so to all, once, and from then
 * on hears each DONE at once: then a number is free when the exchanges with it have ended, whatever is
 * posted later. */
#define _GNU_SOURCE
#include "matching/tags.h"

#include <stdio.h>

#include "engine/state.h"
#include "matching/announcing.h"
#include "matching/coordinator.h"
#include "matching/messages.h"
#include "operations/plans.h"

/* How many coordinators there are, and how many numbers each has, for this MPI's largest tag. */
static hvdl_err divide(hvdl_engine *e, hvdl_tags *tags)
{
    int all = (e->wire.tag_ub - HVDL_TAG_FIRST) / HVDL_TAGS_PER_ID, hosts = e->config.num_hosts;
    int most = all / HVDL_MIN_TAG_NUMBERS;
    if (most < 1)
        return HVDL_EINVAL; /* less than what MPI promises */
    tags->num_coordinators = hosts < most ? hosts : most;
    int each = all / tags->num_coordinators;
    tags->num_numbers = each < HVDL_MAX_TAG_NUMBERS ? each : HVDL_MAX_TAG_NUMBERS;
    return HVDL_OK;
}

hvdl_err hvdl_tags_make(hvdl_engine *e)
{
    hvdl_tags *tags = &e->control->tags;
    hvdl_err err = divide(e, tags);
    if (err)
        return err;
    size_t numbers = (size_t)tags->num_numbers;
    tags->notes = calloc((size_t)e->config.num_hosts, sizeof *tags->notes);
    tags->is_plan = calloc(numbers, sizeof *tags->is_plan);
    tags->num_done = calloc(numbers, sizeof *tags->num_done);
    tags->free_numbers = calloc(numbers, sizeof *tags->free_numbers);
    if (!tags->notes || !tags->is_plan || !tags->num_done || !tags->free_numbers)
        return HVDL_ENOMEM;
    for (int number = tags->num_numbers - 1; number >= 0; number--)
        tags->free_numbers[tags->num_free++] = number;
    return HVDL_OK;
}

void hvdl_tags_free(hvdl_tags *tags)
{
    free(tags->notes);
    free(tags->is_plan);
    free(tags->num_done);
    free(tags->free_numbers);
}

/* The first tag of a number of this coordinator. */
static int tag_of(const hvdl_engine *e, int number)
{
    return HVDL_TAG_FIRST +
           HVDL_TAGS_PER_ID * (e->placement.host * e->control->tags.num_numbers + number);
}

static void tell_short(hvdl_engine *e)
{
    e->control->tags.was_short = true;
    for (int h = 0; h < e->config.num_hosts; h++) {
        hvdl_message head = {.type = HVDL_MSG_SHORT};
        if (h != e->placement.host)
            hvdl_send_message(e, h, &head, NULL, 0);
    }
}

static void send_notes(hvdl_engine *e, int host)
{
    hvdl_message head = {.type = HVDL_MSG_DONE};
    hvdl_send_message(e, host, &head, NULL, 0);
}

void hvdl_on_short(hvdl_engine *e, int host)
{
    e->control->tags.notes[host].at_once = true;
    if (e->control->tags.notes[host].count)
        send_notes(e, host);
}

bool hvdl_has_tag_for_plan(const hvdl_engine *e, char text[HVDL_TEXT_BYTES])
{
    if (e->control->tags.num_plans < e->control->tags.num_numbers - HVDL_NUMBERS_WITHOUT_PLANS)
        return true;
    snprintf(
        text, HVDL_TEXT_BYTES,
        HVDL_TITLE_HERE(
            "plan") " finds no tag for its messages: this MPI's largest tag is %d, and on %d hosts "
                    "%d plans use up those of its coordinator; use fewer at once (a larger "
                    "HVDLITE_BUCKET_BYTES makes fewer plans)",
        e->wire.tag_ub, e->config.num_hosts, e->control->tags.num_plans);
    return false;
}

int hvdl_next_tag(hvdl_engine *e, bool is_plan)
{
    hvdl_control *control = e->control;
    if (!control->tags.num_free && !control->tags.was_short)
        tell_short(e);
    if (!control->tags.num_free)
        return -1;
    control->tags.num_plans += is_plan;
    int number = control->tags.free_numbers[--control->tags.num_free];
    control->tags.is_plan[number] = is_plan;
    return tag_of(e, number);
}

void hvdl_on_free(hvdl_engine *e, int tag)
{
    const hvdl_plan *plan = hvdl_plan_by_tag(e, tag);
    if (plan)
        hvdl_announce(e, (hvdl_entry){.type = HVDL_ENTRY_FREE, .id = plan->id}, NULL, 0);
}

/* No host needs the plan any more: until here those that have joined could be called to its runs. */
static void free_plan(hvdl_engine *e, int number)
{
    int tag = tag_of(e, number);
    e->control->tags.is_plan[number] = false;
    e->control->tags.num_plans--;
    for (int h = 0; h < e->config.num_hosts; h++)
        if (h != e->placement.host) {
            hvdl_message head = {.type = HVDL_MSG_FREE, .tag = tag};
            hvdl_send_message(e, h, &head, NULL, 0);
        }
    hvdl_on_free(e, tag);
}

void hvdl_on_done(hvdl_engine *e, int number)
{
    hvdl_control *control = e->control;
    if (control->tags.num_free == control->tags.num_numbers)
        return; /* a broken host says it of a number that is free */
    if (++control->tags.num_done[number] < e->config.num_hosts)
        return;
    control->tags.num_done[number] = 0;
    if (control->tags.is_plan[number])
        free_plan(e, number);
    control->tags.free_numbers[control->tags.num_free++] = number;
    while (control->tags.num_free && hvdl_decide_waiting(e))
        ;
}

void hvdl_control_tag_done(hvdl_engine *e, int tag)
{
    hvdl_control *control = e->control;
    if (tag < HVDL_TAG_FIRST)
        return; /* it had none: nothing was to be exchanged */
    int id = (tag - HVDL_TAG_FIRST) / HVDL_TAGS_PER_ID;
    int host = id / control->tags.num_numbers, number = id % control->tags.num_numbers;
    if (host == e->placement.host) {
        hvdl_on_done(e, number);
        return;
    }
    hvdl_done_notes *notes = &control->tags.notes[host];
    notes->numbers[notes->count++] = number;
    if (notes->count == HVDL_MAX_DONE || notes->at_once)
        send_notes(e, host);
}
