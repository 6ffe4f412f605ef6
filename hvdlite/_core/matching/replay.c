/* The shared log: every rank of the host runs this state machine over the same entries, so all of them take
 * the same decisions. Called by the driver. */
#define _GNU_SOURCE
#include "matching/replay.h"

#include <stdio.h>
#include <string.h>

#include "collectives/pieces.h"
#include "collectives/rows.h"
#include "engine/fatal.h"
#include "engine/giving_up.h"
#include "engine/state.h"
#include "matching/announcing.h"
#include "matching/coordinator.h"
#include "matching/join.h"
#include "matching/leaving.h"
#include "matching/matches.h"
#include "matching/messages.h"
#include "matching/tags.h"
#include "matching/tiny.h"
#include "matching/weights.h"
#include "operations/black_box.h"
#include "operations/facts.h"
#include "operations/operations.h"
#include "operations/plans.h"
#include "transfers/transfers.h"
#include "watching/missing_query.h"

/* Fails it with a text that may begin with HVDL_TITLE_HERE. */
static void fail_with_title(hvdl_engine *e, hvdl_operation *op, const char *text)
{
    static const char mark[] = HVDL_TITLE_MARK;
    char titled[HVDL_TEXT_BYTES], title[HVDL_TITLE_BYTES], kind[64];
    const char *end = *text == *mark ? strchr(text + 1, *mark) : NULL;
    if (end) {
        snprintf(kind, sizeof kind, "%.*s", (int)(end - text) - 1, text + 1);
        hvdl_put_title(title, sizeof title, kind, op->words, hvdl_shown(op));
        snprintf(titled, sizeof titled, "%s%s", title, end + 1);
    }
    hvdl_finish(e, op, end ? titled : text);
}

static void make_plan(hvdl_engine *e, hvdl_operation *op, uint64_t id, int tag)
{
    if (hvdl_plan_add(e, op->plan, id, tag)) {
        hvdl_out_of_memory(e);
        return;
    }
    if (e->placement.is_leader && e->config.num_hosts > 1)
        hvdl_control_plan_made(e, op->plan);
    hvdl_finish(e, op, NULL);
}

static bool can_take_part(const hvdl_match *match)
{
    return match->plan ||
           (match->variants.count == 1 && hvdl_can_be_joined(&match->variants.variants[0].desc));
}

/* This rank has joined: it needs an operation of its own for what the others do. */
static hvdl_operation *take_part_with_zeros(hvdl_engine *e, hvdl_match *match)
{
    const hvdl_desc *desc =
        match->plan ? &match->plan->posting.desc : &match->variants.variants[0].desc;
    hvdl_operation *op = hvdl_zero_operation(e, match->key, desc);
    if (!op) {
        hvdl_out_of_memory(e);
        return NULL;
    }
    op->plan = match->plan;
    op->match = match;
    match->operation = op;
    return op;
}

/* Ranks of this host have joined, and can't take part. */
static bool fails_by_join(hvdl_engine *e, const hvdl_match *match)
{
    const hvdl_desc *desc = &match->variants.variants[0].desc;
    int absent = hvdl_match_absent(e, match);
    if (absent < 0 || match->plan || hvdl_can_be_joined(desc))
        return false;
    char text[HVDL_TEXT_BYTES];
    hvdl_describe_absent(e, desc, absent, text);
    fail_with_title(e, match->operation, text);
    return true;
}

/* One host: all splits are here. */
static bool fails_by_splits(hvdl_engine *e, const hvdl_match *match)
{
    const hvdl_desc *desc = &match->operation->desc;
    char text[HVDL_TEXT_BYTES];
    if (!match->rows || !hvdl_sends_both_splits(desc) ||
        !hvdl_splits_differ(e, match->rows, match->variants.variants[0].site, text))
        return false;
    fail_with_title(e, match->operation, text);
    return true;
}

static void count_run(hvdl_engine *e, hvdl_plan *plan, hvdl_operation *op)
{
    op->counted = true;
    plan->num_active++;
    if (!plan->posting.desc.count)
        return; /* it ends at once, also where others have joined */
    plan->num_runs++;
    if (e->placement.is_leader && e->config.num_hosts > 1)
        hvdl_control_run(e, plan);
}

