/* Operations as their callers see them: made and posted by any thread, ended by the driver, freed when
 * both are done with them. */
#define _GNU_SOURCE
#include <string.h>

#include "engine/state.h"

/* Every rank of a host keeps tiny data of all of them, and between hosts that of all goes through one, its
 * coordinator: the more there are, the less each may have. */
#define HOST_BYTES 131072
#define COORDINATED_BYTES 65536
#define LEAST_INLINE_BYTES 4096

static size_t most_inline(const hvdl_engine *e)
{
    size_t share = HOST_BYTES / (size_t)e->placement.max_local_size;
    size_t between = COORDINATED_BYTES / (size_t)e->config.num_hosts;
    share = e->config.num_hosts > 1 && between < share ? between : share;
    share = share > LEAST_INLINE_BYTES ? share : LEAST_INLINE_BYTES;
    return share < e->config.inline_bytes ? share : e->config.inline_bytes;
}

/* ---- small facts ---- */

/* Between hosts the parts of all travel with the answer. Where they differ in size none do. */
static bool is_tiny_of_parts(const hvdl_engine *e, const hvdl_desc *desc)
{
    size_t parts = e->config.num_hosts > 1 ? (size_t)e->config.num_ranks : 1;
    return !desc->layout && hvdl_desc_bytes(desc) <= most_inline(e) / parts;
}

bool hvdl_is_tiny(const hvdl_engine *e, const hvdl_desc *desc, bool is_run)
{
    uint8_t tiny = hvdl_facts_of(desc)->tiny;
    if (tiny == HVDL_TINY_ALWAYS || desc->place == HVDL_ORDERED)
        return true;
    if (tiny == HVDL_TINY_NEVER || desc->op == HVDL_ADASUM)
        return false;
    /* Between hosts a tiny operation costs a message to its coordinator and back; a plan's run does
     * without, since nothing is left to agree on. */
    if (is_run && e->config.num_hosts > 1)
        return desc->count == 0;
    if (hvdl_facts_of(desc)->result == HVDL_RESULT_PARTS)
        return is_tiny_of_parts(e, desc);
    /* A coordinator gets one sum of each host, which need not be a partial of the tree. */
    if (e->config.num_hosts > 1 && hvdl_facts_of(desc)->reduces && hvdl_adds_along_tree(e, desc))
        return desc->count == 0;
    return hvdl_desc_bytes(desc) <= most_inline(e);
}

hvdl_scale hvdl_last_scale(const hvdl_engine *e, const hvdl_desc *desc)
{
    hvdl_scale scale = HVDL_UNSCALED;
    scale.divisor = desc->op == HVDL_AVERAGE ? e->config.num_ranks : 1;
    scale.postscale = desc->postscale;
    return scale;
}

hvdl_scale hvdl_host_scale(const hvdl_engine *e, const hvdl_desc *desc)
{
    hvdl_scale scale = e->config.num_hosts > 1 ? HVDL_UNSCALED : hvdl_last_scale(e, desc);
    scale.prescale = desc->prescale;
    return scale;
}

hvdl_scale hvdl_weighted_scale(const hvdl_engine *e, const hvdl_operation *op)
{
    hvdl_scale scale = hvdl_host_scale(e, &op->desc);
    scale.num_first = op->num_weighted;
    scale.factors = op->factors;
    scale.first_postscale = scale.postscale * op->to_weighted;
    return scale;
}

size_t hvdl_data_bytes(const hvdl_desc *desc)
{
    bool moves = hvdl_moves_data(hvdl_facts_of(desc)) && desc->place != HVDL_ORDERED;
    return moves ? hvdl_desc_bytes(desc) : 0;
}

hvdl_key hvdl_make_key(int kind, const char *name)
{
    hvdl_key key = {0xcbf29ce484222325ull, 0x84222325cbf29ce4ull};
    uint64_t tag = (uint64_t)kind;
    key.lo ^= hvdl_mix(tag + 1);
    key.hi ^= hvdl_mix(tag + 0x9e3779b97f4a7c15ull);
    for (const unsigned char *c = (const unsigned char *)name; *c; c++) {
        key.lo = (key.lo ^ *c) * 0x100000001b3ull;
        key.hi = (key.hi ^ *c) * 0x9e3779b97f4a7c15ull;
        key.hi ^= key.hi >> 29;
    }
    return (hvdl_key){hvdl_mix(key.lo), hvdl_mix(key.hi)};
}

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

void hvdl_operation_free(hvdl_operation *op)
{
    free(op->name);
    free(op->error);
    free(op->stall.answer);
    free(op->all_rows);
    if (has_extras(op))
        free_extras(op);
    hvdl_parts_free(&op->parts);
    hvdl_shares_free(&op->shares);
    hvdl_adasum_free(op->adasum);
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
    op->posted_ns = hvdl_now_ns();
    return op;
}

/* Its child goes on without it, and takes over the memory that it works on. */
static void leave_child(hvdl_operation *op)
{
    op->child->parent = NULL;
    op->child->adasum = op->adasum;
    op->child = NULL;
    op->adasum = NULL;
}

