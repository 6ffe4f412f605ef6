/* The collectives of allreduce and reduce. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "collectives/partials.h"
#include "collectives/phases.h"
#include "engine/state.h"
#include "operations/facts.h"

/* ---- what all have ---- */

static hvdl_range elems_of(const hvdl_engine *e, const hvdl_operation *op, uint64_t k)
{
    const hvdl_desc *desc = &op->desc;
    return hvdl_piece_range(e, desc, k, (size_t)desc->count, hvdl_dtype_bytes(desc->dtype));
}

/* Sums of 16-bit floats that are rounded once are formed by the direct exchange; and by recursive doubling of
 * two hosts, which adds up once. */
static hvdl_algorithm reduce_algorithm(const hvdl_engine *e, const hvdl_operation *op,
                                       size_t slice_bytes)
{
    const hvdl_desc *desc = &op->desc;
    bool sixteen = desc->dtype == HVDL_FLOAT16 || desc->dtype == HVDL_BFLOAT16;
    hvdl_algorithm chosen =
        hvdl_choose_algorithm(e->config.rules, e->config.num_rules, slice_bytes);
    if (hvdl_adds_along_tree(e, desc))
        return hvdl_tree_algorithm(e, op, chosen);
    bool fits = !sixteen || (chosen == HVDL_DOUBLING && e->config.num_hosts == 2);
    return fits ? chosen : HVDL_DIRECT;
}

hvdl_pass *hvdl_reducing_pass(const hvdl_engine *e, const hvdl_operation *op, hvdl_pass_type type,
                              int num_sources)
{
    const hvdl_desc *desc = &op->desc;
    hvdl_pass *pass = hvdl_pass_new(type, num_sources);
    if (!pass)
        return NULL;
    pass->dtype = desc->dtype;
    pass->op = desc->op;
    pass->scale = hvdl_weighted_scale(e, op);
    pass->scaled_from = op->input;
    if (op->match->posted && op->match->posted < e->placement.local_size)
        pass->taking_part = op->match->posted_by;
    hvdl_pass_along_tree(e, op, pass);
    return pass;
}

/* Makes what the partials of rails' slices need. */
hvdl_err hvdl_allreduce_prepare(const hvdl_engine *e, hvdl_operation *op, const int64_t *rows)
{
    (void)rows;
    if (e->config.num_hosts == 1 || !hvdl_adds_along_tree(e, &op->desc))
        return HVDL_OK;
    hvdl_range first = elems_of(e, op, 0);
    hvdl_range slice =
        hvdl_slice(hvdl_range_size(first), e->placement.num_rails, 0, op->desc.dtype);
    return hvdl_partials_prepare(e, op, hvdl_range_size(slice), hvdl_count_pieces(e, op));
}

/* Every rail gets the sum of its slice of a piece, in `to`, which is as large as the tensor; or its partials. */
static hvdl_pass *scatter_to_rails(const hvdl_engine *e, const hvdl_operation *op, uint64_t k,
                                   char *to)
{
    hvdl_range range = elems_of(e, op, k);
    int rails = e->placement.num_rails;
    size_t esize = hvdl_dtype_bytes(op->desc.dtype);
    hvdl_pass *pass = hvdl_reducing_pass(e, op, HVDL_PASS_SCATTER, rails);
    for (int rail = 0; pass && rail < rails; rail++) {
        hvdl_range slice = hvdl_slice(hvdl_range_size(range), rails, rail, op->desc.dtype);
        size_t at = (range.begin + slice.begin) * esize;
        pass->sources[rail] = (hvdl_source){
            .local = rail,
            .from = op->input + at,
            .bytes = hvdl_range_size(slice) * esize,
            .to = rail == e->placement.local ? hvdl_partials_at(e, op, k, to + at) : NULL};
    }
    return pass;
}

/* One host: the ranks for which `to` is not NULL get the sum of all. */
static hvdl_pass *reduce_whole(const hvdl_engine *e, const hvdl_operation *op, hvdl_range range,
                               char *to)
{
    size_t at = range.begin * hvdl_dtype_bytes(op->desc.dtype);
    hvdl_pass *pass = hvdl_reducing_pass(e, op, HVDL_PASS_ALLREDUCE, 0);
    if (!pass)
        return NULL;
    pass->in = op->input + at;
    pass->out = to ? to + at : NULL;
    pass->count = hvdl_range_size(range);
    return pass;
}

void hvdl_describe_reduction(const hvdl_engine *e, const hvdl_operation *op,
                             hvdl_exchange_spec *spec)
{
    spec->dtype = op->desc.dtype;
    spec->op = op->desc.op;
    spec->scale = hvdl_last_scale(e, &op->desc);
}

/* A step of the direct exchange takes the place of the few steps of recursive doubling: it sends no more bytes
 * than the ring does. */
void hvdl_scatter_between_hosts(const hvdl_engine *e, const hvdl_operation *op, uint64_t k,
                                hvdl_exchange_spec *spec)
{
    size_t bytes = 0;
    for (int h = 0; h < spec->num_hosts; h++)
        bytes += spec->chunk_bytes[h];
    bool ring = reduce_algorithm(e, op, bytes) == HVDL_RING;
    spec->algorithm = ring ? HVDL_RING : HVDL_DIRECT;
    spec->scatters = true;
    hvdl_exchange_along_tree(e, op, k, spec);
}

/* ---- allreduce ---- */

bool hvdl_allreduce_has_pass(const hvdl_engine *e, const hvdl_operation *op, uint64_t k, int phase)
{
    (void)k;
    bool in_place = op->input == op->output && op->desc.prescale == 1.0 && !op->partials.memory;
    if (phase == HVDL_PHASE_A)
        return e->placement.local_size > 1 || !in_place;
    return e->placement.local_size > 1 && e->config.num_hosts > 1;
}