/* All ranks of this host have posted, or joined. */
static void match_full(hvdl_engine *e, hvdl_match *match)
{
    hvdl_operation *op = match->operation;
    if (match->plan)
        match->plan->collecting = NULL;
    else
        hvdl_table_remove(&e->matches.by_key, &match->by_key);
    match->collecting = false;
    match->epoch = e->join.epoch;
    if (!op && e->join.joined[e->placement.local] && !*e->failure.text) {
        if (can_take_part(match))
            op = take_part_with_zeros(e, match);
        else if (e->placement.is_leader && e->config.num_hosts > 1)
            hvdl_control_posted(e, match); /* it will fail, and this rank has no part in it */
    }
    if (!op) { /* it has failed here already, or has no part in it */
        hvdl_match_free(match);
        return;
    }
    if (hvdl_table_insert(&e->matches.by_id, &match->by_id, match->id)) {
        op->match = NULL;
        hvdl_match_free(match);
        hvdl_out_of_memory(e);
        return;
    }
    if (match->plan)
        count_run(e, match->plan, op);
    if (match->weights)
        hvdl_weigh(e, match, op);
    if (e->config.num_hosts > 1 && !match->plan) {
        if (e->placement.is_leader)
            hvdl_control_posted(e, match);
        else
            match->coordinator = hvdl_coordinator_of(e, match->key);
        return;
    }
    if (match->variants.count > 1) {
        char text[HVDL_TEXT_BYTES];
        hvdl_variants_describe(&match->variants, &e->placement.naming, text);
        fail_with_title(e, op, text);
        return;
    }
    if (fails_by_join(e, match) || fails_by_splits(e, match))
        return;
    hvdl_set_state(e, op, HVDL_MATCHED);
    if (hvdl_makes_plan(op))
        make_plan(e, op, match->id, 0);
    else if (hvdl_is_tiny(e, &op->desc, match->plan != NULL))
        hvdl_complete_tiny(e, match);
    else
        hvdl_begin(e, op, match->plan ? match->plan->tag : 0, match->rows);
}

/* Counts a POST or RUN. */
static void count_posted(hvdl_match *match, int from)
{
    match->posted += !match->posted_by[from];
    match->posted_by[from] = true;
}

/* By the rank `from`. It has been counted, and its payload kept. */
static void match_joined(hvdl_engine *e, hvdl_match *match, hvdl_operation *own, int from)
{
    if (own) {
        match->operation = own;
        own->match = match;
        if (hvdl_refuses(e, own->internal))
            hvdl_finish(e, own, e->failure.text);
    }
    if (!hvdl_match_complete(e, match))
        return;
    const hvdl_operation *op = match->operation;
    if (op && op->ticket && e->config.num_hosts == 1)
        hvdl_box_write_peer(e, op, hvdl_world_rank(e, hvdl_rank_of_local(e, from)));
    match_full(e, match);
}

/* Returns the bytes of the entry that its site takes. */
static __attribute__((noinline)) size_t read_site(const hvdl_engine *e, hvdl_match *match,
                                                  hvdl_variant *variant, const hvdl_entry *entry)
{
    size_t site_bytes = hvdl_post_site_bytes(entry);
    const char *site = (const char *)hvdl_entry_body(entry) + sizeof(hvdl_post_body);
    match->has_sites = true;
    if (variant)
        hvdl_variant_place(variant, hvdl_rank_of_local(e, entry->from), site, site_bytes);
    return hvdl_padded_site_bytes(site_bytes);
}

static void read_post(hvdl_engine *e, const hvdl_entry *entry)
{
    const hvdl_post_body *body = hvdl_entry_body(entry);
    size_t head_bytes = sizeof *body;
    hvdl_match *match = hvdl_match_by_key(e, body->key);
    if (!match) {
        match = hvdl_match_new(e, entry->position);
        if (!match || hvdl_table_insert(&e->matches.by_key, &match->by_key, body->key.lo)) {
            free(match);
            hvdl_out_of_memory(e);
            return;
        }
        match->key = body->key;
    }
    hvdl_operation *own = entry->from == e->placement.local ? hvdl_next_announced(e) : NULL;
    hvdl_variant *variant =
        hvdl_variants_add(&match->variants, &body->desc, hvdl_rank_of_local(e, entry->from));
    if (hvdl_post_site_bytes(entry) || match->has_sites)
        head_bytes += read_site(e, match, variant, entry);
    match->internal = hvdl_post_is_internal(entry);
    count_posted(match, entry->from);
    if (hvdl_keep_payload(e, match, entry, own, &body->desc,
                          (const char *)hvdl_entry_body(entry) + head_bytes,
                          entry->body_bytes - head_bytes)) {
        hvdl_out_of_memory(e);
        return;
    }
    match_joined(e, match, own, entry->from);
}

