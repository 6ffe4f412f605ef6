/* A world of one: there is nothing to agree on, and an operation ends where it is posted. */
#define _GNU_SOURCE
#include <string.h>

#include "engine/state.h"
#include "operations/facts.h"
#include "operations/operations.h"
#include "operations/queue.h"
#include "operations/recording.h"

static hvdl_err finish(hvdl_engine *e, hvdl_operation *op)
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
        hvdl_err err = hvdl_say_number(op, ordered ? (int64_t)hvdl_next_sequence(e) : 0);
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

hvdl_err hvdl_run_alone(hvdl_engine *e, hvdl_operation *op)
{
    if (e->queue.closed)
        return HVDL_ECLOSED;
    if (op->plan && op->weight.is_in_input && op->weight.value > 0.0) {
        op->num_weighted = op->plan->posting.num_weighted;
        op->to_weighted = 1.0 / op->weight.value;
    }
    op->plan = NULL; /* of which no run is ever in flight */
    hvdl_err err = finish(e, op);
    if (!err)
        e->queue.num_operations++;
    return err;
}
