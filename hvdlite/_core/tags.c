/* The tags of exchanges between hosts. Coordinator h gives out numbers of its own range. A number is free
 * again when the leaders of all hosts have said DONE, which they add to their next message to that
 * coordinator. */
#define _GNU_SOURCE
#include "control.h"

/* The first tag of a number of this coordinator. */
static int tag_of(const hvdl_engine *e, int number)
{
    return HVDL_TAG_FIRST + HVDL_TAGS_PER_ID * (e->host * e->control->numbers_per_host + number);
}

int hvdl_next_tag(hvdl_engine *e, bool is_plan)
{
    hvdl_control *control = e->control;
    if (!control->num_free)
        return -1;
    int number = control->free_numbers[--control->num_free];
    control->is_plan[number] = is_plan;
    return tag_of(e, number);
}

void hvdl_take_free(hvdl_engine *e, int tag)
{
    const hvdl_plan *plan = hvdl_plan_by_tag(e, tag);
    if (plan)
        hvdl_announce(e, (hvdl_entry){.type = HVDL_ENTRY_FREE, .id = plan->id}, NULL, 0);
}

/* No host needs the plan any more: until here those that have joined could be called to its runs. */
static void free_plan(hvdl_engine *e, int number)
{
    int tag = tag_of(e, number);
    e->control->is_plan[number] = false;
    for (int h = 0; h < e->config.num_hosts; h++)
        if (h != e->host) {
            hvdl_message head = {.type = HVDL_MSG_FREE, .tag = tag};
            hvdl_send_message(e, h, &head, NULL, 0);
        }
    hvdl_take_free(e, tag);
}

void hvdl_take_done(hvdl_engine *e, int number)
{
    hvdl_control *control = e->control;
    if (++control->num_done[number] < e->config.num_hosts)
        return;
    control->num_done[number] = 0;
    if (control->is_plan[number])
        free_plan(e, number);
    control->free_numbers[control->num_free++] = number;
    hvdl_agreement *agreement = control->waiting;
    if (agreement) {
        control->waiting = agreement->next;
        hvdl_decide(e, agreement);
    }
}

void hvdl_control_tag_done(hvdl_engine *e, int tag)
{
    hvdl_control *control = e->control;
    if (tag < HVDL_TAG_FIRST)
        return; /* it had none: nothing was to be exchanged */
    int id = (tag - HVDL_TAG_FIRST) / HVDL_TAGS_PER_ID;
    int host = id / control->numbers_per_host, number = id % control->numbers_per_host;
    if (host == e->host) {
        hvdl_take_done(e, number);
        return;
    }
    hvdl_done_notes *notes = &control->notes[host];
    notes->numbers[notes->count++] = number;
    if (notes->count == HVDL_MAX_DONE) {
        hvdl_message head = {.type = HVDL_MSG_DONE};
        hvdl_send_message(e, host, &head, NULL, 0);
    }
}
