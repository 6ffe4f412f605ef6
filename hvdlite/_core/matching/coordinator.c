/* Agreement between hosts. When all ranks of a host have posted an operation, its leader tells the
 * operation's **coordinator**: the leader of the host that the operation's key hashes to, so that the
 * work is spread over the hosts. When all hosts have told it, the coordinator answers every leader:
 *
 *   leader -> coordinator   POSTED: what was posted, and the host's part of tiny data
 *   coordinator -> leader   START: a tag for the exchanges, rows  |  RESULT: the tiny result
 *                           |  FAILED: the text of the disagreement
 *
 * and the leader puts the answer into its host's shared log. That is one round trip, in which tiny data
 * travels along. The runs of a plan need none of it: they use the tag the plan was given. */
#define _GNU_SOURCE
#include "matching/coordinator.h"

#include <stdio.h>
#include <string.h>

#include "collectives/rows.h"
#include "engine/fatal.h"
#include "engine/state.h"
#include "matching/announcing.h"
#include "matching/join.h"
#include "matching/matches.h"
#include "matching/messages.h"
#include "matching/tags.h"
#include "matching/tiny.h"
#include "operations/facts.h"

/* An operation that this host's leader has asked about. */
typedef struct {
    hvdl_node by_key;
    hvdl_key key;
    uint64_t id; /* of its match */
} asked;

/* ---- the leader: answers ---- */

void hvdl_on_answer(hvdl_engine *e, const hvdl_message *head, const void *payload)
{
    static const int entry_types[] = {[HVDL_MSG_START] = HVDL_ENTRY_START,
                                      [HVDL_MSG_RESULT] = HVDL_ENTRY_RESULT,
                                      [HVDL_MSG_FAILED] = HVDL_ENTRY_FAIL};
    hvdl_node *node = hvdl_table_first(&e->control->coordinator.asked, head->key.lo);
    while (node && !hvdl_key_equal(HVDL_CONTAINER(node, asked, by_key)->key, head->key))
        node = hvdl_table_next(node->next, head->key.lo);
    if (!node)
        return;
    asked *question = HVDL_CONTAINER(node, asked, by_key);
    hvdl_entry entry = {
        .type = (uint16_t)entry_types[head->type], .id = question->id, .arg = (uint64_t)head->tag};
    hvdl_table_remove(&e->control->coordinator.asked, node);
    free(question);
    hvdl_announce(e, entry, payload, head->payload_bytes);
}

static void answer(hvdl_engine *e, int host, hvdl_key key, int type, int tag, const void *payload,
                   size_t bytes)
{
    hvdl_message head = {.type = type, .key = key, .tag = tag};
    if (host != e->placement.host) {
        hvdl_send_message(e, host, &head, payload, bytes);
        return;
    }
    head.payload_bytes = (uint32_t)bytes;
    hvdl_on_answer(e, &head, payload);
}

/* ---- the coordinator ---- */

static void free_agreement(hvdl_agreement *agreement)
{
    free(agreement->hosts);
    free(agreement->payloads);
    free(agreement->rows);
    free(agreement);
}

static void answer_all(hvdl_engine *e, hvdl_agreement *agreement, int type, int tag,
                       const void *payload, size_t bytes)
{
    for (int h = 0; h < e->config.num_hosts; h++)
        if (agreement->hosts[h])
            answer(e, h, agreement->key, type, tag, payload, bytes);
    free_agreement(agreement);
}

static void refuse(hvdl_engine *e, hvdl_agreement *agreement, const char *text)
{
    answer_all(e, agreement, HVDL_MSG_FAILED, 0, text, strlen(text) + 1);
}

