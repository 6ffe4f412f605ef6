/* The stall check: which ranks wait for which. The driver. */
#ifndef HVDL_STALL_H
#define HVDL_STALL_H

#include "base/descriptors.h"
#include "engine/engine.h"
#include "host/shm.h"

typedef struct hvdl_due hvdl_due;

/* The question about what all ranks call once for each batch. */
extern const char hvdl_uneven[];

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

/* But for the time. */
void hvdl_put_activity(hvdl_shm_last *to, const hvdl_operation *operation, hvdl_activity activity);
/* An allreduce has ended well. */
void hvdl_note_reduced(hvdl_engine *engine, const hvdl_operation *operation);
/* Is it an allreduce once more, as in a loop over batches: of a name that has ended well before, unnamed after
 * another unnamed one, or the run of a plan? Then a rank that is not there may have had fewer of them. (Not
 * for what a process group of torch.distributed has numbered: it knows no join.) */
bool hvdl_comes_again(const hvdl_engine *engine, const hvdl_operation *operation);
/* A failure's text, and that a rank may have run out of batches; in `to`, which is returned. */
const char *hvdl_put_uneven(const char *text, char to[HVDL_TEXT_BYTES]);
/* For the other ranks of the host to read. */
void hvdl_note_operation(hvdl_engine *engine, const hvdl_operation *operation,
                         hvdl_activity activity);
/* The same, of one that may have ended since; it happens now. */
void hvdl_note_activity(hvdl_engine *engine, const hvdl_shm_last *last);
/* Looks for operations that are late, now and then. */
void hvdl_stall_look(hvdl_engine *engine);
void hvdl_read_reported(hvdl_engine *engine, const hvdl_entry *entry);
void hvdl_read_taken(hvdl_engine *engine, const hvdl_entry *entry);
/* Says what is due of this host's ranks, if enough of the journal can be read. *progressed is set,
 * never cleared. */
void hvdl_stall_tell(hvdl_engine *engine, bool *progressed);
/* Describes this host's ranks to the coordinator on `host` that asks, when that is due. */
void hvdl_describe_to(hvdl_engine *engine, int host, const hvdl_late *what);
/* An operation ends: the inquiries about it end, too. */
void hvdl_stall_ended(hvdl_engine *engine, hvdl_operation *operation, bool ok);
/* Everything fails: all inquiries and reports end. */
void hvdl_stall_end(hvdl_engine *engine);
void hvdl_stall_free(hvdl_engine *engine);

#endif
