/* An exchange of one slice between the hosts, as a state machine that never blocks.
 *
 * H hosts take part, one rail of each. The slice lies in place in `buffer`, cut into H chunks, each
 * cut into the same number of segments; a segment is a message. At most HVDL_WINDOW messages of a
 * stream are in flight.
 *
 *   ring      allreduce: 2(H-1) steps, 2(H-1)/H of the slice sent by each host, both directions of
 *             every link busy; the sum of a chunk is formed in ring order, the same for all hosts.
 *             Of the ring and direct only the first half can be done (`scatters`), a reduce-scatter: host
 *             h gets the sum of chunk h, (H-1)/H of the slice is sent. In the ring chunk h then begins
 *             its way at host h + 1, and ends at host h.
 *   gather    allgather: the last H-1 steps of the ring; chunks may differ in size.
 *   direct    allreduce: every host receives the others' parts of its own chunk, adds them in host
 *             order (16-bit floats in float32, rounded once), and sends the sum to all: the same
 *             bytes as the ring, 2(H-1) messages per segment, one rounding, rank order. Along a tree
 *             (base/sum_tree.h) a host sends all its partials of a part, and they are added in its order.
 *   doubling  allreduce by recursive doubling: log2(H) steps (and two where H is no power of two), in
 *             each of which a host sends the whole slice; few messages, so it is for small slices.
 *   pairwise  alltoall: between ranks and not hosts, see pairwise.h.
 *   chain     broadcast: root, root+1, ... each passes segments on while it receives later ones.
 */
#ifndef HVDL_EXCHANGE_H
#define HVDL_EXCHANGE_H

#include "kernels/reduce.h"
#include "net/pairwise.h"

typedef enum {
    HVDL_RING,
    HVDL_DIRECT,
    HVDL_DOUBLING,
    HVDL_RING_GATHER,
    HVDL_CHAIN,
    HVDL_PAIRWISE
} hvdl_algorithm;

/* Slices of up to so many bytes are reduced by this algorithm. */
typedef struct {
    size_t up_to_bytes;
    hvdl_algorithm algorithm;
} hvdl_rule;

/* By the first rule that holds for the slice; none: the ring. */
hvdl_algorithm hvdl_choose_algorithm(const hvdl_rule *rules, int num_rules, size_t slice_bytes);

typedef struct {
    hvdl_algorithm algorithm;
    int host, num_hosts;
    const int *peers; /* rank in the wire's communicator of this rail on each host; borrowed */
    int tag;          /* tag and tag + 1 are this exchange's */
    char *buffer;     /* what is sent is read here, the result is written here */
    hvdl_dtype dtype;
    hvdl_op op;
    hvdl_scale scale; /* of the final result of an allreduce */
    size_t count;     /* elements of the slice; not gather, scatters */
    /* Ring, direct: each host gets the sum of its own chunk only, and the others' are overwritten. */
    bool scatters;
    /* gather, scatters: offset of each host's chunk in `buffer`, and its size, in bytes; copied. */
    const size_t *chunk_offsets, *chunk_bytes;
    const hvdl_pair *pairs; /* pairwise, where hosts are ranks */
    int root;               /* chain: the host that has the data */
    size_t segment_bytes;
    /* Direct, floats: what hosts give are partials of this tree, borrowed; NULL: one part of each, in `buffer`.
     * This host's partial i begins at own_partials + i * partial_stride, in elements of part_dtype: float32, where
     * `dtype` has 16 bits and not all partials are inputs as they are. If it gives one, of `dtype`, that may lie in
     * `buffer`. */
    const hvdl_sum_tree *tree;
    hvdl_dtype part_dtype;
    char *own_partials;
    size_t partial_stride;
} hvdl_exchange_spec;

typedef struct hvdl_exchange hvdl_exchange;

hvdl_err hvdl_exchange_create(hvdl_exchange **out, hvdl_wire *wire, const hvdl_exchange_spec *spec);

/* Does what can be done now. *progressed is set, never cleared; *done: the result is in place and
 * everything sent has left. */
hvdl_err hvdl_exchange_step(hvdl_exchange *exchange, bool *progressed, bool *done);

/* How far one is that is not done. */
hvdl_headway hvdl_exchange_headway(const hvdl_exchange *exchange);

/* Frees it. Of one that is not done the receives are cancelled first. False: a message can't be
 * ended, and `buffer` must stay for the life of the process. */
bool hvdl_exchange_destroy(hvdl_exchange *exchange);

#endif
