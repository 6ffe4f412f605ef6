/* How an operation that is matched, and not tiny, goes through its phases, piece by piece:
 *
 *               A: within the host            X: between the hosts     C: within the host
 *   one host
 *   allreduce   ALLREDUCE
 *   broadcast   SHARE from the root
 *   allgather   SHARE from all
 *   several hosts
 *   allreduce   SCATTER: rails get sums       ring or direct           SHARE from the rails
 *   broadcast   root's host: SHARE            chain from root's host   others: SHARE from the rails
 *   allgather   SHARE from all                gather of host blocks    SHARE from the rails
 *
 * Rails are the first `num_rails` ranks of each host, as many as the smallest host has; rail i of
 * each host exchanges slice i with rail i of the others, all rails at once.
 *
 * When piece k may begin is said by a NEXT entry of the leader (a window of pieces, so that large
 * operations share the conveyor with others), and phase C begins when all rails have said READY: both
 * in the journal, so that the ranks of a host schedule all passes in the same order.
 *
 * An allreduce or broadcast takes each piece through A, X, C independently. An allgather, whose
 * members' parts differ in size, has first its A pieces, then one X piece, then its C pieces, with a
 * halt before and after X. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "state.h"

static bool has_exchange(const hvdl_engine *e)
{
    return e->config.num_hosts > 1;
}

static bool is_rail(const hvdl_engine *e)
{
    return e->local < e->num_rails;
}

static uint64_t window(const hvdl_engine *e)
{
    return has_exchange(e) ? 3 : 2;
}

/* Bytes per piece. It must be the same on all hosts, as slices are cut from pieces. Where every host
 * has one rank, nothing else needs the conveyor and one exchange can be as long as the tensor. */
static size_t piece_bytes(const hvdl_engine *e, const hvdl_desc *desc)
{
    size_t all = hvdl_desc_bytes(desc);
    return e->max_local_size == 1 && all ? all : e->config.piece_bytes / 64 * 64;
}

/* Bytes of each source in one share pass of an allgather. */
static size_t gather_unit(const hvdl_engine *e)
{
    size_t unit = e->config.piece_bytes / (size_t)e->local_size;
    return unit ? unit : 1;
}

/* ---- geometry: what piece k of an operation is ---- */

/* Elements of an allreduce's, bytes of a broadcast's tensor. */
static hvdl_range piece_range(const hvdl_engine *e, const hvdl_operation *op, uint64_t k)
{
    const hvdl_desc *desc = &op->desc;
    bool in_bytes = desc->kind == HVDL_BROADCAST;
    size_t total = in_bytes ? hvdl_desc_bytes(desc) : (size_t)desc->count;
    size_t unit = piece_bytes(e, desc) / (in_bytes ? 1 : hvdl_dtype_bytes(desc->dtype));
    size_t begin = k * unit;
    return (hvdl_range){begin, total - begin < unit ? total : begin + unit};
}

/* Bytes of rail `rail`'s slice of host `host`'s block of an allgather, within `work`. */
static hvdl_range gather_slice(const hvdl_engine *e, const hvdl_operation *op, int host, int rail)
{
    size_t begin = op->host_places[host], size = op->host_places[host + 1] - begin;
    hvdl_range slice = hvdl_slice(size, e->num_rails, rail, HVDL_UINT8);
    return (hvdl_range){begin + slice.begin, begin + slice.end};
}

/* C pieces of an allgather for one remote host's block. */
static uint64_t num_spreading(const hvdl_engine *e, const hvdl_operation *op, int host)
{
    return hvdl_ceil_div(hvdl_range_size(gather_slice(e, op, host, 0)), gather_unit(e));
}

static size_t gather_row_bytes(const hvdl_operation *op)
{
    return hvdl_desc_bytes(&op->desc);
}

static uint64_t num_gathering(const hvdl_engine *e, const hvdl_operation *op)
{
    size_t longest = 0;
    for (int local = 0; local < e->local_size; local++) {
        int rank = e->members[e->host_first[e->host] + local];
        size_t bytes = (size_t)op->all_rows[rank] * gather_row_bytes(op);
        longest = bytes > longest ? bytes : longest;
    }
    return hvdl_ceil_div(longest, gather_unit(e));
}

