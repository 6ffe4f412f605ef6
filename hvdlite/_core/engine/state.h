/* The engine's inside: what engine.c (its life), operations.c (posting and ending), replay.c (the
 * journal), drive.c (driving and waiting), pieces.c (how the kinds of operations go through their
 * phases) and control.c (agreement between hosts) share.
 *
 * Unless said otherwise a field is used by the driver alone: the thread that holds `driving`. */
#ifndef HVDL_STATE_H
#define HVDL_STATE_H

#include <pthread.h>
#include <time.h>

#include "base/descriptors.h"
#include "host/conveyor.h"
#include "engine/breaking.h"
#include "engine/engine.h"
#include "net/exchange.h"
#include "base/sizes.h"
#include "base/table.h"

#define HVDL_PIECE_WINDOW 4 /* pieces of an operation in flight at once, at most */
/* A slower rank of the host may still be at earlier pieces than the leader that opens new ones: by as
 * many passes as it may be blocks behind on the conveyor, which is HVDL_NUM_BUFFERS. */
#define HVDL_PIECE_SLOTS 16
_Static_assert(HVDL_PIECE_SLOTS > HVDL_PIECE_WINDOW + HVDL_NUM_BUFFERS, "pieces share no slot");
#define HVDL_TAG_CONTROL 1
#define HVDL_TAG_FIRST 16
#define HVDL_TAGS_PER_ID (2 * HVDL_PIECE_WINDOW) /* two for each piece in flight */

typedef enum { HVDL_POSTED, HVDL_MATCHED, HVDL_RUNNING, HVDL_DONE, HVDL_FAILED } hvdl_state;

typedef struct hvdl_meeting hvdl_meeting;
typedef struct hvdl_adasum hvdl_adasum;
typedef struct hvdl_course hvdl_course;   /* phases.h */
typedef struct hvdl_inquiry hvdl_inquiry; /* stall.c */
typedef struct hvdl_due hvdl_due;

/* A piece is finished on a rank when its phase A is over there, all rails have done its exchange, and
 * its phase C is over there. Those it does not have are over at once. */
typedef struct {
    bool a_over, c_over, finished;
    int num_ready; /* rails that have done the exchange */
} hvdl_piece;

struct hvdl_operation {
    /* set when posted */
    hvdl_node by_key; /* in engine->in_flight */
    hvdl_key key;
    hvdl_desc desc;
    char *name;
    const char *input;
    char *output;
    int64_t rows;
    int64_t *splits; /* rows for each rank, where they are posted */
    void *owner;
    bool internal;   /* the engine's own */
    hvdl_plan *plan; /* that it is a run of, or makes */
    uint64_t posted_ns;
    uint64_t number;      /* among the operations of this engine; set before anything is recorded */
    hvdl_operation *next; /* in the queue, in engine->announced, or among the orphans */

    _Atomic int state; /* release by the driver, acquire by the callers */
    /* under engine->queue_lock */
    bool released; /* the caller has gone */
    bool finished; /* the driver has gone */

    /* the driver's */
    char *error;
    hvdl_meeting *meeting; /* from the moment it is matched on this host */
    int tag;
    uint64_t num_pieces, started, finished_pieces, announced_pieces;
    uint64_t first_unfinished;           /* all pieces below it are finished */
    hvdl_piece pieces[HVDL_PIECE_SLOTS]; /* piece k, if it is in flight, at k % HVDL_PIECE_SLOTS */
    bool exchange_waits;    /* allgather: its exchange is due once the earlier pieces are done */
    uint64_t num_gathering; /* allgather: pieces before the exchange */
    bool stall_told, stall_given_up; /* stall.c */
    bool pinned;                     /* a message may still use its buffers: never hand them back */
    char *zeros;                     /* of a rank that has joined: its input and output */
    bool counted;                    /* in its plan's num_active */
    const hvdl_course *course;       /* once it has begun: see phases.h */
    char *work;                      /* the result, where it is not the caller's memory */
    /* allgather, alltoall: rows that come from each rank; else what is said of a result */
    int64_t *all_rows;
    int num_rows;
    size_t *places; /* by rank: offset in `work`, in bytes */
    /* allgather */
    size_t *host_places; /* by host, and the total: offset in `work`, which is host by host */
    /* alltoall */
    int64_t *matrix;     /* rows from each member (in the order of `members`) to each local rank */
    size_t *send_places; /* by rank, and the total: offset in the input, in bytes */
    const char *local_stream; /* its rows for the local ranks, in the input or packed */
    char *packed;
    /* Adasum: the operation that works for this one, and the one that this works for */
    hvdl_adasum *adasum;
    hvdl_operation *child, *parent;
};

