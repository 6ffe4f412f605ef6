/* What is known of operations that ranks have posted: within this host, and between hosts. The driver. */
#ifndef HVDL_MATCHING_STATE_H
#define HVDL_MATCHING_STATE_H

#include "base/descriptors.h"
#include "base/table.h"
#include "host/shm.h"
#include "net/wire.h"
#include "operations/operations_state.h"
#include "watching/watching_state.h"

/* ---- within this host ---- */

typedef struct hvdl_deferred hvdl_deferred;

/* Written by announcing.c. */
typedef struct {
    hvdl_operation *posts, *posts_last; /* in the shared log, own entry not read yet, in order */
    hvdl_deferred *deferred, *deferred_last; /* entries that found no room, or wait behind one */
} hvdl_announcing;

/* What the ranks of this host have posted under one key: the same on each of them, because it is made
 * from the shared log. In `by_key` until all have posted, in `by_id` until the operation has ended here. */
struct hvdl_match {
    hvdl_node by_key, by_id;
    hvdl_key key;
    uint64_t id;
    bool collecting; /* in by_key (or its plan's `collecting`) */
    int posted;
    hvdl_variants variants;
    char *payloads; /* tiny: of each local rank, but those that hvdl_payload_of finds elsewhere */
    const char *last_payload; /* while the entry is read that completes it: in the shared log */
    int last_from;            /* its local rank */
    int64_t *rows;            /* as many numbers of rows of each local rank as it posts, or NULL */
    double *weights;          /* weights.c; NULL: those that have posted have none */
    int num_weights;
    hvdl_operation *operation; /* this rank's, once posted */
    hvdl_plan *plan;           /* a run of it */
    uint64_t epoch;            /* of join.c, when it began */
    int coordinator;           /* the host whose leader was asked and has not answered, or -1 */
    bool internal;             /* of the engine's own operations: a joined rank takes part itself */
    bool has_sites;            /* of some of the host's ranks */
    bool posted_by[];          /* by local rank */
};

/* Written by replay.c and matches.h. */
typedef struct {
    hvdl_table by_key; /* collecting */
    hvdl_table by_id;
} hvdl_matches;

/* Within this host; between hosts see hvdl_host_joins. Written by join.c. */
typedef struct {
    bool *joined; /* by local rank */
    int num_joined;
    uint64_t epoch;            /* how often all have joined */
    hvdl_operation *operation; /* this rank's, in the shared log */
    hvdl_operation *held;      /* it waits until all runs posted before are in the shared log */
    int num_zero_operations;   /* of this rank, in flight */
    int last;                  /* once all have joined, while zero operations are left; else -1 */
} hvdl_join;

/* ---- between hosts ---- */

#define HVDL_TAGS_PER_ID (2 * HVDL_PIECE_WINDOW) /* two for each piece in flight */
#define HVDL_MAX_DONE 16 /* DONE notes that are kept for a message that goes there anyway */
/* Of a coordinator: it has at least so many, of which plans leave some to other operations. */
#define HVDL_MIN_TAG_NUMBERS 32
#define HVDL_MAX_TAG_NUMBERS 65536
#define HVDL_NUMBERS_WITHOUT_PLANS 8

typedef struct hvdl_control hvdl_control;

/* What travels: several messages to one host as one of MPI's. */
typedef struct hvdl_packet {
    struct hvdl_packet *next;
    hvdl_request request;
    size_t bytes_used; /* of what follows, which is what is sent */
    struct {
        uint64_t num_messages;
    } head;
    char bytes[];
} hvdl_packet;

/* An operation that other leaders have asked this coordinator about. */
typedef struct hvdl_agreement {
    hvdl_node by_key;
    hvdl_key key;
    uint64_t epoch; /* of join.c */
    bool internal;
    int absent;  /* a rank that has joined and not posted, or -1 */
    bool *hosts; /* that have posted */
    hvdl_variants variants;
    char *payloads;              /* tiny: of each host */
    int64_t *rows;               /* allgather: host by host */
    struct hvdl_agreement *next; /* among those that wait for a tag */
} hvdl_agreement;

/* A run of a plan that is not known here yet. */
typedef struct hvdl_early_run {
    struct hvdl_early_run *next;
    int tag;
    uint64_t run;
} hvdl_early_run;

/* A rank that leaves after an epoch whose end is not known here yet. */
typedef struct hvdl_held_leave {
    struct hvdl_held_leave *next;
    int rank;
} hvdl_held_leave;

typedef struct {
    int32_t count, numbers[HVDL_MAX_DONE];
    bool at_once; /* that coordinator has been short of numbers: nothing is kept back any more */
} hvdl_done_notes;

/* Agreement on operations. Written by coordinator.c. */
typedef struct {
    hvdl_table asked, open;
    hvdl_agreement *waiting, *waiting_last; /* for a free number */
    int next_sequence;                      /* host 0 */
    char *scratch;                          /* for the longest payload */
} hvdl_coordinator;

/* Numbers for exchanges. Written by tags.c. */
typedef struct {
    int num_coordinators;   /* the first hosts, whose leaders they are */
    int num_numbers;        /* of each coordinator */
    hvdl_done_notes *notes; /* per coordinator */
    uint16_t *num_done;     /* per number of this coordinator: hosts that have said DONE */
    bool *is_plan;          /* by number of this coordinator */
    int *free_numbers, num_free, num_plans; /* num_plans: of those that are not free */
    bool was_short;                         /* of numbers, and has told all leaders */
} hvdl_tags;

/* Joins of whole hosts. Written by join.c. */
typedef struct {
    /* By host: how often all its ranks have joined, and how often it has heard that of all. */
    uint64_t *by_host, *heard;
    uint64_t num_told, num_epochs; /* how often this leader has said so, and has heard it of all */
    int last_joined;
    /* Lamport's, which every message carries and a join advances: a host that joins when it could know
     * of another's join has the later time. Of the joins taken in this epoch the latest counts. */
    uint64_t clock, latest_clock;
    int latest_joined;
    int own_join; /* of this host, the last rank: not told yet, as what has come is heard first; or -1 */
    int own_join_steps; /* since then, that heard nothing */
    hvdl_early_run *early_runs;
    uint64_t num_early_zero_runs; /* of all plans: runs that wait for the one before */
    hvdl_held_leave *held_leaves;
} hvdl_host_joins;

/* The messages, written by messages.c (what leaves) and control.c (what comes), and what is agreed on by them. */
struct hvdl_control {
    size_t room; /* bytes of a packet, its head included */
    /* The leader: one from the leader of each other host. Not from any source: with ranks on the own
     * and on other hosts, MPICH 5.0 was seen to lose messages to several such receives. */
    hvdl_request *receives;
    char *receive_buffers;
    hvdl_packet **packets; /* by host: what the next one to it holds already, or NULL */
    int num_packets;       /* of these */
    hvdl_packet *sendings;
    int num_left;  /* leaders of other hosts that have said LEFT, after which they say nothing */
    bool has_left; /* so has this one */
    bool has_told_runs;

    hvdl_coordinator coordinator;
    hvdl_tags tags;
    hvdl_host_joins joins;
};

#endif
