/* Allgather and alltoall: their members' parts differ in size, and where each lies is worked out
 * here. Also the first step of an Adasum, in which every member gets its slice of all tensors. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "engine/phases.h"
#include "base/sizes.h"

static size_t row_bytes(const hvdl_operation *op)
{
    return op->course->rows_are_elems ? hvdl_dtype_bytes(op->desc.dtype)
                                      : hvdl_desc_bytes(&op->desc);
}

/* Bytes of each source in one share pass. */
static size_t share_unit(const hvdl_engine *e)
{
    size_t unit = e->config.piece_bytes / (size_t)e->placement.local_size;
    return unit ? unit : 1;
}

static hvdl_err new_work(hvdl_operation *op, size_t bytes)
{
    return posix_memalign((void **)&op->work, 64, bytes ? bytes : 1) ? HVDL_ENOMEM : HVDL_OK;
}

/* ---- allgather ---- */

hvdl_err hvdl_gather_prepare(const hvdl_engine *e, hvdl_operation *op, const int64_t *rows)
{
    int ranks = e->config.num_ranks, hosts = e->config.num_hosts;
    op->all_rows = malloc((size_t)ranks * sizeof *op->all_rows);
    op->parts.places = malloc((size_t)ranks * sizeof *op->parts.places);
    op->parts.host_places = malloc(((size_t)hosts + 1) * sizeof *op->parts.host_places);
    if (!op->all_rows || !op->parts.places || !op->parts.host_places)
        return HVDL_ENOMEM;
    op->num_rows = ranks;
    size_t at = 0;
    for (int h = 0, i = 0; h < hosts; h++) {
        op->parts.host_places[h] = at;
        for (int local = 0; local < e->placement.host_sizes[h]; local++, i++) {
            int rank = e->placement.members[i];
            op->all_rows[rank] = rows[i];
            op->parts.places[rank] = at;
            at += (size_t)rows[i] * row_bytes(op);
        }
    }
    op->parts.host_places[hosts] = at;
    return new_work(op, at);
}

/* Bytes of rail `rail`'s slice of host `host`'s block, within `work`. */
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
        size_t bytes = (size_t)op->all_rows[hvdl_rank_of_local(e, local)] * row_bytes(op);
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
    return (hvdl_source){local, from, bytes, {0, bytes}, to};
}

