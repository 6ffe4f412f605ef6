/* Whose part is missing where operations stand still, and the texts of that. The driver. */
#ifndef HVDL_STANDING_H
#define HVDL_STANDING_H

#include "watching/report.h"

/* How a host stands. */
typedef enum {
    HVDL_STANDING_SILENT,    /* it has not answered */
    HVDL_STANDING_MOVING,    /* its operations move */
    HVDL_STANDING_STILL,     /* the operation stands still there, too */
    HVDL_STANDING_ENDED,     /* it has ended there */
    HVDL_STANDING_NOT_POSTED /* a run of a plan: it has not begun there, which stall.c reports */
} hvdl_standing_state;

/* In a message from a leader, about one of its operations. */
typedef struct {
    uint64_t still_ns; /* how long it has stood still */
    int32_t is_run;    /* of a plan */
    int32_t unused;
} hvdl_standing_question;

/* The answer. */
struct hvdl_standing {
    int32_t state;  /* hvdl_standing_state */
    int32_t awaits; /* the member whose message it waits for, or -1 */
    char missing[HVDL_MISSING_BYTES];
};

/* How long a rank of this host has not looked, if it is too long; else 0. */
uint64_t hvdl_quiet_ns(const hvdl_engine *engine, int local);
/* How this host stands, whose operation stands still. */
void hvdl_describe_standing(hvdl_engine *engine, const hvdl_operation *operation,
                            hvdl_standing *to);
/* How it stands for another host, which asks about the operation of this key. */
void hvdl_answer_standing(hvdl_engine *engine, hvdl_key key, uint64_t run,
                          const hvdl_standing_question *question, hvdl_standing *to);
/* The whole text, of what is known on this host. False: no rank is to be seen that is missing. */
bool hvdl_describe_standing_here(const hvdl_engine *engine, const hvdl_operation *operation,
                                 bool fails, char text[HVDL_TEXT_BYTES]);
/* The whole text, of the answers of all hosts. */
void hvdl_describe_standing_everywhere(const hvdl_engine *engine, const hvdl_operation *operation,
                                       bool fails, char text[HVDL_TEXT_BYTES]);

#endif
