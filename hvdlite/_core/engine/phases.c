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
    return e->placement.max_local_size == 1 && all ? all : e->config.piece_bytes / 64 * 64;
}

/* Of `total` elements of this size. */
static hvdl_range piece_range(const hvdl_engine *e, const hvdl_operation *op, uint64_t k,
                              size_t total, size_t esize)
{
    size_t unit = piece_bytes(e, &op->desc) / esize, begin = k * unit;
    return (hvdl_range){begin, total - begin < unit ? total : begin + unit};
}

static uint64_t count_pieces(const hvdl_engine *e, hvdl_operation *op)
{
    return hvdl_ceil_div(hvdl_desc_bytes(&op->desc), piece_bytes(e, &op->desc));
}

/* ---- what pieces.c asks ---- */

bool hvdl_piece_has_exchange(const hvdl_engine *e, const hvdl_operation *op, uint64_t k)
{
    return several_hosts(e) && (!op->course->has_exchange || op->course->has_exchange(op, k));
}

bool hvdl_piece_waits(const hvdl_engine *e, const hvdl_operation *op, uint64_t k)
{
    return op->course->waits && several_hosts(e) && op->course->waits(op, k);
}

int hvdl_num_exchangers(const hvdl_engine *e, const hvdl_operation *op)
{
    return op->course->every_rank_exchanges ? e->placement.local_size : e->placement.num_rails;
}

hvdl_err hvdl_make_pass(const hvdl_engine *e, const hvdl_operation *op, uint64_t k, int phase,
                        hvdl_pass **pass)
{
    *pass = NULL;
    if (!op->course->has_pass(e, op, k, phase))
        return HVDL_OK;
    *pass = op->course->make_pass(e, op, k, phase);
    return *pass ? HVDL_OK : HVDL_ENOMEM;
}

hvdl_err hvdl_make_exchange(hvdl_engine *e, const hvdl_operation *op, uint64_t k,
                            hvdl_exchange **exchange)
{
    bool every_rank = op->course->every_rank_exchanges;
    size_t parts = (size_t)(every_rank ? e->config.num_ranks : e->config.num_hosts);
    size_t *table = calloc(4 * parts, sizeof *table); /* the exchange copies what it needs */
    if (!table)
        return HVDL_ENOMEM;
    hvdl_exchange_spec spec = {
        .host = e->placement.host,
        .num_hosts = e->config.num_hosts,
        .peers = e->placement.rail_peers,
        .tag = op->progress.tag,
        .segment_bytes = e->config.segment_bytes,
        .dtype = HVDL_UINT8,
    };
    spec.chunk_offsets = table;
    spec.chunk_bytes = table + parts;
    op->course->describe_exchange(e, op, k, &spec, table);
    hvdl_err err = hvdl_exchange_create(exchange, &e->wire, &spec);
    free(table);
    return err;
}

/* What the rails hold of a piece, in place: elements of `dtype`. */
static hvdl_pass *share_from_rails(const hvdl_engine *e, char *buffer, hvdl_range range,
                                   hvdl_dtype dtype)
{
    hvdl_pass *pass = hvdl_pass_new(HVDL_PASS_SHARE, e->placement.num_rails);
    size_t esize = hvdl_dtype_bytes((int)dtype);
    for (int rail = 0; pass && rail < e->placement.num_rails; rail++) {
        hvdl_range slice = hvdl_slice(hvdl_range_size(range), e->placement.num_rails, rail, dtype);
        char *at = buffer + (range.begin + slice.begin) * esize;
        size_t bytes = hvdl_range_size(slice) * esize;
        pass->sources[rail] = (hvdl_source){rail, at, bytes, {0, bytes}, at};
    }
    return pass;
}

/* This rail's slice of a piece, whose elements are of spec->dtype. */
static void put_slice(const hvdl_engine *e, hvdl_range range, uint64_t k, char *buffer,
                      hvdl_exchange_spec *spec)
{
    size_t esize = hvdl_dtype_bytes((int)spec->dtype);
    hvdl_range slice =
        hvdl_slice(hvdl_range_size(range), e->placement.num_rails, e->placement.local, spec->dtype);
    spec->tag += 2 * (int)(k % HVDL_PIECE_WINDOW);
    spec->buffer = buffer + (range.begin + slice.begin) * esize;
    spec->count = hvdl_range_size(slice);
}

/* ---- allreduce and reducescatter ---- */

static bool keeps_share(const hvdl_operation *op)
{
    return hvdl_facts_of(&op->desc)->result == HVDL_RESULT_SHARE;
}

/* Where the whole result arises on this rank, several hosts. */
static char *whole_result(const hvdl_operation *op)
{
    return keeps_share(op) ? op->work : op->output;
}

