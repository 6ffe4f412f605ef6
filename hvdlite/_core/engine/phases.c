#define _GNU_SOURCE
#include "engine/phases.h"

#include <stdlib.h>
#include <string.h>

static bool several_hosts(const hvdl_engine *e)
{
    return e->config.num_hosts > 1;
}

/* Bytes per piece. It must be the same on all hosts, as slices are cut from pieces. Where every host
 * has one rank, nothing else needs the conveyor and one exchange can be as long as the tensor. */
static size_t piece_bytes(const hvdl_engine *e, const hvdl_desc *desc)
{
    size_t all = hvdl_desc_bytes(desc);
    return e->max_local_size == 1 && all ? all : e->config.piece_bytes / 64 * 64;
}

/* Elements of what is reduced, bytes of what is broadcast. */
static hvdl_range piece_range(const hvdl_engine *e, const hvdl_operation *op, uint64_t k)
{
    const hvdl_desc *desc = &op->desc;
    bool in_bytes = op->course == HVDL_BROADCAST;
    size_t total = in_bytes ? hvdl_desc_bytes(desc) : (size_t)desc->count;
    size_t unit = piece_bytes(e, desc) / (in_bytes ? 1 : hvdl_dtype_bytes(desc->dtype));
    size_t begin = k * unit;
    return (hvdl_range){begin, total - begin < unit ? total : begin + unit};
}

/* Where the whole result of a reduction arises on this rank, several hosts; or the root's data. */
static char *whole_result(const hvdl_operation *op)
{
    return op->course == HVDL_REDUCESCATTER ? op->work : op->output;
}

uint64_t hvdl_count_pieces(const hvdl_engine *e, hvdl_operation *op)
{
    switch (op->course) {
    case HVDL_ALLGATHER: return hvdl_count_gather(e, op);
    case HVDL_ALLTOALL: return hvdl_count_alltoall(e, op);
    default: return hvdl_ceil_div(hvdl_desc_bytes(&op->desc), piece_bytes(e, &op->desc));
    }
}

bool hvdl_piece_has_exchange(const hvdl_engine *e, const hvdl_operation *op, uint64_t k)
{
    switch (op->course) {
    case HVDL_ALLGATHER: return several_hosts(e) && k == op->num_gathering;
    case HVDL_ALLTOALL: return several_hosts(e) && k == 0;
    default: return several_hosts(e);
    }
}

bool hvdl_piece_waits(const hvdl_engine *e, const hvdl_operation *op, uint64_t k)
{
    return op->course == HVDL_ALLGATHER && several_hosts(e) &&
           (k == op->num_gathering || k == op->num_gathering + 1);
}

int hvdl_num_exchangers(const hvdl_engine *e, const hvdl_operation *op)
{
    return op->course == HVDL_ALLTOALL ? e->local_size : e->num_rails;
}

/* ---- passes ---- */

static hvdl_pass *share_from_root(const hvdl_engine *e, const hvdl_operation *op, hvdl_range range)
{
    hvdl_pass *pass = hvdl_pass_new(HVDL_PASS_SHARE, 1);
    size_t bytes = hvdl_range_size(range);
    if (pass)
        pass->sources[0] = (hvdl_source){e->local_of[op->desc.root],
                                         op->input + range.begin,
                                         bytes,
                                         {0, bytes},
                                         op->output + range.begin};
    return pass;
}

/* What the rails hold of a piece, in place: elements of `dtype`. */
static hvdl_pass *share_from_rails(const hvdl_engine *e, char *buffer, hvdl_range range,
                                   hvdl_dtype dtype)
{
    hvdl_pass *pass = hvdl_pass_new(HVDL_PASS_SHARE, e->num_rails);
    size_t esize = hvdl_dtype_bytes((int)dtype);
    for (int rail = 0; pass && rail < e->num_rails; rail++) {
        hvdl_range slice = hvdl_slice(hvdl_range_size(range), e->num_rails, rail, dtype);
        char *at = buffer + (range.begin + slice.begin) * esize;
        size_t bytes = hvdl_range_size(slice) * esize;
        pass->sources[rail] = (hvdl_source){rail, at, bytes, {0, bytes}, at};
    }
    return pass;
}