/* What the ranks of this host have posted under one key: the same on each of them, because it is made
 * from the journal. In `by_key` until all have posted, in `by_id` until the operation has ended here. */
struct hvdl_meeting {
    hvdl_node by_key, by_id;
    hvdl_key key;
    uint64_t id;
    bool collecting; /* in by_key (or its plan's `collecting`) */
    int posted;
    hvdl_variants variants;
    char *payloads; /* tiny: of each local rank, but those that hvdl_payload_of finds elsewhere */
    const char *last_payload;  /* while the entry is read that completes it: in the journal */
    int last_from;             /* its local rank */
    int64_t *rows;             /* as many numbers of rows of each local rank as it posts, or NULL */
    hvdl_operation *operation; /* this rank's, once posted */
    hvdl_plan *plan;           /* a run of it */
    uint64_t epoch;            /* of join.c, when it began */
    bool reported, given_up;   /* stall.c */
    int coordinator;           /* the host whose leader was asked and has not answered, or -1 */
    bool internal;    /* of the engine's own operations: who has joined takes part itself */
    bool posted_by[]; /* by local rank */
};

struct hvdl_plan {
    hvdl_node by_id;      /* in engine->plans */
    hvdl_posting posting; /* name is a copy */
    hvdl_key key;         /* of its runs */
    char *name;
    uint64_t id;
    int tag;
    bool ready;
    char *error;              /* it could not be made */
    hvdl_operation *waiting;  /* a run posted before it was ready */
    hvdl_meeting *collecting; /* of the next run */
    uint64_t num_runs;        /* begun on this host, or, on a host that has joined, about to be */
    uint64_t num_known_runs;  /* the leader: also those of others that wait for the one before */
    bool zero_run_announced;  /* the leader: ZERO_RUN is in the journal, and not read yet */
    bool ends_elsewhere; /* the leader: a host where a rank has left begins these and no more: */
    uint64_t num_runs_elsewhere;
    int num_active;   /* runs that have begun and not ended on this rank */
    bool given_back;  /* all local ranks have freed it, and no run is left */
    int num_released; /* local ranks that have freed it */
    /* under engine->queue_lock */
    hvdl_operation *run; /* in flight */
    bool made;           /* its making has ended */
    bool released;       /* by the caller; `next` is then in engine->released_plans */
    bool announced;      /* RELEASE is in the journal */
    hvdl_plan *next;
};

/* A journal entry that found no room yet, or that waits behind one. */
typedef struct hvdl_deferred {
    struct hvdl_deferred *next;
    hvdl_entry head;
    hvdl_shm_last posts; /* what is noted then */
    size_t body_bytes;
    char body[];
} hvdl_deferred;

typedef struct hvdl_running_exchange {
    struct hvdl_running_exchange *next;
    hvdl_exchange *exchange;
    hvdl_operation *operation;
    uint64_t piece;
} hvdl_running_exchange;

typedef struct hvdl_control hvdl_control; /* control.c */

struct hvdl_engine {
    /* constant */
    hvdl_engine_config config; /* pointers are copies of the engine's own */
    int *host_sizes, *members, *world_ranks;
    int *host_of, *local_of; /* by rank */
    int *host_first;         /* index in members of each host's first */
    const char **name_of;    /* host name, by rank */
    hvdl_naming naming;      /* of the last two */
    char **host_names;
    int host, local, local_size, num_rails;
    int max_local_size;
    int *all_ranks;       /* 0, 1, 2, ... */
    int *rail_peers;      /* rank of this rank's rail on each host; NULL if it is not a rail */
    bool is_leader;       /* of its host: speaks for it with the other hosts */
    int num_coordinators; /* the first hosts, whose leaders they are; see tags.c */

