/* The collectives of plans whose buffers have owners: see owners.h. */
#define _GNU_SOURCE
#include "collectives/owners.h"

#include <stdlib.h>

#include "base/sizes.h"
#include "collectives/partials.h"
#include "collectives/phases.h"
#include "engine/state.h"

/* ---- who owns what: in elements of the buffer ---- */

static bool one_host(const hvdl_engine *e)
{
    return e->config.num_hosts == 1;
}

static bool on_each_host(const hvdl_desc *desc)
{
    return hvdl_facts_of(desc)->owners == HVDL_OWNERS_OF_HOST;
}

/* The buffer as if it were of the type by which it is cut. */
static hvdl_desc cut_of(const hvdl_desc *desc)
{
    hvdl_desc cut = *desc;
    cut.dtype = desc->cut_as;
    return cut;
}

/* One host: elements of each rank's share that a piece takes, so that all ranks have something to do. */
static size_t share_unit(const hvdl_engine *e, const hvdl_desc *desc)
{
    size_t bytes = e->config.piece_bytes / (size_t)e->placement.local_size / 64 * 64;
    return (bytes ? bytes : 64) / hvdl_dtype_bytes(desc->cut_as);
}

uint64_t hvdl_owned_pieces(const hvdl_engine *e, const hvdl_desc *desc)
{
    hvdl_desc cut = cut_of(desc);
    if (!one_host(e))
        return hvdl_pieces_of(e, &cut);
    hvdl_range largest =
        hvdl_slice((size_t)desc->count, e->placement.local_size, 0, (hvdl_dtype)desc->cut_as);
    return hvdl_ceil_div(hvdl_range_size(largest), share_unit(e, desc));
}

static hvdl_range within(hvdl_range range, hvdl_range part)
{
    return (hvdl_range){range.begin + part.begin, range.begin + part.end};
}

static hvdl_range slice_of(const hvdl_engine *e, const hvdl_desc *desc, uint64_t k, int rail)
{
    hvdl_desc cut = cut_of(desc);
    hvdl_range piece = hvdl_piece_range(e, &cut, k, (size_t)cut.count, hvdl_dtype_bytes(cut.dtype));
    return within(piece, hvdl_slice(hvdl_range_size(piece), e->placement.num_rails, rail,
                                    (hvdl_dtype)cut.dtype));
}

/* The part of a rail's slice that a host owns. */
static hvdl_range chunk_of(const hvdl_engine *e, const hvdl_desc *desc, uint64_t k, int rail,
                           int host)
{
    int hosts = e->config.num_hosts, chunk = (host + 1) % hosts;
    size_t elem_bytes = hvdl_dtype_bytes(cut_of(desc).dtype);
    hvdl_range slice = slice_of(e, desc, k, rail);
    return on_each_host(desc)
               ? slice
               : within(slice, hvdl_chunk(hvdl_range_size(slice), hosts, chunk, elem_bytes));
}

/* One host: the parts of the ranks' shares that piece k takes. */
static hvdl_range part_of_share(const hvdl_engine *e, const hvdl_desc *desc, uint64_t k, int local)
{
    hvdl_range share =
        hvdl_slice((size_t)desc->count, e->placement.local_size, local, (hvdl_dtype)desc->cut_as);
    size_t unit = share_unit(e, desc), size = hvdl_range_size(share);
    size_t begin = k * unit < size ? k * unit : size;
    return within(share, (hvdl_range){begin, size - begin < unit ? size : begin + unit});
}

hvdl_range hvdl_owned(const hvdl_engine *e, const hvdl_desc *desc, uint64_t k, int member)
{
    int local = e->placement.local_of[member], host = e->placement.host_of[member];
    if (one_host(e))
        return part_of_share(e, desc, k, local);
    int rails = e->placement.num_rails, rail = local % rails;
    int served = (e->placement.host_sizes[host] - rail + rails - 1) / rails;
    hvdl_range chunk = chunk_of(e, desc, k, rail, host);
    return within(
        chunk, hvdl_slice(hvdl_range_size(chunk), served, local / rails, (hvdl_dtype)desc->cut_as));
}

