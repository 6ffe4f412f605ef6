/* The engine: operations are posted by any thread, matched between the ranks, and driven to their
 * end by one thread at a time: the progress thread, or a caller that waits. See docs/design/core.md.
 *
 * An operation only moves forward: POSTED, MATCHED, RUNNING, DONE or FAILED. The engine never blocks
 * in one: each is a state machine, and every sweep moves all of them as far as they can go now. */
#ifndef HVDL_ENGINE_H
#define HVDL_ENGINE_H

#include "base/extents.h"
#include "base/kinds.h"
#include "base/schedule.h"
#include "net/exchange.h"

typedef struct hvdl_engine hvdl_engine;
typedef struct hvdl_operation hvdl_operation;
typedef struct hvdl_plan hvdl_plan;
typedef struct hvdl_box_memory hvdl_box_memory; /* operations/black_box.h */

#define HVDL_MAX_RULES 8

typedef struct {
    int fd;                 /* -1: there is none */
    uint64_t device, inode; /* which file it is: a program may close it and open another one */
} hvdl_socket;

typedef struct {
    int rank, num_ranks, num_hosts; /* ranks of the members, from 0 */
    const int *host_sizes;          /* ranks per host */
    const int *members;             /* ranks, host by host, ascending within each */
    const int *world_ranks;         /* what texts call each rank */
    const char *const *host_names;  /* per host */
    int memory_fd;                  /* -1: alone on the host */
    const hvdl_wire *wire;          /* NULL where there is one host */
    bool progress_thread;
    size_t inline_bytes;  /* up to here an operation's data travels with its posting */
    size_t block_bytes;   /* of the pipeline */
    size_t segment_bytes; /* of messages between hosts */
    size_t piece_bytes;   /* what goes through the phases of an operation as a unit */
    uint64_t stall_warning_ns, stall_shutdown_ns; /* 0: never */
    void (*say)(const char *line);                /* to the user; any thread */
    hvdl_socket launcher;                         /* learns of reports */
    hvdl_rule rules[HVDL_MAX_RULES];              /* how slices are reduced between hosts */
    int num_rules;
    bool deterministic;         /* floats are added along a tree: base/sum_tree.h */
    size_t event_capacity;      /* of hvdl_engine_record, from the start */
    hvdl_box_memory *black_box; /* stays for as long as the process; NULL: none */
    uint32_t team;              /* what the black box calls this engine's members */
} hvdl_engine_config;

/* What is to be done. The buffers must stay until the operation has ended; `owner` is handed back by
 * hvdl_engine_reap or hvdl_operation_release when it has. */
typedef struct {
    hvdl_desc desc;
    const char *name;
    const char *
        words; /* what texts say of it in place of kind and name; NULL: these. Ranks need not agree */
    bool unnamed;       /* matched whatever the kind */
    const char *site;   /* where the script posts it, for texts; NULL: not known. Cut at the front;
                       * not empty */
    uint64_t posted_ns; /* 0: now */
    const void *input;
    void *output;
    /* Where a kind has a part for each rank: of each, instead of `input` or `output`; or NULL. Copied. */
    const void *const *inputs;
    void *const *outputs;
    int64_t rows; /* where they travel beside the descriptor: this rank's first dimension */
    const int64_t *splits; /* hvdl_num_splits numbers, or NULL; copied */
    /* Of a plan that unites within each host: where its buffer lies, instead of `input` and `output`,
     * which are then NULL. Copied. */
    hvdl_extents extents;
    /* Of a plan on one host that reduces: the first so many elements are weighted, if its runs have weights:
     * see hvdl_plan_start. */
    size_t num_weighted;
    void *owner;
} hvdl_posting;

/* A send or receive. The memory must stay as a posting's buffers. */
typedef struct {
    bool is_send;
    int peer, tag; /* peer: a member; of a receive, -1: any; tag: not negative */
    void *memory;
    size_t bytes;
    const char *site; /* as a posting's */
    void *owner;
} hvdl_message_posting;

