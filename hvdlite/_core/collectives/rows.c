/* Allgather, with a result of the engine's, as the number of rows is known only then, or in the caller's
 * memory. On one host each part goes from its rank's input to its place. With several, all parts are
 * gathered in the order of the hosts, as the exchange sends whole hosts; that is the result itself if it is one
 * tensor and the ranks of each host follow each other. */
#define _GNU_SOURCE
#include "collectives/rows.h"

#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "collectives/phases.h"
#include "engine/state.h"

/* Bytes of each source in one share pass. */
static size_t share_unit(const hvdl_engine *e)
{
    size_t unit = e->config.piece_bytes / (size_t)e->placement.local_size;
    return unit ? unit : 1;
}

static bool in_host_order(const hvdl_engine *e)
{
    for (int i = 0; i < e->config.num_ranks; i++)
        if (e->placement.members[i] != i)
            return false;
    return true;
}

/* ---- where the parts go ---- */

/* Every part is gathered where the one before it in the order of the hosts ends. */
static void place_in_host_order(const hvdl_engine *e, hvdl_operation *op)
{
    size_t at = 0;
    for (int h = 0, i = 0; h < e->config.num_hosts; h++) {
        op->parts.host_places[h] = at;
        for (int local = 0; local < e->placement.host_sizes[h]; local++, i++) {
            hvdl_pair *pair = &op->parts.pairs[e->placement.members[i]];
            pair->to = op->parts.gathered + at;
            at += pair->recv_bytes;
        }
    }
    op->parts.host_places[e->config.num_hosts] = at;
}

static void place_in_rank_order(const hvdl_engine *e, hvdl_operation *op, char *to)
{
    for (int rank = 0; rank < e->config.num_ranks; rank++) {
        op->parts.pairs[rank].to = to;
        to += op->parts.pairs[rank].recv_bytes;
    }
}

static hvdl_err new_places(const hvdl_engine *e, hvdl_operation *op)
{
    size_t ranks = (size_t)e->config.num_ranks, hosts = (size_t)e->config.num_hosts;
    op->parts.pairs = calloc(ranks, sizeof *op->parts.pairs);
    op->parts.host_places = malloc((hosts + 1) * sizeof *op->parts.host_places);
    return op->parts.pairs && op->parts.host_places ? HVDL_OK : HVDL_ENOMEM;
}

hvdl_err hvdl_gather_prepare(const hvdl_engine *e, hvdl_operation *op, const int64_t *rows)
{
    int ranks = e->config.num_ranks;
    size_t all = 0;
    op->all_rows = malloc((size_t)ranks * sizeof *op->all_rows);
    if (!op->all_rows || new_places(e, op))
        return HVDL_ENOMEM;
    op->num_rows = ranks;
    for (int i = 0; i < ranks; i++) {
        int rank = e->placement.members[i];
        op->all_rows[rank] = rows[i];
        op->parts.pairs[rank].recv_bytes = (size_t)rows[i] * hvdl_desc_bytes(&op->desc);
        all += op->parts.pairs[rank].recv_bytes;
    }
    if (hvdl_new_work(op, all))
        return HVDL_ENOMEM;
    op->parts.gathered = op->work;
    if (e->config.num_hosts == 1)
        place_in_rank_order(e, op, op->work);
    else
        place_in_host_order(e, op);
    return HVDL_OK;
}

/* Several hosts: in the result itself, or in memory from which the parts are copied in the end. */
static hvdl_err gather_on_hosts(const hvdl_engine *e, hvdl_operation *op, size_t all)
{
    op->parts.gathered = op->output;
    if (op->outputs || !in_host_order(e)) {
        if (hvdl_new_work(op, all))
            return HVDL_ENOMEM;
        op->parts.gathered = op->work;
    }
    place_in_host_order(e, op);
    return HVDL_OK;
}

