/* How the kinds of operations go through their phases: what each piece of an operation is, on this
 * rank. pieces.c moves the pieces; an hvdl_collective, one for each kind, says what they are made of.
 *
 *                   A: within the host            X: between the hosts     C: within the host
 *   one host
 *   allreduce       ALLREDUCE
 *   reduce          ALLREDUCE or SCATTER, for the root
 *   reducescatter   SCATTER of shares
 *   broadcast       SHARE from the root
 *   allgather       SHARE from all
 *   alltoall        PARTS; so are gather and scatter, where most parts are empty
 *   to owners       SCATTER of what each owns
 *   unite           SHARE from the owners
 *   several hosts
 *   allreduce       SCATTER: rails get sums       ring or direct           SHARE from the rails
 *   reduce          SCATTER: rails get sums       half of that, to the     root's host: SHARE
 *                                                 root's host
 *   reducescatter   SCATTER of all shares         half of that             SHARE, where a host has
 *                                                                          more ranks than rails
 *   broadcast       root's host: SHARE            chain from root's host   others: SHARE from rails
 *   allgather       SHARE from all                gather of host blocks    SHARE from the rails
 *   alltoall        PARTS                         pairwise, every rank
 *   to owners       as allreduce                  the first half of        SHARE, where a host has
 *                                                 allreduce's              more ranks than rails
 *   unite           SHARE, where a host has       gather of the owners'    as allreduce
 *                   more ranks than rails         chunks
 *
 * Rails are the first `num_rails` ranks of each host, as many as the smallest host has; rail i of
 * each host exchanges slice i with rail i of the others, all rails at once.
 *
 * An allreduce, reduce, reducescatter or broadcast takes each piece through A, X, C independently. An
 * allgather, whose members' parts differ in size, has first its A pieces, then one X piece, then its
 * C pieces. An alltoall has one X piece, and then its A pieces, which need not wait for it. */
#ifndef HVDL_PHASES_H
#define HVDL_PHASES_H

#include "engine/state.h"

enum { HVDL_PHASE_A, HVDL_PHASE_C };

/* How one kind goes through its phases. Functions may be NULL where it says so. */
struct hvdl_collective {
    /* Makes what the operation needs besides the caller's buffers. rows: the numbers of rows that were
     * posted: of each member, in the order of `members`; where splits are posted, for each member in that
     * order, what it sends to each local rank. NULL: nothing is needed. */
    hvdl_err (*prepare)(const hvdl_engine *engine, hvdl_operation *operation, const int64_t *rows);
    uint64_t (*count_pieces)(const hvdl_engine *engine, hvdl_operation *operation);
    /* Several hosts: is there something to exchange for this piece? NULL: for every one. */
    bool (*has_exchange)(const hvdl_operation *operation, uint64_t piece);
    /* Several hosts: must all pieces before this one be finished before it is announced? NULL: never. */
    bool (*waits)(const hvdl_operation *operation, uint64_t piece);
    /* Is there something to do within the host in this phase of a piece? */
    bool (*has_pass)(const hvdl_engine *engine, const hvdl_operation *operation, uint64_t piece,
                     int phase);
    hvdl_pass *(*make_pass)(const hvdl_engine *engine, const hvdl_operation *operation,
                            uint64_t piece, int phase);
    /* Fills in what is not the same for all kinds. table: zeroed, four numbers for each host, or, if
     * every rank exchanges, for each rank. */
    void (*describe_exchange)(const hvdl_engine *engine, const hvdl_operation *operation,
                              uint64_t piece, hvdl_exchange_spec *spec, size_t *table);
    /* All pieces are finished: puts the result to where the caller finds it, or posts a child that goes
     * on. NULL: the result is there. */
    hvdl_err (*settle)(hvdl_engine *engine, hvdl_operation *operation);
    bool every_rank_exchanges; /* else the rails do */
    bool rows_are_elems;       /* else a row is as large as the descriptor says */
};

/* ---- the collectives: of the kinds that have pieces, and of Adasum ---- */

extern const hvdl_collective hvdl_collective_allreduce, hvdl_collective_reduce,
    hvdl_collective_reducescatter, hvdl_collective_broadcast, hvdl_collective_allgather,
    hvdl_collective_allgather_into, hvdl_collective_alltoall, hvdl_collective_alltoall_into,
    hvdl_collective_gather, hvdl_collective_scatter, hvdl_collective_adasum,
    hvdl_collective_reduce_to_owners, hvdl_collective_unite, hvdl_collective_unite_on_host;

/* ---- phases.c: what pieces.c asks ---- */

bool hvdl_piece_has_exchange(const hvdl_engine *engine, const hvdl_operation *operation,
                             uint64_t piece);
