/* How the kinds of operations go through their phases: what each piece of an operation is, on this
 * rank. pieces.c moves the pieces; this says what they are made of.
 *
 *                   A: within the host            X: between the hosts     C: within the host
 *   one host
 *   allreduce       ALLREDUCE
 *   reducescatter   ALLREDUCE, keeping own rows
 *   broadcast       SHARE from the root
 *   allgather       SHARE from all
 *   alltoall        SHARE from all, own rows
 *   several hosts
 *   allreduce       SCATTER: rails get sums       ring or direct           SHARE from the rails
 *   reducescatter   as allreduce, into memory of the engine's; the own rows are copied at the end
 *   broadcast       root's host: SHARE            chain from root's host   others: SHARE from rails
 *   allgather       SHARE from all                gather of host blocks    SHARE from the rails
 *   alltoall        SHARE from all, own rows      pairwise, every rank
 *
 * Rails are the first `num_rails` ranks of each host, as many as the smallest host has; rail i of
 * each host exchanges slice i with rail i of the others, all rails at once.
 *
 * An allreduce, reducescatter or broadcast takes each piece through A, X, C independently. An
 * allgather, whose members' parts differ in size, has first its A pieces, then one X piece, then its
 * C pieces. An alltoall has one X piece, and then its A pieces, which need not wait for it. */
#ifndef HVDL_PHASES_H
#define HVDL_PHASES_H

#include "engine/state.h"

enum { HVDL_PHASE_A, HVDL_PHASE_C };

/* Makes what the operation needs besides the caller's buffers. rows: allgather: of each member, in
 * the order of `members`; alltoall: for each member in that order, what it sends to each local rank. */
hvdl_err hvdl_prepare(const hvdl_engine *engine, hvdl_operation *operation, const int64_t *rows);

/* All pieces are finished: the result goes to where the caller finds it. */
hvdl_err hvdl_settle_result(const hvdl_engine *engine, hvdl_operation *operation);

uint64_t hvdl_count_pieces(const hvdl_engine *engine, hvdl_operation *operation);
bool hvdl_piece_has_exchange(const hvdl_engine *engine, const hvdl_operation *operation,
                             uint64_t piece);
/* Must all pieces before this one be finished before it is announced? */
bool hvdl_piece_waits(const hvdl_engine *engine, const hvdl_operation *operation, uint64_t piece);
/* The local ranks that take part in an exchange are the first so many. */
int hvdl_num_exchangers(const hvdl_engine *engine, const hvdl_operation *operation);

/* *pass: NULL where this rank has nothing to do in the phase. */
hvdl_err hvdl_make_pass(const hvdl_engine *engine, const hvdl_operation *operation, uint64_t piece,
                        int phase, hvdl_pass **pass);
hvdl_err hvdl_make_exchange(hvdl_engine *engine, const hvdl_operation *operation, uint64_t piece,
                            hvdl_exchange **exchange);

/* ---- rows.c: allgather and alltoall, whose parts differ in size ---- */

size_t hvdl_row_bytes(const hvdl_operation *operation);
hvdl_err hvdl_prepare_gather(const hvdl_engine *engine, hvdl_operation *operation,
                             const int64_t *rows);
hvdl_err hvdl_prepare_alltoall(const hvdl_engine *engine, hvdl_operation *operation,
                               const int64_t *rows);
hvdl_err hvdl_reorder_gathered(const hvdl_engine *engine, hvdl_operation *operation);
uint64_t hvdl_count_gather(const hvdl_engine *engine, hvdl_operation *operation);
uint64_t hvdl_count_alltoall(const hvdl_engine *engine, const hvdl_operation *operation);
hvdl_pass *hvdl_gather_pass(const hvdl_engine *engine, const hvdl_operation *operation,
                            uint64_t piece);
hvdl_pass *hvdl_spread_pass(const hvdl_engine *engine, const hvdl_operation *operation,
                            uint64_t piece);
hvdl_pass *hvdl_alltoall_pass(const hvdl_engine *engine, const hvdl_operation *operation,
                              uint64_t piece);
/* Fills offsets and sizes by host, in bytes. */
void hvdl_gather_chunks(const hvdl_engine *engine, const hvdl_operation *operation, size_t *offsets,
                        size_t *bytes);
/* Fills offsets and sizes by rank, in bytes; 0 for ranks of this host. */
void hvdl_alltoall_parts(const hvdl_engine *engine, const hvdl_operation *operation,
                         size_t *send_offsets, size_t *send_bytes, size_t *recv_offsets,
                         size_t *recv_bytes);

#endif