hvdl_err hvdl_engine_owned(const hvdl_engine *e, const hvdl_desc *desc, int member, hvdl_range **to,
                           size_t *count)
{
    uint64_t pieces = hvdl_owned_pieces(e, desc);
    hvdl_range *ranges = hvdl_new_array(pieces, sizeof *ranges);
    size_t num = 0;
    if (!ranges)
        return HVDL_ENOMEM;
    for (uint64_t k = 0; k < pieces; k++) {
        hvdl_range part = hvdl_owned(e, desc, k, member);
        if (!hvdl_range_size(part))
            continue;
        if (num && ranges[num - 1].end == part.begin)
            ranges[num - 1].end = part.end;
        else
            ranges[num++] = part;
    }
    *to = ranges;
    *count = num;
    return HVDL_OK;
}

static hvdl_range owned_by_local(const hvdl_engine *e, const hvdl_operation *op, uint64_t k,
                                 int local)
{
    return hvdl_owned(e, &op->desc, k, hvdl_rank_of_local(e, local));
}

/* ---- what all have ---- */

static uint64_t count_pieces(const hvdl_engine *e, hvdl_operation *op)
{
    return hvdl_owned_pieces(e, &op->desc);
}

static bool has_chunks(const hvdl_operation *op, uint64_t k)
{
    (void)k;
    return !on_each_host(&op->desc);
}

static bool more_ranks_than_rails(const hvdl_engine *e)
{
    return e->placement.local_size > e->placement.num_rails;
}

/* What a local rank has in place, and which this rank takes all of, or nothing. */
static hvdl_source in_place(const hvdl_operation *op, int local, hvdl_range elems, bool takes)
{
    size_t esize = hvdl_dtype_bytes(op->desc.dtype), bytes = hvdl_range_size(elems) * esize;
    size_t begin = elems.begin * esize;
    hvdl_range take = {0, takes ? bytes : 0};
    if (op->extents.list)
        return (hvdl_source){.local = local, .bytes = bytes, .take = take, .begin = begin};
    char *at = op->output + begin;
    return (hvdl_source){.local = local, .from = at, .bytes = bytes, .take = take, .to = at};
}

/* The hosts' chunks of this rail's slice, as offsets from where the slice begins. */
static void put_chunks(const hvdl_engine *e, const hvdl_operation *op, uint64_t k, size_t *table)
{
    size_t esize = hvdl_dtype_bytes(op->desc.dtype);
    size_t begin = slice_of(e, &op->desc, k, e->placement.local).begin;
    size_t *offsets = table, *bytes = table + e->config.num_hosts;
    for (int h = 0; h < e->config.num_hosts; h++) {
        hvdl_range chunk = chunk_of(e, &op->desc, k, e->placement.local, h);
        offsets[h] = (chunk.begin - begin) * esize;
        bytes[h] = hvdl_range_size(chunk) * esize;
    }
}

/* ---- reduce to owners ---- */

static bool to_owners_has_pass(const hvdl_engine *e, const hvdl_operation *op, uint64_t k,
                               int phase)
{
    if (phase == HVDL_PHASE_A)
        return hvdl_allreduce_has_pass(e, op, k, phase);
    return more_ranks_than_rails(e);
}

/* One host: each rank adds up what it owns. */
static hvdl_pass *scatter_to_owners(const hvdl_engine *e, const hvdl_operation *op, uint64_t k)
{
    int ranks = e->placement.local_size;
    size_t esize = hvdl_dtype_bytes(op->desc.dtype);
    hvdl_pass *pass = hvdl_reducing_pass(e, op, HVDL_PASS_SCATTER, ranks);
    for (int local = 0; pass && local < ranks; local++) {
        hvdl_range part = owned_by_local(e, op, k, local);
        size_t at = part.begin * esize;
        pass->sources[local] =
            (hvdl_source){.local = local,
                          .from = op->input + at,
                          .bytes = hvdl_range_size(part) * esize,
                          .to = local == e->placement.local ? op->output + at : NULL};
    }
    return pass;
}

/* The rails give the other ranks what these own of the chunks. */
static hvdl_pass *share_chunks(const hvdl_engine *e, const hvdl_operation *op, uint64_t k)
{
    int rails = e->placement.num_rails, own = e->placement.local;
    size_t esize = hvdl_dtype_bytes(op->desc.dtype);
    hvdl_pass *pass = hvdl_pass_new(HVDL_PASS_SHARE, rails);
    for (int rail = 0; pass && rail < rails; rail++) {
        hvdl_range chunk = chunk_of(e, &op->desc, k, rail, e->placement.host);
        hvdl_source *source = &pass->sources[rail];
        *source = in_place(op, rail, chunk, false);
        if (own == rail || own % rails != rail)
            continue;
        hvdl_range part = owned_by_local(e, op, k, own);
        source->take.begin = (part.begin - chunk.begin) * esize;
        source->take.end = (part.end - chunk.begin) * esize;
        source->to = op->output + part.begin * esize;
    }
    return pass;
}

