/* The memory region that the ranks of one host share. It holds
 *
 *   - the **shared log**: a ring of entries that every rank appends to and every rank reads, all in the
 *     same order. Decisions on which the ranks of a host must agree (which operations are matched,
 *     which piece is next) are made by replaying it: each rank runs the same state machine over
 *     the same entries, so there is no leader and no vote within a host.
 *   - the **stage counters** of the pipeline (pipeline.h): per rank, how many blocks it has put in,
 *     reduced and taken out, ever.
 *   - the **staging** blocks: per rank HVDL_NUM_BUFFERS blocks that it writes and all read.
 *   - the **mailboxes** (mailbox.h): per rank a few blocks for messages to one other rank.
 *   - the **doorbells**: futex words to wake a rank that sleeps.
 *
 * A rank that is alone on its host has the same structures in private memory.
 * All functions are called by the thread that drives the engine, but for hvdl_shm_kick. */
#ifndef HVDL_SHM_H
#define HVDL_SHM_H

#include <stdatomic.h>

#include <time.h>

#include "base/types.h"

#define HVDL_CALLER_BYTES 64 /* the region's first bytes are the caller's */
#define HVDL_SHOWN_BYTES 120 /* of an operation's name or words, with its NUL */
#define HVDL_MAX_LOCAL 1024  /* ranks on one host */
#define HVDL_NUM_BUFFERS 4   /* staging blocks per rank */
#define HVDL_ENTRY_ALIGN 64  /* shared log entries are multiples of it */

#define HVDL_PAST_CACHE_BYTES 4096 /* less goes into the caches in any case */
#define HVDL_TIMED_BYTES 16384     /* less is not timed */

typedef enum { HVDL_STAGE_IN = 0, HVDL_STAGE_REDUCED, HVDL_STAGE_OUT, HVDL_NUM_STAGES } hvdl_stage;

typedef enum {
    HVDL_ENTRY_PAD = 0,    /* skips to the start of the ring */
    HVDL_ENTRY_POST,       /* a rank posts an operation: key, descriptor, payload */
    HVDL_ENTRY_RUN,        /* a rank starts a plan */
    HVDL_ENTRY_START,      /* the hosts agree on an operation: its tag, rows */
    HVDL_ENTRY_RESULT,     /* the hosts' result of a tiny operation */
    HVDL_ENTRY_FAIL,       /* the hosts disagree, or one can't take part: the text */
    HVDL_ENTRY_NEXT,       /* the next piece of an operation may begin */
    HVDL_ENTRY_READY,      /* a rail has done its exchange of a piece */
    HVDL_ENTRY_FREE,       /* all hosts have freed a plan */
    HVDL_ENTRY_RELEASE,    /* a rank has freed a plan */
    HVDL_ENTRY_JOIN,       /* a rank has joined */
    HVDL_ENTRY_ALL_JOINED, /* all ranks have */
    HVDL_ENTRY_ZERO,     /* all ranks of this host have: they take part in an operation of others */
    HVDL_ENTRY_ZERO_RUN, /* and in a run of a plan */
    HVDL_ENTRY_GIVE_UP,  /* too late: everything fails, with this text */
    HVDL_ENTRY_MISSING_QUERY,  /* which ranks have not called an operation? */
    HVDL_ENTRY_MISSING_ANSWER, /* those of a host */
    HVDL_ENTRY_HEADER,         /* from one rank to another one: transfers.h; id: the addressee */
    HVDL_ENTRY_LEAVE           /* a rank leaves */
} hvdl_entry_type;

/* An entry's head; `body_bytes` of body follow it. */
typedef struct {
    uint16_t type, from; /* hvdl_entry_type; local index of the rank that appended it */
    uint32_t body_bytes;
    uint64_t id;  /* operation or plan: position of the entry that introduced it, here and below */
    uint64_t arg; /* START, ZERO: tag; NEXT, READY: piece; ALL_JOINED: the last rank; POST: see
                   * announcing.h; RUN: see weights.c */
    int64_t rows; /* POST of an allgather: first dimension; RUN: see weights.c */
    uint64_t position; /* set by the shared log */
} hvdl_entry;

