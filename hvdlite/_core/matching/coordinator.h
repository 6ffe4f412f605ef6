/* Agreement between hosts on what all have posted. Their leaders' drivers. */
#ifndef HVDL_COORDINATOR_H
#define HVDL_COORDINATOR_H

#include "matching/messages.h"

/* The leader: all ranks of this host have posted. */
void hvdl_control_posted(hvdl_engine *engine, hvdl_match *match);
/* The leader: a rank has left, so what is not agreed on yet fails. */
void hvdl_control_fail_open(hvdl_engine *engine);
void hvdl_on_posted(hvdl_engine *engine, const hvdl_message *message, const void *payload);
void hvdl_on_answer(hvdl_engine *engine, const hvdl_message *message, const void *payload);
/* Host 0: numbers an operation that stays on devices, for its coordinator. */
void hvdl_on_order(hvdl_engine *engine, int host, hvdl_key key);
/* The coordinator: it has the number, and tells all. */
void hvdl_on_sequence(hvdl_engine *engine, hvdl_key key, int sequence);
/* Has the host posted it, and no answer been given yet? */
bool hvdl_is_open(const hvdl_engine *engine, hvdl_key key, int host);
/* Hosts have joined: what is complete now is decided. */
void hvdl_decide_complete(hvdl_engine *engine);
/* Decides the oldest one that waits for a tag; false: there is none. */
bool hvdl_decide_waiting(hvdl_engine *engine);
hvdl_err hvdl_coordinator_make(hvdl_engine *engine, size_t payload_bytes);
void hvdl_coordinator_free(hvdl_coordinator *coordinator);

#endif
