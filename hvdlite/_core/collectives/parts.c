/* Kinds in which each member has a part for each other one: alltoall, and gather and scatter, in which most
 * parts are empty. Also the first step of an Adasum, in which every member gets its slice of all tensors.
 *
 * On a host, each rank's staging block holds a slot for every other rank of the host, so that all of them
 * have something to take from each block; a rank copies its own part itself. (In a gather there is one slot,
 * the root's.) Parts for other hosts go from rank to rank, from the caller's memory to the caller's memory. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "collectives/phases.h"
#include "collectives/rows.h"
#include "engine/state.h"

hvdl_err hvdl_new_work(hvdl_operation *op, size_t bytes)
{
    return posix_memalign((void **)&op->work, 64, bytes ? bytes : 1) ? HVDL_ENOMEM : HVDL_OK;
}

/* ---- how much goes from whom to whom ---- */

static hvdl_err new_pairs(const hvdl_engine *e, hvdl_operation *op)
{
    op->parts.pairs = calloc((size_t)e->config.num_ranks, sizeof *op->parts.pairs);
    return op->parts.pairs ? HVDL_OK : HVDL_ENOMEM;
}

/* The parts follow each other in these buffers, or are where the caller said. */
static void place(const hvdl_engine *e, hvdl_operation *op, const char *from, char *to)
{
    for (int rank = 0; rank < e->config.num_ranks; rank++) {
        hvdl_pair *pair = &op->parts.pairs[rank];
        pair->from = op->inputs ? op->inputs[rank] : from;
        pair->to = op->outputs ? op->outputs[rank] : to;
        from += op->inputs ? 0 : pair->send_bytes;
        to += op->outputs ? 0 : pair->recv_bytes;
    }
}

static void note_longest(hvdl_operation *op, size_t bytes)
{
    op->parts.longest = bytes > op->parts.longest ? bytes : op->parts.longest;
}

/* Rows that member `index` (in the order of `members`) sends to local rank `local`. */
static int64_t rows_between(const hvdl_engine *e, const int64_t *rows, int index, int local)
{
    return rows[(size_t)index * (size_t)e->placement.local_size + (size_t)local];
}

hvdl_err hvdl_alltoall_prepare(const hvdl_engine *e, hvdl_operation *op, const int64_t *rows)
{
    int ranks = e->config.num_ranks, first = e->placement.host_first[e->placement.host];
    size_t row = op->collective->rows_are_elems ? hvdl_dtype_bytes(op->desc.dtype)
                                                : hvdl_desc_bytes(&op->desc);
    size_t all = 0;
    op->all_rows = malloc((size_t)ranks * sizeof *op->all_rows);
    if (!op->all_rows || new_pairs(e, op))
        return HVDL_ENOMEM;
    op->num_rows = ranks;
    for (int i = 0; i < ranks; i++) {
        int rank = e->placement.members[i];
        hvdl_pair *pair = &op->parts.pairs[rank];
        op->all_rows[rank] = rows_between(e, rows, i, e->placement.local);
        pair->send_bytes = (size_t)op->splits[rank] * row;
        pair->recv_bytes = (size_t)op->all_rows[rank] * row;
        all += pair->recv_bytes;
    }
    for (int from = 0; from < e->placement.local_size; from++)
        for (int to = 0; to < e->placement.local_size; to++)
            note_longest(op, (size_t)rows_between(e, rows, first + from, to) * row);
    if (hvdl_new_work(op, all))
        return HVDL_ENOMEM;
    place(e, op, op->input, op->work);
    return HVDL_OK;
}