void hvdl_finish(hvdl_engine *e, hvdl_operation *op, const char *text)
{
    hvdl_operation *parent = op->parent;
    if (e->failure.broken && !text)
        text = e->failure.text; /* nothing succeeds any more, however far it came in this sweep */
    if (e->stall.told)
        hvdl_stall_ended(e, op, !text);
    if (op->child)
        leave_child(op);
    if (op->transfer)
        hvdl_transfer_end(e, op->transfer);
    char with_cause[HVDL_TEXT_BYTES];
    hvdl_err err = HVDL_OK;
    if (!text && op->desc.kind == HVDL_ALLREDUCE && !op->internal)
        hvdl_note_reduced(e, op);
    else if (text && !e->failure.broken && hvdl_comes_again(e, op) && !hvdl_is_run(op) &&
             !strcmp(text, e->failure.text))
        text = hvdl_put_uneven(text, with_cause); /* a rank has left */
    if (parent) {
        op->parent = NULL;
        err = hvdl_adasum_child_done(e, parent, op, text);
    }
    if (op->meeting)
        hvdl_meeting_leave(&e->meetings, op->meeting);
    op->meeting = NULL;
    if (text)
        op->error = strdup(text);
    hvdl_join_forget(&e->join, op);
    bool zeros = op->zeros, counted = op->counted;
    hvdl_plan *plan = op->plan;
    bool makes_plan = hvdl_makes_plan(op);
    hvdl_record(&e->recording, op, text ? HVDL_FAILED : HVDL_DONE, 0);
    if (op->ticket)
        hvdl_box_write_state(e, op, text ? HVDL_FAILED : HVDL_DONE);
    if (!op->internal)
        hvdl_note_activity(e, hvdl_activity_of(op, text ? HVDL_DID_FAIL : HVDL_DID_END));

    hvdl_queue_end(e, op, text ? HVDL_FAILED : HVDL_DONE);
    /* From here on `op` may be freed by its caller. */
    if (makes_plan)
        hvdl_plan_made(e, plan, text);
    if (counted)
        hvdl_plan_run_ended(e, plan);
    if (zeros)
        hvdl_zero_operation_ended(e);
    hvdl_wake_waiting(e);
    if (err)
        hvdl_out_of_memory(e);
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

hvdl_err hvdl_finish_alone(hvdl_engine *e, hvdl_operation *op)
{
    const hvdl_desc *desc = &op->desc;
    const hvdl_kind_facts *facts = hvdl_facts_of(desc);
    size_t bytes = hvdl_data_bytes(desc);
    const void *input;
    uint64_t begun_ns = hvdl_now_ns();
    bool ordered = desc->place == HVDL_ORDERED;
    char *output = op->outputs ? op->outputs[0] : op->output;
    input = op->inputs ? op->inputs[0] : op->input;
    if (e->failure.broken) {
        op->error = strdup(e->failure.text);
        op->finished = true;
        atomic_store_explicit(&op->state, HVDL_FAILED, memory_order_release);
        return HVDL_OK;
    }
    if (op->splits && facts->rows == HVDL_ROWS_BOTH) {
        if (op->splits[0] != op->splits[1])
            return HVDL_EINVAL;
        bytes *= (size_t)op->splits[0];
    }
    if (facts->result == HVDL_RESULT_GATHERED || facts->result == HVDL_RESULT_NUMBER || ordered) {
        hvdl_err err = hvdl_say_number(op, ordered ? (int64_t)hvdl_queue_turn(e) : 0);
        if (err)
            return err;
    }
    if (facts->result == HVDL_RESULT_GATHERED && !ordered) {
        op->all_rows[0] = facts->rows == HVDL_ROWS_SPLITS ? op->splits[0] : op->rows;
        bytes *= (size_t)op->all_rows[0];
        if (posix_memalign((void **)&op->work, 64, bytes ? bytes : 1))
            return HVDL_ENOMEM;
        if (bytes)
            memcpy(op->work, op->input, bytes);
    } else if (bytes && facts->reduces) {
        hvdl_scale scale = hvdl_weighted_scale(e, op);
        hvdl_reduce(desc->dtype, HVDL_SUM, op->output, &input, 1, (size_t)desc->count, &scale);
    } else if (bytes && output != input) {
        memcpy(output, input, bytes);
    }
    op->number = hvdl_queue_number(e);
    hvdl_record(&e->recording, op, HVDL_POSTED, op->posted_ns);
    hvdl_record(&e->recording, op, HVDL_MATCHED, begun_ns);
    hvdl_record(&e->recording, op, HVDL_RUNNING, begun_ns);
    hvdl_record(&e->recording, op, HVDL_DONE, 0);
    op->finished = true;
    atomic_store_explicit(&op->state, HVDL_DONE, memory_order_release);
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
    if (e->config.num_ranks == 1) {
        err = e->queue.closed ? HVDL_ECLOSED : hvdl_finish_alone(e, op);
        if (!err)
            hvdl_queue_count_alone(&e->queue);
    } else {
        err = hvdl_enqueue(e, op, wake);
    }
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
