/* Operations whose data travels in the shared log, beside their posting: what the ranks gave, and, on one
 * host, the result. */
#define _GNU_SOURCE
#include "matching/tiny.h"

#include <string.h>

#include "base/sizes.h"
#include "collectives/partials.h"
#include "collectives/reducescatter.h"
#include "engine/fatal.h"
#include "engine/state.h"
#include "matching/matches.h"
#include "operations/facts.h"
#include "operations/operations.h"
#include "operations/queue.h"

const char *hvdl_payload_of(const hvdl_engine *e, const hvdl_match *match, int local, size_t bytes)
{
    if (local == e->placement.local)
        return match->operation->input;
    if (match->last_payload && local == match->last_from)
        return match->last_payload;
    return match->payloads + (size_t)local * bytes;
}

static __attribute__((noinline)) hvdl_err keep_rows(const hvdl_engine *e, hvdl_match *match,
                                                    const hvdl_entry *entry, const hvdl_desc *desc,
                                                    const void *payload)
{
    size_t row = hvdl_num_rows_posted(desc, e->config.num_ranks);
    if (!row)
        return HVDL_OK;
    if (!match->rows)
        match->rows = calloc((size_t)e->placement.local_size * row, sizeof *match->rows);
    if (!match->rows)
        return HVDL_ENOMEM;
    if (hvdl_facts_of(desc)->rows == HVDL_ROWS_OWN)
        payload = &entry->rows;
    memcpy(match->rows + entry->from * row, payload, row * sizeof *match->rows);
    return HVDL_OK;
}

hvdl_err hvdl_keep_payload(hvdl_engine *e, hvdl_match *match, const hvdl_entry *entry,
                           const hvdl_operation *own, const hvdl_desc *desc, const void *payload,
                           size_t bytes)
{
    if (match->variants.count > 1)
        return HVDL_OK; /* it fails */
    if (hvdl_facts_of(desc)->rows != HVDL_ROWS_SAME) {
        hvdl_err err = keep_rows(e, match, entry, desc, payload);
        if (err || hvdl_sends_splits(desc))
            return err;
    }
    if (!bytes)
        return HVDL_OK;
    if (hvdl_match_complete(e, match)) {
        match->last_payload = payload;
        match->last_from = entry->from;
        return HVDL_OK;
    }
    if (own)
        return HVDL_OK; /* its input is read where it is */
    if (!match->payloads) {
        match->payloads = hvdl_new_array((size_t)e->placement.local_size, bytes);
        if (!match->payloads)
            return HVDL_ENOMEM;
    }
    memcpy(match->payloads + entry->from * bytes, payload, bytes);
    return HVDL_OK;
}

void hvdl_put_tiny_part(hvdl_operation *op, int rank, const char *from, size_t bytes)
{
    char *to = op->outputs ? op->outputs[rank] : op->output + (size_t)rank * bytes;
    if (to != from)
        memcpy(to, from, bytes);
}

hvdl_range hvdl_tiny_part(const hvdl_engine *e, const hvdl_operation *op)
{
    const hvdl_kind_facts *facts = hvdl_facts_of(&op->desc);
    if (facts->result == HVDL_RESULT_SHARE)
        return hvdl_own_elems(e, op);
    if (hvdl_root_gets(facts) && op->desc.root != e->config.rank)
        return (hvdl_range){0, 0};
    return (hvdl_range){0, (size_t)op->desc.count};
}

/* One host. */
static void reduce_along_tree(const hvdl_engine *e, const hvdl_match *match,
                              const void *const *inputs, int num_inputs, size_t count,
                              const hvdl_scale *scale)
{
    const hvdl_operation *op = match->operation;
    uint8_t merges[HVDL_MAX_LOCAL];
    hvdl_tree_merges(e->placement.local_size, match->posted_by, merges);
    hvdl_reduce_tree(op->desc.dtype, op->desc.dtype, op->desc.op, op->output, inputs, merges,
                     num_inputs, count, scale);
}

void hvdl_complete_tiny(hvdl_engine *e, hvdl_match *match)
{
    hvdl_operation *op = match->operation;
    const hvdl_desc *desc = &op->desc;
    size_t bytes = hvdl_data_bytes(desc);
    hvdl_set_state(e, op, HVDL_RUNNING);
    if (desc->place == HVDL_ORDERED) {
        bool joined = hvdl_match_absent(e, match) >= 0;
        if (hvdl_say_number(op, joined ? HVDL_NO_SEQUENCE : (int64_t)hvdl_next_sequence(e))) {
            hvdl_out_of_memory(e);
            return;
        }
    }
    if (bytes && hvdl_facts_of(desc)->result == HVDL_RESULT_PARTS) {
        for (int r = 0; r < e->placement.local_size; r++)
            hvdl_put_tiny_part(op, hvdl_rank_of_local(e, r), hvdl_payload_of(e, match, r, bytes),
                               bytes);
    } else if (bytes && hvdl_root_gives(hvdl_facts_of(desc))) {
        const char *from = hvdl_payload_of(e, match, e->placement.local_of[desc->root], bytes);
        if (op->output != from)
            memcpy(op->output, from, bytes);
    } else if (bytes) {
        const void *inputs[HVDL_MAX_LOCAL];
        hvdl_range own = hvdl_tiny_part(e, op);
        hvdl_scale all = hvdl_weighted_scale(e, op), scale = hvdl_scale_from(&all, own.begin);
        double factors[HVDL_MAX_LOCAL];
        int num_inputs = 0; /* ranks that have joined and not posted are left out */
        for (int r = 0; r < e->placement.local_size; r++)
            if (match->posted_by[r]) {
                factors[num_inputs] = scale.factors ? scale.factors[r] : 1.0;
                inputs[num_inputs++] =
                    hvdl_payload_of(e, match, r, bytes) + own.begin * hvdl_dtype_bytes(desc->dtype);
            }
        if (scale.factors)
            scale.factors = factors;
        if (hvdl_adds_along_tree(e, desc))
            reduce_along_tree(e, match, inputs, num_inputs, hvdl_range_size(own), &scale);
        else
            hvdl_reduce(desc->dtype, desc->op, op->output, inputs, num_inputs, hvdl_range_size(own),
                        &scale);
    }
    hvdl_finish(e, op, NULL);
}
