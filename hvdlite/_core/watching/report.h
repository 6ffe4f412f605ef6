/* Texts about operations that wait, and what they are made of. */
#ifndef HVDL_REPORT_H
#define HVDL_REPORT_H

#include "engine/state.h"

/* A text that is put together. */
typedef struct {
    char *text;
    size_t room, used;
} hvdl_writer;

/* What has no room is cut, and ends in dots. */
void hvdl_put(hvdl_writer *to, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* "rank 1 on b (which last finished …)". */
void hvdl_put_rank(const hvdl_engine *engine, hvdl_writer *to, int local,
                   const hvdl_shm_last *last);

/* What a rank of this host last did. */
hvdl_shm_last hvdl_last_of(const hvdl_engine *engine, int local);

/* To the user. */
void hvdl_say(const hvdl_engine *engine, const char *text);
/* To the user, and to the launcher, which can find out where the ranks are. */
void hvdl_report(const hvdl_engine *engine, const char *text);

#endif