/* The sum, or the root's data, of a tiny operation; into scratch. Returns its size. */
static size_t tiny_result(hvdl_engine *e, const hvdl_agreement *agreement, char *to)
{
    const hvdl_desc *desc = &agreement->variants.variants[0].desc;
    size_t bytes = hvdl_data_bytes(desc);
    if (!bytes)
        return 0;
    if (hvdl_facts_of(desc)->result == HVDL_RESULT_PARTS) {
        bytes *= (size_t)e->config.num_ranks;
        memcpy(to, agreement->payloads, bytes);
        return bytes;
    }
    if (hvdl_root_gives(hvdl_facts_of(desc))) {
        memcpy(to, agreement->payloads + (size_t)e->placement.host_of[desc->root] * bytes, bytes);
        return bytes;
    }
    const void *inputs[e->config.num_hosts];
    hvdl_scale scale = hvdl_last_scale(e, desc);
    int num_inputs = 0; /* hosts that have joined are left out */
    for (int h = 0; h < e->config.num_hosts; h++)
        if (agreement->hosts[h])
            inputs[num_inputs++] = agreement->payloads + (size_t)h * bytes;
    hvdl_reduce(desc->dtype, desc->op, to, inputs, num_inputs, (size_t)desc->count, &scale);
    return bytes;
}

/* What a host's ranks get of an alltoall, into scratch: for each member in the order of `members`,
 * the rows it sends to each local rank. Returns its size. */
static size_t rows_to_host(hvdl_engine *e, const hvdl_agreement *agreement, int host)
{
    size_t ranks = (size_t)e->config.num_ranks, at = 0;
    int64_t *to = (int64_t *)e->control->coordinator.scratch;
    for (size_t member = 0; member < ranks; member++)
        for (int local = 0; local < e->placement.host_sizes[host]; local++) {
            int rank = e->placement.members[e->placement.host_first[host] + local];
            to[at++] = agreement->rows[member * ranks + (size_t)rank];
        }
    return at * sizeof *to;
}

/* Host 0 counts, and the coordinator tells all: a host that knows the number may leave, and its LEFT must
 * not arrive at another host before the number does. */
void hvdl_on_order(hvdl_engine *e, int host, hvdl_key key)
{
    hvdl_message head = {
        .type = HVDL_MSG_SEQUENCE, .key = key, .tag = e->control->coordinator.next_sequence++};
    if (host == e->placement.host)
        hvdl_on_sequence(e, key, head.tag);
    else
        hvdl_send_message(e, host, &head, NULL, 0);
}

void hvdl_on_sequence(hvdl_engine *e, hvdl_key key, int sequence)
{
    for (int h = 0; h < e->config.num_hosts; h++)
        answer(e, h, key, HVDL_MSG_RESULT, sequence, NULL, 0);
}

static void ask_for_sequence(hvdl_engine *e, hvdl_key key)
{
    hvdl_message head = {.type = HVDL_MSG_ORDER, .key = key};
    if (e->placement.host == 0)
        hvdl_on_order(e, 0, key);
    else
        hvdl_send_message(e, 0, &head, NULL, 0);
}

/* Hosts that have joined take part with zeros. */
static void call_joined_hosts(hvdl_engine *e, const hvdl_agreement *agreement, int tag)
{
    for (int h = 0; h < e->config.num_hosts; h++) {
        hvdl_message head = {.type = HVDL_MSG_ZERO, .key = agreement->key, .tag = tag};
        head.variants = agreement->variants;
        if (agreement->hosts[h])
            continue;
        if (h == e->placement.host)
            hvdl_on_zero(e, &head);
        else
            hvdl_send_message(e, h, &head, NULL, 0);
    }
}