/* Equal parts, or splits, which all ranks of this host have posted. */
static hvdl_err alltoall_into_prepare(const hvdl_engine *e, hvdl_operation *op, const int64_t *rows)
{
    size_t ranks = (size_t)e->config.num_ranks, esize = hvdl_dtype_bytes(op->desc.dtype);
    size_t equal = op->splits ? 0 : hvdl_desc_bytes(&op->desc) / ranks;
    (void)rows;
    if (new_pairs(e, op))
        return HVDL_ENOMEM;
    for (size_t rank = 0; rank < ranks; rank++) {
        hvdl_pair *pair = &op->parts.pairs[rank];
        pair->send_bytes = op->splits ? (size_t)op->splits[rank] * esize : equal;
        pair->recv_bytes = op->splits ? (size_t)op->splits[ranks + rank] * esize : equal;
    }
    note_longest(op, equal);
    for (int from = 0; op->splits && from < e->placement.local_size; from++)
        for (int to = 0; to < e->placement.local_size; to++)
            note_longest(op, (size_t)op->match->rows[(size_t)from * 2 * ranks +
                                                     (size_t)hvdl_rank_of_local(e, to)] *
                                 esize);
    place(e, op, op->input, op->output);
    return HVDL_OK;
}

static bool is_root(const hvdl_engine *e, const hvdl_operation *op)
{
    return op->desc.root == e->config.rank;
}

static bool has_root_here(const hvdl_engine *e, const hvdl_operation *op)
{
    return e->placement.host_of[op->desc.root] == e->placement.host;
}

static hvdl_err gather_prepare(const hvdl_engine *e, hvdl_operation *op, const int64_t *rows)
{
    size_t bytes = hvdl_desc_bytes(&op->desc);
    (void)rows;
    if (new_pairs(e, op))
        return HVDL_ENOMEM;
    for (int rank = 0; is_root(e, op) && rank < e->config.num_ranks; rank++)
        op->parts.pairs[rank].recv_bytes = bytes;
    op->parts.pairs[op->desc.root].send_bytes = bytes;
    note_longest(op, has_root_here(e, op) ? bytes : 0);
    place(e, op, op->input, op->output);
    op->parts.pairs[op->desc.root].from = op->input;
    return HVDL_OK;
}

static hvdl_err scatter_prepare(const hvdl_engine *e, hvdl_operation *op, const int64_t *rows)
{
    size_t bytes = hvdl_desc_bytes(&op->desc);
    (void)rows;
    if (new_pairs(e, op))
        return HVDL_ENOMEM;
    for (int rank = 0; is_root(e, op) && rank < e->config.num_ranks; rank++)
        op->parts.pairs[rank].send_bytes = bytes;
    op->parts.pairs[op->desc.root].recv_bytes = bytes;
    note_longest(op, has_root_here(e, op) ? bytes : 0);
    place(e, op, op->input, op->output);
    op->parts.pairs[op->desc.root].to = op->output;
    return HVDL_OK;
}

/* ---- splits that do not fit ---- */

bool hvdl_splits_differ(const hvdl_engine *e, const int64_t *rows, const char *site,
                        char text[HVDL_TEXT_BYTES])
{
    bool has_site = *site != '\0';
    size_t ranks = (size_t)e->config.num_ranks;
    const int *members = e->placement.members;
    for (size_t i = 0; i < ranks; i++)
        for (size_t j = 0; j < ranks; j++) {
            int from = members[i], to = members[j];
            int64_t sent = rows[i * 2 * ranks + (size_t)to];
            int64_t expected = rows[j * 2 * ranks + ranks + (size_t)from];
            if (sent == expected)
                continue;
            snprintf(text, HVDL_TEXT_BYTES,
                     HVDL_TITLE_HERE(
                         "%s") "%s%s%s: rank %d on %s sends %lld elements to rank %d on %s, which "
                               "expects %lld; make the splits of both ranks fit",
                     hvdl_kind_name(HVDL_ALLTOALL_INTO), has_site ? " (" : "", site,
                     has_site ? ")" : "", hvdl_world_rank(e, from), e->placement.name_of[from],
                     (long long)sent, hvdl_world_rank(e, to), e->placement.name_of[to],
                     (long long)expected);
            return true;
        }
    return false;
}

/* ---- pieces ---- */

/* Parts that a staging block has room for. */
static int num_slots(const hvdl_engine *e, const hvdl_operation *op)
{
    int others = e->placement.local_size - 1;
    return op->desc.kind == HVDL_GATHER || others == 0 ? 1 : others;
}

