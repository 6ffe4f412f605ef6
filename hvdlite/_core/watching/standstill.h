/* Operations that all ranks have posted and that stand still: their data does not move. The driver. */
#ifndef HVDL_STANDSTILL_H
#define HVDL_STANDSTILL_H

#include "engine/engine.h"
#include "watching/stall.h"
#include "host/shm.h"

typedef struct hvdl_standing hvdl_standing;

/* Written by standstill.c. */
typedef struct {
    uint64_t next_look_ns, looked_ns;
    uint64_t place;    /* a hash of how far all operations of this host were at the last look */
    uint64_t still_ns; /* how long it has not changed, while this rank was running */
    int num_reports;   /* since then: that were made, or were another's to make */
    uint64_t next_report_ns; /* of still_ns: when the next one is due */
    bool said;               /* this rank has said it, */
    hvdl_late reported;      /* of this operation */
    hvdl_standing *answers;  /* by host; the leader, while it asks the others; else NULL */
    uint64_t asked_ns;
    int num_answers, num_asked; /* num_asked: questions, ever */
} hvdl_standstill;

/* Looks now and then whether the operations move. */
void hvdl_standstill_look(hvdl_engine *engine);
void hvdl_standstill_free(hvdl_engine *engine);

/* Breaks the engine with the text with which this host's ranks fail. */
void hvdl_take_verdict(hvdl_engine *engine);
#define hvdl_heed_verdict(engine)                                                                  \
    do {                                                                                           \
        if (atomic_load_explicit(&(engine)->shm.control->verdict, memory_order_relaxed))           \
            hvdl_take_verdict(engine);                                                             \
    } while (0)

#endif
