/* What the stall check knows. */
#ifndef HVDL_WATCHING_STATE_H
#define HVDL_WATCHING_STATE_H

#include <pthread.h>

#include "base/descriptors.h"
#include "engine/engine.h"
#include "host/shm.h"

struct hvdl_missing_query;

#define HVDL_NUM_REDUCED 128 /* a power of two */

/* Written by stall.c, but for the first four. */
typedef struct {
    struct hvdl_missing_query *calls; /* missing_query.c: under way */
    uint64_t num_calls;               /* the same: ever */
    bool *silent;         /* the same: by host: it did not answer, and nothing has come since */
    hvdl_shm_last *lasts; /* missing.c: what the ranks of this host last did */
    uint64_t next_look_ns, looked_ns;
    uint64_t ran_ns;   /* for how long this rank has been running, without its pauses */
    uint64_t seen_ns;  /* of ran_ns: the last look */
    uint64_t place;    /* a hash of how far all operations of this host were at the last look */
    uint64_t still_ns; /* of ran_ns: how long it has not changed */
    int num_still;     /* reports of that */
    bool told;         /* there were calls: what ends may have one, or have been reported */
    uint64_t
        reduced[HVDL_NUM_REDUCED]; /* keys of allreduces that have ended well, each in its slot */
    pthread_mutex_t lock;          /* of the answers to callers */
    _Atomic bool wanted;           /* any thread: a caller wants one */
} hvdl_stall;

/* Of one operation. Written by stall.c. */
typedef struct {
    struct hvdl_missing_query *call; /* under way, or NULL */
    int num_reports;                 /* that were due */
    bool told;                       /* this rank has made one */
    uint64_t next_ns;                /* not before */
    _Atomic bool wanted;             /* any thread: a caller wants to know who is missing */
    char *answer;                    /* under stall.lock */
} hvdl_lateness;

#endif