static uint64_t count_pieces(const hvdl_engine *e, hvdl_operation *op)
{
    if (op->desc.kind != HVDL_ALLGATHER)
        return hvdl_ceil_div(hvdl_desc_bytes(&op->desc), piece_bytes(e, &op->desc));
    op->num_gathering = num_gathering(e, op);
    if (!has_exchange(e))
        return op->num_gathering;
    uint64_t pieces = op->num_gathering + 1;
    for (int h = 0; h < e->config.num_hosts; h++)
        if (h != e->host)
            pieces += num_spreading(e, op, h);
    return pieces;
}

/* Does piece k of this operation have an exchange? */
static bool piece_has_exchange(const hvdl_engine *e, const hvdl_operation *op, uint64_t k)
{
    return has_exchange(e) && (op->desc.kind != HVDL_ALLGATHER || k == op->num_gathering);
}

/* ---- passes ---- */

static hvdl_pass *share_from_root(const hvdl_engine *e, const hvdl_operation *op, hvdl_range range)
{
    hvdl_pass *pass = hvdl_pass_new(HVDL_PASS_SHARE, 1);
    if (pass)
        pass->sources[0] = (hvdl_source){e->local_of[op->desc.root], op->input + range.begin,
                                         op->output + range.begin, hvdl_range_size(range)};
    return pass;
}

/* What the rails hold of a piece, in place: `esize` bytes per unit of `range`. */
static hvdl_pass *share_from_rails(const hvdl_engine *e, char *buffer, hvdl_range range,
                                   hvdl_dtype dtype)
{
    hvdl_pass *pass = hvdl_pass_new(HVDL_PASS_SHARE, e->num_rails);
    size_t esize = hvdl_dtype_bytes((int)dtype);
    for (int rail = 0; pass && rail < e->num_rails; rail++) {
        hvdl_range slice = hvdl_slice(hvdl_range_size(range), e->num_rails, rail, dtype);
        char *at = buffer + (range.begin + slice.begin) * esize;
        pass->sources[rail] = (hvdl_source){rail, at, at, hvdl_range_size(slice) * esize};
    }
    return pass;
}

static hvdl_pass *reduce_pass(const hvdl_engine *e, const hvdl_operation *op, hvdl_range range)
{
    const hvdl_desc *desc = &op->desc;
    size_t offset = range.begin * hvdl_dtype_bytes(desc->dtype);
    hvdl_pass *pass = hvdl_pass_new(has_exchange(e) ? HVDL_PASS_SCATTER : HVDL_PASS_ALLREDUCE, 0);
    if (!pass)
        return NULL;
    pass->dtype = desc->dtype;
    pass->op = desc->op;
    pass->prescale = (hvdl_scale){1, desc->prescale};
    pass->scale = has_exchange(e) ? (hvdl_scale){1, 1.0} : hvdl_final_scale(e, desc);
    pass->in = op->input + offset;
    pass->out = op->output + offset;
    pass->count = hvdl_range_size(range);
    pass->num_rails = e->num_rails;
    return pass;
}

static hvdl_pass *gather_pass(const hvdl_engine *e, const hvdl_operation *op, uint64_t k)
{
    size_t begin = k * gather_unit(e);
    hvdl_pass *pass = hvdl_pass_new(HVDL_PASS_SHARE, e->local_size);
    for (int local = 0; pass && local < e->local_size; local++) {
        int rank = e->members[e->host_first[e->host] + local];
        size_t bytes = (size_t)op->all_rows[rank] * gather_row_bytes(op);
        size_t left = bytes > begin ? bytes - begin : 0;
        pass->sources[local] =
            (hvdl_source){local, op->input + begin, op->work + op->places[rank] + begin,
                          left < gather_unit(e) ? left : gather_unit(e)};
    }
    return pass;
}

/* C piece k of an allgather: a part of what the rails received of one other host's block. */
static hvdl_pass *spread_pass(const hvdl_engine *e, const hvdl_operation *op, uint64_t k)
{
    uint64_t index = k - op->num_gathering - 1;
    int host = e->host == 0 ? 1 : 0;
    while (index >= num_spreading(e, op, host)) {
        index -= num_spreading(e, op, host++);
        host += host == e->host;
    }
    size_t begin = index * gather_unit(e);
    hvdl_pass *pass = hvdl_pass_new(HVDL_PASS_SHARE, e->num_rails);
    for (int rail = 0; pass && rail < e->num_rails; rail++) {
        hvdl_range slice = gather_slice(e, op, host, rail);
        size_t size = hvdl_range_size(slice), left = size > begin ? size - begin : 0;
        char *at = op->work + slice.begin + begin;
        pass->sources[rail] =
            (hvdl_source){rail, at, at, left < gather_unit(e) ? left : gather_unit(e)};
    }
    return pass;
}

