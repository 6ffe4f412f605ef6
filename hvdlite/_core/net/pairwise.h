/* The pairwise exchange of an alltoall: every rank has a part for every other one. In step s rank r
 * sends to rank r + s and receives from rank r - s (mod P), so that no rank is everybody's target at
 * the same time; HVDL_ACTIVE steps are under way at once, each a stream of segments. P - 1 steps, and
 * each byte is sent once. */
#ifndef HVDL_PAIRWISE_H
#define HVDL_PAIRWISE_H

#include "net/streams.h"

#define HVDL_ACTIVE 4

typedef struct hvdl_pairwise hvdl_pairwise;

/* What goes to one other rank, and what comes from it; of 0 bytes nothing is sent or received. */
typedef struct {
    const char *from;
    size_t send_bytes;
    char *to;
    size_t recv_bytes;
} hvdl_pair;

typedef struct {
    int rank, num_ranks, tag;
    const hvdl_pair *pairs; /* by rank; copied */
    size_t segment_bytes;
} hvdl_pairwise_spec;

hvdl_err hvdl_pairwise_create(hvdl_pairwise **out, const hvdl_pairwise_spec *spec);
/* As hvdl_exchange_step. */
hvdl_err hvdl_pairwise_step(hvdl_pairwise *pairwise, hvdl_wire *wire, bool *progressed, bool *done);
hvdl_headway hvdl_pairwise_headway(const hvdl_pairwise *pairwise);
/* As hvdl_exchange_destroy. */
bool hvdl_pairwise_destroy(hvdl_pairwise *pairwise, hvdl_wire *wire);

#endif
