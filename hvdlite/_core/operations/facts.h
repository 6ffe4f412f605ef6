/* What follows from an operation's descriptor and from where the ranks are. Pure. */
#ifndef HVDL_FACTS_H
#define HVDL_FACTS_H

#include "engine/state.h"
#include "kernels/reduce.h"

bool hvdl_is_tiny(const hvdl_engine *engine, const hvdl_desc *desc, bool is_run);
/* Of the sum over this host's ranks; and, where there are other hosts, of the sum over the hosts. */
hvdl_scale hvdl_host_scale(const hvdl_engine *engine, const hvdl_desc *desc);
hvdl_scale hvdl_last_scale(const hvdl_engine *engine, const hvdl_desc *desc);
/* hvdl_host_scale of an operation that may be a run with weights. */
hvdl_scale hvdl_weighted_scale(const hvdl_engine *engine, const hvdl_operation *operation);
/* Bytes of the user's data that go through the engine: none where it only agrees. */
size_t hvdl_data_bytes(const hvdl_desc *desc);
/* What keys are made of besides kinds of operations and names. */
enum { HVDL_KEY_OF_PLAN = 254, HVDL_KEY_OF_UNNAMED = 255 };
hvdl_key hvdl_make_key(int kind, const char *name);
/* Does a rank that has joined take part in such an operation? */
bool hvdl_can_be_joined(const hvdl_desc *desc);
/* The text for an operation in which a rank that has joined takes no part. */
void hvdl_describe_absent(const hvdl_engine *engine, const hvdl_desc *desc, int rank,
                          char text[HVDL_TEXT_BYTES]);

#endif
