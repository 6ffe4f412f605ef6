/* Operations: made by any thread, ended by the driver. */
#ifndef HVDL_OPERATIONS_H
#define HVDL_OPERATIONS_H

#include "engine/state.h"

/* Ends an operation; text NULL: it succeeded. Takes it out of its match. */
void hvdl_finish(hvdl_engine *engine, hvdl_operation *operation, const char *text);
void hvdl_set_state(hvdl_engine *engine, hvdl_operation *operation, hvdl_state state);
/* What the operation says besides its result. */
hvdl_err hvdl_say_number(hvdl_operation *operation, int64_t number);
/* Posts an operation that works for `parent`, under its key and the number of the step. */
hvdl_err hvdl_post_child(hvdl_engine *engine, hvdl_operation *parent, const hvdl_posting *posting,
                         int step);
/* An operation of the engine's own that no caller waits for, as if it were in flight already. */
hvdl_operation *hvdl_adopt_operation(hvdl_engine *engine, const hvdl_posting *posting,
                                     hvdl_key key);
/* Copies of a posting's texts, in the memory of the name, which is returned; NULL: no memory. */
char *hvdl_keep_texts(const hvdl_posting *posting, const char **site, const char **words);
/* One that nobody knows yet; NULL: no memory. */
hvdl_operation *hvdl_operation_new(const hvdl_posting *posting);
void hvdl_operation_free(hvdl_operation *operation);
/* alone.c: in a world of one, in place of queueing it. */
hvdl_err hvdl_run_alone(hvdl_engine *engine, hvdl_operation *operation);

#endif