enum { PHASE_A, PHASE_C };

/* *pass: NULL where the phase has nothing to do. */
static hvdl_err make_pass(const hvdl_engine *e, const hvdl_operation *op, uint64_t k, int phase,
                          hvdl_pass **pass)
{
    const hvdl_desc *desc = &op->desc;
    bool shares = e->local_size > 1 && has_exchange(e);
    bool needed;
    *pass = NULL;
    switch (desc->kind) {
    case HVDL_ALLREDUCE: {
        hvdl_range range = piece_range(e, op, k);
        bool in_place = op->input == op->output && desc->prescale == 1.0;
        needed = phase == PHASE_A ? e->local_size > 1 || !in_place : shares;
        if (needed)
            *pass = phase == PHASE_A ? reduce_pass(e, op, range)
                                     : share_from_rails(e, op->output, range, desc->dtype);
        break;
    }
    case HVDL_BROADCAST: {
        bool has_root = e->host_of[desc->root] == e->host;
        needed = phase == PHASE_A ? has_root : shares && !has_root;
        if (needed)
            *pass = phase == PHASE_A
                        ? share_from_root(e, op, piece_range(e, op, k))
                        : share_from_rails(e, op->output, piece_range(e, op, k), HVDL_UINT8);
        break;
    }
    default:
        needed = phase == PHASE_A
                     ? k != op->num_gathering && (k < op->num_gathering || e->local_size > 1)
                     : false;
        if (needed)
            *pass = k < op->num_gathering ? gather_pass(e, op, k) : spread_pass(e, op, k);
        break;
    }
    return needed && !*pass ? HVDL_ENOMEM : HVDL_OK;
}

/* ---- exchanges ---- */

static void fill_exchange(const hvdl_engine *e, const hvdl_operation *op, uint64_t k,
                          size_t *chunk_offsets, size_t *chunk_bytes, hvdl_exchange_spec *spec)
{
    const hvdl_desc *desc = &op->desc;
    spec->host = e->host;
    spec->num_hosts = e->config.num_hosts;
    spec->peers = e->rail_peers;
    /* The hosts number the pieces of an allgather differently, but it has only one exchange. */
    bool alone = desc->kind == HVDL_ALLGATHER;
    spec->tag = op->tag + (alone ? 0 : 2 * (int)(k % HVDL_PIECE_WINDOW));
    spec->segment_bytes = e->config.segment_bytes;
    spec->dtype = HVDL_UINT8;
    if (desc->kind == HVDL_ALLGATHER) {
        spec->algorithm = HVDL_GATHER;
        spec->buffer = op->work;
        for (int h = 0; h < e->config.num_hosts; h++) {
            hvdl_range slice = gather_slice(e, op, h, e->local);
            chunk_offsets[h] = slice.begin;
            chunk_bytes[h] = hvdl_range_size(slice);
        }
        spec->chunk_offsets = chunk_offsets;
        spec->chunk_bytes = chunk_bytes;
        return;
    }
    hvdl_range range = piece_range(e, op, k);
    if (desc->kind == HVDL_BROADCAST) {
        spec->algorithm = HVDL_CHAIN;
        spec->root = e->host_of[desc->root];
    } else {
        bool sixteen = desc->dtype == HVDL_FLOAT16 || desc->dtype == HVDL_BFLOAT16;
        spec->algorithm = sixteen || e->config.deterministic ? HVDL_DIRECT : HVDL_RING;
        spec->dtype = desc->dtype;
        spec->op = desc->op;
        spec->scale = hvdl_final_scale(e, desc);
    }
    hvdl_range slice = hvdl_slice(hvdl_range_size(range), e->num_rails, e->local, spec->dtype);
    spec->buffer = op->output + (range.begin + slice.begin) * hvdl_dtype_bytes((int)spec->dtype);
    spec->count = hvdl_range_size(slice);
}

static void announce_ready(hvdl_engine *e, hvdl_operation *op, uint64_t k)
{
    hvdl_entry head = {.type = HVDL_ENTRY_READY, .id = op->meeting->id, .arg = k};
    hvdl_announce(e, head, NULL, 0);
}