static hvdl_pass *to_owners_make_pass(const hvdl_engine *e, const hvdl_operation *op, uint64_t k,
                                      int phase)
{
    if (phase == HVDL_PHASE_C)
        return share_chunks(e, op, k);
    return one_host(e) ? scatter_to_owners(e, op, k) : hvdl_allreduce_make_pass(e, op, k, phase);
}

/* The allreduce's, up to where each host has the sum of its chunk. Recursive doubling has no such half: it
 * is for small slices, and every host has every sum. But of two hosts' it is the sum that direct gives. */
static void to_owners_describe_exchange(const hvdl_engine *e, const hvdl_operation *op, uint64_t k,
                                        hvdl_exchange_spec *spec, size_t *table)
{
    hvdl_allreduce_describe_exchange(e, op, k, spec, table);
    if (on_each_host(&op->desc))
        return;
    if (spec->algorithm == HVDL_DOUBLING && e->config.num_hosts == 2)
        spec->algorithm = HVDL_DIRECT;
    if (spec->algorithm == HVDL_DOUBLING)
        return;
    put_chunks(e, op, k, table);
    spec->scatters = true;
    hvdl_exchange_along_tree(e, op, k, spec);
}

const hvdl_collective hvdl_collective_reduce_to_owners = {
    .prepare = hvdl_allreduce_prepare,
    .count_pieces = count_pieces,
    .has_pass = to_owners_has_pass,
    .make_pass = to_owners_make_pass,
    .describe_exchange = to_owners_describe_exchange,
};

/* ---- unite ---- */

/* All local ranks give what they own. */
static hvdl_pass *share_owned(const hvdl_engine *e, const hvdl_operation *op, uint64_t k)
{
    int ranks = e->placement.local_size;
    hvdl_pass *pass = hvdl_pass_new(HVDL_PASS_SHARE, ranks);
    for (int local = 0; pass && local < ranks; local++)
        pass->sources[local] = in_place(op, local, owned_by_local(e, op, k, local), true);
    if (pass)
        pass->extents = op->extents;
    return pass;
}

static hvdl_pass *share_slices(const hvdl_engine *e, const hvdl_operation *op, uint64_t k)
{
    int rails = e->placement.num_rails;
    hvdl_pass *pass = hvdl_pass_new(HVDL_PASS_SHARE, rails);
    for (int rail = 0; pass && rail < rails; rail++)
        pass->sources[rail] = in_place(op, rail, slice_of(e, &op->desc, k, rail), true);
    return pass;
}

static bool unite_has_pass(const hvdl_engine *e, const hvdl_operation *op, uint64_t k, int phase)
{
    (void)op, (void)k;
    if (phase == HVDL_PHASE_A)
        return one_host(e) || more_ranks_than_rails(e);
    return e->placement.local_size > 1;
}

static hvdl_pass *unite_make_pass(const hvdl_engine *e, const hvdl_operation *op, uint64_t k,
                                  int phase)
{
    return phase == HVDL_PHASE_A ? share_owned(e, op, k) : share_slices(e, op, k);
}

static void unite_describe_exchange(const hvdl_engine *e, const hvdl_operation *op, uint64_t k,
                                    hvdl_exchange_spec *spec, size_t *table)
{
    hvdl_range slice = slice_of(e, &op->desc, k, e->placement.local);
    spec->algorithm = HVDL_RING_GATHER;
    spec->tag += 2 * (int)(k % HVDL_PIECE_WINDOW);
    spec->buffer = op->output + slice.begin * hvdl_dtype_bytes(op->desc.dtype);
    put_chunks(e, op, k, table);
}

const hvdl_collective hvdl_collective_unite = {
    .count_pieces = count_pieces,
    .has_pass = unite_has_pass,
    .make_pass = unite_make_pass,
    .describe_exchange = unite_describe_exchange,
};

/* ---- unite on each host ---- */

static bool unite_on_host_has_pass(const hvdl_engine *e, const hvdl_operation *op, uint64_t k,
                                   int phase)
{
    (void)op, (void)k;
    return phase == HVDL_PHASE_A && e->placement.local_size > 1;
}

const hvdl_collective hvdl_collective_unite_on_host = {
    .count_pieces = count_pieces,
    .has_exchange = has_chunks,
    .has_pass = unite_on_host_has_pass,
    .make_pass = unite_make_pass,
};
