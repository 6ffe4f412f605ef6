/* The texts of the stall check, and what it knows of a late operation. */
#ifndef HVDL_REPORT_H
#define HVDL_REPORT_H

#include "engine/state.h"

/* Parts of a text, which has room for both and for what stands around them. */
#define HVDL_MISSING_BYTES 608
#define HVDL_POSTED_BYTES 128

/* A text that is put together. */
typedef struct {
    char *text;
    size_t room, used;
} hvdl_writer;

/* What is said of a host, or of several. */
typedef struct {
    char posted[HVDL_POSTED_BYTES], missing[HVDL_MISSING_BYTES];
    uint32_t num_missing;
    uint32_t num_elsewhere; /* of the missing ranks, those that are in another operation */
    uint32_t num_failed;    /* of the missing ranks, those of which the last operation failed */
    uint32_t num_users;     /* and of these, those in one that is not hvdlite's own */
} hvdl_stall_part;
_Static_assert(sizeof(hvdl_stall_part) <= HVDL_TEXT_BYTES, "a message has room for it");

/* What has no room is cut, and ends in dots. */
void hvdl_put(hvdl_writer *to, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* A plan's runs go through all hosts without an agreement: what counts is their number. */
uint64_t hvdl_run_of(const hvdl_operation *operation);
/* The operation at this moment. */
hvdl_late hvdl_late_of(const hvdl_engine *engine, const hvdl_operation *operation, uint64_t now);
/* That of an operation which has not ended here; NULL: nobody of this host has posted it. */
hvdl_meeting *hvdl_meeting_of(hvdl_engine *engine, hvdl_key key, uint64_t run);

/* It is known here that all ranks have posted it. */
bool hvdl_is_agreed(const hvdl_engine *engine, const hvdl_meeting *meeting);

/* The ranks of this host: which have posted, and what the others last did. Where it is known that all
 * have posted, neither. lasts: by local rank; what had been posted by then has been read. */
void hvdl_describe_host(hvdl_engine *engine, const hvdl_late *what, const hvdl_shm_last *lasts,
                        hvdl_stall_part *answer);
/* Adds ranks, such as "0, 4-6", where their numbers belong between those that are there. */
void hvdl_put_in_order(hvdl_writer *to, const char *ranks);
/* What a late operation's text ends with. */
typedef enum {
    HVDL_ASK_PATH,
    HVDL_ASK_ORDER,
    HVDL_ASK_OWN,
    HVDL_ASK_FAILED,
    HVDL_ASK_HOST
} hvdl_advice;
/* num_silent: hosts or ranks that do not answer. */
hvdl_advice hvdl_advice_for(const hvdl_stall_part *all, int num_silent);

/* The whole text. asker: this host, if another one does not answer it, which may be the fault of either's link;
 * else NULL. */
void hvdl_describe_late(const hvdl_late *what, const char *posted, const char *missing,
                        hvdl_advice advice, const char *asker, char text[HVDL_TEXT_BYTES]);
/* It was reported, and goes on. */
void hvdl_describe_going_on(const hvdl_late *what, char text[HVDL_TEXT_BYTES]);
/* Is the next report due of what has waited for so long, and was reported so often? */
bool hvdl_report_is_due(const hvdl_engine *engine, uint64_t age_ns, int report);
/* To the user. */
void hvdl_say(const hvdl_engine *engine, const char *text);
/* To the user, and to the launcher, which can find out where the ranks are. */
void hvdl_report(const hvdl_engine *engine, const char *text);
void hvdl_say_going_on(hvdl_engine *engine, hvdl_late what);
/* Everything fails with this text: on this host; a leader's: on all hosts. */
void hvdl_give_up_here(hvdl_engine *engine, const char *text);
void hvdl_give_up_everywhere(hvdl_engine *engine, const char *text);
/* Another rank of this host, with what it last did. */
void hvdl_put_rank(hvdl_engine *engine, hvdl_writer *to, int local);

#endif
