/* Where the members' parts of a result lie, which may differ in size. The driver. */
#ifndef HVDL_ROWS_H
#define HVDL_ROWS_H

#include "engine/engine.h"

/* Written by rows.c and parts.c. */
typedef struct {
    hvdl_pair *pairs; /* by rank: what goes there, and what comes from there; local ranks, too */
    /* allgather */
    char *gathered;         /* several hosts: all parts, host by host */
    size_t *host_places;    /* by host, and the total: offset in `gathered` */
    uint64_t num_gathering; /* pieces before the exchange */
    /* alltoall, gather, scatter */
    size_t longest; /* bytes of the longest part that goes from a rank of this host to one of it */
} hvdl_parts;

void hvdl_parts_free(hvdl_parts *parts);
/* Memory for a result that is not, or not at once, the caller's. */
hvdl_err hvdl_new_work(hvdl_operation *operation, size_t bytes);
/* Whether one rank sends another more or less elements than that expects, and the text about the first such
 * two. rows: the splits of all members, in the order of `members`. site: of the lowest rank, or empty. */
bool hvdl_splits_differ(const hvdl_engine *engine, const int64_t *rows, const char *site,
                        char text[HVDL_TEXT_BYTES]);

#endif
