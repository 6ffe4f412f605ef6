/* What the stall check knows. Written by the files that are named.
 * The driver, unless it says otherwise. */
#ifndef HVDL_WATCHING_STATE_H
#define HVDL_WATCHING_STATE_H

#include <pthread.h>

#include "base/descriptors.h"
#include "engine/engine.h"
#include "host/shm.h"

typedef struct hvdl_due hvdl_due;

/* A late operation, in the journal and in messages. */
typedef struct {
    hvdl_key key;
    uint64_t run; /* of a plan: its number */
    uint64_t age_ns;
    int32_t kind;
    int32_t gives_up;    /* the limit after which everything fails has passed, too */
    int32_t report;      /* it is reported again and again: from 0 */
    int32_t attempt;     /* at this report, from 0: the ranks that should have spoken did not */
    int32_t comes_again; /* hvdl_comes_again */
    int32_t is_asked;    /* between hosts: the reporting host waits for the coordinator's answer */
    int32_t in_words;
    char name[128];             /* or words; plain */
    char site[HVDL_SITE_BYTES]; /* where the reporting rank's script calls it; empty: not known */
} hvdl_late;

#define HVDL_NUM_REDUCED 128 /* a power of two */

/* Written by stall.c. */
typedef struct {
    hvdl_due *due, *due_last;
    hvdl_shm_last *survey; /* what the ranks of this host last did */
    uint64_t next_look_ns;
    bool told; /* something has been late: what ends may have been reported */
    uint64_t
        reduced[HVDL_NUM_REDUCED]; /* keys of allreduces that have ended well, each in its slot */
} hvdl_stall;

/* Of one operation. Written by stall.c. */
typedef struct {
    bool announced; /* its report is in the journal, and not read yet */
    bool said;      /* this rank reported it, and it had no meeting to note that in */
} hvdl_lateness;

/* Of one meeting: the journal says so, but for the times and `said`. Written by stall.c. */
typedef struct {
    int num_reports; /* that have begun */
    bool given_up;   /* and so has failing everything */
    int attempt;     /* of the last one */
    int speaker;     /* local rank: that must speak now */
    bool taken;      /* it has */
    uint64_t since_ns;
    bool said; /* this rank has reported it */
} hvdl_reporting;

typedef struct hvdl_question hvdl_question;

typedef struct {
    uint64_t heard_ns; /* a message of the stall check has come */
    bool silent;       /* it did not answer, and nothing has come since */
} hvdl_host_signs;

/* Written by silence.c. */
typedef struct {
    hvdl_host_signs *hosts;    /* several hosts */
    uint64_t *ranks_heard_ns;  /* by local rank: when an entry about what is late was read */
    hvdl_question *questions;  /* the leader's: another host must speak about these */
    uint64_t looked_ns;        /* the last look */
    uint64_t awake_ns;         /* since then there was no long time between two looks */
    uint64_t standing_at;      /* where in the journal this rank reads */
    uint64_t standing_from_ns; /* and since when, if it should read on or append and can't */
    int num_standing_reports;
} hvdl_silence;

typedef struct hvdl_inquiry hvdl_inquiry;

/* Written by inquiries.c. */
typedef struct {
    hvdl_inquiry *first;
    int num_asking; /* of these, under way */
} hvdl_inquiries;

typedef struct hvdl_standing hvdl_standing;

/* Written by standstill.c. */
typedef struct {
    uint64_t next_look_ns, looked_ns;
    uint64_t place;    /* a hash of how far all operations of this host were at the last look */
    uint64_t still_ns; /* how long it has not changed, while this rank was running */
    int num_reports;   /* since then: that were made, or were another's to make */
    uint64_t next_report_ns; /* of still_ns: when the next one is due */
    bool said;               /* this rank has said it, */
    hvdl_late reported;      /* of this operation */
    hvdl_standing *answers;  /* by host; the leader, while it asks the others; else NULL */
    uint64_t asked_ns;
    int num_answers, num_asked; /* num_asked: questions, ever */
} hvdl_standstill;

typedef struct hvdl_roll_call hvdl_roll_call;

/* Written by roll_call.c, under `lock`: any thread. */
typedef struct {
    pthread_mutex_t lock;
    hvdl_roll_call *calls; /* that are under way */
    uint64_t last_number;
    _Atomic bool waiting; /* a call has not begun yet: the driver looks */
} hvdl_roll_calls;

#endif