/* Bytes of each part that a piece moves. */
static size_t piece_bytes(const hvdl_engine *e, const hvdl_operation *op)
{
    size_t slot = hvdl_slot_bytes(&e->shm, num_slots(e, op));
    size_t blocks = e->config.piece_bytes / e->shm.block_bytes / (size_t)e->placement.local_size;
    return slot * (blocks ? blocks : 1);
}

uint64_t hvdl_alltoall_count_pieces(const hvdl_engine *e, hvdl_operation *op)
{
    return hvdl_ceil_div(op->parts.longest, piece_bytes(e, op)) + (e->config.num_hosts > 1);
}

bool hvdl_alltoall_has_exchange(const hvdl_operation *op, uint64_t k)
{
    (void)op;
    return k == 0;
}

bool hvdl_alltoall_has_pass(const hvdl_engine *e, const hvdl_operation *op, uint64_t k, int phase)
{
    return phase == HVDL_PHASE_A && !hvdl_piece_has_exchange(e, op, k);
}

/* Bytes that a piece moves of a part. */
static size_t bytes_in_piece(size_t bytes, size_t begin, size_t unit)
{
    size_t left = bytes > begin ? bytes - begin : 0;
    return left < unit ? left : unit;
}

hvdl_pass *hvdl_alltoall_make_pass(const hvdl_engine *e, const hvdl_operation *op, uint64_t k,
                                   int phase)
{
    size_t unit = piece_bytes(e, op), begin = (k - (e->config.num_hosts > 1)) * unit;
    hvdl_pass *pass = hvdl_pass_new(HVDL_PASS_PARTS, e->placement.local_size);
    (void)phase;
    if (!pass)
        return NULL;
    pass->num_slots = num_slots(e, op);
    pass->count = bytes_in_piece(op->parts.longest, begin, unit);
    for (int local = 0; local < e->placement.local_size; local++) {
        const hvdl_pair *pair = &op->parts.pairs[hvdl_rank_of_local(e, local)];
        hvdl_source *source = &pass->sources[local];
        source->local = local;
        source->bytes = bytes_in_piece(pair->send_bytes, begin, unit);
        source->take.end = bytes_in_piece(pair->recv_bytes, begin, unit);
        if (source->bytes)
            source->from = pair->from + begin;
        if (source->take.end)
            source->to = pair->to + begin;
    }
    return pass;
}

void hvdl_alltoall_describe_exchange(const hvdl_engine *e, const hvdl_operation *op, uint64_t k,
                                     hvdl_exchange_spec *spec, size_t *table)
{
    hvdl_pair *pairs = (hvdl_pair *)table;
    (void)k;
    _Static_assert(sizeof *pairs <= 4 * sizeof *table,
                   "the table has room for a pair of each rank");
    spec->algorithm = HVDL_PAIRWISE;
    spec->host = e->config.rank;
    spec->num_hosts = e->config.num_ranks;
    spec->peers = e->placement.all_ranks;
    spec->pairs = pairs;
    for (int rank = 0; rank < e->config.num_ranks; rank++)
        if (e->placement.host_of[rank] != e->placement.host)
            pairs[rank] = op->parts.pairs[rank];
}

/* ---- the collectives ---- */

#define COLLECTIVE_OF_PARTS                                                                        \
    .count_pieces = hvdl_alltoall_count_pieces, .has_exchange = hvdl_alltoall_has_exchange,        \
    .has_pass = hvdl_alltoall_has_pass, .make_pass = hvdl_alltoall_make_pass,                      \
    .describe_exchange = hvdl_alltoall_describe_exchange, .every_rank_exchanges = true

const hvdl_collective hvdl_collective_alltoall = {.prepare = hvdl_alltoall_prepare,
                                                  COLLECTIVE_OF_PARTS};
const hvdl_collective hvdl_collective_alltoall_into = {.prepare = alltoall_into_prepare,
                                                       COLLECTIVE_OF_PARTS};
const hvdl_collective hvdl_collective_gather = {.prepare = gather_prepare, COLLECTIVE_OF_PARTS};
const hvdl_collective hvdl_collective_scatter = {.prepare = scatter_prepare, COLLECTIVE_OF_PARTS};
