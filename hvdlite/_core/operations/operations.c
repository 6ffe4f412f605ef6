/* Operations as their callers see them: made and posted by any thread, ended by the driver, freed when
 * both are done with them. */
#define _GNU_SOURCE
#include "operations/operations.h"

#include <string.h>

#include "collectives/reducescatter.h"
#include "engine/fatal.h"
#include "engine/state.h"
#include "engine/waking.h"
#include "matching/matches.h"
#include "operations/activity.h"
#include "operations/black_box.h"
#include "operations/facts.h"
#include "operations/queue.h"
#include "operations/recording.h"

void hvdl_set_state(hvdl_engine *e, hvdl_operation *op, hvdl_state state)
{
    hvdl_record(&e->recording, op, state, 0);
    if (op->ticket)
        hvdl_box_write_state(e, op, state);
    atomic_store_explicit(&op->state, (int)state, memory_order_release);
}

/* ---- operations: making and ending ---- */

/* What most operations have none of. */
static __attribute__((noinline)) void free_extras(hvdl_operation *op)
{
    free(op->work);
    free(op->partials.memory);
    free(op->zeros);
    free(op->splits);
    free(op->extents.list);
    free(op->inputs);
    free(op->outputs);
    free(op->transfer);
}

static bool has_extras(const hvdl_operation *op)
{
    return (uintptr_t)op->work | (uintptr_t)op->zeros | (uintptr_t)op->splits |
           (uintptr_t)op->inputs | (uintptr_t)op->outputs | (uintptr_t)op->transfer |
           (uintptr_t)op->extents.list | (uintptr_t)op->partials.memory;
}

/* Also what the collectives keep of it: collectives_state.h. */
void hvdl_operation_free(hvdl_operation *op)
{
    free(op->name);
    free(op->error);
    free(op->stall.answer);
    free(op->all_rows);
    if (has_extras(op))
        free_extras(op);
    free(op->parts.pairs);
    free(op->parts.host_places);
    free(op->shares.begins);
    if (op->adasum) {
        free(op->adasum->slices);
        free(op->adasum->dots);
        free(op->adasum->result);
        free(op->adasum);
    }
    free(op);
}

/* The end of a site that is too long: the line's number stands there. */
static const char *cut_site(const char *site)
{
    size_t bytes = strlen(site);
    if (bytes < HVDL_SITE_BYTES)
        return site;
    site += bytes - (HVDL_SITE_BYTES - 1);
    while (((unsigned char)*site & 0xc0) == 0x80)
        site++; /* to where a character of UTF-8 begins */
    return site;
}

/* In one piece of memory, as there are many operations. */
__attribute__((noinline)) char *hvdl_keep_texts(const hvdl_posting *posting, const char **site,
                                                const char **words)
{
    const char *place = posting->site ? cut_site(posting->site) : "";
    const char *in_words = posting->words ? posting->words : "";
    size_t name_bytes = strlen(posting->name) + 1, site_bytes = strlen(place) + 1;
    size_t words_bytes = strlen(in_words) + 1;
    char *name = malloc(name_bytes + site_bytes + words_bytes);
    if (!name)
        return NULL;
    memcpy(name, posting->name, name_bytes);
    memcpy(name + name_bytes, place, site_bytes);
    memcpy(name + name_bytes + site_bytes, in_words, words_bytes);
    *site = posting->site ? name + name_bytes : NULL;
    *words = posting->words ? name + name_bytes + site_bytes : NULL;
    return name;
}

hvdl_operation *hvdl_operation_new(const hvdl_posting *posting)
{
    hvdl_operation *op = calloc(1, sizeof *op);
    hvdl_err err = HVDL_OK;
    if (op && (posting->site || posting->words))
        op->name = hvdl_keep_texts(posting, &op->site, &op->words);
    else if (op)
        op->name = strdup(posting->name);
    if (op && posting->extents.list && !err)
        err = hvdl_extents_copy(posting->extents, &op->extents);
    if (!op || err || !op->name) {
        if (op)
            hvdl_operation_free(op);
        return NULL;
    }
    op->desc = posting->desc;
    op->input = posting->input;
    op->output = posting->output;
    op->rows = posting->rows;
    op->owner = posting->owner;
    op->unnamed = posting->unnamed;
    op->key = hvdl_make_key(posting->unnamed ? HVDL_KEY_OF_UNNAMED : posting->desc.kind, op->name);
    op->posted_ns = posting->posted_ns ? posting->posted_ns : hvdl_now_ns();
    return op;
}

void hvdl_finish(hvdl_engine *e, hvdl_operation *op, const char *text)
{
    char room[HVDL_TEXT_BYTES];
    text = e->callbacks->ending(e, op, text, room);
    /* What ends after its epoch has ended earlier on other ranks. */
    if (text && op->match && op->match->epoch == e->join.epoch && !op->unnamed &&
        hvdl_queue_count_failure(e, op->key))
        hvdl_out_of_memory(e);
    if (op->match)
        hvdl_match_leave(&e->matches, op->match);
    op->match = NULL;
    if (text)
        op->error = strdup(text);
    hvdl_ended ended = {op->plan, hvdl_makes_plan(op), op->counted, op->zeros != NULL, text};
    hvdl_state state = text ? HVDL_FAILED : HVDL_DONE;
    hvdl_record(&e->recording, op, state, 0);
    if (op->ticket)
        hvdl_box_write_state(e, op, state);
    if (!op->internal)
        hvdl_note_operation(e, op, text ? HVDL_DID_FAIL : HVDL_DID_END);
    hvdl_queue_end(e, op, state);
    /* From here on `op` may be freed by its caller. */
    if (ended.makes_plan || ended.counted || ended.had_zeros)
        e->callbacks->ended(e, &ended);
    hvdl_wake_waiting(e);
}

