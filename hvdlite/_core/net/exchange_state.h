/* What the exchanges that cut a slice into segments share: exchange.c and direct.c. */
#ifndef HVDL_EXCHANGE_STATE_H
#define HVDL_EXCHANGE_STATE_H

#include "base/schedule.h"
#include "net/exchange.h"
#include "net/streams.h"

/* The two streams with one other host in the direct exchange. */
typedef struct {
    hvdl_stream send_part, recv_part, send_sum, recv_sum;
    char *parts;     /* HVDL_WINDOW segments received from that host, each with all its partials */
    size_t partials; /* per segment, a message each */
} direct_peer;

struct hvdl_exchange {
    hvdl_exchange_spec spec;
    hvdl_wire *wire;
    size_t esize, num_segments;
    size_t segment_room;    /* bytes of the largest segment, of what is received to be added */
    size_t *chunks;         /* gather, scatters: offsets, then sizes, of all hosts' chunks */
    hvdl_stream send, recv; /* but for direct and pairwise */
    size_t num_messages;    /* ring, gather, doubling: of the whole exchange, each way */
    size_t num_reducing;    /* ring: the first so many received messages are added */
    size_t num_sums;        /* direct: segments of sums from and to each host */
    direct_peer *directs;   /* direct: one per host, the own one unused */
    size_t reduced; /* direct: segments of the own chunk that are complete; doubling: messages whose
                     * step is over for their segment */
    hvdl_pairwise *pairwise;
    char *scratch;
};

/* Bytes of segment `segment` of host `chunk`'s chunk, as offsets in the buffer. */
hvdl_range hvdl_segment_at(const hvdl_exchange *exchange, int chunk, size_t segment);

/* Where hosts scatter, empty segments are left out. */
hvdl_err hvdl_send_segment(hvdl_exchange *exchange, hvdl_stream *stream, hvdl_range at, int host,
                           int tag);
hvdl_err hvdl_recv_segment(hvdl_exchange *exchange, hvdl_stream *stream, hvdl_range at, void *to,
                           int host, int tag);

/* How large that is which is sent to be added, of so many bytes of sums. */
static inline size_t hvdl_part_bytes(const hvdl_exchange *x, size_t sum_bytes)
{
    return x->spec.tree ? sum_bytes / x->esize * hvdl_dtype_bytes((int)x->spec.part_dtype)
                        : sum_bytes;
}

/* ---- direct.c ---- */

/* After num_segments and segment_room are known. */
hvdl_err hvdl_direct_allocate(hvdl_exchange *exchange);
hvdl_err hvdl_direct_step(hvdl_exchange *exchange, bool *progressed, bool *done);
hvdl_headway hvdl_direct_headway(const hvdl_exchange *exchange);
/* Its streams. False: MPI may still use its memory. */
bool hvdl_direct_end(hvdl_exchange *exchange);

#endif
