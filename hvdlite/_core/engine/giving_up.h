/* Giving up: a caller lets all operations fail, on all ranks. */
#ifndef HVDL_GIVING_UP_H
#define HVDL_GIVING_UP_H

#include "engine/state.h"

#define HVDL_NO_REASON "the caller gave up"

/* The driver, if it is wanted. Returns true: it did something. */
bool hvdl_giving_up_step(hvdl_engine *engine);
/* All ranks of all hosts fail with this text, also where this rank is no leader. at_once: this one does not wait until
 * its own host has read of it, which a rank that is stopped may prevent. */
void hvdl_announce_give_up(hvdl_engine *engine, const char *text, bool at_once);
/* The leader of another host says so. */
void hvdl_on_give_up(hvdl_engine *engine, const void *reason, size_t bytes);
void hvdl_read_give_up(hvdl_engine *engine, const hvdl_entry *entry);

#endif