static inline const void *hvdl_entry_body(const hvdl_entry *entry)
{
    return entry + 1;
}

#define HVDL_LEFT_BROKEN 2
#define HVDL_NUM_CLAIMS 16384

typedef enum {
    HVDL_DID_NOTHING,
    HVDL_DID_POST,
    HVDL_DID_END,
    HVDL_DID_FAIL,
    HVDL_DID_UNKNOWN /* never noted: the reader finds it half written */
} hvdl_activity;

/* The last thing that a rank did, for the others to read. */
typedef struct {
    uint64_t time_ns;
    int32_t kind, activity;
    int32_t in_words;
    char name[HVDL_SHOWN_BYTES]; /* or words; cut */
} hvdl_shm_last;

/* Written by its rank alone. Every line that others poll is its own, so that no store of one rank
 * takes away a line that another one polls for something else. */
typedef struct {
    _Alignas(128) _Atomic uint64_t stages[HVDL_NUM_STAGES];
    _Alignas(128) _Atomic uint64_t cursor;   /* shared log position up to which it has read */
    _Alignas(128) _Atomic uint32_t doorbell; /* wakes the thread that drives its engine */
    _Atomic uint32_t idle_doorbell;          /* wakes its progress thread when nothing is driven */
    _Atomic int32_t pid;                     /* 0: not attached yet */
    /* 0: not; 1: in good order; HVDL_LEFT_BROKEN + r: operations were lost for the sake of rank r */
    _Atomic uint32_t left;
    _Alignas(128) _Atomic uint32_t last_sequence; /* operations/activity.c */
    hvdl_shm_last last;
    _Atomic uint64_t pid_namespace; /* pid means something only to ranks of the same one */
    /* stall.c: when it last looked; how far its operations were then, as a hash; and 1 + the member
     * whose message it waits for, or 0 */
    _Alignas(128) _Atomic uint64_t looked_ns;
    _Atomic uint64_t place;
    _Atomic uint32_t awaits;
} hvdl_shm_rank;

typedef struct {
    char caller[HVDL_CALLER_BYTES];
    _Alignas(128) _Atomic uint64_t tail; /* shared log position after the last reserved entry */
    /* Bit r: rank r's driver is about to sleep. Set before its last look, read after every publish;
     * a sequentially consistent fence on both sides, so that one of the two sees the other. */
    _Alignas(128) _Atomic uint64_t sleepers[HVDL_MAX_LOCAL / 64];
    _Alignas(128) _Atomic uint32_t past_cache; /* locality.h: what local rank 0 has found out */
    _Alignas(
        128) _Atomic uint64_t claims[HVDL_NUM_CLAIMS]; /* missing_query.c: who makes a report */
    _Atomic uint32_t has_told_shutdown;                /* report.c: how to let a wait end the job */
    hvdl_shm_rank ranks[];
} hvdl_shm_control;

typedef struct {
    int local_size, local_rank;
    size_t block_bytes;
    hvdl_shm_control *control;
    _Atomic uint64_t
        *stamps; /* per entry slot: position + 1 of the entry that begins there, last */
    char *ring;
    char *staging, *mail;
    uint64_t ring_bytes; /* a power of two */
    uint64_t read_position;
    uint64_t write_limit;           /* no rank's cursor is below write_limit - ring_bytes */
    uint64_t seen[HVDL_NUM_STAGES]; /* lower bounds of the minima of all ranks' stages */
    uint64_t past_cache_bytes;      /* written past the caches, ever */
    void *mapping;
    size_t mapping_bytes;
    int *pidfds; /* opened when first needed; -1 unknown, -2 can't be watched */
} hvdl_shm;

/* How long that many bytes took. bytes 0: not timed. */
typedef struct {
    size_t bytes;
    uint64_t ns;
} hvdl_timed;

static inline uint64_t hvdl_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Bytes of the region. payload_bytes: the most that a rank adds to the posting of an operation.
 * HVDL_ENOMEM: more than can be addressed. */
