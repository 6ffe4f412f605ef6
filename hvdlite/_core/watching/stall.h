/* The stall check: operations that wait for too long are reported, with the ranks that keep them back, and after
 * another limit everything fails. The driver.
 *
 * An operation is late if ranks have not posted it. If all have, and no block, message or piece of any operation
 * moves on this host, it stands still. */
#ifndef HVDL_STALL_H
#define HVDL_STALL_H

#include "engine/state.h"

hvdl_err hvdl_stall_make(hvdl_engine *engine);
void hvdl_stall_free(hvdl_engine *engine);

/* An allreduce has ended well. */
void hvdl_note_reduced(hvdl_engine *engine, const hvdl_operation *operation);

/* Looks for operations that are late, now and then. Returns whether it did. */
bool hvdl_stall_look(hvdl_engine *engine);
/* If there are calls: ends those that all hosts have answered. */
void hvdl_stall_step(hvdl_engine *engine);
/* If a caller wants it: asks for that caller. */
void hvdl_stall_ask_for_callers(hvdl_engine *engine);
/* An operation ends. */
void hvdl_stall_ended(hvdl_engine *engine, hvdl_operation *operation, bool ok);

#endif
