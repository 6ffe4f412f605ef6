/* What a coordinator asks the hosts about late operations. The driver; between hosts. Its messages: messages.h. */
#ifndef HVDL_INQUIRIES_H
#define HVDL_INQUIRIES_H

#include "engine/state.h"

/* Ends those that no host answers any more, and begins others. */
void hvdl_inquiries_look(hvdl_engine *engine, uint64_t now);
/* Nobody waits for it any more. goes_on: it is no error. */
void hvdl_inquiries_forget(hvdl_engine *engine, hvdl_key key, uint64_t run, bool goes_on);
/* Everything fails. */
void hvdl_inquiries_end(hvdl_engine *engine);

/* ---- messages ---- */

/* The coordinator has an answer: no rank waits any more. goes_on: it is no error. */
void hvdl_stall_decided(hvdl_engine *engine, hvdl_key key, bool goes_on);
void hvdl_on_stalled(hvdl_engine *engine, int host, const void *payload);
/* The host that asked for it has said this report itself. */
void hvdl_on_spoken(hvdl_engine *engine, hvdl_key key, uint64_t run, int report);
void hvdl_on_ask(hvdl_engine *engine, int host, hvdl_key key, uint64_t run);
void hvdl_on_status(hvdl_engine *engine, int host, hvdl_key key, uint64_t run, const void *payload);
void hvdl_on_give_up(hvdl_engine *engine, const void *reason, size_t bytes);

#endif
