/* The engine and an operation: structs of one owner each. An owner is the file that its header names. It
 * alone writes its struct, and only in the driver, the thread that holds `driving.lock`, unless the header
 * says otherwise. Other files read the struct, or call the owner to change it.
 *
 * The folders engine, operations, matching, courses, transfers and watching are one state machine: they share
 * these structs and call each other in circles. A sweep (drive.c) drains the queue (announcing.c) and reads the
 * journal (replay.c); entries begin operations (pieces.c, tiny.c) or ask the other hosts (control.c,
 * coordinator.c); an operation that ends (operations.c) announces and begins others. They import base, kernels,
 * host and net, and are imported by python alone. */
#ifndef HVDL_STATE_H
#define HVDL_STATE_H

#include "base/kinds.h"
#include "courses/adasum.h"
#include "matching/announcing.h"
#include "engine/breaking.h"
#include "engine/drive.h"
#include "engine/engine.h"
#include "engine/giving_up.h"
#include "matching/join.h"
#include "operations/black_box.h"
#include "operations/operations.h"
#include "courses/partials.h"
#include "courses/pieces.h"
#include "engine/placement.h"
#include "operations/plans.h"
#include "operations/queue.h"
#include "operations/recording.h"
#include "courses/reducescatter.h"
#include "matching/replay.h"
#include "courses/rows.h"
#include "watching/stall.h"
#include "transfers/transfers.h"

typedef struct hvdl_course hvdl_course;   /* phases.h */
typedef struct hvdl_control hvdl_control; /* control.h */

struct hvdl_operation {
    /* set when posted */
    hvdl_node by_key; /* in queue.in_flight */
    hvdl_key key;
    hvdl_desc desc;
    char *name;
    const char *site;  /* behind the name, in its memory; NULL: not known */
    const char *words; /* the same: a posting's */
    const char *input;
    char *output;
    const void **inputs; /* as posted, or NULL */
    void **outputs;
    int64_t rows;
    int64_t *splits;      /* as posted, or NULL */
    hvdl_extents extents; /* as posted */
    void *owner;
    bool has_weight; /* a run of a plan: see hvdl_plan_start */
    hvdl_weight weight;
    bool internal;           /* the engine's own */
    bool unnamed;            /* its name was made for it, and never comes again */
    hvdl_plan *plan;         /* that it is a run of, or makes */
    hvdl_transfer *transfer; /* of a send or receive; else NULL */
    uint64_t posted_ns;
    uint64_t number;      /* among the operations of this engine; set before anything is recorded */
    hvdl_operation *next; /* in the queue, in announcing.posts, or among the orphans */

    _Atomic int state; /* release by the driver, acquire by the callers */
    /* under queue.lock */
    bool released; /* the caller has gone */
    bool finished; /* the driver has gone */

    /* the driver's */
    uint64_t ticket; /* in the black box; 0: it is not there */
    char *error;
    hvdl_meeting *meeting; /* from the moment it is matched on this host */
    /* Of a run with weights: of how many elements, from the first on, the inputs are multiplied by the factors
     * of the local ranks (NULL: 1.0 each), and the average by to_weighted. Written by weights.c. */
    size_t num_weighted;
    const double *factors;
    double to_weighted;
    const hvdl_course *course; /* once it has begun: see phases.h */
    hvdl_progress progress;
    hvdl_lateness stall;
    bool pinned;  /* a message may still use its buffers: never hand them back */
    char *zeros;  /* of a rank that has joined: its input and output */
    bool counted; /* in its plan's num_active */
    char *work;   /* the result, where it is not the caller's memory */
    /* allgather, alltoall: rows that come from each rank; else what is said of a result */
    int64_t *all_rows;
    int num_rows;
    hvdl_parts parts;
    hvdl_shares shares; /* reducescatter */
    hvdl_partial_sums partials;
    /* Adasum: the operation that works for this one, and the one that this works for */
    hvdl_adasum *adasum;
    hvdl_operation *child, *parent;
};

/* What texts show of it: see hvdl_put_title. */
static inline const char *hvdl_shown(const hvdl_operation *op)
{
    return op->words ? op->words : op->name;
}

static inline void hvdl_put_title_of(char *to, size_t room, const hvdl_operation *op)
{
    hvdl_put_title(to, room, hvdl_kind_name(op->desc.kind), op->words, hvdl_shown(op));
}

struct hvdl_engine {
    hvdl_engine_config config; /* constant; its arrays are the placement's */
    hvdl_placement placement;
    hvdl_shm shm;
    hvdl_conveyor conveyor;
    hvdl_wire wire;

    hvdl_queue queue;         /* any thread */
    hvdl_recording recording; /* any thread */
    hvdl_driving driving;     /* any thread, in parts */

    hvdl_black_box black_box;
    hvdl_announcing announcing;
    hvdl_meetings meetings;
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

static inline bool hvdl_makes_plan(const hvdl_operation *operation)
{
    return operation->desc.kind == HVDL_PLAN;
}

static inline bool hvdl_is_run(const hvdl_operation *operation)
{
    return operation->plan && !hvdl_makes_plan(operation);
}

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

static inline size_t hvdl_desc_bytes(const hvdl_desc *desc)
{
    return (size_t)desc->count * hvdl_dtype_bytes(desc->dtype);
}

/* Whether an operation that is not matched can't be any more, as a rank has left: the engine's own go on
 * for those that are matched, unless it is broken. */
static inline bool hvdl_refuses(const hvdl_engine *engine, bool internal)
{
    return *engine->failure.text && (engine->failure.broken || !internal);
}

#endif