static void read_run(hvdl_engine *e, const hvdl_entry *entry)
{
    hvdl_plan *plan = hvdl_plan_by_id(&e->plans, entry->id);
    if (!plan)
        return;
    if (!plan->collecting) {
        plan->collecting = hvdl_match_new(e, entry->position);
        if (!plan->collecting) {
            hvdl_out_of_memory(e);
            return;
        }
        plan->collecting->plan = plan;
        plan->collecting->key = plan->key;
        plan->collecting->variants.count = 1;
    }
    hvdl_operation *own = entry->from == e->placement.local ? plan->run : NULL;
    count_posted(plan->collecting, entry->from);
    if (hvdl_keep_weight(e, plan->collecting, entry) ||
        hvdl_keep_payload(e, plan->collecting, entry, own, &plan->posting.desc,
                          hvdl_entry_body(entry), entry->body_bytes)) {
        hvdl_out_of_memory(e);
        return;
    }
    match_joined(e, plan->collecting, own, entry->from);
}

static void read_start(hvdl_engine *e, hvdl_operation *op, const hvdl_entry *entry)
{
    op->match->coordinator = -1; /* it has answered */
    hvdl_set_state(e, op, HVDL_MATCHED);
    if (hvdl_makes_plan(op))
        make_plan(e, op, entry->id, (int)entry->arg);
    else
        hvdl_begin(e, op, (int)entry->arg, hvdl_entry_body(entry));
}

static void read_result(hvdl_engine *e, hvdl_operation *op, const hvdl_entry *entry)
{
    const hvdl_desc *desc = &op->desc;
    const char *result = hvdl_entry_body(entry);
    hvdl_set_state(e, op, HVDL_MATCHED);
    hvdl_set_state(e, op, HVDL_RUNNING);
    if (desc->place == HVDL_ORDERED) {
        if (hvdl_say_number(op, (int64_t)entry->arg)) {
            hvdl_out_of_memory(e);
            return;
        }
    } else if (hvdl_facts_of(desc)->result == HVDL_RESULT_PARTS) {
        size_t bytes = hvdl_data_bytes(desc);
        for (int i = 0; bytes && i < e->config.num_ranks; i++)
            hvdl_put_tiny_part(op, e->placement.members[i], result + (size_t)i * bytes, bytes);
    } else if (entry->body_bytes) {
        hvdl_range own = hvdl_tiny_part(e, op);
        size_t esize = hvdl_dtype_bytes(desc->dtype);
        if (hvdl_range_size(own))
            memcpy(op->output, result + own.begin * esize, hvdl_range_size(own) * esize);
    }
    hvdl_finish(e, op, NULL);
}

static void read_release(hvdl_engine *e, uint64_t id)
{
    hvdl_plan *plan = hvdl_plan_by_id(&e->plans, id);
    if (!plan)
        return;
    plan->num_released++;
    if (hvdl_plan_settle(e, plan) && e->placement.is_leader)
        hvdl_control_tag_done(e, plan->tag);
}

static void read_free(hvdl_engine *e, uint64_t id)
{
    hvdl_plan *plan = hvdl_plan_by_id(&e->plans, id);
    if (!plan)
        return;
    hvdl_plan_remove(e, plan);
}

/* The others' operation: all ranks of this host have joined. */
static void begin_with_zeros(hvdl_engine *e, hvdl_match *match, const hvdl_desc *desc, int tag)
{
    hvdl_desc zeros = *desc;
    /* The others' factor might change what is neutral. An Adasum's is for a slice of everyone's
     * tensors, which this rank scales. */
    if (desc->op != HVDL_ADASUM)
        zeros.prescale = 1.0;
    hvdl_operation *op = match ? hvdl_zero_operation(e, match->key, &zeros) : NULL;
    if (!op || hvdl_table_insert(&e->matches.by_id, &match->by_id, match->id)) {
        free(match);
        hvdl_out_of_memory(e);
        return;
    }
    op->partials.scaled = desc->prescale != 1.0;
    match->collecting = false;
    match->operation = op;
    match->epoch = e->join.epoch;
    op->match = match;
    op->plan = match->plan;
    if (op->plan) {
        op->counted = true;
        op->plan->num_active++;
    }
    hvdl_begin(e, op, tag, NULL);
}

static void read_zero(hvdl_engine *e, const hvdl_entry *entry)
{
    hvdl_post_body body;
    hvdl_match *match = hvdl_match_new(e, entry->position);
    memcpy(&body, hvdl_entry_body(entry), sizeof body);
    if (match)
        match->key = body.key;
    begin_with_zeros(e, match, &body.desc, (int)entry->arg);
}