/* All hosts have posted it, or joined, or a tag is free for it: it is answered, or waits for a tag. */
static void decide(hvdl_engine *e, hvdl_agreement *agreement)
{
    hvdl_control *control = e->control;
    const hvdl_desc *desc = &agreement->variants.variants[0].desc;
    bool differ = agreement->variants.count > 1;
    bool is_absent = agreement->absent >= 0 && !hvdl_can_be_joined(desc);
    char text[HVDL_TEXT_BYTES];
    if (differ) {
        hvdl_variants_describe(&agreement->variants, &e->placement.naming, text);
        refuse(e, agreement, text);
        return;
    }
    if (is_absent) {
        hvdl_describe_absent(e, desc, agreement->absent, text);
        refuse(e, agreement, text);
        return;
    }
    if (desc->place == HVDL_ORDERED && agreement->absent >= 0) {
        answer_all(e, agreement, HVDL_MSG_RESULT, HVDL_NO_SEQUENCE, NULL, 0);
        return;
    }
    if (desc->place == HVDL_ORDERED) {
        ask_for_sequence(e, agreement->key);
        free_agreement(agreement);
        return;
    }
    if (hvdl_is_tiny(e, desc, false)) {
        size_t bytes = tiny_result(e, agreement, e->control->coordinator.scratch);
        answer_all(e, agreement, HVDL_MSG_RESULT, 0, e->control->coordinator.scratch, bytes);
        return;
    }
    if (hvdl_sends_both_splits(desc) &&
        hvdl_splits_differ(e, agreement->rows, agreement->variants.variants[0].site, text)) {
        refuse(e, agreement, text);
        return;
    }
    bool is_plan = desc->kind == HVDL_PLAN;
    if (is_plan && !hvdl_has_tag_for_plan(e, text)) {
        refuse(e, agreement, text);
        return;
    }
    int tag = hvdl_next_tag(e, is_plan);
    if (tag < 0) {
        agreement->next = NULL;
        if (control->coordinator.waiting)
            control->coordinator.waiting_last->next = agreement;
        else
            control->coordinator.waiting = agreement;
        control->coordinator.waiting_last = agreement;
        return;
    }
    call_joined_hosts(e, agreement, tag);
    if (hvdl_sends_both_splits(desc)) { /* each rank has its own, and those of its host */
        answer_all(e, agreement, HVDL_MSG_START, tag, NULL, 0);
        return;
    }
    if (hvdl_sends_splits(desc)) {
        for (int h = 0; h < e->config.num_hosts; h++)
            answer(e, h, agreement->key, HVDL_MSG_START, tag, e->control->coordinator.scratch,
                   rows_to_host(e, agreement, h));
        free_agreement(agreement);
        return;
    }
    size_t bytes = agreement->rows ? (size_t)e->config.num_ranks * sizeof(int64_t) : 0;
    answer_all(e, agreement, HVDL_MSG_START, tag, agreement->rows, bytes);
}

bool hvdl_decide_waiting(hvdl_engine *e)
{
    hvdl_agreement *agreement = e->control->coordinator.waiting;
    if (!agreement)
        return false;
    e->control->coordinator.waiting = agreement->next;
    decide(e, agreement);
    return true;
}

static hvdl_agreement *agreement_of(hvdl_engine *e, hvdl_key key, uint64_t epoch)
{
    hvdl_table *open = &e->control->coordinator.open;
    hvdl_node *node = hvdl_table_first(open, key.lo);
    for (; node; node = hvdl_table_next(node->next, key.lo)) {
        hvdl_agreement *agreement = HVDL_CONTAINER(node, hvdl_agreement, by_key);
        if (hvdl_key_equal(agreement->key, key) && agreement->epoch == epoch)
            return agreement;
    }
    hvdl_agreement *agreement = calloc(1, sizeof *agreement);
    if (!agreement)
        return NULL;
    agreement->key = key;
    agreement->epoch = epoch;
    agreement->absent = -1;
    agreement->hosts = calloc((size_t)e->config.num_hosts, sizeof *agreement->hosts);
    if (!agreement->hosts || hvdl_table_insert(open, &agreement->by_key, key.lo)) {
        free_agreement(agreement);
        return NULL;
    }
    return agreement;
}

/* Keeps what a host sent along. */
static hvdl_err keep_part(hvdl_engine *e, hvdl_agreement *agreement, int host,
                          const hvdl_desc *desc, const void *payload, size_t bytes)
{
    if (!bytes || agreement->variants.count > 1)
        return HVDL_OK;
    size_t row = hvdl_num_rows_posted(desc, e->config.num_ranks);
    if (row) {
        if (!agreement->rows)
            agreement->rows = calloc((size_t)e->config.num_ranks * row, sizeof *agreement->rows);
        if (!agreement->rows)
            return HVDL_ENOMEM;
        memcpy(agreement->rows + (size_t)e->placement.host_first[host] * row, payload, bytes);
        return HVDL_OK;
    }
    bool parts =
        hvdl_facts_of(desc)->result == HVDL_RESULT_PARTS; /* of each member, else of the host */
    size_t each = parts ? hvdl_data_bytes(desc) : bytes;
    if (!agreement->payloads)
        agreement->payloads =
            calloc((size_t)(parts ? e->config.num_ranks : e->config.num_hosts), each);
    if (!agreement->payloads)
        return HVDL_ENOMEM;
    memcpy(agreement->payloads + (size_t)(parts ? e->placement.host_first[host] : host) * each,
           payload, bytes);
    return HVDL_OK;
}

