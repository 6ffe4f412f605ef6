/* An operation, and what is kept of all of them. */
#ifndef HVDL_OPERATIONS_STATE_H
#define HVDL_OPERATIONS_STATE_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/kinds.h"
#include "base/table.h"
#include "collectives/collectives_state.h"
#include "engine/engine.h"
#include "watching/watching_state.h"

typedef struct hvdl_match hvdl_match;       /* matching_state.h */
typedef struct hvdl_transfer hvdl_transfer; /* transfers_state.h */

typedef enum { HVDL_POSTED, HVDL_MATCHED, HVDL_RUNNING, HVDL_DONE, HVDL_FAILED } hvdl_state;

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
    hvdl_match *match; /* from the moment it is matched on this host */
    /* Of a run with weights: of how many elements, from the first on, the inputs are multiplied by the factors
     * of the local ranks (NULL: 1.0 each), and the average by to_weighted. Written by weights.c. */
    size_t num_weighted;
    const double *factors;
    double to_weighted;
    const hvdl_collective *collective; /* once it has begun: see phases.h */
    hvdl_progress progress;
    hvdl_lateness stall;
    bool pinned;  /* a message may still use its buffers: never hand them back */
    char *zeros;  /* of a rank that has joined: its input and output */
    bool counted; /* in its plan's num_active */
    char *work;   /* the result, where it is not the caller's memory */
    /* allgather, alltoall: rows that come from each rank; else a number that the result comes with */
    int64_t *all_rows;
    int num_rows;
    hvdl_parts parts;
    hvdl_shares shares; /* reducescatter */
    hvdl_partial_sums partials;
    /* Adasum: the operation that works for this one, and the one that this works for */
    hvdl_adasum *adasum;
    hvdl_operation *child, *parent;
};

/* An operation that has ended. */
typedef struct {
    hvdl_plan *plan;
    bool makes_plan, counted, had_zeros;
    const char *text; /* NULL: well */
} hvdl_ended;

struct hvdl_plan {
    hvdl_node by_id;      /* in engine->plans */
    hvdl_posting posting; /* name and words are copies */
    hvdl_key key;         /* of its runs */
    char *name;
    uint64_t id;
    int tag;
    bool ready;
    char *error;             /* it could not be made */
    hvdl_operation *waiting; /* a run posted before it was ready */
    hvdl_match *collecting;  /* of the next run */
    uint64_t num_runs;       /* begun on this host, or, on a host that has joined, about to be */
    uint64_t num_known_runs; /* the leader: also those of others that wait for the one before */
    bool zero_run_announced; /* the leader: ZERO_RUN is in the shared log, and not read yet */
    bool ends_elsewhere; /* the leader: a host where a rank has left begins these and no more: */
    uint64_t num_runs_elsewhere;
    int num_active;   /* runs that have begun and not ended on this rank */
    bool given_back;  /* all local ranks have freed it, and no run is left */
    int num_released; /* local ranks that have freed it */
    /* written by queue.c, under its lock */
    hvdl_operation *run; /* in flight */
    bool made;           /* its making has ended */
    bool released;       /* by the caller; `next` is then in queue.released_plans */
    bool announced;      /* RELEASE is in the shared log */
    hvdl_plan *next;
};

/* Written by plans.c. */
typedef struct {
    hvdl_table by_id;
    int num_waiting_runs; /* for their plans to be made */
} hvdl_plans;

/* Written by queue.c, under `lock`. */
typedef struct {
    pthread_mutex_t lock;
    hvdl_operation *first, *last;
    hvdl_table in_flight;      /* operations by key */
    hvdl_operation *orphans;   /* done, and released by their caller before */
    hvdl_plan *released_plans; /* to be announced */
    hvdl_table failed_keys;    /* how often operations of a key have failed in this epoch */
    void **dead_owners;        /* of plans that are gone */
    size_t num_dead_owners, room_dead_owners;
    uint64_t num_operations, last_number;
    uint64_t next_sequence; /* of operations that the engine only agrees on; one host */
    bool closed;
    bool undriven;             /* and no thread drives the engine any more */
    _Atomic bool queued;       /* the queue or released_plans is not empty */
    _Atomic bool has_dead;     /* orphans or dead_owners is not empty */
    _Atomic int num_in_flight; /* operations that have not ended */
} hvdl_queue;

/* Written by recording.c, under `lock`. */
typedef struct {
    pthread_mutex_t lock;
    hvdl_event *events; /* a ring */
    size_t capacity;
    uint64_t num_events; /* since the ring was new */
    _Atomic bool on;     /* relaxed: the ring itself is under the lock */
} hvdl_recording;

#define HVDL_BOX_ENTRIES 512
#define HVDL_BOX_NAME_BYTES 112
#define HVDL_BOX_HEAD_BYTES 4096 /* with the ticket counter at its end */

/* Of the times, which are CLOCK_MONOTONIC's, 0 means that it has not happened. All words are atomic, as they are read
 * while they are written. launcher/reports/black_box.py reads them, and launcher/machine/notes.py has their
 * sizes. */
typedef struct {
    /* 0 while the rest is written; a release, so that who reads it sees the rest. Counts from 1. */
    _Atomic uint64_t ticket;
    _Atomic uint64_t key; /* of its kind and name */
    _Atomic uint64_t posted_ns, matched_ns, started_ns, ended_ns;
    _Atomic uint64_t bytes;
    _Atomic uint32_t team,
        round; /* round: how many of this key there have been in this epoch; 0: not counted */
    _Atomic uint32_t epoch; /* of join.c: a joined rank counts anew */
    _Atomic uint32_t members;
    _Atomic int32_t
        peer; /* a message: the other rank; else the last one to post it; -1: not known */
    _Atomic uint8_t kind;
    _Atomic uint8_t failed;
    _Atomic uint8_t
        in_words; /* of an operation of hvdlite's own, what users read in place of its name */
    uint8_t zero[1];
    /* Its characters, in the order of memory: cut in the middle, and NUL after the end of a shorter one. */
    _Atomic uint64_t name[HVDL_BOX_NAME_BYTES / sizeof(uint64_t)];
} hvdl_box_entry;

/* Of all engines of the process, which write at the same time. */
struct hvdl_box_memory {
    char head[HVDL_BOX_HEAD_BYTES - sizeof(uint64_t)]; /* Python's: a text that says what this is */
    _Atomic uint64_t last_ticket;
    hvdl_box_entry entries[HVDL_BOX_ENTRIES];
};

typedef struct hvdl_box_rounds hvdl_box_rounds;

/* Written by black_box.c. The driver. */
typedef struct {
    hvdl_box_memory *memory; /* NULL: there is none */
    hvdl_box_rounds *rounds;
    uint64_t now_ns; /* the clock, as this sweep has read it; 0: it has not */
} hvdl_black_box;

/* What texts show of it: see hvdl_put_title. */
static inline const char *hvdl_shown(const hvdl_operation *op)
{
    return op->words ? op->words : op->name;
}

static inline void hvdl_put_title_of(char *to, size_t room, const hvdl_operation *op)
{
    hvdl_put_title(to, room, hvdl_kind_name(op->desc.kind), op->words, hvdl_shown(op));
}

static inline bool hvdl_makes_plan(const hvdl_operation *operation)
{
    return operation->desc.kind == HVDL_PLAN;
}

static inline bool hvdl_is_run(const hvdl_operation *operation)
{
    return operation->plan && !hvdl_makes_plan(operation);
}

static inline size_t hvdl_desc_bytes(const hvdl_desc *desc)
{
    return (size_t)desc->count * hvdl_dtype_bytes(desc->dtype);
}

#endif
