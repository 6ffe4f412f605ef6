/* The stall check: operations that wait for too long are reported, with the ranks that keep them back, and after
 * another limit everything fails. The driver.
 *
 * An operation is late if ranks have not posted it. If all have, and no block, message or piece of any operation
 * moves on this host, it stands still. */
#ifndef HVDL_STALL_H
#define HVDL_STALL_H

#include <pthread.h>

#include "base/descriptors.h"
#include "engine/engine.h"
#include "host/shm.h"

struct hvdl_roll_call;

/* The question about what all ranks call once for each batch. */
extern const char hvdl_uneven[];

#define HVDL_NUM_REDUCED 128 /* a power of two */

/* Written by stall.c, but for the first four. */
typedef struct {
    struct hvdl_roll_call *calls; /* roll_call.c: under way */
    uint64_t num_calls;           /* the same: ever */
    bool *silent;         /* the same: by host: it did not answer, and nothing has come since */
    hvdl_shm_last *lasts; /* missing.c: what the ranks of this host last did */
    uint64_t next_look_ns, looked_ns;
    uint64_t
        ran_ns;     /* for how long this rank has been running: a pause of it is nobody's silence */
    uint64_t place; /* a hash of how far all operations of this host were at the last look */
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
    struct hvdl_roll_call *call; /* under way, or NULL */
    int num_reports;             /* that were due, here or on a host that asks */
    int told_by;                 /* the host that has the last of them to make */
    int num_said;                /* of these, up to the last one that this rank has made */
    uint64_t next_ns;            /* not before */
    _Atomic bool wanted;         /* any thread: a caller wants to know who is missing */
    char *answer;                /* under stall.lock */
} hvdl_lateness;

hvdl_err hvdl_stall_make(hvdl_engine *engine);
void hvdl_stall_free(hvdl_engine *engine);

hvdl_shm_last hvdl_activity_of(const hvdl_operation *operation, hvdl_activity activity);
/* An allreduce has ended well. */
void hvdl_note_reduced(hvdl_engine *engine, const hvdl_operation *operation);
/* Is it an allreduce once more, as in a loop over batches: of a name that has ended well before, unnamed after
 * another unnamed one, or the run of a plan? Then a rank that is not there may have had fewer of them. (Not
 * for what a process group of torch.distributed has numbered: it knows no join.) */
bool hvdl_comes_again(const hvdl_engine *engine, const hvdl_operation *operation);
/* A failure's text, and that a rank may have run out of batches; in `to`, which is returned. */
const char *hvdl_put_uneven(const char *text, char to[HVDL_TEXT_BYTES]);
/* For the other ranks of the host to read, with the time. */
void hvdl_note_activity(hvdl_engine *engine, hvdl_shm_last last);

/* Whether a report is due of what has waited for so long, if the first one is due after `first_ns` (0: never). */
bool hvdl_report_is_due(uint64_t first_ns, uint64_t age_ns, int report);
/* Looks for operations that are late, now and then. */
void hvdl_stall_look(hvdl_engine *engine);
/* If there are calls: ends those that all hosts have answered. */
void hvdl_stall_step(hvdl_engine *engine);
/* If a caller wants it: asks for that caller. */
void hvdl_stall_ask_for_callers(hvdl_engine *engine);
/* An operation ends. */
void hvdl_stall_ended(hvdl_engine *engine, hvdl_operation *operation, bool ok);

#endif
