/* Roll calls: a rank asks all hosts which ranks keep an operation back. The driver.
 *
 * The rank describes its own host; its leader asks the leaders of the others, whose answers come back the same
 * way. A host that does not answer in time is silent. Nothing is sent while all is well. */
#ifndef HVDL_MISSING_QUERY_H
#define HVDL_MISSING_QUERY_H

#include "watching/report.h"

#define HVDL_MISSING_BYTES 608 /* of a text, which has room for it and for what stands around it */
/* A host that does not answer for so long is taken for cut off or stopped: its leader looks for messages twice
 * a second, and any other rank every 2 s. */
#define HVDL_PATIENCE_NS 1500000000ull
/* Whoever should have ended everything has not, so long after it was due. */
#define HVDL_OVERDUE_NS (4 * HVDL_PATIENCE_NS)

typedef enum {
    HVDL_CALL_CALLER, /* who has not called it? For a caller whose time is over */
    HVDL_CALL_LATE,   /* the same: it is late */
    HVDL_CALL_STILL,  /* all have called it: why does its data not move? */
    HVDL_CALL_HELD    /* the shared log stands still: by whom? Of this host alone */
} hvdl_call_kind;

/* In the shared log and between leaders. */
typedef struct {
    hvdl_key key;
    uint64_t run, number;
    uint64_t still_ns;   /* how long it has not moved */
    int32_t host, local; /* that asks */
    int32_t kind;        /* hvdl_call_kind */
    int32_t report;      /* which it is for */
    int32_t gives_up;    /* it is the last one: then all fails */
    int32_t is_run;      /* of a plan */
    int32_t is_posted;   /* all ranks of that host have posted it, and its coordinator knows so */
    int32_t is_alone;    /* no host is asked */
    int32_t is_overdue;  /* it gives up, whoever else does */
} hvdl_question;

enum { HVDL_TOLD_BY_NOBODY = -1, HVDL_TOLD_ALREADY = -2 };

typedef enum { HVDL_TAKES_NO_PART, HVDL_HAS_NOT_POSTED, HVDL_HAS_POSTED } hvdl_presence;

/* Of one host; the presence of each local rank follows, a byte each. */
typedef struct {
    uint64_t number;
    int32_t host, local, num_ranks; /* host: that answers; local: that asks */
    int32_t goes_on;                /* it moves, or has been decided: there is nothing to report */
    int32_t awaits;                 /* the member whose message this host waits for, or -1 */
    int32_t told_by;                /* the host that has this report to make; or one of those */
    int32_t num_elsewhere; /* missing ranks that are in another operation, or failed in one */
    char missing[HVDL_MISSING_BYTES];
} hvdl_answer;

/* The answers of other hosts and, at its end, this one's. Written by missing_query.c. */
typedef struct hvdl_missing_query {
    struct hvdl_missing_query *next;
    hvdl_operation *operation;
    hvdl_question question;
    uint64_t what;     /* its report is about, as in hvdl_claim_report */
    uint64_t asked_ns; /* of stall.ran_ns */
    int num_answers, num_missing, num_elsewhere, num_silent, awaits;
    int num_cut; /* missing ranks that have no room in the text */
    bool goes_on;
    bool is_told; /* a host before this one reports it */
    char text[HVDL_MISSING_BYTES];
    hvdl_writer missing;
    bool *answered;    /* by host */
    uint8_t *presence; /* by rank */
} hvdl_missing_query;

/* NULL: no memory. It must be ended before the operation is. */
hvdl_missing_query *hvdl_call_roll(hvdl_engine *engine, hvdl_operation *operation,
                                   const hvdl_question *how, uint64_t what);
void hvdl_end_missing_query(hvdl_engine *engine, hvdl_missing_query *call);
/* All other hosts have answered or are silent. */
bool hvdl_roll_is_complete(const hvdl_engine *engine, const hvdl_missing_query *call);
/* Adds what is true of this host as of the last survey, and which hosts were silent. */
void hvdl_close_roll(hvdl_engine *engine, hvdl_missing_query *call);

/* That report, about what this number stands for on this host (a match; how far it is), is for `host` to make.
 * HVDL_TOLD_BY_NOBODY: so it is now; else the host that makes it, or that this one has made it. */
int hvdl_claim_report(hvdl_engine *engine, uint64_t what, const hvdl_question *asked, int host);
/* This host has made it. */
void hvdl_note_told(hvdl_engine *engine, const hvdl_missing_query *call);
/* Whether this host is about to end everything: it, or HVDL_TOLD_BY_NOBODY. */
int hvdl_ending_host(const hvdl_engine *engine);
/* Nothing ends. */
void hvdl_unclaim_end(hvdl_engine *engine);

/* The leader asks the other hosts. */
void hvdl_read_missing_query(hvdl_engine *engine, const hvdl_entry *entry);
/* A host has answered; for the rank that asked. */
void hvdl_read_roll_answer(hvdl_engine *engine, const hvdl_entry *entry);

/* ---- messages ---- */

void hvdl_on_missing_query(hvdl_engine *engine, int host, const void *payload, size_t bytes);
void hvdl_on_roll_answer(hvdl_engine *engine, int host, const void *payload, size_t bytes);

#endif
