/* The stall check: which ranks wait for which. The driver. */
#ifndef HVDL_STALL_H
#define HVDL_STALL_H

#include "engine/engine.h"
#include "host/shm.h"

typedef struct hvdl_inquiry hvdl_inquiry;
typedef struct hvdl_due hvdl_due;

/* Written by stall.c. */
typedef struct {
    hvdl_inquiry *inquiries;
    int num_asking; /* of these, under way */
    hvdl_due *due, *due_last;
    hvdl_shm_last *survey; /* what the ranks of this host last did */
    uint64_t next_look_ns;
} hvdl_stall;

/* Of one operation. Written by stall.c. */
typedef struct {
    bool told, given_up;
} hvdl_lateness;

hvdl_shm_last hvdl_activity_of(const hvdl_operation *operation, hvdl_activity activity);
/* For the other ranks of the host to read, with the time. */
void hvdl_note_activity(hvdl_engine *engine, hvdl_shm_last last);
/* Looks for operations that are late, now and then. */
void hvdl_stall_look(hvdl_engine *engine);
void hvdl_read_reported(hvdl_engine *engine, const hvdl_entry *entry);
/* Says what is due of this host's ranks, if enough of the journal can be read. *progressed is set,
 * never cleared. */
void hvdl_stall_tell(hvdl_engine *engine, bool *progressed);
/* An operation ends: the inquiries about it end, too. */
void hvdl_stall_ended(hvdl_engine *engine, const hvdl_operation *operation);
/* Everything fails: all inquiries and reports end. */
void hvdl_stall_end(hvdl_engine *engine);
void hvdl_stall_free(hvdl_engine *engine);

#endif