static hvdl_pass *reduce_pass(const hvdl_engine *e, const hvdl_operation *op, hvdl_range range)
{
    const hvdl_desc *desc = &op->desc;
    size_t esize = hvdl_dtype_bytes(desc->dtype);
    hvdl_pass *pass = hvdl_pass_new(several_hosts(e) ? HVDL_PASS_SCATTER : HVDL_PASS_ALLREDUCE, 0);
    if (!pass)
        return NULL;
    pass->dtype = desc->dtype;
    pass->op = desc->op;
    pass->scale = hvdl_host_scale(e, desc);
    if (op->meeting->posted && op->meeting->posted < e->local_size)
        pass->taking_part = op->meeting->posted_by;
    pass->in = op->input + range.begin * esize;
    pass->count = hvdl_range_size(range);
    pass->num_rails = e->num_rails;
    if (op->course == HVDL_REDUCESCATTER && !several_hosts(e)) {
        hvdl_range own = hvdl_own_elems(e, desc);
        size_t begin = own.begin > range.begin ? own.begin : range.begin;
        size_t end = own.end < range.end ? own.end : range.end;
        if (begin < end) {
            pass->keep = (hvdl_range){begin - range.begin, end - range.begin};
            pass->out = op->output + (begin - own.begin) * esize;
        }
        return pass;
    }
    pass->keep = (hvdl_range){0, pass->count};
    pass->out = whole_result(op) + range.begin * esize;
    return pass;
}

hvdl_err hvdl_make_pass(const hvdl_engine *e, const hvdl_operation *op, uint64_t k, int phase,
                        hvdl_pass **pass)
{
    const hvdl_desc *desc = &op->desc;
    bool in_a = phase == HVDL_PHASE_A, shares = e->local_size > 1 && several_hosts(e);
    bool needed;
    *pass = NULL;
    switch (op->course) {
    case HVDL_ALLREDUCE:
    case HVDL_REDUCESCATTER: {
        hvdl_range range = piece_range(e, op, k);
        bool in_place = op->input == whole_result(op) && desc->prescale == 1.0;
        needed = in_a ? e->local_size > 1 || !in_place : shares;
        if (needed)
            *pass = in_a ? reduce_pass(e, op, range)
                         : share_from_rails(e, whole_result(op), range, desc->dtype);
        break;
    }
    case HVDL_BROADCAST: {
        bool has_root = e->host_of[desc->root] == e->host;
        needed = in_a ? has_root : shares && !has_root;
        if (needed)
            *pass = in_a ? share_from_root(e, op, piece_range(e, op, k))
                         : share_from_rails(e, op->output, piece_range(e, op, k), HVDL_UINT8);
        break;
    }
    case HVDL_ALLGATHER:
        needed = in_a && k != op->num_gathering && (k < op->num_gathering || e->local_size > 1);
        if (needed)
            *pass = k < op->num_gathering ? hvdl_gather_pass(e, op, k) : hvdl_spread_pass(e, op, k);
        break;
    default:
        needed = in_a && !hvdl_piece_has_exchange(e, op, k);
        if (needed)
            *pass = hvdl_alltoall_pass(e, op, k);
        break;
    }
    return needed && !*pass ? HVDL_ENOMEM : HVDL_OK;
}

/* ---- exchanges ---- */

/* Sums in the order of the hosts, rounded once, are formed by the direct exchange; and by recursive
 * doubling of two hosts, which adds up once. */
static hvdl_algorithm reduce_algorithm(const hvdl_engine *e, const hvdl_desc *desc,
                                       size_t slice_bytes)
{
    bool sixteen = desc->dtype == HVDL_FLOAT16 || desc->dtype == HVDL_BFLOAT16;
    bool in_order = sixteen || e->config.deterministic;
    hvdl_algorithm chosen =
        hvdl_choose_algorithm(e->config.rules, e->config.num_rules, slice_bytes);
    bool fits = !in_order || (chosen == HVDL_DOUBLING && e->config.num_hosts == 2);
    return fits ? chosen : HVDL_DIRECT;
}

