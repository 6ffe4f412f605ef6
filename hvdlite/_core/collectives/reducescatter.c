/* The collective of reducescatter. */
#define _GNU_SOURCE
#include "collectives/reducescatter.h"

#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "collectives/partials.h"
#include "collectives/phases.h"
#include "engine/placement.h"
#include "engine/state.h"
#include "operations/facts.h"

/* Piece k has a part of every member's share, so that all ranks of a host have something to add up in each
 * block, and all hosts in each exchange. Rail i exchanges the parts of the i-th rank of each host and, where
 * a host has more ranks than rails, of those that come a whole number of rails later: host by host, which
 * makes a host's chunk. They lie so in `work` of the rail, piece by piece. Its first part of its own host's
 * chunk is its own. On one host, where every rank is a rail, the sums go to where they belong at once. */

static size_t begin_of_share(const hvdl_engine *e, const hvdl_operation *op, int member)
{
    const hvdl_desc *desc = &op->desc;
    size_t begin = 0;
    if (op->splits) {
        for (int other = 0; other < member; other++)
            begin += (size_t)op->splits[other];
        return begin;
    }
    size_t rows = (size_t)desc->dims[0], row = rows ? (size_t)desc->count / rows : 0;
    return hvdl_part(rows, (size_t)e->config.num_ranks, (size_t)member, 1).begin * row;
}

static size_t end_of_share(const hvdl_engine *e, const hvdl_operation *op, int member)
{
    bool is_last = member + 1 == e->config.num_ranks;
    return is_last ? (size_t)op->desc.count : begin_of_share(e, op, member + 1);
}

hvdl_range hvdl_own_elems(const hvdl_engine *e, const hvdl_operation *op)
{
    int own = e->config.rank;
    return (hvdl_range){begin_of_share(e, op, own), end_of_share(e, op, own)};
}

hvdl_err hvdl_join_inputs(const hvdl_engine *e, hvdl_operation *op)
{
    size_t esize = hvdl_dtype_bytes(op->desc.dtype);
    if (e->config.num_ranks == 1) {
        op->input = op->inputs[0];
        return HVDL_OK;
    }
    if (!hvdl_is_tiny(e, &op->desc, false))
        return HVDL_OK;
    op->work = hvdl_new_array((size_t)op->desc.count, esize);
    if (!op->work)
        return HVDL_ENOMEM;
    for (int member = 0; member < e->config.num_ranks; member++) {
        size_t begin = begin_of_share(e, op, member), end = end_of_share(e, op, member);
        if (end > begin)
            memcpy(op->work + begin * esize, op->inputs[member], (end - begin) * esize);
    }
    op->input = op->work;
    return HVDL_OK;
}

static size_t share_of(const hvdl_operation *op, int member)
{
    return op->shares.begins[member + 1] - op->shares.begins[member];
}

/* What pieces before piece k have of a member's share. */
static size_t before_piece(const hvdl_operation *op, int member, uint64_t k)
{
    size_t share = share_of(op, member);
    return k * op->shares.unit < share ? k * op->shares.unit : share;
}

static size_t part_of(const hvdl_operation *op, int member, uint64_t k)
{
    return before_piece(op, member, k + 1) - before_piece(op, member, k);
}

/* This rank's data of a member's part. */
static const char *input_of(const hvdl_operation *op, int member, uint64_t k)
{
    size_t at = before_piece(op, member, k), esize = hvdl_dtype_bytes(op->desc.dtype);
    if (op->inputs)
        return (const char *)op->inputs[member] + at * esize;
    return op->input + (op->shares.begins[member] + at) * esize;
}

/* The members that a rail serves, host by host; all begin with {0, rail}. -1: there are no more. */
typedef struct {
    int host, local;
} served;

static int next_served(const hvdl_engine *e, served *at)
{
    int rails = e->placement.num_rails;
    while (at->host < e->config.num_hosts) {
        int host = at->host, local = at->local;
        if (local < e->placement.host_sizes[host]) {
            at->local += rails;
            return hvdl_member_of_host(&e->placement, host, local);
        }
        at->host++;
        at->local %= rails;
    }
    return -1;
}