hvdl_err hvdl_say_number(hvdl_operation *op, int64_t number)
{
    op->all_rows = malloc(sizeof *op->all_rows);
    if (!op->all_rows)
        return HVDL_ENOMEM;
    op->num_rows = 1;
    op->all_rows[0] = number;
    return HVDL_OK;
}

/* ---- posting: any thread ---- */

static hvdl_err copy_splits(const hvdl_engine *e, const hvdl_posting *posting, hvdl_operation *op)
{
    size_t ranks = (size_t)e->config.num_ranks;
    size_t count = hvdl_num_splits(hvdl_facts_of(&posting->desc), e->config.num_ranks);
    int64_t left = hvdl_sends_splits(&posting->desc) ? posting->rows : posting->desc.count;
    op->splits = malloc(count * sizeof *op->splits);
    if (!op->splits)
        return HVDL_ENOMEM;
    memcpy(op->splits, posting->splits, count * sizeof *op->splits);
    for (size_t rank = 0; rank < ranks; rank++) {
        if (op->splits[rank] < 0 || op->splits[rank] > left)
            return HVDL_EINVAL;
        left -= op->splits[rank];
    }
    return HVDL_OK;
}

static hvdl_err copy_addresses(const hvdl_engine *e, const hvdl_posting *posting,
                               hvdl_operation *op)
{
    size_t bytes = (size_t)e->config.num_ranks * sizeof(void *);
    if (posting->inputs && !(op->inputs = malloc(bytes)))
        return HVDL_ENOMEM;
    if (posting->outputs && !(op->outputs = malloc(bytes)))
        return HVDL_ENOMEM;
    if (posting->inputs)
        memcpy(op->inputs, posting->inputs, bytes);
    if (posting->outputs)
        memcpy(op->outputs, posting->outputs, bytes);
    return HVDL_OK;
}

/* What it consists of besides the struct. */
static __attribute__((noinline)) hvdl_err copy_numbers(const hvdl_engine *e,
                                                       const hvdl_posting *posting,
                                                       hvdl_operation *op)
{
    const hvdl_desc *desc = &posting->desc;
    bool cut = hvdl_facts_of(desc)->rows == HVDL_ROWS_CUT && posting->splits;
    hvdl_err err = cut || hvdl_sends_splits(desc) ? copy_splits(e, posting, op) : HVDL_OK;
    if (!err && (posting->inputs || posting->outputs))
        err = copy_addresses(e, posting, op);
    if (!err && posting->inputs && hvdl_facts_of(desc)->reduces)
        err = hvdl_join_inputs(e, op);
    return err;
}

hvdl_err hvdl_engine_post(hvdl_engine *e, const hvdl_posting *posting, bool wake,
                          hvdl_operation **out)
{
    hvdl_operation *op = hvdl_operation_new(posting);
    if (!op)
        return HVDL_ENOMEM;
    hvdl_err err = HVDL_OK;
    if (posting->splits || posting->inputs || posting->outputs)
        err = copy_numbers(e, posting, op);
    if (err) {
        hvdl_operation_free(op);
        return err;
    }
    err = hvdl_enqueue(e, op, wake);
    if (err)
        hvdl_operation_free(op);
    else
        *out = op;
    return err;
}

hvdl_operation *hvdl_adopt_operation(hvdl_engine *e, const hvdl_posting *posting, hvdl_key key)
{
    hvdl_operation *op = hvdl_operation_new(posting);
    if (!op)
        return NULL;
    op->key = key;
    op->internal = op->released = true;
    if (hvdl_queue_adopt(e, op)) {
        hvdl_operation_free(op);
        return NULL;
    }
    return op;
}

/* Not by the name, which a rank that has joined does not know. */
static hvdl_key child_key(hvdl_key parent, int step)
{
    return (hvdl_key){hvdl_mix(parent.lo + (uint64_t)step + 1),
                      hvdl_mix(parent.hi ^ (uint64_t)step << 32)};
}

hvdl_err hvdl_post_child(hvdl_engine *e, hvdl_operation *parent, const hvdl_posting *posting,
                         int step)
{
    hvdl_operation *op = hvdl_operation_new(posting);
    if (!op)
        return HVDL_ENOMEM;
    op->key = child_key(parent->key, step);
    op->internal = op->released = true;
    op->parent = parent;
    hvdl_err err = hvdl_enqueue(e, op, false);
    if (err)
        hvdl_operation_free(op);
    else
        parent->child = op;
    return err;
}

/* ---- what callers read ---- */

const char *hvdl_operation_error(const hvdl_operation *op)
{
    if (atomic_load_explicit(&op->state, memory_order_acquire) != HVDL_FAILED)
        return NULL;
    return op->error ? op->error : "out of memory";
}

const int64_t *hvdl_operation_rows(const hvdl_operation *op, int *count)
{
    *count = op->num_rows;
    return op->all_rows;
}

const hvdl_desc *hvdl_operation_desc(const hvdl_operation *op)
{
    return &op->desc;
}

const char *hvdl_operation_name(const hvdl_operation *op)
{
    return op->name;
}

void *hvdl_operation_move_output(hvdl_operation *op)
{
    void *output = op->work;
    op->work = NULL;
    return output;
}
