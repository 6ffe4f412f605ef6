/* Runs an operation that is matched and not tiny: its pieces go through their phases
 * (phases.h).
 *
 * When piece k may begin is said by a NEXT entry of the leader (a window of pieces, so that large
 * operations share the pipeline with others), and phase C begins when all that exchange have said
 * READY: both in the shared log, so that the ranks of a host schedule all passes in the same order. */
#define _GNU_SOURCE
#include "collectives/pieces.h"

#include <stdlib.h>
#include <string.h>

#include "collectives/phases.h"
#include "engine/fatal.h"
#include "engine/state.h"
#include "matching/announcing.h"
#include "matching/tags.h"
#include "net/streams.h"
#include "operations/operations.h"

struct hvdl_running_exchange {
    hvdl_running_exchange *next;
    hvdl_exchange *exchange;
    hvdl_operation *operation;
    uint64_t piece;
};

static uint64_t window(const hvdl_engine *e)
{
    return e->config.num_hosts > 1 ? 3 : 2;
}

static void announce_ready(hvdl_engine *e, hvdl_operation *op, uint64_t k)
{
    hvdl_entry head = {.type = HVDL_ENTRY_READY, .id = op->match->id, .arg = k};
    hvdl_announce(e, head, NULL, 0);
}

static void start_exchange(hvdl_engine *e, hvdl_operation *op, uint64_t k)
{
    hvdl_running_exchange *running = calloc(1, sizeof *running);
    if (!running || hvdl_make_exchange(e, op, k, &running->exchange)) {
        free(running);
        hvdl_out_of_memory_in(e, op);
        return;
    }
    running->operation = op;
    running->piece = k;
    running->next = NULL;
    if (!e->pieces.exchanges)
        hvdl_streams_begin(&e->wire, hvdl_now_ns());
    hvdl_running_exchange **last =
        &e->pieces.exchanges; /* in order: the oldest piece is moved first */
    while (*last)
        last = &(*last)->next;
    *last = running;
}