static void read_zero_run(hvdl_engine *e, const hvdl_entry *entry)
{
    hvdl_plan *plan = hvdl_plan_by_id(&e->plans, entry->id);
    if (!plan)
        return;
    hvdl_match *match = hvdl_match_new(e, entry->position);
    if (match) {
        match->key = plan->key;
        match->plan = plan;
    }
    if (!e->placement.is_leader) /* it has counted when it was told */
        plan->num_runs++;
    plan->zero_run_announced = false;
    begin_with_zeros(e, match, &plan->posting.desc, plan->tag);
}

/* Begins what is complete now that a rank has joined. */
static void complete_matches(hvdl_engine *e)
{
    /* What is complete first, then begun: beginning may change the tables. */
    size_t room = e->matches.by_key.count + e->plans.by_id.count, count = 0;
    hvdl_match **complete = malloc((room + 1) * sizeof *complete);
    if (!complete) {
        hvdl_out_of_memory(e);
        return;
    }
    for (size_t i = 0; i < e->matches.by_key.num_slots; i++)
        for (hvdl_node *node = e->matches.by_key.slots[i]; node; node = node->next) {
            hvdl_match *match = HVDL_CONTAINER(node, hvdl_match, by_key);
            if (hvdl_match_complete(e, match))
                complete[count++] = match;
        }
    for (size_t i = 0; i < e->plans.by_id.num_slots; i++)
        for (hvdl_node *node = e->plans.by_id.slots[i]; node; node = node->next) {
            hvdl_match *match = HVDL_CONTAINER(node, hvdl_plan, by_id)->collecting;
            if (match && hvdl_match_complete(e, match))
                complete[count++] = match;
        }
    for (size_t i = 0; i < count; i++)
        match_full(e, complete[i]);
    free(complete);
}

static void read_join(hvdl_engine *e, int local)
{
    if (!hvdl_join_add(e, local))
        return;
    complete_matches(e);
    hvdl_join_added(e, local);
}

static void read_entry(hvdl_engine *e, const hvdl_entry *entry)
{
    hvdl_operation *op = NULL;
    if (e->failure.broken)
        return; /* what is left of it is in vain */
    switch (entry->type) {
    case HVDL_ENTRY_POST: read_post(e, entry); return;
    case HVDL_ENTRY_RUN: read_run(e, entry); return;
    case HVDL_ENTRY_FREE: read_free(e, entry->id); return;
    case HVDL_ENTRY_RELEASE: read_release(e, entry->id); return;
    case HVDL_ENTRY_JOIN: read_join(e, entry->from); return;
    case HVDL_ENTRY_ALL_JOINED: hvdl_read_all_joined(e, (int)entry->arg); return;
    case HVDL_ENTRY_ZERO: read_zero(e, entry); return;
    case HVDL_ENTRY_ZERO_RUN: read_zero_run(e, entry); return;
    case HVDL_ENTRY_GIVE_UP: hvdl_read_give_up(e, entry); return;
    case HVDL_ENTRY_MISSING_QUERY: hvdl_read_missing_query(e, entry); return;
    case HVDL_ENTRY_MISSING_ANSWER: hvdl_read_roll_answer(e, entry); return;
    case HVDL_ENTRY_HEADER: hvdl_read_header(e, entry); return;
    case HVDL_ENTRY_LEAVE: hvdl_read_leave(e, (int)entry->id, entry->arg); return;
    default: break;
    }
    hvdl_match *match = hvdl_match_by_id(e, entry->id);
    if (match)
        op = match->operation;
    if (!op)
        return; /* it has failed here already */
    switch (entry->type) {
    case HVDL_ENTRY_START: read_start(e, op, entry); break;
    case HVDL_ENTRY_RESULT: read_result(e, op, entry); break;
    case HVDL_ENTRY_FAIL: fail_with_title(e, op, hvdl_entry_body(entry)); break;
    case HVDL_ENTRY_NEXT: hvdl_piece_next(e, op); break;
    case HVDL_ENTRY_READY: hvdl_piece_ready(e, op, entry->arg); break;
    default: break;
    }
}

bool hvdl_read_log(hvdl_engine *e)
{
    bool any = false;
    for (const hvdl_entry *entry; (entry = hvdl_log_next(&e->shm)); any = true) {
        read_entry(e, entry);
        hvdl_log_advance(&e->shm, entry);
    }
    return any;
}
