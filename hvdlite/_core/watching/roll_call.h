/* Roll calls: a caller asks which ranks have not called an operation. */
#ifndef HVDL_ROLL_CALL_H
#define HVDL_ROLL_CALL_H

#include "engine/state.h"

/* The driver, if any is waiting: begins calls whose operation this host knows by now. Returns whether it
 * began one. */
bool hvdl_roll_calls_step(hvdl_engine *engine);
/* The leader asks the other hosts. */
void hvdl_read_roll_call(hvdl_engine *engine, const hvdl_entry *entry);
/* A host has answered; for the rank that asked. */
void hvdl_read_roll_answer(hvdl_engine *engine, const hvdl_entry *entry);

/* ---- messages ---- */

void hvdl_on_roll_call(hvdl_engine *engine, int host, const void *payload, size_t bytes);
void hvdl_on_roll_answer(hvdl_engine *engine, int host, const void *payload, size_t bytes);

#endif
