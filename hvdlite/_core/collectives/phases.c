#define _GNU_SOURCE
#include "collectives/phases.h"

#include <stdlib.h>
#include <string.h>

#include "engine/state.h"

static bool several_hosts(const hvdl_engine *e)
{
    return e->config.num_hosts > 1;
}

/* Bytes per piece. It must be the same on all hosts, as slices are cut from pieces. Where every host
 * has one rank, nothing else needs the pipeline and one exchange can be as long as the tensor. */
static size_t piece_bytes(const hvdl_engine *e, const hvdl_desc *desc)
{
    size_t all = hvdl_desc_bytes(desc);
    return e->placement.max_local_size == 1 && all ? all : e->config.piece_bytes / 64 * 64;
}

size_t hvdl_engine_cut_bytes(const hvdl_engine *e)
{
    if (!several_hosts(e) || e->config.deterministic)
        return 64; /* each element is added up in an order that does not depend on where it lies */
    return e->placement.max_local_size == 1 ? 0 : e->config.piece_bytes / 64 * 64;
}

hvdl_range hvdl_piece_range(const hvdl_engine *e, const hvdl_desc *desc, uint64_t k, size_t total,
                            size_t esize)
{
    size_t unit = piece_bytes(e, desc) / esize, begin = k * unit;
    return (hvdl_range){begin, total - begin < unit ? total : begin + unit};
}

uint64_t hvdl_pieces_of(const hvdl_engine *e, const hvdl_desc *desc)
{
    return hvdl_ceil_div(hvdl_desc_bytes(desc), piece_bytes(e, desc));
}

uint64_t hvdl_count_pieces(const hvdl_engine *e, hvdl_operation *op)
{
    return hvdl_pieces_of(e, &op->desc);
}

/* ---- what pieces.c asks ---- */

bool hvdl_piece_has_exchange(const hvdl_engine *e, const hvdl_operation *op, uint64_t k)
{
    return several_hosts(e) &&
           (!op->collective->has_exchange || op->collective->has_exchange(op, k));
}

bool hvdl_piece_waits(const hvdl_engine *e, const hvdl_operation *op, uint64_t k)
{
    return op->collective->waits && several_hosts(e) && op->collective->waits(op, k);
}

int hvdl_num_exchangers(const hvdl_engine *e, const hvdl_operation *op)
{
    return op->collective->every_rank_exchanges ? e->placement.local_size : e->placement.num_rails;
}

hvdl_err hvdl_make_pass(const hvdl_engine *e, const hvdl_operation *op, uint64_t k, int phase,
                        hvdl_pass **pass)
{
    *pass = NULL;
    if (!op->collective->has_pass(e, op, k, phase))
        return HVDL_OK;
    *pass = op->collective->make_pass(e, op, k, phase);
    return *pass ? HVDL_OK : HVDL_ENOMEM;
}

hvdl_err hvdl_make_exchange(hvdl_engine *e, const hvdl_operation *op, uint64_t k,
                            hvdl_exchange **exchange)
{
    bool every_rank = op->collective->every_rank_exchanges;
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
    op->collective->describe_exchange(e, op, k, &spec, table);
    hvdl_err err = hvdl_exchange_create(exchange, &e->wire, &spec);
    free(table);
    return err;
}

hvdl_pass *hvdl_share_from_rails(const hvdl_engine *e, char *buffer, hvdl_range range,
                                 hvdl_dtype dtype)
{
    hvdl_pass *pass = hvdl_pass_new(HVDL_PASS_SHARE, e->placement.num_rails);
    size_t esize = hvdl_dtype_bytes((int)dtype);
    for (int rail = 0; pass && rail < e->placement.num_rails; rail++) {
        hvdl_range slice = hvdl_slice(hvdl_range_size(range), e->placement.num_rails, rail, dtype);
        char *at = buffer + (range.begin + slice.begin) * esize;
        size_t bytes = hvdl_range_size(slice) * esize;
        pass->sources[rail] =
            (hvdl_source){.local = rail, .from = at, .bytes = bytes, .take = {0, bytes}, .to = at};
    }
    return pass;
}

void hvdl_put_slice(const hvdl_engine *e, hvdl_range range, uint64_t k, char *buffer,
                    hvdl_exchange_spec *spec)
{
    size_t esize = hvdl_dtype_bytes((int)spec->dtype);
    hvdl_range slice =
        hvdl_slice(hvdl_range_size(range), e->placement.num_rails, e->placement.local, spec->dtype);
    spec->tag += 2 * (int)(k % HVDL_PIECE_WINDOW);
    spec->buffer = buffer + (range.begin + slice.begin) * esize;
    spec->count = hvdl_range_size(slice);
}

/* ---- broadcast ---- */

static hvdl_range bytes_of(const hvdl_engine *e, const hvdl_operation *op, uint64_t k)
{
    return hvdl_piece_range(e, &op->desc, k, hvdl_desc_bytes(&op->desc), 1);
}

static hvdl_pass *share_from_root(const hvdl_engine *e, const hvdl_operation *op, hvdl_range range)
{
    hvdl_pass *pass = hvdl_pass_new(HVDL_PASS_SHARE, 1);
    size_t bytes = hvdl_range_size(range);
    if (pass)
        pass->sources[0] = (hvdl_source){.local = e->placement.local_of[op->desc.root],
                                         .from = op->input + range.begin,
                                         .bytes = bytes,
                                         .take = {0, bytes},
                                         .to = op->output + range.begin};
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
                                 : hvdl_share_from_rails(e, op->output, range, HVDL_UINT8);
}

static void broadcast_describe_exchange(const hvdl_engine *e, const hvdl_operation *op, uint64_t k,
                                        hvdl_exchange_spec *spec, size_t *table)
{
    (void)table;
    spec->algorithm = HVDL_CHAIN;
    spec->root = e->placement.host_of[op->desc.root];
    hvdl_put_slice(e, bytes_of(e, op, k), k, op->output, spec);
}

const hvdl_collective hvdl_collective_broadcast = {
    .count_pieces = hvdl_count_pieces,
    .has_pass = broadcast_has_pass,
    .make_pass = broadcast_make_pass,
    .describe_exchange = broadcast_describe_exchange,
};
