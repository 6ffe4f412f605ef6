/* The course of an operation that is matched and not tiny. The driver. */
#ifndef HVDL_PIECES_H
#define HVDL_PIECES_H

#include "engine/engine.h"
#include "host/conveyor.h"

#define HVDL_PIECE_WINDOW 4 /* pieces of an operation in flight at once, at most */
/* A slower rank of the host may still be at earlier pieces than the leader that opens new ones: by as
 * many passes as it may be blocks behind on the conveyor, which is HVDL_NUM_BUFFERS. */
#define HVDL_PIECE_SLOTS 16
_Static_assert(HVDL_PIECE_SLOTS > HVDL_PIECE_WINDOW + HVDL_NUM_BUFFERS, "pieces share no slot");

/* A piece is finished on a rank when its phase A is over there, all rails have done its exchange, and
 * its phase C is over there. Those it does not have are over at once. */
typedef struct {
    bool a_over, c_over, finished;
    int num_ready; /* rails that have done the exchange */
} hvdl_piece;

/* How far an operation is. Written by pieces.c. */
typedef struct {
    int tag;
    uint64_t num_pieces, started, finished, announced;
    uint64_t first_unfinished;           /* all pieces below it are finished */
    hvdl_piece pieces[HVDL_PIECE_SLOTS]; /* piece k, if it is in flight, at k % HVDL_PIECE_SLOTS */
    bool exchange_waits; /* allgather: its exchange is due once the earlier pieces are done */
} hvdl_progress;

typedef struct hvdl_running_exchange hvdl_running_exchange;

/* Of all operations. Written by pieces.c. */
typedef struct {
    hvdl_running_exchange *exchanges;
    bool pinned; /* MPI may still use an operation's buffers: they are kept for ever */
} hvdl_pieces;

/* Starts an operation that is matched everywhere and is not tiny. all_rows (allgather): by rank. */
void hvdl_begin(hvdl_engine *engine, hvdl_operation *operation, int tag, const int64_t *all_rows);
void hvdl_piece_next(hvdl_engine *engine, hvdl_operation *operation);
void hvdl_piece_ready(hvdl_engine *engine, hvdl_operation *operation, uint64_t piece);
void hvdl_pass_finished(hvdl_engine *engine, hvdl_pass *pass);
/* Moves the exchanges. */
void hvdl_step_exchanges(hvdl_engine *engine, bool *progressed);
/* How far the exchanges of an operation are that run on this rank; NULL: of all operations. */
hvdl_headway hvdl_exchanges_headway(const hvdl_engine *engine, const hvdl_operation *operation);
/* Takes all passes and exchanges down: everything is about to fail. */
void hvdl_abandon_all(hvdl_engine *engine);

#endif
