/* Giving up: a caller lets all operations fail, on all ranks. */
#ifndef HVDL_GIVING_UP_H
#define HVDL_GIVING_UP_H

#include <pthread.h>

#include "engine/engine.h"
#include "host/shm.h"

/* Written by giving_up.c: any thread. */
typedef struct {
    pthread_mutex_t lock;
    char text[HVDL_TEXT_BYTES]; /* the first one; under `lock` */
    _Atomic bool wanted;        /* the driver must announce it */
} hvdl_giving_up;

/* The driver, if it is wanted. Returns true: it did something. */
bool hvdl_giving_up_step(hvdl_engine *engine);
/* All ranks of all hosts fail with this text, also where this rank is no leader. */
void hvdl_announce_give_up(hvdl_engine *engine, const char *text);
void hvdl_read_give_up(hvdl_engine *engine, const hvdl_entry *entry);

#endif