bool hvdl_piece_waits(const hvdl_engine *engine, const hvdl_operation *operation, uint64_t piece);
/* The local ranks that take part in an exchange are the first so many. */
int hvdl_num_exchangers(const hvdl_engine *engine, const hvdl_operation *operation);
/* *pass: NULL where this rank has nothing to do in the phase. */
hvdl_err hvdl_make_pass(const hvdl_engine *engine, const hvdl_operation *operation, uint64_t piece,
                        int phase, hvdl_pass **pass);
hvdl_err hvdl_make_exchange(hvdl_engine *engine, const hvdl_operation *operation, uint64_t piece,
                            hvdl_exchange **exchange);

/* ---- phases.c: what several collectives use ---- */

/* Of `total` elements of this size. */
hvdl_range hvdl_piece_range(const hvdl_engine *engine, const hvdl_desc *desc, uint64_t piece,
                            size_t total, size_t esize);
uint64_t hvdl_pieces_of(const hvdl_engine *engine, const hvdl_desc *desc);
uint64_t hvdl_count_pieces(const hvdl_engine *engine, hvdl_operation *operation);
/* What the rails hold of a piece, in place: elements of `dtype`. */
hvdl_pass *hvdl_share_from_rails(const hvdl_engine *engine, char *buffer, hvdl_range range,
                                 hvdl_dtype dtype);
/* This rail's slice of a piece, whose elements are of spec->dtype. */
void hvdl_put_slice(const hvdl_engine *engine, hvdl_range range, uint64_t piece, char *buffer,
                    hvdl_exchange_spec *spec);

/* ---- reducing.c: the allreduce's, of which another collective is the first half ---- */

bool hvdl_allreduce_has_pass(const hvdl_engine *engine, const hvdl_operation *operation,
                             uint64_t piece, int phase);
hvdl_pass *hvdl_allreduce_make_pass(const hvdl_engine *engine, const hvdl_operation *operation,
                                    uint64_t piece, int phase);
void hvdl_allreduce_describe_exchange(const hvdl_engine *engine, const hvdl_operation *operation,
                                      uint64_t piece, hvdl_exchange_spec *spec, size_t *table);
hvdl_err hvdl_allreduce_prepare(const hvdl_engine *engine, hvdl_operation *operation,
                                const int64_t *rows);
/* A pass that adds up the operation's elements. */
hvdl_pass *hvdl_reducing_pass(const hvdl_engine *engine, const hvdl_operation *operation,
                              hvdl_pass_type type, int num_sources);
void hvdl_describe_reduction(const hvdl_engine *engine, const hvdl_operation *operation,
                             hvdl_exchange_spec *spec);
/* Of hosts that get only their own chunks' sums. */
void hvdl_scatter_between_hosts(const hvdl_engine *engine, const hvdl_operation *operation,
                                uint64_t piece, hvdl_exchange_spec *spec);

/* ---- rows.c, parts.c: what other collectives use that gather rows, or send some to each rank ---- */

hvdl_err hvdl_gather_prepare(const hvdl_engine *engine, hvdl_operation *operation,
                             const int64_t *rows);
uint64_t hvdl_gather_count_pieces(const hvdl_engine *engine, hvdl_operation *operation);
bool hvdl_gather_has_exchange(const hvdl_operation *operation, uint64_t piece);
bool hvdl_gather_waits(const hvdl_operation *operation, uint64_t piece);
bool hvdl_gather_has_pass(const hvdl_engine *engine, const hvdl_operation *operation,
                          uint64_t piece, int phase);
hvdl_pass *hvdl_gather_make_pass(const hvdl_engine *engine, const hvdl_operation *operation,
                                 uint64_t piece, int phase);
void hvdl_gather_describe_exchange(const hvdl_engine *engine, const hvdl_operation *operation,
                                   uint64_t piece, hvdl_exchange_spec *spec, size_t *table);

hvdl_err hvdl_alltoall_prepare(const hvdl_engine *engine, hvdl_operation *operation,
                               const int64_t *rows);
uint64_t hvdl_alltoall_count_pieces(const hvdl_engine *engine, hvdl_operation *operation);
bool hvdl_alltoall_has_exchange(const hvdl_operation *operation, uint64_t piece);
bool hvdl_alltoall_has_pass(const hvdl_engine *engine, const hvdl_operation *operation,
                            uint64_t piece, int phase);
hvdl_pass *hvdl_alltoall_make_pass(const hvdl_engine *engine, const hvdl_operation *operation,
                                   uint64_t piece, int phase);
void hvdl_alltoall_describe_exchange(const hvdl_engine *engine, const hvdl_operation *operation,
                                     uint64_t piece, hvdl_exchange_spec *spec, size_t *table);

#endif