/* The most that a rank adds to the posting of an operation: tiny data, or an alltoall's splits, both those
 * that it sends and those that it receives. */
static inline size_t hvdl_posted_payload(int num_ranks, size_t inline_bytes)
{
    size_t splits = 2 * (size_t)num_ranks * sizeof(int64_t);
    return inline_bytes > splits ? inline_bytes : splits;
}

/* An operation has reached a state. */
typedef struct {
    uint64_t time_ns;    /* CLOCK_MONOTONIC */
    uint64_t operation;  /* its number: names come again */
    uint64_t bytes;      /* of the tensor on this rank */
    int32_t kind, state; /* hvdl_kind; see hvdl_state_name */
    char name[224];      /* cut */
} hvdl_event;

/* Event i, the oldest first, stands at (first + i) % capacity; `ring` is the caller's to free. */
typedef struct {
    hvdl_event *ring;
    size_t capacity, first, count;
    uint64_t lost; /* older ones that found no room */
} hvdl_events;

/* Of the black box in the configuration. */
size_t hvdl_box_bytes(void);

hvdl_err hvdl_engine_create(hvdl_engine **out, const hvdl_engine_config *config);

/* wake: have the progress thread begin at once; false if the caller waits for it next. */
hvdl_err hvdl_engine_post(hvdl_engine *engine, const hvdl_posting *posting, bool wake,
                          hvdl_operation **out);

hvdl_err hvdl_engine_post_message(hvdl_engine *engine, const hvdl_message_posting *posting,
                                  bool wake, hvdl_operation **out);
/* A send or receive that is not matched will not be any more: it fails. False: it is matched, or has ended. */
bool hvdl_operation_withdraw(hvdl_engine *engine, hvdl_operation *operation);

/* The posting's kind is that of its runs: hvdl_is_kind_of_runs. */
hvdl_err hvdl_plan_create(hvdl_engine *engine, const hvdl_posting *posting, hvdl_plan **out);
/* How much this rank's first elements count in an average: 0, or positive and finite. is_in_input: they have
 * been multiplied by it already. */
typedef struct {
    double value;
    bool is_in_input;
} hvdl_weight;

/* weight: NULL, or this rank's. The weights travel with the announcements of the run. If all that take part in
 * it have one, the first elements of an average (or of a sum that `postscale` makes one) are weighted, unless
 * all weights are 0. HVDL_EDUP: the previous run has not ended. */
hvdl_err hvdl_plan_start(hvdl_engine *engine, hvdl_plan *plan, const hvdl_weight *weight,
                         void *owner, hvdl_operation **out);
/* The plan's memory goes when its last run has ended, also after close. Its posting's owner comes back
 * from reap. */
void hvdl_plan_release(hvdl_engine *engine, hvdl_plan *plan);

/* What a member owns of the buffer of a plan of this descriptor, whose kind has owners: ranges of elements,
 * ascending, none of which is empty or touches the next. They are the caller's to free(). */
hvdl_err hvdl_engine_owned(const hvdl_engine *engine, const hvdl_desc *desc, int member,
                           hvdl_range **ranges, size_t *count);

bool hvdl_operation_done(const hvdl_operation *operation);
/* Drives the engine, or sleeps while another thread does, until the operation is done or timeout_ns
 * have passed. Returns whether it is done. */
bool hvdl_operation_wait(hvdl_engine *engine, hvdl_operation *operation, long timeout_ns);
/* Where there is no progress thread: does what can be done now. */
void hvdl_engine_poll(hvdl_engine *engine);

/* For a thread that waits for any of several operations, and drives nothing. The count changes when an operation
 * has ended, and now and then without one. */
uint32_t hvdl_engine_ends(const hvdl_engine *engine);
/* Sleeps until the count is another than `seen`. */
void hvdl_engine_await_end(hvdl_engine *engine, uint32_t seen, long timeout_ns);
/* Changes the count. */
void hvdl_engine_wake(hvdl_engine *engine);

