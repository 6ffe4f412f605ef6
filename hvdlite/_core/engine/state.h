/* The engine, and with the other …_state.h an operation: structs of one owner each, the files that the comment above
 * a struct names. They alone write it, and only in the driver, the thread that holds `driving.lock`, unless it says
 * otherwise. Other files read the struct, or call the owner to change it.
 *
 * The folders engine, operations, matching, collectives, transfers and watching share these structs. A sweep (drive.c)
 * hands on what callers have posted (drain.c) and reads the shared log (replay.c) and messages (control.c); these begin
 * operations (pieces.c, tiny.c) or ask the other hosts (coordinator.c). Calls go down; what happens below is told
 * above by `callbacks`. See docs/design/core.md. */
#ifndef HVDL_STATE_H
#define HVDL_STATE_H

#include "engine/engine.h"
#include "engine/placement.h"
#include "matching/matching_state.h"
#include "operations/operations_state.h"
#include "transfers/transfers_state.h"
#include "watching/watching_state.h"

/* Written by drive.c and waking.c. */
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
    _Atomic bool thread_idle;      /* the progress thread sleeps on this rank's idle_doorbell */
    _Atomic bool
        has_more; /* a caller asks who is missing, a text to give up with, messages: set behind what tells of them */
    /* the driver's */
    uint64_t sweeps;
    int idle_looks;         /* since anything moved */
    uint64_t idle_since_ns; /* with other hosts: the first of them */
    long pause_ns;
} hvdl_driving;

/* Written by fatal.c and failing.c. An engine is broken when data was under way as something went wrong: then also
 * what is matched fails. If a rank has only left, what is matched still ends well. */
typedef struct {
    char text[HVDL_TEXT_BYTES]; /* empty: operations can succeed */
    int first_gone;             /* the first rank that left or died */
    bool broken;
    bool ended;  /* and everything has failed for it */
    bool tells;  /* the other ranks learn of it from this one */
    int culprit; /* the rank for which it was broken: this one, or one that has gone */
} hvdl_failure;

/* Written by giving_up.c, and by hvdl_engine_give_up: any thread. */
typedef struct {
    pthread_mutex_t lock;
    char text[HVDL_TEXT_BYTES]; /* the first one; under `lock` */
    _Atomic bool wanted;        /* the driver must announce it */
} hvdl_giving_up;

/* What happens below is told to the parts above by these: callbacks.c fills them. */
typedef struct {
    /* An operation is about to end; text NULL: well. Returns the text with which it ends, which may be in `room`. */
    const char *(*ending)(hvdl_engine *engine, hvdl_operation *operation, const char *text,
                          char room[HVDL_TEXT_BYTES]);
    /* It has ended, and may be freed already: what its plan and the join need to know of it. */
    void (*ended)(hvdl_engine *engine, const hvdl_ended *ended);
    /* Reads what the shared log holds now, whatever comes of it. Returns whether there was anything. */
    bool (*read_log)(hvdl_engine *engine);
} hvdl_callbacks;

struct hvdl_engine {
    hvdl_engine_config config; /* constant; its arrays are the placement's */
    hvdl_placement placement;
    const hvdl_callbacks *callbacks;
    hvdl_shm shm;
    hvdl_pipeline pipeline;
    hvdl_wire wire;

    hvdl_queue queue;         /* any thread */
    hvdl_recording recording; /* any thread */
    hvdl_driving driving;     /* any thread, in parts */

    hvdl_black_box black_box;
    hvdl_announcing announcing;
    hvdl_matches matches;
    hvdl_plans plans;
    hvdl_pieces pieces;
    hvdl_join join;
    hvdl_stall stall;
    hvdl_transfers transfers;
    hvdl_failure failure;
    hvdl_giving_up giving_up; /* any thread */
    hvdl_control *control;    /* several hosts; else NULL */
};

/* ---- small facts ---- */

static inline int hvdl_rank_of_local(const hvdl_engine *engine, int local)
{
    return hvdl_member_of_host(&engine->placement, engine->placement.host, local);
}

static inline int hvdl_world_rank(const hvdl_engine *engine, int rank)
{
    return engine->placement.world_ranks[rank];
}

/* What texts call this rank. */
static inline int hvdl_own_number(const hvdl_engine *engine)
{
    return hvdl_world_rank(engine, engine->config.rank);
}

/* Whether an operation that is not matched can't be any more, as a rank has left: the engine's own go on
 * for those that are matched, unless it is broken. */
static inline bool hvdl_refuses(const hvdl_engine *engine, bool internal)
{
    return *engine->failure.text && (engine->failure.broken || !internal);
}

#endif
