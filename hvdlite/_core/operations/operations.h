/* Operations: made by any thread, ended by the driver. */
#ifndef HVDL_OPERATIONS_H
#define HVDL_OPERATIONS_H

#include "engine/engine.h"
#include "base/schedule.h"
#include "kernels/reduce.h"

typedef enum { HVDL_POSTED, HVDL_MATCHED, HVDL_RUNNING, HVDL_DONE, HVDL_FAILED } hvdl_state;

/* Ends an operation; text NULL: it succeeded. Takes it out of its meeting. */
void hvdl_finish(hvdl_engine *engine, hvdl_operation *operation, const char *text);
void hvdl_set_state(hvdl_engine *engine, hvdl_operation *operation, hvdl_state state);
bool hvdl_is_tiny(const hvdl_engine *engine, const hvdl_desc *desc, bool is_run);
/* Of the sum over this host's ranks; and, where there are other hosts, of the sum over the hosts. */
hvdl_scale hvdl_host_scale(const hvdl_engine *engine, const hvdl_desc *desc);
hvdl_scale hvdl_last_scale(const hvdl_engine *engine, const hvdl_desc *desc);
/* hvdl_host_scale of an operation that may be a run with weights. */
hvdl_scale hvdl_weighted_scale(const hvdl_engine *engine, const hvdl_operation *operation);
/* What the operation says besides its result. */
hvdl_err hvdl_say_number(hvdl_operation *operation, int64_t number);
/* What a rank of a reducescatter gets. */
hvdl_range hvdl_own_elems(const hvdl_engine *engine, const hvdl_operation *operation);
/* Bytes of the user's data that go through the engine: none where it only agrees. */
size_t hvdl_data_bytes(const hvdl_desc *desc);
/* Posts an operation that works for `parent`, under its key and the number of the step. */
hvdl_err hvdl_post_child(hvdl_engine *engine, hvdl_operation *parent, const hvdl_posting *posting,
                         int step);
/* An operation of the engine's own that no caller waits for, as if it were in flight already. */
hvdl_operation *hvdl_adopt_operation(hvdl_engine *engine, const hvdl_posting *posting,
                                     hvdl_key key);
/* What keys are made of besides kinds of operations and names. */
enum { HVDL_KEY_OF_PLAN = 254, HVDL_KEY_OF_UNNAMED = 255 };
hvdl_key hvdl_make_key(int kind, const char *name);
/* Copies of a posting's texts, in the memory of the name, which is returned; NULL: no memory. */
char *hvdl_keep_texts(const hvdl_posting *posting, const char **site, const char **words);
/* One that nobody knows yet; NULL: no memory. */
hvdl_operation *hvdl_operation_new(const hvdl_posting *posting);
void hvdl_operation_free(hvdl_operation *operation);
/* alone.c: in a world of one, in place of queueing it. */
hvdl_err hvdl_run_alone(hvdl_engine *engine, hvdl_operation *operation);

#endif