/* An allreduce or broadcast that is cut at multiples of so many bytes, its last part no shorter than that, has
 * the bits of one that is not cut. 0: it may not be cut. */
size_t hvdl_engine_cut_bytes(const hvdl_engine *engine);

/* It has not ended after so long: names the ranks that have not called it, as far as this host knows or the others
 * answer within a second. */
void hvdl_describe_timeout(hvdl_engine *engine, hvdl_operation *operation, double seconds,
                           char text[HVDL_TEXT_BYTES]);
/* All operations fail on all ranks, with the first text of a rank of the host, and all that are posted later. */
void hvdl_engine_give_up(hvdl_engine *engine, const char *text);
/* How many operations of this kind and name have failed since all ranks last joined. Once such an operation has
 * ended here, that is the same on every rank that it has ended on. */
uint64_t hvdl_engine_failures(hvdl_engine *engine, int kind, const char *name);

/* Of an operation that is done. NULL: it succeeded. */
const char *hvdl_operation_error(const hvdl_operation *operation);
/* Of a gathered result: rows that came from each rank. Join: the last rank to join. A receive: its
 * source, and how many bytes came. Of a tensor that
 * stays on its device: the operation's sequence number. NULL otherwise. */
const int64_t *hvdl_operation_rows(const hvdl_operation *operation, int *count);
/* A gathered result, which becomes the caller's to free(). Once. */
void *hvdl_operation_move_output(hvdl_operation *operation);
const hvdl_desc *hvdl_operation_desc(const hvdl_operation *operation);
const char *hvdl_operation_name(const hvdl_operation *operation);

/* The caller's last use of it. Returns the owner if the operation is done, else NULL: it comes back
 * from hvdl_engine_reap later. */
void *hvdl_operation_release(hvdl_engine *engine, hvdl_operation *operation);
void *hvdl_engine_reap(hvdl_engine *engine);

int hvdl_engine_num_ranks(const hvdl_engine *engine);
int hvdl_engine_rank(const hvdl_engine *engine);
int hvdl_engine_num_hosts(const hvdl_engine *engine);
/* Whether plans that add up floats take weights: sums along a tree have no factors of ranks. */
bool hvdl_engine_weighs(const hvdl_engine *engine);
/* What texts call a rank. */
int hvdl_engine_world_rank(const hvdl_engine *engine, int rank);

const char *hvdl_state_name(int state); /* "POSTED" ... */
/* From now on keeps the latest `capacity` events; 0: none. What was kept before is gone. */
hvdl_err hvdl_engine_record(hvdl_engine *engine, size_t capacity);
/* A copy of those that are kept. */
hvdl_err hvdl_engine_events(hvdl_engine *engine, hvdl_events *to);
/* Takes out those that are kept. */
hvdl_err hvdl_engine_drain_events(hvdl_engine *engine, hvdl_events *to);

typedef struct {
    uint64_t operations, control_messages, data_messages, data_bytes;
    uint64_t past_cache_bytes; /* written past the caches for the other ranks of the host */
    uint64_t late_wakings;     /* callers that found the engine free, and nobody had told them */
} hvdl_counters;
hvdl_counters hvdl_engine_counters(hvdl_engine *engine);
/* The part of data_bytes that went to this rank, of another host. */
uint64_t hvdl_engine_sent_bytes(hvdl_engine *engine, int rank);

/* Fails what is pending, tells the others, ends the thread. Not collective.
 * linger: this rank is about to end MPI. Then the leader of a host stays until those of the other hosts
 * have said that they leave, so that no message is left to MPI without a receiver. */
void hvdl_engine_close(hvdl_engine *engine, bool linger);
/* After close, and when no operation or plan of it is held any more. */
void hvdl_engine_free(hvdl_engine *engine);

#endif
