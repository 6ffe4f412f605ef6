#define _GNU_SOURCE
#include "collectives/partials.h"

#include "base/sizes.h"
#include "engine/state.h"

bool hvdl_adds_along_tree(const hvdl_engine *e, const hvdl_desc *desc)
{
    return e->config.deterministic && hvdl_is_float(desc->dtype) && desc->op != HVDL_ADASUM;
}

/* Sums of 16-bit floats stay float32 until they are complete; inputs without a factor are as exact as they are. */
static hvdl_dtype part_dtype(const hvdl_engine *e, const hvdl_operation *op)
{
    bool sixteen = op->desc.dtype == HVDL_FLOAT16 || op->desc.dtype == HVDL_BFLOAT16;
    bool scaled = op->desc.prescale != 1.0 || op->partials.scaled;
    bool widens = e->config.num_hosts > 1 && (e->placement.tree.combines || scaled);
    return sixteen && widens ? HVDL_FLOAT32 : (hvdl_dtype)op->desc.dtype;
}

static size_t num_own(const hvdl_engine *e)
{
    return (size_t)e->placement.tree.num_of[e->placement.host];
}

hvdl_err hvdl_partials_prepare(const hvdl_engine *e, hvdl_operation *op, size_t most_elems,
                               uint64_t num_pieces)
{
    hvdl_dtype dtype = part_dtype(e, op);
    bool in_place = num_own(e) == 1 && dtype == op->desc.dtype;
    if (e->config.num_hosts == 1 || in_place || !most_elems ||
        e->placement.local >= e->placement.num_rails)
        return HVDL_OK;
    size_t slots = num_pieces < HVDL_PIECE_WINDOW ? (size_t)num_pieces : HVDL_PIECE_WINDOW;
    size_t stride = hvdl_ceil_div(most_elems * hvdl_dtype_bytes((int)dtype), 64) * 64, bytes;
    if (hvdl_multiply(slots * num_own(e), stride, &bytes))
        return HVDL_ENOMEM;
    op->partials.stride = stride;
    return posix_memalign((void **)&op->partials.memory, 64, bytes) ? HVDL_ENOMEM : HVDL_OK;
}

char *hvdl_partials_at(const hvdl_engine *e, const hvdl_operation *op, uint64_t k, char *sums)
{
    const hvdl_partial_sums *partials = &op->partials;
    if (!partials->memory)
        return sums;
    return partials->memory + k % HVDL_PIECE_WINDOW * num_own(e) * partials->stride;
}

void hvdl_pass_along_tree(const hvdl_engine *e, const hvdl_operation *op, hvdl_pass *pass)
{
    pass->part_dtype = (hvdl_dtype)op->desc.dtype;
    if (!hvdl_adds_along_tree(e, &op->desc))
        return;
    pass->partial_begins = e->placement.tree.own_begins;
    pass->num_partials = (int)num_own(e);
    pass->part_stride = op->partials.stride;
    pass->part_dtype = part_dtype(e, op);
}

void hvdl_exchange_along_tree(const hvdl_engine *e, const hvdl_operation *op, uint64_t k,
                              hvdl_exchange_spec *spec)
{
    if (!hvdl_adds_along_tree(e, &op->desc) || spec->algorithm != HVDL_DIRECT)
        return;
    spec->tree = &e->placement.tree;
    spec->part_dtype = part_dtype(e, op);
    spec->own_partials = hvdl_partials_at(e, op, k, spec->buffer);
    spec->partial_stride = op->partials.stride;
}

/* Recursive doubling rounds at each step, and keeps partials where sums are. */
hvdl_algorithm hvdl_tree_algorithm(const hvdl_engine *e, const hvdl_operation *op,
                                   hvdl_algorithm chosen)
{
    int hosts = e->config.num_hosts;
    bool sixteen = hvdl_dtype_bytes(op->desc.dtype) == 2;
    bool rounds_once = part_dtype(e, op) == op->desc.dtype && (!sixteen || hosts == 2);
    bool doubles =
        chosen == HVDL_DOUBLING && rounds_once && hvdl_sum_tree_doubles(&e->placement.tree, hosts);
    return doubles ? HVDL_DOUBLING : HVDL_DIRECT;
}