    hvdl_shm shm;
    hvdl_conveyor conveyor;
    hvdl_wire wire;
    hvdl_control *control;

    /* the queue: any thread, under queue_lock */
    pthread_mutex_t queue_lock;
    hvdl_operation *queue_first, *queue_last;
    hvdl_table in_flight;      /* operations by key */
    hvdl_operation *orphans;   /* done, and released by their caller before */
    hvdl_plan *released_plans; /* to be announced */
    void **dead_owners;        /* of plans that are gone */
    size_t num_dead_owners, room_dead_owners;
    uint64_t num_operations, last_number;
    bool closed;
    bool undriven;       /* and nobody drives any more */
    _Atomic bool queued; /* the queue or released_plans is not empty */

    /* what was recorded: any thread, under events_lock, but for `recording` */
    pthread_mutex_t events_lock;
    hvdl_event *events; /* a ring */
    size_t event_capacity;
    uint64_t num_events; /* since the ring was new */
    _Atomic bool recording;

    /* who drives */
    pthread_mutex_t driving;
    pthread_t thread;
    bool has_thread; /* constant: also when the thread has ended */
    _Atomic bool stop;
    _Atomic int num_waiting;     /* callers in hvdl_operation_wait: the thread leaves it to them */
    _Atomic int num_sleeping;    /* of those, asleep on done_count */
    _Atomic uint32_t done_count; /* futex: counts ended operations and drivers that left */
    _Atomic uint64_t late_wakings; /* see hvdl_counters */
    _Atomic int num_in_flight;     /* operations that have not ended */
    _Atomic bool busy;             /* there is background work: sends, releases */
    _Atomic bool thread_idle;      /* the progress thread sleeps on this rank's idle_bell */

    /* the driver's */
    hvdl_table meetings; /* collecting, by key */
    hvdl_table meetings_by_id;
    hvdl_table plans;                           /* by id */
    hvdl_operation *announced, *announced_last; /* in the journal, own entry not read yet */
    hvdl_deferred *deferred, *deferred_last;
    hvdl_running_exchange *exchanges;
    char *scratch; /* inline_bytes */
    bool *joined;  /* by local rank */
    int num_joined;
    uint64_t epoch;            /* how often all have joined */
    hvdl_operation *join;      /* this rank's, in the journal */
    hvdl_operation *held_join; /* it waits until all runs posted before are in the journal */
    int num_waiting_runs;      /* for their plans to be made */
    int num_zero_operations;   /* of this rank, in flight */
    int last_joined;           /* once all have joined, while zero operations are left; else -1 */
    hvdl_inquiry *inquiries;
    int num_asking; /* of these, under way */
    hvdl_due *due, *due_last;
    hvdl_shm_last *survey; /* what the ranks of this host last did */
    uint64_t next_stall_look_ns, sweeps;
    uint64_t next_turn; /* of operations that the engine only agrees on; one host */
    hvdl_failure failure;
    bool pinned;            /* MPI may still use an operation\'s buffers: they are kept for ever */
    int idle_looks;         /* since anything moved */
    uint64_t idle_since_ns; /* with other hosts: the first of them */
    long pause_ns;
};

/* ---- operations.c ---- */

/* Ends an operation; text NULL: it succeeded. Takes it out of its meeting. */
void hvdl_finish(hvdl_engine *engine, hvdl_operation *operation, const char *text);
void hvdl_set_state(hvdl_engine *engine, hvdl_operation *operation, hvdl_state state);
bool hvdl_is_tiny(const hvdl_engine *engine, const hvdl_desc *desc, bool is_run);
/* Of the sum over this host's ranks; and, where there are other hosts, of the sum over the hosts. */
hvdl_scale hvdl_host_scale(const hvdl_engine *engine, const hvdl_desc *desc);
hvdl_scale hvdl_last_scale(const hvdl_engine *engine, const hvdl_desc *desc);
/* What the operation says besides its result. */
hvdl_err hvdl_say_number(hvdl_operation *operation, int64_t number);
/* What a rank of a reducescatter keeps. */
hvdl_range hvdl_own_elems(const hvdl_engine *engine, const hvdl_desc *desc);
/* Bytes of the user's data that go through the engine: none where it only agrees. */
size_t hvdl_data_bytes(const hvdl_desc *desc);
/* Posts an operation that works for `parent`, under its key and the number of the step. */
hvdl_err hvdl_post_child(hvdl_engine *engine, hvdl_operation *parent, const hvdl_posting *posting,
                         int step);