static void start_exchange(hvdl_engine *e, hvdl_operation *op, uint64_t k)
{
    int hosts = e->config.num_hosts;
    size_t chunk_offsets[hosts], chunk_bytes[hosts];
    hvdl_exchange_spec spec = {0};
    hvdl_running_exchange *running = calloc(1, sizeof *running);
    fill_exchange(e, op, k, chunk_offsets, chunk_bytes, &spec);
    if (!running || hvdl_exchange_create(&running->exchange, &e->wire, &spec)) {
        free(running);
        hvdl_break(e, "rank %d is out of memory in %s '%s'", e->config.rank,
                   hvdl_kind_name(op->desc.kind), op->name);
        return;
    }
    running->operation = op;
    running->piece = k;
    running->next = NULL;
    hvdl_running_exchange **last = &e->exchanges; /* in order: the oldest piece is moved first */
    while (*last)
        last = &(*last)->next;
    *last = running;
}

void hvdl_step_exchanges(hvdl_engine *e, bool *progressed)
{
    for (hvdl_running_exchange **at = &e->exchanges; *at;) {
        hvdl_running_exchange *running = *at;
        bool done = false;
        if (hvdl_exchange_step(running->exchange, progressed, &done)) {
            hvdl_break(e, "rank %d on %s: MPI reported an error in %s '%s'", e->config.rank,
                       e->name_of[e->config.rank], hvdl_kind_name(running->operation->desc.kind),
                       running->operation->name);
            return;
        }
        if (!done) {
            at = &running->next;
            continue;
        }
        *at = running->next;
        hvdl_exchange_destroy(running->exchange);
        announce_ready(e, running->operation, running->piece);
        free(running);
        *progressed = true;
    }
}

void hvdl_abandon_all(hvdl_engine *e)
{
    for (hvdl_pass *pass = hvdl_conveyor_clear(&e->conveyor), *next; pass; pass = next) {
        next = pass->next;
        free(pass);
    }
    while (e->exchanges) {
        hvdl_running_exchange *running = e->exchanges;
        e->exchanges = running->next;
        if (!hvdl_exchange_destroy(running->exchange))
            running->operation->pinned = e->pinned = true;
        free(running);
    }
}

/* ---- the course of a piece ---- */

static void after_a(hvdl_engine *e, hvdl_operation *op, uint64_t k);
static void piece_done(hvdl_engine *e, hvdl_operation *op, uint64_t k);

static hvdl_piece *piece_of(hvdl_operation *op, uint64_t k)
{
    return &op->pieces[k % HVDL_PIECE_SLOTS];
}

/* Returns true if a pass was scheduled; false if the phase is over at once. */
static bool schedule(hvdl_engine *e, hvdl_operation *op, uint64_t k, int phase)
{
    hvdl_pass *pass;
    if (make_pass(e, op, k, phase, &pass)) {
        hvdl_break(e, "rank %d is out of memory in %s '%s'", e->config.rank,
                   hvdl_kind_name(op->desc.kind), op->name);
        return true;
    }
    if (!pass)
        return false;
    pass->owner = op;
    pass->piece = k;
    pass->phase = phase;
    hvdl_conveyor_add(&e->conveyor, pass);
    return true;
}

/* The leader says when the next piece may begin: within a window from the oldest one that is not
 * finished, since pieces k and k + HVDL_PIECE_WINDOW use the same tags. */
static void offer_next(hvdl_engine *e, hvdl_operation *op)
{
    if (!e->is_leader)
        return;
    while (op->announced_pieces < op->num_pieces &&
           op->announced_pieces - op->first_unfinished < window(e)) {
        uint64_t k = op->announced_pieces;
        bool halt = op->desc.kind == HVDL_ALLGATHER && has_exchange(e) &&
                    (k == op->num_gathering || k == op->num_gathering + 1);
        if (halt && op->finished_pieces < k)
            return;
        op->announced_pieces++;
        hvdl_entry head = {.type = HVDL_ENTRY_NEXT, .id = op->meeting->id, .arg = k};
        hvdl_announce(e, head, NULL, 0);
    }
}

void hvdl_piece_next(hvdl_engine *e, hvdl_operation *op)
{
    uint64_t k = op->started++;
    *piece_of(op, k) = (hvdl_piece){0};
    if (!schedule(e, op, k, PHASE_A))
        after_a(e, op, k);
}

/* Phase A of piece k is over on this rank. */
static void after_a(hvdl_engine *e, hvdl_operation *op, uint64_t k)
{
    hvdl_piece *piece = piece_of(op, k);
    piece->a_over = true;
    if (!piece_has_exchange(e, op, k) || piece->c_over) {
        piece_done(e, op, k);
        return;
    }
    if (!is_rail(e))
        return; /* READY entries say when it goes on */
    if (op->desc.kind == HVDL_ALLGATHER && op->finished_pieces < k) {
        op->exchange_waits = true;
        return;
    }
    start_exchange(e, op, k);
}