hvdl_err hvdl_shm_bytes(int local_size, size_t payload_bytes, size_t block_bytes, size_t *bytes);

/* Maps the region of file descriptor fd (-1: private memory, local_size 1), and announces this
 * process in it. The file descriptor stays the caller's. */
hvdl_err hvdl_shm_open(hvdl_shm *shm, int fd, int local_size, int local_rank, size_t payload_bytes,
                       size_t block_bytes);
void hvdl_shm_close(hvdl_shm *shm);

/* Appends head and body (two parts, so that no caller has to join them) and rings the doorbells.
 * HVDL_EAGAIN: the ring is full until the slowest rank has read on (it is woken if it idles). */
hvdl_err hvdl_log_append(hvdl_shm *shm, hvdl_entry head, const void *body, size_t body_bytes,
                         const void *more, size_t more_bytes);

/* Whether to write that many bytes past the caches, as other ranks will read them (locality.h); counts
 * them if so. */
bool hvdl_goes_past_cache(hvdl_shm *shm, size_t bytes);
/* Copies data that others will read, past the caches if that is better. `to` may be `from`. */
void hvdl_shm_copy(hvdl_shm *shm, void *to, const void *from, size_t bytes);
/* The same; adds to *timed, if that is not NULL, how long it took where there is a choice. is_of_large: a part
 * of something that no cache holds, which is not `to`. */
void hvdl_shm_copy_timed(hvdl_shm *shm, void *to, const void *from, size_t bytes, bool is_of_large,
                         hvdl_timed *timed);
/* For tests: this process writes past the caches (1), never does so (0), or when that is faster (-1, the
 * default). */
void hvdl_force_past_cache(int force);
bool hvdl_past_cache_is_forced(void);

/* The next entry that this rank has not read, or NULL; valid until hvdl_log_advance. */
const hvdl_entry *hvdl_log_next(hvdl_shm *shm);
void hvdl_log_advance(hvdl_shm *shm, const hvdl_entry *entry);

/* Rank `local`'s staging block for block number `block` of the pipeline. */
static inline char *hvdl_staging(const hvdl_shm *shm, int local, uint64_t block)
{
    size_t index = (size_t)local * HVDL_NUM_BUFFERS + block % HVDL_NUM_BUFFERS;
    return shm->staging + index * shm->block_bytes;
}

/* Have all ranks of the host passed `stage` for `count` blocks? If so, what they wrote before is
 * visible (acquire; pairs with hvdl_stage_publish). */
bool hvdl_stage_reached(hvdl_shm *shm, hvdl_stage stage, uint64_t count);
void hvdl_stage_publish(hvdl_shm *shm, hvdl_stage stage, uint64_t count, bool ring);

/* Sleeping, by the driver: prepare; look once more for work; then sleep or not; always done.
 * Sleeps until rung or for timeout_ns at most. */
uint32_t hvdl_shm_sleep_prepare(hvdl_shm *shm);
void hvdl_shm_sleep(hvdl_shm *shm, uint32_t doorbell, long timeout_ns);
void hvdl_shm_sleep_done(hvdl_shm *shm);

/* Wakes the drivers of the other ranks that sleep, after something was published for them. */
void hvdl_shm_ring(hvdl_shm *shm);

/* Wakes the driver of one of them if it sleeps. */
void hvdl_shm_ring_one(hvdl_shm *shm, int local);
/* Has a rank look that drives nothing. */
void hvdl_shm_ring_idle(hvdl_shm *shm, int local);

/* Wakes this rank's own driver if it sleeps: any thread, after it has published work. */
void hvdl_shm_kick(hvdl_shm *shm);

/* A local rank that has ended without leaving first, or -1. Costs a system call. */
int hvdl_shm_find_dead(hvdl_shm *shm);

/* Plain futex wait and wake on a word of this process or of shared memory. */
void hvdl_futex_wait(_Atomic uint32_t *word, uint32_t value, long timeout_ns);
void hvdl_futex_wake(_Atomic uint32_t *word);

#endif
