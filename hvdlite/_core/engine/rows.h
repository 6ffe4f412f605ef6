/* Where the parts of a gathered result lie, which differ in size. The driver. */
#ifndef HVDL_ROWS_H
#define HVDL_ROWS_H

#include "engine/engine.h"

/* Written by rows.c. */
typedef struct {
    size_t *places; /* by rank: offset in `work`, in bytes */
    /* allgather */
    size_t *host_places;    /* by host, and the total: offset in `work`, which is host by host */
    uint64_t num_gathering; /* pieces before the exchange */
    /* alltoall */
    int64_t *matrix;     /* rows from each member (in the order of `members`) to each local rank */
    size_t *send_places; /* by rank, and the total: offset in the input, in bytes */
    const char *local_stream; /* its rows for the local ranks, in the input or packed */
    char *packed;
} hvdl_parts;

void hvdl_parts_free(hvdl_parts *parts);

#endif