/* An operation of the engine's own that no caller waits for, as if it were in flight already. */
hvdl_operation *hvdl_adopt_operation(hvdl_engine *engine, const hvdl_posting *posting,
                                     hvdl_key key);
void hvdl_meeting_free(hvdl_meeting *meeting);
/* What keys are made of besides kinds of operations and names. */
enum { HVDL_KEY_OF_PLAN = 254, HVDL_KEY_OF_UNNAMED = 255 };
hvdl_key hvdl_make_key(int kind, const char *name);
/* One that nobody knows yet; NULL: no memory. */
hvdl_operation *hvdl_operation_new(const hvdl_posting *posting);
void hvdl_operation_free(hvdl_operation *operation);
/* Hands it to the driver, unless one of its key is in flight (HVDL_EDUP) or the engine is closed. */
hvdl_err hvdl_enqueue(hvdl_engine *engine, hvdl_operation *operation, bool wake);
/* In a world of one there is nothing to agree on. */
hvdl_err hvdl_finish_alone(hvdl_engine *engine, hvdl_operation *operation);
void hvdl_wake_thread(hvdl_engine *engine);
/* An operation has ended, or the driver has left: callers that sleep look again. */
void hvdl_wake_waiting(hvdl_engine *engine);

/* ---- plans.c ---- */

void hvdl_plan_free(hvdl_engine *engine, hvdl_plan *plan);
/* Its buffers can be handed back. */
void hvdl_plan_drop_owner(hvdl_engine *engine, hvdl_plan *plan);
/* The engine is closed: no plan runs any more, so that their buffers can be handed back. Those that
 * were made are freed with the engine, the others when they are released. */
void hvdl_plans_end(hvdl_engine *engine);
/* A plan was released while its making or a run was under way, which has now ended. */
void hvdl_plan_note_release(hvdl_engine *engine, hvdl_plan *plan);

/* ---- recording.c ---- */

/* time_ns 0: now. Nothing is told of the engine's own operations. */
void hvdl_record(hvdl_engine *engine, const hvdl_operation *operation, hvdl_state state,
                 uint64_t time_ns);

/* ---- announcing.c, and replay.c, which reads what was announced ---- */

/* A POST entry's body; tiny data follows. */
typedef struct {
    hvdl_key key;
    hvdl_desc desc;
} hvdl_post_body;

/* Appends to the journal now or, in order, later. */
void hvdl_announce(hvdl_engine *engine, hvdl_entry head, const void *body, size_t bytes);
/* Each returns whether it did anything. */
bool hvdl_append_deferred(hvdl_engine *engine);
bool hvdl_drain_queue(hvdl_engine *engine);
bool hvdl_read_journal(hvdl_engine *engine);
/* The making of a plan has ended; error NULL: well. */
void hvdl_plan_made(hvdl_engine *engine, hvdl_plan *plan, const char *error);
/* A run has ended here. */
void hvdl_plan_run_ended(hvdl_engine *engine, hvdl_plan *plan);
hvdl_meeting *hvdl_meeting_by_key(hvdl_engine *engine, hvdl_key key);
hvdl_meeting *hvdl_meeting_by_id(hvdl_engine *engine, uint64_t id);

/* How often a rank that does nothing looks for what others want of it, and how long one that leaves
 * helps to end what is under way: longer, so that those have looked meanwhile. */
#define HVDL_IDLE_LOOK_NS 2000000000
#define HVDL_DRAIN_NS 2400000000

/* Begins what is complete now that a rank has joined. */
void hvdl_complete_meetings(hvdl_engine *engine);
/* Puts the operation's name into a text. */
#define HVDL_NAME_HERE "\001"