/* Where a piece begins in `work` of a rail, in elements. */
static size_t begin_of_piece(const hvdl_engine *e, const hvdl_operation *op, int rail, uint64_t k)
{
    size_t begin = 0;
    served at = {0, rail};
    for (int member; (member = next_served(e, &at)) >= 0;)
        begin += before_piece(op, member, k);
    return begin;
}

/* Where a rail's chunk of its own host begins in a piece of its `work`, in elements. */
static size_t begin_of_own_chunk(const hvdl_engine *e, const hvdl_operation *op, int rail,
                                 uint64_t k)
{
    size_t begin = begin_of_piece(e, op, rail, k);
    served at = {0, rail};
    for (int member; (member = next_served(e, &at)) >= 0;) {
        if (e->placement.host_of[member] == e->placement.host)
            break;
        begin += part_of(op, member, k);
    }
    return begin;
}

static size_t largest_share(const hvdl_engine *e, const hvdl_operation *op)
{
    size_t largest = 0;
    for (int member = 0; member < e->config.num_ranks; member++)
        if (share_of(op, member) > largest)
            largest = share_of(op, member);
    return largest;
}

static uint64_t reducescatter_count_pieces(const hvdl_engine *e, hvdl_operation *op)
{
    return hvdl_ceil_div(largest_share(e, op), op->shares.unit);
}

/* The pieces have about the size of others where the shares do. */
static hvdl_err reducescatter_prepare(const hvdl_engine *e, hvdl_operation *op, const int64_t *rows)
{
    size_t ranks = (size_t)e->config.num_ranks, esize = hvdl_dtype_bytes(op->desc.dtype);
    size_t *begins = hvdl_new_array(ranks + 1, sizeof *begins);
    (void)rows;
    if (!begins)
        return HVDL_ENOMEM;
    op->shares.begins = begins;
    begins[0] = 0;
    for (size_t member = 1; member < ranks; member++)
        begins[member] = op->splits ? begins[member - 1] + (size_t)op->splits[member - 1]
                                    : begin_of_share(e, op, (int)member);
    begins[ranks] = (size_t)op->desc.count;
    uint64_t pieces = hvdl_count_pieces(e, op);
    size_t unit = hvdl_ceil_div(largest_share(e, op), pieces ? pieces : 1), line = 64 / esize;
    op->shares.unit = hvdl_ceil_div(unit ? unit : 1, line) * line;
    if (e->config.num_hosts == 1 || e->placement.local >= e->placement.num_rails)
        return HVDL_OK;
    pieces = reducescatter_count_pieces(e, op);
    size_t bytes = begin_of_piece(e, op, e->placement.local, pieces) * esize;
    if (posix_memalign((void **)&op->work, 64, bytes ? bytes : 1))
        return HVDL_ENOMEM;
    if (!hvdl_adds_along_tree(e, &op->desc))
        return HVDL_OK;
    /* No piece is larger than the first one. */
    return hvdl_partials_prepare(e, op, begin_of_piece(e, op, e->placement.local, 1), pieces);
}

static bool reducescatter_has_pass(const hvdl_engine *e, const hvdl_operation *op, uint64_t k,
                                   int phase)
{
    (void)op, (void)k;
    return phase == HVDL_PHASE_A ||
           (e->config.num_hosts > 1 && e->placement.local_size > e->placement.num_rails);
}