void hvdl_step_exchanges(hvdl_engine *e, bool *progressed)
{
    for (hvdl_running_exchange **at = &e->pieces.exchanges; *at;) {
        hvdl_running_exchange *running = *at;
        bool done = false;
        hvdl_err err = hvdl_exchange_step(running->exchange, progressed, &done);
        if (err == HVDL_ENOMEM) {
            hvdl_out_of_memory_in(e, running->operation);
            return;
        }
        if (err) {
            hvdl_fatal(e, "rank %d on %s: MPI reported an error in %s '%s'", hvdl_own_number(e),
                       e->placement.name_of[e->config.rank],
                       hvdl_kind_name(running->operation->desc.kind), running->operation->name);
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

hvdl_headway hvdl_exchanges_headway(const hvdl_engine *e, const hvdl_operation *op)
{
    hvdl_headway all = {.peer = -1};
    const hvdl_running_exchange *running = e->pieces.exchanges;
    for (; running; running = running->next) {
        if (op && running->operation != op)
            continue;
        hvdl_headway one = hvdl_exchange_headway(running->exchange);
        all.done += one.done;
        all.total += one.total;
        all.peer = all.peer < 0 ? one.peer : all.peer;
    }
    return all;
}

void hvdl_abandon_all(hvdl_engine *e)
{
    for (hvdl_pass *pass = hvdl_pipeline_clear(&e->pipeline), *next; pass; pass = next) {
        next = pass->next;
        free(pass);
    }
    if (e->pieces.exchanges)
        hvdl_wire_poll(&e->wire); /* what was sent since the last time may have left */
    while (e->pieces.exchanges) {
        hvdl_running_exchange *running = e->pieces.exchanges;
        e->pieces.exchanges = running->next;
        if (!hvdl_exchange_destroy(running->exchange))
            running->operation->pinned = e->pieces.pinned = true;
        free(running);
    }
}

/* ---- how a piece runs ---- */

static void break_for_memory(hvdl_engine *e, const hvdl_operation *op)
{
    char title[HVDL_TITLE_BYTES];
    hvdl_put_title_of(title, sizeof title, op);
    hvdl_fatal(e, "rank %d has no memory for the result of %s", hvdl_own_number(e), title);
}

static void after_a(hvdl_engine *e, hvdl_operation *op, uint64_t k);
static void piece_done(hvdl_engine *e, hvdl_operation *op, uint64_t k);

static hvdl_piece *piece_of(hvdl_operation *op, uint64_t k)
{
    return &op->progress.pieces[k % HVDL_PIECE_SLOTS];
}

/* Returns true if a pass was scheduled; false if the phase is over at once. */
static bool schedule(hvdl_engine *e, hvdl_operation *op, uint64_t k, int phase)
{
    hvdl_pass *pass;
    if (hvdl_make_pass(e, op, k, phase, &pass)) {
        hvdl_out_of_memory_in(e, op);
        return true;
    }
    if (!pass)
        return false;
    pass->owner = op;
    pass->piece = k;
    pass->phase = phase;
    hvdl_pipeline_add(&e->pipeline, pass);
    return true;
}

/* The leader says when the next piece may begin: within a window from the oldest one that is not
 * finished, since pieces k and k + HVDL_PIECE_WINDOW use the same tags. */
static void offer_next(hvdl_engine *e, hvdl_operation *op)
{
    if (!e->placement.is_leader)
        return;
    while (op->progress.announced < op->progress.num_pieces &&
           op->progress.announced - op->progress.first_unfinished < window(e)) {
        uint64_t k = op->progress.announced;
        if (hvdl_piece_waits(e, op, k) && op->progress.finished < k)
            return;
        op->progress.announced++;
        hvdl_entry head = {.type = HVDL_ENTRY_NEXT, .id = op->match->id, .arg = k};
        hvdl_announce(e, head, NULL, 0);
    }
}

void hvdl_piece_next(hvdl_engine *e, hvdl_operation *op)
{
    uint64_t k = op->progress.started++;
    *piece_of(op, k) = (hvdl_piece){0};
    if (!schedule(e, op, k, HVDL_PHASE_A))
        after_a(e, op, k);
}

/* Phase A of piece k is over on this rank. */
static void after_a(hvdl_engine *e, hvdl_operation *op, uint64_t k)
{
    hvdl_piece *piece = piece_of(op, k);
    piece->a_over = true;
    if (!hvdl_piece_has_exchange(e, op, k) || piece->c_over) {
        piece_done(e, op, k);
        return;
    }
    if (e->placement.local >= hvdl_num_exchangers(e, op))
        return; /* READY entries say when it goes on */
    if (hvdl_piece_waits(e, op, k) && op->progress.finished < k) {
        op->progress.exchange_waits = true;
        return;
    }
    start_exchange(e, op, k);
}

void hvdl_piece_ready(hvdl_engine *e, hvdl_operation *op, uint64_t k)
{
    hvdl_piece *piece = piece_of(op, k);
    if (++piece->num_ready < hvdl_num_exchangers(e, op) || schedule(e, op, k, HVDL_PHASE_C))
        return;
    /* The rails may be faster than this rank's own phase A. */
    piece->c_over = true;
    if (piece->a_over)
        piece_done(e, op, k);
}

void hvdl_pass_finished(hvdl_engine *e, hvdl_pass *pass)
{
    hvdl_operation *op = pass->owner;
    if (pass->phase == HVDL_PHASE_A)
        after_a(e, op, pass->piece);
    else
        piece_done(e, op, pass->piece);
    free(pass);
}

static void complete(hvdl_engine *e, hvdl_operation *op)
{
    if (e->config.num_hosts > 1 && e->placement.is_leader && !op->plan)
        hvdl_control_tag_done(e, op->progress.tag);
    if (op->collective->settle && op->collective->settle(e, op))
        break_for_memory(e, op);
    else if (!op->child)
        hvdl_finish(e, op, NULL);
}

static void piece_done(hvdl_engine *e, hvdl_operation *op, uint64_t k)
{
    op->progress.finished++;
    piece_of(op, k)->finished = true;
    while (op->progress.first_unfinished < op->progress.started &&
           piece_of(op, op->progress.first_unfinished)->finished)
        op->progress.first_unfinished++;
    if (op->progress.exchange_waits && op->progress.finished == op->parts.num_gathering) {
        op->progress.exchange_waits = false;
        start_exchange(e, op, op->parts.num_gathering);
    }
    if (op->progress.finished == op->progress.num_pieces)
        complete(e, op);
    else
        offer_next(e, op);
}

/* ---- the start ---- */

static const hvdl_collective *collective_of(const hvdl_desc *desc)
{
    static const hvdl_collective *const collectives[HVDL_NUM_KINDS] = {
        [HVDL_ALLREDUCE] = &hvdl_collective_allreduce,
        [HVDL_REDUCESCATTER] = &hvdl_collective_reducescatter,
        [HVDL_BROADCAST] = &hvdl_collective_broadcast,
        [HVDL_ALLGATHER] = &hvdl_collective_allgather,
        [HVDL_ALLTOALL] = &hvdl_collective_alltoall,
        [HVDL_REDUCE] = &hvdl_collective_reduce,
        [HVDL_ALLGATHER_INTO] = &hvdl_collective_allgather_into,
        [HVDL_ALLTOALL_INTO] = &hvdl_collective_alltoall_into,
        [HVDL_GATHER] = &hvdl_collective_gather,
        [HVDL_SCATTER] = &hvdl_collective_scatter,
        [HVDL_REDUCE_TO_OWNERS] = &hvdl_collective_reduce_to_owners,
        [HVDL_REDUCE_TO_HOST_OWNERS] = &hvdl_collective_reduce_to_owners,
        [HVDL_UNITE] = &hvdl_collective_unite,
        [HVDL_UNITE_ON_HOST] = &hvdl_collective_unite_on_host,
    };
    return desc->op == HVDL_ADASUM && desc->kind == HVDL_ALLREDUCE ? &hvdl_collective_adasum
                                                                   : collectives[desc->kind];
}

void hvdl_begin(hvdl_engine *e, hvdl_operation *op, int tag, const int64_t *rows)
{
    hvdl_set_state(e, op, HVDL_RUNNING);
    op->progress.tag = tag;
    op->collective = collective_of(&op->desc);
    if (op->collective->prepare && op->collective->prepare(e, op, rows)) {
        break_for_memory(e, op);
        return;
    }
    op->progress.num_pieces = op->collective->count_pieces(e, op);
    if (op->progress.num_pieces == 0)
        complete(e, op);
    else
        offer_next(e, op);
}