static void describe_exchange(const hvdl_engine *e, const hvdl_operation *op, uint64_t k,
                              hvdl_exchange_spec *spec)
{
    const hvdl_desc *desc = &op->desc;
    hvdl_range range = piece_range(e, op, k);
    if (op->course != HVDL_BROADCAST)
        spec->dtype = desc->dtype;
    size_t esize = hvdl_dtype_bytes((int)spec->dtype);
    hvdl_range slice = hvdl_slice(hvdl_range_size(range), e->num_rails, e->local, spec->dtype);
    spec->tag += 2 * (int)(k % HVDL_PIECE_WINDOW);
    spec->buffer = whole_result(op) + (range.begin + slice.begin) * esize;
    spec->count = hvdl_range_size(slice);
    if (op->course == HVDL_BROADCAST) {
        spec->algorithm = HVDL_CHAIN;
        spec->root = e->host_of[desc->root];
    } else {
        spec->algorithm = reduce_algorithm(e, desc, spec->count * esize);
        spec->op = desc->op;
        spec->scale = hvdl_last_scale(e, desc);
    }
}

hvdl_err hvdl_make_exchange(hvdl_engine *e, const hvdl_operation *op, uint64_t k,
                            hvdl_exchange **exchange)
{
    size_t parts =
        (size_t)(op->course == HVDL_ALLTOALL ? e->config.num_ranks : e->config.num_hosts);
    size_t *table = calloc(4 * parts, sizeof *table); /* the exchange copies what it needs */
    if (!table)
        return HVDL_ENOMEM;
    hvdl_exchange_spec spec = {
        .host = e->host,
        .num_hosts = e->config.num_hosts,
        .peers = e->rail_peers,
        .tag = op->tag,
        .segment_bytes = e->config.segment_bytes,
        .dtype = HVDL_UINT8,
    };
    spec.chunk_offsets = table;
    spec.chunk_bytes = table + parts;
    if (op->course == HVDL_ALLGATHER) {
        spec.algorithm = HVDL_GATHER;
        spec.buffer = op->work;
        hvdl_gather_chunks(e, op, table, table + parts);
    } else if (op->course == HVDL_ALLTOALL) {
        spec.algorithm = HVDL_PAIRWISE;
        spec.host = e->config.rank;
        spec.num_hosts = e->config.num_ranks;
        spec.peers = e->all_ranks;
        spec.input = op->input;
        spec.buffer = op->work;
        spec.send_offsets = table + 2 * parts;
        spec.send_bytes = table + 3 * parts;
        hvdl_alltoall_parts(e, op, table + 2 * parts, table + 3 * parts, table, table + parts);
    } else {
        describe_exchange(e, op, k, &spec);
    }
    hvdl_err err = hvdl_exchange_create(exchange, &e->wire, &spec);
    free(table);
    return err;
}

/* ---- before and after ---- */

hvdl_err hvdl_prepare(const hvdl_engine *e, hvdl_operation *op, const int64_t *rows)
{
    size_t bytes = hvdl_desc_bytes(&op->desc);
    switch (op->course) {
    case HVDL_ALLGATHER: return hvdl_prepare_gather(e, op, rows);
    case HVDL_ALLTOALL: return hvdl_prepare_alltoall(e, op, rows);
    case HVDL_REDUCESCATTER:
        if (several_hosts(e) && posix_memalign((void **)&op->work, 64, bytes ? bytes : 1))
            return HVDL_ENOMEM;
        return HVDL_OK;
    default: return HVDL_OK;
    }
}

hvdl_err hvdl_settle_result(const hvdl_engine *e, hvdl_operation *op)
{
    if (op->course == HVDL_ALLGATHER)
        return hvdl_reorder_gathered(e, op);
    if (op->course == HVDL_REDUCESCATTER && several_hosts(e)) {
        size_t esize = hvdl_dtype_bytes(op->desc.dtype);
        hvdl_range own = hvdl_own_elems(e, &op->desc);
        if (hvdl_range_size(own))
            memcpy(op->output, op->work + own.begin * esize, hvdl_range_size(own) * esize);
    }
    return HVDL_OK;
}
