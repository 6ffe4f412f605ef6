/* Messages between the leaders of the hosts: control.c moves them; coordinator.c (agreement), tags.c, join.c,
 * inquiries.c and silence.c say what is in them. */
#ifndef HVDL_CONTROL_H
#define HVDL_CONTROL_H

#include "matching/messages.h"

/* ---- control.c ---- */

hvdl_err hvdl_control_create(hvdl_engine *engine);
/* Moves messages. *progressed is set, never cleared. */
void hvdl_control_step(hvdl_engine *engine, bool *progressed);
void hvdl_control_destroy(hvdl_engine *engine);

/* ---- inquiries.c ---- */

/* The coordinator has an answer: no rank waits any more. goes_on: it is no error. */
void hvdl_stall_decided(hvdl_engine *engine, hvdl_key key, bool goes_on);
void hvdl_on_stalled(hvdl_engine *engine, int host, const void *payload);
/* The host that asked for it has said this report itself. */
void hvdl_on_spoken(hvdl_engine *engine, hvdl_key key, uint64_t run, int report);
void hvdl_on_ask(hvdl_engine *engine, int host, hvdl_key key, uint64_t run);
void hvdl_on_status(hvdl_engine *engine, int host, hvdl_key key, uint64_t run, const void *payload);
void hvdl_on_give_up(hvdl_engine *engine, const void *reason, size_t bytes);

/* ---- roll_call.c ---- */

void hvdl_on_roll_call(hvdl_engine *engine, int host, const void *payload, size_t bytes);
void hvdl_on_roll_answer(hvdl_engine *engine, int host, const void *payload, size_t bytes);

/* ---- silence.c ---- */

void hvdl_on_heard(hvdl_engine *engine, const hvdl_message *message);

/* ---- standstill.c ---- */

void hvdl_on_stands(hvdl_engine *engine, const hvdl_message *message, const void *payload);
void hvdl_on_standing(hvdl_engine *engine, const hvdl_message *message, const void *payload);
void hvdl_on_stood(hvdl_engine *engine, const char *text);

#endif