static hvdl_pass *gather_pass(const hvdl_engine *e, const hvdl_operation *op, uint64_t k)
{
    size_t unit = share_unit(e), begin = k * unit;
    hvdl_pass *pass = hvdl_pass_new(HVDL_PASS_SHARE, e->placement.local_size);
    for (int local = 0; pass && local < e->placement.local_size; local++) {
        int rank = hvdl_rank_of_local(e, local);
        size_t bytes = (size_t)op->all_rows[rank] * row_bytes(op);
        size_t left = bytes > begin ? bytes - begin : 0;
        pass->sources[local] =
            part_of(local, op->input + begin, op->work + op->parts.places[rank] + begin,
                    left < unit ? left : unit);
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
        char *at = op->work + slice.begin + begin;
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
    spec->algorithm = HVDL_GATHER;
    spec->buffer = op->work;
    for (int h = 0; h < e->config.num_hosts; h++) {
        hvdl_range slice = gather_slice(e, op, h, e->placement.local);
        offsets[h] = slice.begin;
        bytes[h] = hvdl_range_size(slice);
    }
}

/* Members whose ranks are not together on their hosts: from host order to rank order. */
static hvdl_err reorder(hvdl_engine *e, hvdl_operation *op)
{
    bool in_order = true;
    for (int i = 0; i < e->config.num_ranks; i++)
        in_order &= e->placement.members[i] == i;
    if (in_order)
        return HVDL_OK;
    char *gathered = op->work;
    if (new_work(op, op->parts.host_places[e->config.num_hosts])) {
        op->work = gathered;
        return HVDL_ENOMEM;
    }
    char *to = op->work;
    for (int rank = 0; rank < e->config.num_ranks; rank++) {
        size_t bytes = (size_t)op->all_rows[rank] * row_bytes(op);
        if (bytes)
            memcpy(to, gathered + op->parts.places[rank], bytes);
        to += bytes;
    }
    free(gathered);
    return HVDL_OK;
}

const hvdl_course hvdl_course_allgather = {
    .prepare = hvdl_gather_prepare,
    .count_pieces = hvdl_gather_count_pieces,
    .has_exchange = hvdl_gather_has_exchange,
    .waits = hvdl_gather_waits,
    .has_pass = hvdl_gather_has_pass,
    .make_pass = hvdl_gather_make_pass,
    .describe_exchange = hvdl_gather_describe_exchange,
    .settle = reorder,
};

/* ---- alltoall ---- */

/* Rows that member `index` (in the order of `members`) sends to local rank `local`. */
static int64_t rows_between(const hvdl_engine *e, const hvdl_operation *op, int index, int local)
{
    return op->parts.matrix[(size_t)index * (size_t)e->placement.local_size + (size_t)local];
}

/* What each local rank puts into the conveyor: its rows for the local ranks, one after the other.
 * Bytes of local rank `from`'s part for local rank `to`. */
static hvdl_range local_part(const hvdl_engine *e, const hvdl_operation *op, int from, int to)
{
    int index = e->placement.host_first[e->placement.host] + from;
    size_t begin = 0, row = row_bytes(op);
    for (int local = 0; local < to; local++)
        begin += (size_t)rows_between(e, op, index, local) * row;
    return (hvdl_range){begin, begin + (size_t)rows_between(e, op, index, to) * row};
}

static size_t local_stream_bytes(const hvdl_engine *e, const hvdl_operation *op, int from)
{
    return local_part(e, op, from, e->placement.local_size - 1).end;
}

/* Where this rank's rows for the local ranks begin; they are packed first if they are not together,
 * as the ranks of this host are not. */
static hvdl_err pack_local_stream(const hvdl_engine *e, hvdl_operation *op)
{
    bool together = true;
    for (int local = 1; local < e->placement.local_size; local++)
        together &= hvdl_rank_of_local(e, local) == hvdl_rank_of_local(e, 0) + local;
    op->parts.local_stream = op->input + op->parts.send_places[hvdl_rank_of_local(e, 0)];
    if (together)
        return HVDL_OK;
    size_t bytes = local_stream_bytes(e, op, e->placement.local);
    op->parts.packed = malloc(bytes ? bytes : 1);
    if (!op->parts.packed)
        return HVDL_ENOMEM;
    op->parts.local_stream = op->parts.packed;
    for (int local = 0; local < e->placement.local_size; local++) {
        hvdl_range part = local_part(e, op, e->placement.local, local);
        if (hvdl_range_size(part))
            memcpy(op->parts.packed + part.begin,
                   op->input + op->parts.send_places[hvdl_rank_of_local(e, local)],
                   hvdl_range_size(part));
    }
    return HVDL_OK;
}

hvdl_err hvdl_alltoall_prepare(const hvdl_engine *e, hvdl_operation *op, const int64_t *rows)
{
    size_t ranks = (size_t)e->config.num_ranks, row = row_bytes(op), at = 0, sent = 0;
    size_t matrix_bytes = ranks * (size_t)e->placement.local_size * sizeof(int64_t);
    op->parts.matrix = hvdl_new_array(ranks * (size_t)e->placement.local_size, sizeof(int64_t));
    op->all_rows = malloc(ranks * sizeof *op->all_rows);
    op->parts.places = malloc(ranks * sizeof *op->parts.places);
    op->parts.send_places = malloc((ranks + 1) * sizeof *op->parts.send_places);
    if (!op->parts.matrix || !op->all_rows || !op->parts.places || !op->parts.send_places)
        return HVDL_ENOMEM;
    op->num_rows = (int)ranks;
    memcpy(op->parts.matrix, rows, matrix_bytes);
    for (int i = 0; i < (int)ranks; i++)
        op->all_rows[e->placement.members[i]] = rows_between(e, op, i, e->placement.local);
    for (size_t rank = 0; rank < ranks; rank++) {
        op->parts.places[rank] = at;
        op->parts.send_places[rank] = sent;
        at += (size_t)op->all_rows[rank] * row;
        sent += (size_t)op->splits[rank] * row;
    }
    op->parts.send_places[ranks] = sent;
    hvdl_err err = new_work(op, at);
    return err ? err : pack_local_stream(e, op);
}

static uint64_t num_sharing(const hvdl_engine *e, const hvdl_operation *op)
{
    size_t longest = 0;
    for (int local = 0; local < e->placement.local_size; local++) {
        size_t bytes = local_stream_bytes(e, op, local);
        longest = bytes > longest ? bytes : longest;
    }
    return hvdl_ceil_div(longest, share_unit(e));
}

uint64_t hvdl_alltoall_count_pieces(const hvdl_engine *e, hvdl_operation *op)
{
    return num_sharing(e, op) + (e->config.num_hosts > 1);
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

hvdl_pass *hvdl_alltoall_make_pass(const hvdl_engine *e, const hvdl_operation *op, uint64_t k,
                                   int phase)
{
    (void)phase;
    size_t unit = share_unit(e), begin = (k - (e->config.num_hosts > 1)) * unit;
    hvdl_pass *pass = hvdl_pass_new(HVDL_PASS_SHARE, e->placement.local_size);
    for (int local = 0; pass && local < e->placement.local_size; local++) {
        size_t total = local_stream_bytes(e, op, local), left = total > begin ? total - begin : 0;
        size_t bytes = left < unit ? left : unit;
        hvdl_range mine = local_part(e, op, local, e->placement.local), take = {0, 0};
        size_t first = mine.begin > begin ? mine.begin : begin;
        size_t last = mine.end < begin + bytes ? mine.end : begin + bytes;
        char *to = op->work + op->parts.places[hvdl_rank_of_local(e, local)];
        if (first < last) {
            take = (hvdl_range){first - begin, last - begin};
            to += first - mine.begin;
        }
        pass->sources[local] =
            (hvdl_source){local, op->parts.local_stream + begin, bytes, take, to};
    }
    return pass;
}

void hvdl_alltoall_describe_exchange(const hvdl_engine *e, const hvdl_operation *op, uint64_t k,
                                     hvdl_exchange_spec *spec, size_t *table)
{
    size_t ranks = (size_t)e->config.num_ranks;
    size_t *recv_offsets = table, *recv_bytes = table + ranks;
    size_t *send_offsets = table + 2 * ranks, *send_bytes = table + 3 * ranks;
    (void)k;
    spec->algorithm = HVDL_PAIRWISE;
    spec->host = e->config.rank;
    spec->num_hosts = e->config.num_ranks;
    spec->peers = e->placement.all_ranks;
    spec->input = op->input;
    spec->buffer = op->work;
    spec->send_offsets = send_offsets;
    spec->send_bytes = send_bytes;
    for (int rank = 0; rank < e->config.num_ranks; rank++) {
        bool here = e->placement.host_of[rank] == e->placement.host;
        send_offsets[rank] = op->parts.send_places[rank];
        send_bytes[rank] = here ? 0 : op->parts.send_places[rank + 1] - op->parts.send_places[rank];
        recv_offsets[rank] = op->parts.places[rank];
        recv_bytes[rank] = here ? 0 : (size_t)op->all_rows[rank] * row_bytes(op);
    }
}

const hvdl_course hvdl_course_alltoall = {
    .prepare = hvdl_alltoall_prepare,
    .count_pieces = hvdl_alltoall_count_pieces,
    .has_exchange = hvdl_alltoall_has_exchange,
    .has_pass = hvdl_alltoall_has_pass,
    .make_pass = hvdl_alltoall_make_pass,
    .describe_exchange = hvdl_alltoall_describe_exchange,
    .every_rank_exchanges = true,
};

void hvdl_parts_free(hvdl_parts *parts)
{
    free(parts->places);
    free(parts->host_places);
    free(parts->matrix);
    free(parts->send_places);
    free(parts->packed);
}