void hvdl_piece_ready(hvdl_engine *e, hvdl_operation *op, uint64_t k)
{
    hvdl_piece *piece = piece_of(op, k);
    if (++piece->num_ready < e->num_rails || schedule(e, op, k, PHASE_C))
        return;
    /* The rails may be faster than this rank's own phase A. */
    piece->c_over = true;
    if (piece->a_over)
        piece_done(e, op, k);
}

void hvdl_pass_finished(hvdl_engine *e, hvdl_pass *pass)
{
    hvdl_operation *op = pass->owner;
    if (pass->phase == PHASE_A)
        after_a(e, op, pass->piece);
    else
        piece_done(e, op, pass->piece);
    free(pass);
}

/* Members whose ranks are not together on their hosts: from host order to rank order. */
static hvdl_err reorder_gathered(hvdl_engine *e, hvdl_operation *op)
{
    bool in_order = true;
    for (int i = 0; i < e->config.num_ranks; i++)
        in_order &= e->members[i] == i;
    if (in_order)
        return HVDL_OK;
    size_t total = op->host_places[e->config.num_hosts];
    char *output;
    if (posix_memalign((void **)&output, 64, total ? total : 1))
        return HVDL_ENOMEM;
    char *to = output;
    for (int rank = 0; rank < e->config.num_ranks; rank++) {
        size_t bytes = (size_t)op->all_rows[rank] * gather_row_bytes(op);
        if (bytes)
            memcpy(to, op->work + op->places[rank], bytes);
        to += bytes;
    }
    free(op->work);
    op->work = output;
    return HVDL_OK;
}

static void complete(hvdl_engine *e, hvdl_operation *op)
{
    if (has_exchange(e) && e->is_leader && !op->plan)
        hvdl_control_tag_done(e, op->tag);
    if (op->desc.kind == HVDL_ALLGATHER && reorder_gathered(e, op)) {
        hvdl_break(e, "rank %d has no memory for the result of allgather '%s'", e->config.rank,
                   op->name);
        return;
    }
    hvdl_finish(e, op, NULL);
}

static void piece_done(hvdl_engine *e, hvdl_operation *op, uint64_t k)
{
    op->finished_pieces++;
    piece_of(op, k)->finished = true;
    while (op->first_unfinished < op->started && piece_of(op, op->first_unfinished)->finished)
        op->first_unfinished++;
    if (op->exchange_waits && op->finished_pieces == op->num_gathering) {
        op->exchange_waits = false;
        start_exchange(e, op, op->num_gathering);
    }
    if (op->finished_pieces == op->num_pieces)
        complete(e, op);
    else
        offer_next(e, op);
}

/* ---- the start ---- */

static hvdl_err prepare_gather(hvdl_engine *e, hvdl_operation *op, const int64_t *rows)
{
    int ranks = e->config.num_ranks, hosts = e->config.num_hosts;
    op->all_rows = malloc((size_t)ranks * sizeof *op->all_rows);
    op->places = malloc((size_t)ranks * sizeof *op->places);
    op->host_places = malloc(((size_t)hosts + 1) * sizeof *op->host_places);
    if (!op->all_rows || !op->places || !op->host_places)
        return HVDL_ENOMEM;
    /* `rows` come in the order of `members`: host by host. */
    size_t at = 0;
    for (int h = 0, i = 0; h < hosts; h++) {
        op->host_places[h] = at;
        for (int local = 0; local < e->host_sizes[h]; local++, i++) {
            int rank = e->members[i];
            op->all_rows[rank] = rows[i];
            op->places[rank] = at;
            at += (size_t)rows[i] * gather_row_bytes(op);
        }
    }
    op->host_places[hosts] = at;
    return posix_memalign((void **)&op->work, 64, at ? at : 1) ? HVDL_ENOMEM : HVDL_OK;
}

void hvdl_begin(hvdl_engine *e, hvdl_operation *op, int tag, const int64_t *all_rows)
{
    hvdl_set_state(e, op, HVDL_RUNNING);
    op->tag = tag;
    if (op->desc.kind == HVDL_ALLGATHER && prepare_gather(e, op, all_rows)) {
        op->work = NULL;
        hvdl_break(e, "rank %d has no memory for the result of allgather '%s'", e->config.rank,
                   op->name);
        return;
    }
    op->num_pieces = count_pieces(e, op);
    if (op->num_pieces == 0)
        complete(e, op);
    else
        offer_next(e, op);
}
