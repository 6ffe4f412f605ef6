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
    return hvdl_desc_bytes(desc) <= most_inline(e);
}

hvdl_scale hvdl_last_scale(const hvdl_engine *e, const hvdl_desc *desc)
{
    return (hvdl_scale){1.0, desc->op == HVDL_AVERAGE ? e->config.num_ranks : 1, desc->postscale};
}

hvdl_scale hvdl_host_scale(const hvdl_engine *e, const hvdl_desc *desc)
{
    hvdl_scale scale = e->config.num_hosts > 1 ? HVDL_UNSCALED : hvdl_last_scale(e, desc);
    scale.prescale = desc->prescale;
    return scale;
}

size_t hvdl_data_bytes(const hvdl_desc *desc)
{
    bool moves = hvdl_moves_data(hvdl_facts_of(desc)) && desc->place != HVDL_ORDERED;
    return moves ? hvdl_desc_bytes(desc) : 0;
}

hvdl_range hvdl_own_elems(const hvdl_engine *e, const hvdl_desc *desc)
{
    size_t rows = (size_t)desc->dims[0], row = rows ? (size_t)desc->count / rows : 0;
    hvdl_range own = hvdl_part(rows, (size_t)e->config.num_ranks, (size_t)e->config.rank, 1);
    return (hvdl_range){own.begin * row, own.end * row};
}

static uint64_t mix(uint64_t h)
{
    h = (h ^ h >> 33) * 0xff51afd7ed558ccdull;
    h = (h ^ h >> 33) * 0xc4ceb9fe1a85ec53ull;
    return h ^ h >> 33;
}

hvdl_key hvdl_make_key(int kind, const char *name)
{
    hvdl_key key = {0xcbf29ce484222325ull, 0x84222325cbf29ce4ull};
    uint64_t tag = (uint64_t)kind;
    key.lo ^= mix(tag + 1);
    key.hi ^= mix(tag + 0x9e3779b97f4a7c15ull);
    for (const unsigned char *c = (const unsigned char *)name; *c; c++) {
        key.lo = (key.lo ^ *c) * 0x100000001b3ull;
        key.hi = (key.hi ^ *c) * 0x9e3779b97f4a7c15ull;
        key.hi ^= key.hi >> 29;
    }
    return (hvdl_key){mix(key.lo), mix(key.hi)};
}

void hvdl_set_state(hvdl_engine *e, hvdl_operation *op, hvdl_state state)
{
    hvdl_record(&e->recording, op, state, 0);
    atomic_store_explicit(&op->state, (int)state, memory_order_release);
}

/* ---- operations: making and ending ---- */

void hvdl_operation_free(hvdl_operation *op)
{
    free(op->name);
    free(op->error);
    free(op->all_rows);
    free(op->work);
    free(op->zeros);
    free(op->splits);
    hvdl_parts_free(&op->parts);
    hvdl_adasum_free(op->adasum);
    free(op);
}

hvdl_operation *hvdl_operation_new(const hvdl_posting *posting)
{
    hvdl_operation *op = calloc(1, sizeof *op);
    char *name = strdup(posting->name);
    if (!op || !name) {
        free(op);
        free(name);
        return NULL;
    }
    op->name = name;
    op->desc = posting->desc;
    op->input = posting->input;
    op->output = posting->output;
    op->rows = posting->rows;
    op->owner = posting->owner;
    op->key = hvdl_make_key(posting->unnamed ? HVDL_KEY_OF_UNNAMED : posting->desc.kind, name);
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
    hvdl_heed_verdict(e); /* of the others, while this rank was stopped */
    if (e->failure.broken && !text)
        text = e->failure.text; /* nothing succeeds any more, however far it came in this sweep */
    if (e->stall.told)
        hvdl_stall_ended(e, op, !text);
    if (op->child)
        leave_child(op);
    hvdl_err err = HVDL_OK;
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
    const void *input = op->input;
    uint64_t begun_ns = hvdl_now_ns();
    bool ordered = desc->place == HVDL_ORDERED;
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
        hvdl_scale scale = {desc->prescale, 1, desc->postscale};
        hvdl_reduce(desc->dtype, HVDL_SUM, op->output, &input, 1, (size_t)desc->count, &scale);
    } else if (bytes && op->output != op->input) {
        memcpy(op->output, op->input, bytes);
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
    int64_t left = posting->rows;
    op->splits = malloc(ranks * sizeof *op->splits);
    if (!op->splits)
        return HVDL_ENOMEM;
    memcpy(op->splits, posting->splits, ranks * sizeof *op->splits);
    for (size_t rank = 0; rank < ranks; rank++) {
        if (op->splits[rank] < 0 || op->splits[rank] > left)
            return HVDL_EINVAL;
        left -= op->splits[rank];
    }
    return HVDL_OK;
}

hvdl_err hvdl_engine_post(hvdl_engine *e, const hvdl_posting *posting, bool wake,
                          hvdl_operation **out)
{
    hvdl_operation *op = hvdl_operation_new(posting);
    if (!op)
        return HVDL_ENOMEM;
    hvdl_err err = hvdl_sends_splits(&posting->desc) ? copy_splits(e, posting, op) : HVDL_OK;
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
    return (hvdl_key){mix(parent.lo + (uint64_t)step + 1), mix(parent.hi ^ (uint64_t)step << 32)};
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