static hvdl_pass *reduce_parts(const hvdl_engine *e, const hvdl_operation *op, uint64_t k)
{
    size_t esize = hvdl_dtype_bytes(op->desc.dtype);
    bool several_hosts = e->config.num_hosts > 1;
    hvdl_pass *pass = hvdl_reducing_pass(e, op, HVDL_PASS_SCATTER, e->config.num_ranks);
    size_t sum_bytes = pass ? hvdl_dtype_bytes((int)pass->part_dtype) : 0;
    hvdl_source *source = pass ? pass->sources : NULL;
    for (int rail = 0; pass && rail < e->placement.num_rails; rail++) {
        char *to = NULL;
        if (rail == e->placement.local && several_hosts)
            to = hvdl_partials_at(e, op, k, op->work + begin_of_piece(e, op, rail, k) * esize);
        else if (rail == e->placement.local)
            to = op->output + before_piece(op, e->config.rank, k) * esize;
        served at = {0, rail};
        for (int member; (member = next_served(e, &at)) >= 0;) {
            size_t elems = part_of(op, member, k);
            *source++ = (hvdl_source){
                .local = rail, .from = input_of(op, member, k), .bytes = elems * esize, .to = to};
            to = to ? to + elems * sum_bytes : NULL;
        }
    }
    return pass;
}

/* The rails give the parts of the ranks that are none. */
static hvdl_pass *share_parts(const hvdl_engine *e, const hvdl_operation *op, uint64_t k)
{
    size_t esize = hvdl_dtype_bytes(op->desc.dtype);
    int rails = e->placement.num_rails;
    hvdl_pass *pass = hvdl_pass_new(HVDL_PASS_SHARE, rails);
    for (int rail = 0; pass && rail < rails; rail++) {
        hvdl_source source = {.local = rail};
        if (rail == e->placement.local) {
            int own = hvdl_rank_of_local(e, rail);
            size_t at = begin_of_own_chunk(e, op, rail, k) + part_of(op, own, k);
            source.from = op->work + at * esize;
        }
        for (int local = rail + rails; local < e->placement.local_size; local += rails) {
            size_t bytes = part_of(op, hvdl_rank_of_local(e, local), k) * esize;
            if (local == e->placement.local) {
                source.take = (hvdl_range){source.bytes, source.bytes + bytes};
                source.to = op->output + before_piece(op, e->config.rank, k) * esize;
            }
            source.bytes += bytes;
        }
        pass->sources[rail] = source;
    }
    return pass;
}

static hvdl_pass *reducescatter_make_pass(const hvdl_engine *e, const hvdl_operation *op,
                                          uint64_t k, int phase)
{
    return phase == HVDL_PHASE_A ? reduce_parts(e, op, k) : share_parts(e, op, k);
}

static void reducescatter_describe_exchange(const hvdl_engine *e, const hvdl_operation *op,
                                            uint64_t k, hvdl_exchange_spec *spec, size_t *table)
{
    size_t esize = hvdl_dtype_bytes(op->desc.dtype);
    int own = e->placement.local, hosts = e->config.num_hosts;
    size_t *bytes = table + hosts;
    served at = {0, own};
    for (int member; (member = next_served(e, &at)) >= 0;)
        bytes[e->placement.host_of[member]] += part_of(op, member, k) * esize;
    for (int h = 1; h < hosts; h++)
        table[h] = table[h - 1] + bytes[h - 1];
    hvdl_describe_reduction(e, op, spec);
    spec->tag += 2 * (int)(k % HVDL_PIECE_WINDOW);
    spec->buffer = op->work + begin_of_piece(e, op, own, k) * esize;
    hvdl_scatter_between_hosts(e, op, k, spec);
}

/* Copies a rail's own parts from `work`. */
static hvdl_err reducescatter_settle(hvdl_engine *e, hvdl_operation *op)
{
    size_t esize = hvdl_dtype_bytes(op->desc.dtype);
    int rail = e->placement.local, own = e->config.rank;
    if (e->config.num_hosts == 1 || rail >= e->placement.num_rails)
        return HVDL_OK;
    for (uint64_t k = 0; part_of(op, own, k); k++)
        memcpy(op->output + before_piece(op, own, k) * esize,
               op->work + begin_of_own_chunk(e, op, rail, k) * esize, part_of(op, own, k) * esize);
    return HVDL_OK;
}

const hvdl_collective hvdl_collective_reducescatter = {
    .prepare = reducescatter_prepare,
    .count_pieces = reducescatter_count_pieces,
    .has_pass = reducescatter_has_pass,
    .make_pass = reducescatter_make_pass,
    .describe_exchange = reducescatter_describe_exchange,
    .settle = reducescatter_settle,
};