/* Has every host posted, or joined? */
static bool is_complete(const hvdl_engine *e, hvdl_agreement *agreement)
{
    for (int h = 0; h < e->config.num_hosts; h++) {
        if (agreement->hosts[h])
            continue;
        if (agreement->internal || e->control->joins.by_host[h] <= agreement->epoch)
            return false;
        if (hvdl_leader_of(e, h) > agreement->absent)
            agreement->absent = hvdl_leader_of(e, h);
    }
    return true;
}

void hvdl_on_posted(hvdl_engine *e, const hvdl_message *head, const void *payload)
{
    if (hvdl_refuses(e, head->internal)) {
        answer(e, head->host, head->key, HVDL_MSG_FAILED, 0, e->failure.text,
               strlen(e->failure.text) + 1);
        return;
    }
    hvdl_agreement *agreement = agreement_of(e, head->key, head->epoch);
    if (agreement) {
        hvdl_variants_merge(&agreement->variants, &head->variants);
        agreement->internal = head->internal;
        if (head->rank > agreement->absent)
            agreement->absent = head->rank;
    }
    if (!agreement || keep_part(e, agreement, head->host, &head->variants.variants[0].desc, payload,
                                head->payload_bytes)) {
        hvdl_out_of_memory(e);
        return;
    }
    agreement->hosts[head->host] = true;
    if (!is_complete(e, agreement))
        return;
    hvdl_table_remove(&e->control->coordinator.open, &agreement->by_key);
    decide(e, agreement);
}

bool hvdl_is_open(const hvdl_engine *e, hvdl_key key, int host)
{
    hvdl_node *node = hvdl_table_first(&e->control->coordinator.open, key.lo);
    for (; node; node = hvdl_table_next(node->next, key.lo)) {
        const hvdl_agreement *agreement = HVDL_CONTAINER(node, hvdl_agreement, by_key);
        if (hvdl_key_equal(agreement->key, key) && agreement->hosts[host])
            return true;
    }
    return false;
}

void hvdl_decide_complete(hvdl_engine *e)
{
    hvdl_table *open = &e->control->coordinator.open;
    hvdl_agreement *complete = NULL;
    for (size_t i = 0; i < open->num_slots; i++)
        for (hvdl_node *node = open->slots[i], *next; node; node = next) {
            hvdl_agreement *agreement = HVDL_CONTAINER(node, hvdl_agreement, by_key);
            next = node->next;
            if (!is_complete(e, agreement))
                continue;
            hvdl_table_remove(open, node);
            agreement->next = complete;
            complete = agreement;
        }
    while (complete) {
        hvdl_agreement *agreement = complete;
        complete = agreement->next;
        decide(e, agreement);
    }
}

void hvdl_control_fail_open(hvdl_engine *e)
{
    hvdl_table *open = &e->control->coordinator.open;
    for (size_t i = 0; i < open->num_slots; i++)
        for (hvdl_node *node = open->slots[i], *next; node; node = next) {
            hvdl_agreement *agreement = HVDL_CONTAINER(node, hvdl_agreement, by_key);
            next = node->next;
            if (!hvdl_refuses(e, agreement->internal))
                continue; /* what is matched is ended */
            hvdl_table_remove(open, &agreement->by_key);
            refuse(e, agreement, e->failure.text);
        }
}

/* ---- the leader: questions ---- */

/* One after the other, into scratch. Returns their size. */
static size_t parts_of_host(hvdl_engine *e, const hvdl_match *match, size_t bytes)
{
    char *to = e->control->coordinator.scratch;
    for (int r = 0; r < e->placement.local_size; r++, to += bytes)
        if (match->posted_by[r]) /* else it fails: a rank has joined */
            memcpy(to, hvdl_payload_of(e, match, r, bytes), bytes);
    return (size_t)e->placement.local_size * bytes;
}

