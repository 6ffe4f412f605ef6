/* Why an engine's operations can't succeed any more. The driver. */
#ifndef HVDL_FATAL_H
#define HVDL_FATAL_H

#include "engine/state.h"

/* These record that the engine is broken, the first reason alone, and return: nothing is freed, nothing
 * fails before the sweep ends. Until then no operation succeeds any more, and no entry of the shared log is
 * read. So whatever calls them, or is called after them, need not look. */
void hvdl_fatal(hvdl_engine *engine, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* `culprit` has left or died. */
void hvdl_fatal_because_of(hvdl_engine *engine, int culprit, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* All ranks do so alike: this one tells nobody. */
void hvdl_fatal_on_all(hvdl_engine *engine, const char *text);
/* A message that belongs to no operation could not be started or moved: MPI's error, or no memory. */
void hvdl_fatal_for_wire(hvdl_engine *engine, hvdl_err err);
void hvdl_out_of_memory(hvdl_engine *engine);
void hvdl_out_of_memory_in(hvdl_engine *engine, const hvdl_operation *operation);

/* A rank has left in good order, or this one leaves: no new operation can succeed. */
void hvdl_note_gone(hvdl_engine *engine, int rank);

#endif