hvdl_pass *hvdl_allreduce_make_pass(const hvdl_engine *e, const hvdl_operation *op, uint64_t k,
                                    int phase)
{
    hvdl_range range = elems_of(e, op, k);
    if (phase == HVDL_PHASE_C)
        return hvdl_share_from_rails(e, op->output, range, op->desc.dtype);
    return e->config.num_hosts > 1 ? scatter_to_rails(e, op, k, op->output)
                                   : reduce_whole(e, op, range, op->output);
}

void hvdl_allreduce_describe_exchange(const hvdl_engine *e, const hvdl_operation *op, uint64_t k,
                                      hvdl_exchange_spec *spec, size_t *table)
{
    (void)table;
    hvdl_describe_reduction(e, op, spec);
    hvdl_put_slice(e, elems_of(e, op, k), k, op->output, spec);
    spec->algorithm = reduce_algorithm(e, op, spec->count * hvdl_dtype_bytes(op->desc.dtype));
    hvdl_exchange_along_tree(e, op, k, spec);
}

const hvdl_collective hvdl_collective_allreduce = {
    .prepare = hvdl_allreduce_prepare,
    .count_pieces = hvdl_count_pieces,
    .has_pass = hvdl_allreduce_has_pass,
    .make_pass = hvdl_allreduce_make_pass,
    .describe_exchange = hvdl_allreduce_describe_exchange,
};

/* ---- reduce ---- */

/* On one host the root adds up everything where it would wait longer for the others' sums. */
#define ROOT_ALONE_BYTES 16384

static bool is_root(const hvdl_engine *e, const hvdl_operation *op)
{
    return op->desc.root == e->config.rank;
}

/* Where the sums of this rank's slices arise. */
static char *reduced_at(const hvdl_engine *e, const hvdl_operation *op)
{
    return is_root(e, op) ? op->output : op->work;
}

/* A rail needs memory for its slices, which is as large as the tensor, and touched nowhere else. */
static hvdl_err reduce_prepare(const hvdl_engine *e, hvdl_operation *op, const int64_t *rows)
{
    size_t bytes = hvdl_desc_bytes(&op->desc);
    bool needs_memory = e->config.num_hosts > 1 && !is_root(e, op) && bytes &&
                        e->placement.local < e->placement.num_rails;
    if (needs_memory && posix_memalign((void **)&op->work, 64, bytes))
        return HVDL_ENOMEM;
    return hvdl_allreduce_prepare(e, op, rows);
}

static bool reduce_has_pass(const hvdl_engine *e, const hvdl_operation *op, uint64_t k, int phase)
{
    (void)k;
    bool in_place =
        op->input == reduced_at(e, op) && op->desc.prescale == 1.0 && !op->partials.memory;
    if (phase == HVDL_PHASE_A)
        return e->placement.local_size > 1 || !in_place;
    return e->placement.local_size > 1 && e->config.num_hosts > 1 &&
           e->placement.host_of[op->desc.root] == e->placement.host;
}

static hvdl_pass *reduce_to_root(const hvdl_engine *e, const hvdl_operation *op, hvdl_range range)
{
    size_t esize = hvdl_dtype_bytes(op->desc.dtype), at = range.begin * esize;
    size_t bytes = hvdl_range_size(range) * esize;
    if (e->placement.local_size > 2 && bytes > ROOT_ALONE_BYTES)
        return reduce_whole(e, op, range, is_root(e, op) ? op->output : NULL);
    hvdl_pass *pass = hvdl_reducing_pass(e, op, HVDL_PASS_SCATTER, 1);
    if (pass)
        pass->sources[0] = (hvdl_source){.local = e->placement.local_of[op->desc.root],
                                         .from = op->input + at,
                                         .bytes = bytes,
                                         .to = is_root(e, op) ? op->output + at : NULL};
    return pass;
}

static hvdl_pass *reduce_make_pass(const hvdl_engine *e, const hvdl_operation *op, uint64_t k,
                                   int phase)
{
    hvdl_range range = elems_of(e, op, k);
    if (phase == HVDL_PHASE_A)
        return e->config.num_hosts > 1 ? scatter_to_rails(e, op, k, reduced_at(e, op))
                                       : reduce_to_root(e, op, range);
    hvdl_pass *pass = hvdl_share_from_rails(e, reduced_at(e, op), range, op->desc.dtype);
    for (int rail = 0; pass && !is_root(e, op) && rail < pass->num_sources; rail++)
        pass->sources[rail].take = (hvdl_range){0, 0};
    return pass;
}

/* The root's host owns everything, and the others nothing: in the ring that makes a chain. */
static void reduce_describe_exchange(const hvdl_engine *e, const hvdl_operation *op, uint64_t k,
                                     hvdl_exchange_spec *spec, size_t *table)
{
    hvdl_describe_reduction(e, op, spec);
    hvdl_put_slice(e, elems_of(e, op, k), k, reduced_at(e, op), spec);
    table[e->config.num_hosts + e->placement.host_of[op->desc.root]] =
        spec->count * hvdl_dtype_bytes(op->desc.dtype);
    hvdl_scatter_between_hosts(e, op, k, spec);
}

const hvdl_collective hvdl_collective_reduce = {
    .prepare = reduce_prepare,
    .count_pieces = hvdl_count_pieces,
    .has_pass = reduce_has_pass,
    .make_pass = reduce_make_pass,
    .describe_exchange = reduce_describe_exchange,
};