static hvdl_err gather_into_prepare(const hvdl_engine *e, hvdl_operation *op, const int64_t *rows)
{
    size_t esize = hvdl_dtype_bytes(op->desc.dtype), all = 0;
    (void)rows;
    if (new_places(e, op))
        return HVDL_ENOMEM;
    for (int rank = 0; rank < e->config.num_ranks; rank++) {
        int64_t elems = op->splits ? op->splits[rank] : op->desc.count;
        op->parts.pairs[rank].recv_bytes = (size_t)elems * esize;
        all += op->parts.pairs[rank].recv_bytes;
    }
    if (e->config.num_hosts > 1)
        return gather_on_hosts(e, op, all);
    place_in_rank_order(e, op, op->output);
    for (int rank = 0; op->outputs && rank < e->config.num_ranks; rank++)
        op->parts.pairs[rank].to = op->outputs[rank];
    return HVDL_OK;
}

/* ---- pieces ---- */

/* Bytes of rail `rail`'s slice of host `host`'s block, within `gathered`. */
static hvdl_range gather_slice(const hvdl_engine *e, const hvdl_operation *op, int host, int rail)
{
    size_t begin = op->parts.host_places[host], size = op->parts.host_places[host + 1] - begin;
    hvdl_range slice = hvdl_slice(size, e->placement.num_rails, rail, HVDL_UINT8);
    return (hvdl_range){begin + slice.begin, begin + slice.end};
}

/* C pieces for one remote host's block. */
static uint64_t num_spreading(const hvdl_engine *e, const hvdl_operation *op, int host)
{
    return hvdl_ceil_div(hvdl_range_size(gather_slice(e, op, host, 0)), share_unit(e));
}

static uint64_t num_gathering(const hvdl_engine *e, const hvdl_operation *op)
{
    size_t longest = 0;
    for (int local = 0; local < e->placement.local_size; local++) {
        size_t bytes = op->parts.pairs[hvdl_rank_of_local(e, local)].recv_bytes;
        longest = bytes > longest ? bytes : longest;
    }
    return hvdl_ceil_div(longest, share_unit(e));
}

uint64_t hvdl_gather_count_pieces(const hvdl_engine *e, hvdl_operation *op)
{
    op->parts.num_gathering = num_gathering(e, op);
    if (e->config.num_hosts == 1)
        return op->parts.num_gathering;
    uint64_t pieces = op->parts.num_gathering + 1;
    for (int h = 0; h < e->config.num_hosts; h++)
        if (h != e->placement.host)
            pieces += num_spreading(e, op, h);
    return pieces;
}

static hvdl_source part_of(int local, const char *from, char *to, size_t bytes)
{
    return (hvdl_source){
        .local = local, .from = from, .bytes = bytes, .take = {0, bytes}, .to = to};
}

static hvdl_pass *gather_pass(const hvdl_engine *e, const hvdl_operation *op, uint64_t k)
{
    size_t unit = share_unit(e), begin = k * unit;
    hvdl_pass *pass = hvdl_pass_new(HVDL_PASS_SHARE, e->placement.local_size);
    for (int local = 0; pass && local < e->placement.local_size; local++) {
        const hvdl_pair *pair = &op->parts.pairs[hvdl_rank_of_local(e, local)];
        size_t left = pair->recv_bytes > begin ? pair->recv_bytes - begin : 0;
        if (left)
            pass->sources[local] =
                part_of(local, op->input + begin, pair->to + begin, left < unit ? left : unit);
    }
    return pass;
}

/* C piece k: a part of what the rails received of one other host's block. */
static hvdl_pass *spread_pass(const hvdl_engine *e, const hvdl_operation *op, uint64_t k)
{
    uint64_t index = k - op->parts.num_gathering - 1;
    int host = e->placement.host == 0 ? 1 : 0;
    while (index >= num_spreading(e, op, host)) {
        index -= num_spreading(e, op, host++);
        host += host == e->placement.host;
    }
    size_t unit = share_unit(e), begin = index * unit;
    hvdl_pass *pass = hvdl_pass_new(HVDL_PASS_SHARE, e->placement.num_rails);
    for (int rail = 0; pass && rail < e->placement.num_rails; rail++) {
        hvdl_range slice = gather_slice(e, op, host, rail);
        size_t size = hvdl_range_size(slice), left = size > begin ? size - begin : 0;
        char *at = op->parts.gathered + slice.begin + begin;
        pass->sources[rail] = part_of(rail, at, at, left < unit ? left : unit);
    }
    return pass;
}