/* ---- join.c ---- */

/* Have all ranks of this host posted, or joined? */
bool hvdl_meeting_complete(const hvdl_engine *engine, const hvdl_meeting *meeting);
/* A rank of this host that has not posted, or -1. */
int hvdl_meeting_absent(const hvdl_engine *engine, const hvdl_meeting *meeting);
/* Does a rank that has joined take part in such an operation? */
bool hvdl_can_be_joined(const hvdl_desc *desc);
/* The text for one in which it does not. */
void hvdl_describe_absent(const hvdl_engine *engine, const hvdl_desc *desc, int rank,
                          char text[HVDL_TEXT_BYTES]);
/* One of those has ended. */
void hvdl_zero_operation_ended(hvdl_engine *engine);
/* What a rank that has joined takes part with; NULL: no memory. */
hvdl_operation *hvdl_zero_operation(hvdl_engine *engine, hvdl_key key, const hvdl_desc *desc);
void hvdl_read_join(hvdl_engine *engine, int local);
void hvdl_read_all_joined(hvdl_engine *engine, int last);
/* The leader: a run of the plan has ended here, or its beginning was read, and others may wait. */
void hvdl_next_zero_run(hvdl_engine *engine, hvdl_plan *plan);

/* ---- leaving.c ---- */

void hvdl_read_leave(hvdl_engine *engine, int rank, bool clean);
/* Looks for ranks of this host that have died, or left while they were needed. */
void hvdl_look_for_dead(hvdl_engine *engine);

/* ---- stall.c ---- */

hvdl_shm_last hvdl_activity_of(const hvdl_operation *operation, hvdl_activity activity);
/* For the other ranks of the host to read, with the time. */
void hvdl_note_activity(hvdl_engine *engine, hvdl_shm_last last);
/* Looks for operations that are late, now and then. */
void hvdl_stall_look(hvdl_engine *engine);
void hvdl_read_reported(hvdl_engine *engine, const hvdl_entry *entry);
/* Says what is due of this host's ranks, if enough of the journal can be read. *progressed is set,
 * never cleared. */
void hvdl_stall_tell(hvdl_engine *engine, bool *progressed);
/* An operation ends: nobody need be asked about it any more. */
void hvdl_stall_ended(hvdl_engine *engine, const hvdl_operation *operation);
/* Everything fails: nobody is late any more. */
void hvdl_stall_end(hvdl_engine *engine);
void hvdl_stall_free(hvdl_engine *engine);

/* ---- drive.c ---- */

/* Moves everything as far as it can go now. Returns whether anything moved. */
bool hvdl_sweep(hvdl_engine *engine);
/* The same, for who does not look again soon: Open MPI moves messages when asked which have ended and
 * none had, and says of those only when asked again. */
bool hvdl_sweep_twice(hvdl_engine *engine);
/* Nothing moved: looks again soon, lets others run, or sleeps, the longer it lasts.
 * wanted: whether somebody else wants to drive. */
void hvdl_pause(hvdl_engine *engine, bool (*wanted)(hvdl_engine *));
bool hvdl_nobody(hvdl_engine *engine);
void *hvdl_progress_main(void *engine);

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
    return engine->members[engine->host_first[engine->host] + local];
}

static inline int hvdl_world_rank(const hvdl_engine *engine, int rank)
{
    return engine->world_ranks[rank];
}

/* What texts call this rank. */
static inline int hvdl_own_number(const hvdl_engine *engine)
{
    return hvdl_world_rank(engine, engine->config.rank);
}

/* The host whose leader is the coordinator of what has this key. */
static inline int hvdl_coordinator_of(const hvdl_engine *engine, hvdl_key key)
{
    return (int)(key.hi % (uint64_t)engine->num_coordinators);
}

static inline size_t hvdl_desc_bytes(const hvdl_desc *desc)
{
    return (size_t)desc->count * hvdl_dtype_bytes(desc->dtype);
}

/* ---- adasum.c ---- */

/* A later step is over; text NULL: well. */
hvdl_err hvdl_adasum_child_done(hvdl_engine *engine, hvdl_operation *operation,
                                hvdl_operation *child, const char *text);