static hvdl_range elems_of(const hvdl_engine *e, const hvdl_operation *op, uint64_t k)
{
    const hvdl_desc *desc = &op->desc;
    return piece_range(e, op, k, (size_t)desc->count, hvdl_dtype_bytes(desc->dtype));
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
    if (op->meeting->posted && op->meeting->posted < e->placement.local_size)
        pass->taking_part = op->meeting->posted_by;
    pass->in = op->input + range.begin * esize;
    pass->count = hvdl_range_size(range);
    pass->num_rails = e->placement.num_rails;
    if (keeps_share(op) && !several_hosts(e)) {
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

static bool reduce_has_pass(const hvdl_engine *e, const hvdl_operation *op, uint64_t k, int phase)
{
    (void)k;
    bool in_place = op->input == whole_result(op) && op->desc.prescale == 1.0;
    if (phase == HVDL_PHASE_A)
        return e->placement.local_size > 1 || !in_place;
    return e->placement.local_size > 1 && several_hosts(e);
}

static hvdl_pass *reduce_make_pass(const hvdl_engine *e, const hvdl_operation *op, uint64_t k,
                                   int phase)
{
    hvdl_range range = elems_of(e, op, k);
    return phase == HVDL_PHASE_A ? reduce_pass(e, op, range)
                                 : share_from_rails(e, whole_result(op), range, op->desc.dtype);
}

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

static void reduce_describe_exchange(const hvdl_engine *e, const hvdl_operation *op, uint64_t k,
                                     hvdl_exchange_spec *spec, size_t *table)
{
    (void)table;
    const hvdl_desc *desc = &op->desc;
    size_t esize = hvdl_dtype_bytes(desc->dtype);
    spec->dtype = desc->dtype;
    spec->op = desc->op;
    spec->scale = hvdl_last_scale(e, desc);
    put_slice(e, elems_of(e, op, k), k, whole_result(op), spec);
    spec->algorithm = reduce_algorithm(e, desc, spec->count * esize);
}

static hvdl_err reducescatter_prepare(const hvdl_engine *e, hvdl_operation *op, const int64_t *rows)
{
    size_t bytes = hvdl_desc_bytes(&op->desc);
    (void)rows;
    if (several_hosts(e) && posix_memalign((void **)&op->work, 64, bytes ? bytes : 1))
        return HVDL_ENOMEM;
    return HVDL_OK;
}

static hvdl_err reducescatter_settle(hvdl_engine *e, hvdl_operation *op)
{
    size_t esize = hvdl_dtype_bytes(op->desc.dtype);
    hvdl_range own = hvdl_own_elems(e, &op->desc);
    if (several_hosts(e) && hvdl_range_size(own))
        memcpy(op->output, op->work + own.begin * esize, hvdl_range_size(own) * esize);
    return HVDL_OK;
}

const hvdl_course hvdl_course_allreduce = {
    .count_pieces = count_pieces,
    .has_pass = reduce_has_pass,
    .make_pass = reduce_make_pass,
    .describe_exchange = reduce_describe_exchange,
};

const hvdl_course hvdl_course_reducescatter = {
    .prepare = reducescatter_prepare,
    .count_pieces = count_pieces,
    .has_pass = reduce_has_pass,
    .make_pass = reduce_make_pass,
    .describe_exchange = reduce_describe_exchange,
    .settle = reducescatter_settle,
};

/* ---- broadcast ---- */

static hvdl_range bytes_of(const hvdl_engine *e, const hvdl_operation *op, uint64_t k)
{
    return piece_range(e, op, k, hvdl_desc_bytes(&op->desc), 1);
}

static hvdl_pass *share_from_root(const hvdl_engine *e, const hvdl_operation *op, hvdl_range range)
{
    hvdl_pass *pass = hvdl_pass_new(HVDL_PASS_SHARE, 1);
    size_t bytes = hvdl_range_size(range);
    if (pass)
        pass->sources[0] = (hvdl_source){e->placement.local_of[op->desc.root],
                                         op->input + range.begin,
                                         bytes,
                                         {0, bytes},
                                         op->output + range.begin};
    return pass;
}

static bool broadcast_has_pass(const hvdl_engine *e, const hvdl_operation *op, uint64_t k,
                               int phase)
{
    (void)k;
    bool has_root = e->placement.host_of[op->desc.root] == e->placement.host;
    return phase == HVDL_PHASE_A ? has_root
                                 : e->placement.local_size > 1 && several_hosts(e) && !has_root;
}

static hvdl_pass *broadcast_make_pass(const hvdl_engine *e, const hvdl_operation *op, uint64_t k,
                                      int phase)
{
    hvdl_range range = bytes_of(e, op, k);
    return phase == HVDL_PHASE_A ? share_from_root(e, op, range)
                                 : share_from_rails(e, op->output, range, HVDL_UINT8);
}

static void broadcast_describe_exchange(const hvdl_engine *e, const hvdl_operation *op, uint64_t k,
                                        hvdl_exchange_spec *spec, size_t *table)
{
    (void)table;
    spec->algorithm = HVDL_CHAIN;
    spec->root = e->placement.host_of[op->desc.root];
    put_slice(e, bytes_of(e, op, k), k, op->output, spec);
}

const hvdl_course hvdl_course_broadcast = {
    .count_pieces = count_pieces,
    .has_pass = broadcast_has_pass,
    .make_pass = broadcast_make_pass,
    .describe_exchange = broadcast_describe_exchange,
};