/* This host's part of the data, into scratch (or, rows, as they are). */
static size_t host_part(hvdl_engine *e, const hvdl_match *match, const void **part)
{
    const hvdl_desc *desc = &match->variants.variants[0].desc;
    *part = e->control->coordinator.scratch;
    if (match->variants.count > 1)
        return 0;
    if (match->rows && desc->place != HVDL_ORDERED) {
        size_t row = hvdl_num_rows_posted(desc, e->config.num_ranks);
        *part = match->rows;
        return (size_t)e->placement.local_size * row * sizeof(int64_t);
    }
    size_t bytes = hvdl_data_bytes(desc);
    if (!bytes || !hvdl_is_tiny(e, desc, false))
        return 0;
    if (hvdl_facts_of(desc)->result == HVDL_RESULT_PARTS)
        return parts_of_host(e, match, bytes);
    if (hvdl_root_gives(hvdl_facts_of(desc))) {
        if (e->placement.host_of[desc->root] != e->placement.host ||
            !match->posted_by[e->placement.local_of[desc->root]])
            return 0;
        *part = hvdl_payload_of(e, match, e->placement.local_of[desc->root], bytes);
        return bytes;
    }
    const void *inputs[HVDL_MAX_LOCAL];
    hvdl_scale scale = hvdl_host_scale(e, desc);
    int num_inputs = 0;
    for (int r = 0; r < e->placement.local_size; r++)
        if (match->posted_by[r])
            inputs[num_inputs++] = hvdl_payload_of(e, match, r, bytes);
    hvdl_reduce(desc->dtype, desc->op, e->control->coordinator.scratch, inputs, num_inputs,
                (size_t)desc->count, &scale);
    return bytes;
}

void hvdl_control_posted(hvdl_engine *e, hvdl_match *match)
{
    asked *question = calloc(1, sizeof *question);
    if (!question ||
        hvdl_table_insert(&e->control->coordinator.asked, &question->by_key, match->key.lo)) {
        free(question);
        hvdl_out_of_memory(e);
        return;
    }
    question->key = match->key;
    question->id = match->id;
    hvdl_message head = {.type = HVDL_MSG_POSTED, .host = e->placement.host, .key = match->key};
    head.variants = match->variants;
    head.internal = match->internal;
    head.epoch = match->internal ? 0 : e->join.epoch; /* an Adasum may go on beyond a join */
    head.rank = hvdl_match_absent(e, match);
    const void *part;
    size_t bytes = host_part(e, match, &part);
    match->coordinator = hvdl_coordinator_of(e, match->key);
    if (match->coordinator == e->placement.host) {
        head.payload_bytes = (uint32_t)bytes;
        hvdl_on_posted(e, &head, part);
    } else {
        hvdl_send_message(e, match->coordinator, &head, part, bytes);
    }
}

/* ---- life ---- */

hvdl_err hvdl_coordinator_make(hvdl_engine *e, size_t payload_bytes)
{
    e->control->coordinator.scratch = malloc(payload_bytes);
    return e->control->coordinator.scratch ? HVDL_OK : HVDL_ENOMEM;
}

static void free_asked(hvdl_table *table)
{
    for (size_t i = 0; i < table->num_slots; i++)
        while (table->slots[i]) {
            asked *question = HVDL_CONTAINER(table->slots[i], asked, by_key);
            hvdl_table_remove(table, &question->by_key);
            free(question);
        }
    free(table->slots);
}

static void free_open(hvdl_table *table)
{
    for (size_t i = 0; i < table->num_slots; i++)
        while (table->slots[i]) {
            hvdl_agreement *agreement = HVDL_CONTAINER(table->slots[i], hvdl_agreement, by_key);
            hvdl_table_remove(table, &agreement->by_key);
            free_agreement(agreement);
        }
    free(table->slots);
}

void hvdl_coordinator_free(hvdl_coordinator *coordinator)
{
    free_asked(&coordinator->asked);
    free_open(&coordinator->open);
    while (coordinator->waiting) {
        hvdl_agreement *next = coordinator->waiting->next;
        free_agreement(coordinator->waiting);
        coordinator->waiting = next;
    }
    free(coordinator->scratch);
}