void hvdl_adasum_free(hvdl_adasum *adasum);

/* The longest payload of a posting, or of a message between hosts. */
hvdl_err hvdl_largest_payload(const hvdl_engine_config *config, size_t *bytes);

/* Whether an operation that is not matched can't be any more, as a rank has left: the engine's own go on
 * for those that are matched, unless it is broken. */
static inline bool hvdl_refuses(const hvdl_engine *engine, bool internal)
{
    return *engine->failure.text && (engine->failure.broken || !internal);
}

/* ---- pieces.c ---- */

/* Starts an operation that is matched everywhere and is not tiny. all_rows (allgather): by rank. */
void hvdl_begin(hvdl_engine *engine, hvdl_operation *operation, int tag, const int64_t *all_rows);
void hvdl_piece_next(hvdl_engine *engine, hvdl_operation *operation);
void hvdl_piece_ready(hvdl_engine *engine, hvdl_operation *operation, uint64_t piece);
void hvdl_pass_finished(hvdl_engine *engine, hvdl_pass *pass);
/* Moves the exchanges. */
void hvdl_step_exchanges(hvdl_engine *engine, bool *progressed);
/* Takes all passes and exchanges down: everything is about to fail. */
void hvdl_abandon_all(hvdl_engine *engine);

/* ---- control.c ---- */

hvdl_err hvdl_control_create(hvdl_engine *engine);
/* The leader: all ranks of this host have posted. */
void hvdl_control_posted(hvdl_engine *engine, hvdl_meeting *meeting);
/* The leader: the exchanges of an operation with this tag have ended on this host. */
void hvdl_control_tag_done(hvdl_engine *engine, int tag);
/* The leader: a rank has left, so what is not agreed on yet fails. */
void hvdl_control_fail_open(hvdl_engine *engine);
/* The leader: all ranks of this host have joined, `last` as the last one. */
void hvdl_control_joined(hvdl_engine *engine, int last);
/* The leader: a run of a plan has begun here, to which hosts that have joined must come. */
void hvdl_control_run(hvdl_engine *engine, const hvdl_plan *plan);
/* The leader: a plan is made, of which others may have told a run already. */
void hvdl_control_plan_made(hvdl_engine *engine, hvdl_plan *plan);
/* Moves messages. *progressed is set, never cleared. */
void hvdl_control_step(hvdl_engine *engine, bool *progressed);
/* Whether sends are under way. */
bool hvdl_control_busy(const hvdl_engine *engine);
/* Sends what has been said since the last time: many small messages go out as one. */
void hvdl_control_flush(hvdl_engine *engine);
/* Tells the other hosts that a rank of this one leaves; on its leader. After its own leave it says
 * nothing more. */
void hvdl_control_leave(hvdl_engine *engine, int rank, bool clean);
/* The leader, when a rank of another host has left: has this host begun a run that the other one never
 * will? */
bool hvdl_control_run_is_lost(const hvdl_engine *engine);
/* Have the leaders of all other hosts said that they leave? */
bool hvdl_control_all_left(const hvdl_engine *engine);
void hvdl_control_destroy(hvdl_engine *engine);

/* ---- tiny.c ---- */

/* Keeps what a rank of this host posted with its operation, and has been counted in the meeting. own:
 * the operation of this rank, or NULL: of another one. The last one's data stays in the journal, where
 * it is used before this entry has been read. */
hvdl_err hvdl_keep_payload(hvdl_engine *engine, hvdl_meeting *meeting, const hvdl_entry *entry,
                           const hvdl_operation *own, const hvdl_desc *desc, const void *payload,
                           size_t bytes);
/* What a local rank gave to a tiny operation, which is complete on this host and has not failed here. */
const char *hvdl_payload_of(const hvdl_engine *engine, const hvdl_meeting *meeting, int local,
                            size_t bytes);
/* The elements of a tiny result that this rank wants. */
hvdl_range hvdl_tiny_part(const hvdl_engine *engine, const hvdl_desc *desc);
/* On one host: all the data is here. */
void hvdl_complete_tiny(hvdl_engine *engine, hvdl_meeting *meeting);

#endif
