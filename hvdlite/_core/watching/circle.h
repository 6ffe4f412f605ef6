/* Circles: ranks that wait for each other, each in an operation that another one has not posted. */
#ifndef HVDL_CIRCLE_H
#define HVDL_CIRCLE_H

#include <pthread.h>

#include "engine/engine.h"
#include "host/shm.h"

/* Of the thread that waits in an operation. Written by circle.c, under `lock`: any thread. */
typedef struct {
    pthread_mutex_t lock;
    uint64_t waits_in; /* the number of its operation; 0: no thread waits for long */
    uint64_t id;       /* of the wait */
    bool alone;        /* no other thread of this process could post anything */
    bool published;    /* to the other ranks of the host */
    /* the driver's */
    uint64_t next_look_ns;
    uint64_t told; /* the circle that was reported last, as the sum of its meetings */
} hvdl_circle;

/* The driver: looks now and then whether this rank is in a circle. */
void hvdl_circle_look(hvdl_engine *engine);
void hvdl_read_circle(hvdl_engine *engine, const hvdl_entry *entry);

#endif
