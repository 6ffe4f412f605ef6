/* Driving the engine: by its progress thread, or by a caller that waits. */
#ifndef HVDL_DRIVE_H
#define HVDL_DRIVE_H

#include <pthread.h>

#include "engine/engine.h"

/* Written by drive.c. */
typedef struct {
    pthread_mutex_t lock; /* the thread that holds it is the driver */
    pthread_t thread;
    bool has_thread; /* constant: also when the thread has ended */
    _Atomic bool stop;
    _Atomic int num_waiting;     /* callers in hvdl_operation_wait: the thread leaves it to them */
    _Atomic int num_sleeping;    /* of those, asleep on done_count */
    _Atomic uint32_t done_count; /* futex: counts ended operations and drivers that left */
    _Atomic uint64_t late_wakings; /* see hvdl_counters */
    _Atomic bool busy;             /* there is background work: sends, releases */
    _Atomic bool thread_idle;      /* the progress thread sleeps on this rank's idle_bell */
    _Atomic bool
        has_more; /* a caller who asks who is missing, a text to give up with, messages: set behind what tells of them */
    /* the driver's */
    uint64_t sweeps;
    int idle_looks;         /* since anything moved */
    uint64_t idle_since_ns; /* with other hosts: the first of them */
    long pause_ns;
} hvdl_driving;

/* How often a rank that does nothing looks for what others want of it, and how long one that leaves
 * helps to end what is under way: longer, so that those have looked meanwhile. */
#define HVDL_IDLE_LOOK_NS 2000000000
#define HVDL_DRAIN_NS 2400000000
/* A leader: more often, as other hosts take one that does not answer (roll_call.h) for stopped. */
#define HVDL_LEADER_IDLE_LOOK_NS 500000000

hvdl_err hvdl_driving_start(hvdl_engine *engine);
/* Ends the thread, and keeps callers that wait from driving. */
void hvdl_driving_stop(hvdl_engine *engine);

/* Moves everything as far as it can go now. Returns whether anything moved. */
bool hvdl_sweep(hvdl_engine *engine);
/* The same, for a caller that does not look again soon: Open MPI moves messages when asked which have ended and
 * none had, and reports those only when asked again. */
bool hvdl_sweep_twice(hvdl_engine *engine);
/* Nothing moved: looks again soon, lets others run, or sleeps, the longer it lasts.
 * wanted: whether somebody else wants to drive. */
void hvdl_pause(hvdl_engine *engine, bool (*wanted)(hvdl_engine *));
bool hvdl_nobody(hvdl_engine *engine);

void hvdl_wake_thread(hvdl_engine *engine);
/* An operation has ended, or the driver has left: callers that sleep look again. */
void hvdl_wake_waiting(hvdl_engine *engine);

#endif
