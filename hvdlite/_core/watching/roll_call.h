/* Roll calls: a caller asks which ranks have not called an operation. */
#ifndef HVDL_ROLL_CALL_H
#define HVDL_ROLL_CALL_H

#include <pthread.h>

#include "engine/engine.h"
#include "host/shm.h"

typedef struct hvdl_roll_call hvdl_roll_call;

/* Written by roll_call.c, under `lock`: any thread. */
typedef struct {
    pthread_mutex_t lock;
    hvdl_roll_call *calls; /* that are under way */
    uint64_t last_number;
    _Atomic bool waiting; /* a call has not begun yet: the driver looks */
} hvdl_roll_calls;

/* The driver, if any is waiting: begins calls whose operation this host knows by now. Returns whether it
 * began one. */
bool hvdl_roll_calls_step(hvdl_engine *engine);
/* The leader asks the other hosts. */
void hvdl_read_roll_call(hvdl_engine *engine, const hvdl_entry *entry);
/* A host has answered; for the rank that asked. */
void hvdl_read_roll_answer(hvdl_engine *engine, const hvdl_entry *entry);

#endif
