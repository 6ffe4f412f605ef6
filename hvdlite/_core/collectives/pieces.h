/* Runs an operation that is matched and not tiny. The driver. */
#ifndef HVDL_PIECES_H
#define HVDL_PIECES_H

#include "engine/state.h"

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