bool hvdl_gather_has_pass(const hvdl_engine *e, const hvdl_operation *op, uint64_t k, int phase)
{
    return phase == HVDL_PHASE_A && k != op->parts.num_gathering &&
           (k < op->parts.num_gathering || e->placement.local_size > 1);
}

hvdl_pass *hvdl_gather_make_pass(const hvdl_engine *e, const hvdl_operation *op, uint64_t k,
                                 int phase)
{
    (void)phase;
    return k < op->parts.num_gathering ? gather_pass(e, op, k) : spread_pass(e, op, k);
}

bool hvdl_gather_has_exchange(const hvdl_operation *op, uint64_t k)
{
    return k == op->parts.num_gathering;
}

bool hvdl_gather_waits(const hvdl_operation *op, uint64_t k)
{
    return k == op->parts.num_gathering || k == op->parts.num_gathering + 1;
}

void hvdl_gather_describe_exchange(const hvdl_engine *e, const hvdl_operation *op, uint64_t k,
                                   hvdl_exchange_spec *spec, size_t *table)
{
    size_t *offsets = table, *bytes = table + e->config.num_hosts;
    (void)k;
    spec->algorithm = HVDL_RING_GATHER;
    spec->buffer = op->parts.gathered;
    for (int h = 0; h < e->config.num_hosts; h++) {
        hvdl_range slice = gather_slice(e, op, h, e->placement.local);
        offsets[h] = slice.begin;
        bytes[h] = hvdl_range_size(slice);
    }
}

/* ---- the end ---- */

/* Copies the parts from the order of the hosts to that of the ranks: one after the other, or to where each
 * is wanted. */
static void reorder(const hvdl_engine *e, const hvdl_operation *op, char *to, void *const *each)
{
    for (int rank = 0; rank < e->config.num_ranks; rank++) {
        const hvdl_pair *pair = &op->parts.pairs[rank];
        if (pair->recv_bytes)
            memcpy(each ? each[rank] : to, pair->to, pair->recv_bytes);
        to += each ? 0 : pair->recv_bytes;
    }
}

/* The result of members whose ranks are not together on their hosts. */
static hvdl_err gather_settle(hvdl_engine *e, hvdl_operation *op)
{
    if (e->config.num_hosts == 1 || in_host_order(e))
        return HVDL_OK;
    if (hvdl_new_work(op, op->parts.host_places[e->config.num_hosts])) {
        op->work = op->parts.gathered;
        return HVDL_ENOMEM;
    }
    reorder(e, op, op->work, NULL);
    free(op->parts.gathered);
    return HVDL_OK;
}

static hvdl_err gather_into_settle(hvdl_engine *e, hvdl_operation *op)
{
    if (op->work)
        reorder(e, op, op->output, op->outputs);
    return HVDL_OK;
}

/* ---- the collectives ---- */

#define COLLECTIVE_OF_ROWS                                                                         \
    .count_pieces = hvdl_gather_count_pieces, .has_exchange = hvdl_gather_has_exchange,            \
    .waits = hvdl_gather_waits, .has_pass = hvdl_gather_has_pass,                                  \
    .make_pass = hvdl_gather_make_pass, .describe_exchange = hvdl_gather_describe_exchange

const hvdl_collective hvdl_collective_allgather = {
    .prepare = hvdl_gather_prepare,
    .settle = gather_settle,
    COLLECTIVE_OF_ROWS,
};

const hvdl_collective hvdl_collective_allgather_into = {
    .prepare = gather_into_prepare,
    .settle = gather_into_settle,
    COLLECTIVE_OF_ROWS,
};
