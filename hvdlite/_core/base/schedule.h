/* Which rank owns which part, and what is sent in which step: pure functions of counts.
 *
 * Words: a **piece** is a part of a tensor that goes through all phases of an operation as a unit;
 * a **slice** is the part of a piece that one rail (a rank that exchanges with the other hosts)
 * owns; a **chunk** is the part of a slice that one host owns in an exchange; a **segment** is a
 * part of a chunk that travels as one message; a **block** is what passes through the memory of a
 * host in one step. */
#ifndef HVDL_SCHEDULE_H
#define HVDL_SCHEDULE_H

#include "base/types.h"

typedef struct {
    size_t begin, end;
} hvdl_range;

/* Part `index` of `count` elements cut into `parts`, as equal as multiples of `align` allow.
 * The parts follow each other and cover everything; the last ones may be empty. */
hvdl_range hvdl_part(size_t count, size_t parts, size_t index, size_t align);

/* A host's chunk of a slice of `count` elements. Cuts are at cache lines of the slice, as a vector
 * loop that updates one owner's elements treats what is left at an end in another way. */
hvdl_range hvdl_chunk(size_t count, int num_hosts, int chunk, size_t elem_bytes);

static inline size_t hvdl_range_size(hvdl_range range)
{
    return range.end - range.begin;
}

static inline size_t hvdl_ceil_div(size_t a, size_t b)
{
    return a / b + (a % b != 0);
}

/* The ring on H hosts. In step s, host h sends chunk (h - s) mod H to host h + 1 and receives chunk
 * (h - s - 1) mod H from host h - 1. An allreduce has 2(H-1) steps: in the first H-1 what arrives is
 * added to the own chunk (after which host h holds the whole sum of chunk h + 1), in the others it
 * replaces it. An allgather has only the last H-1, with steps counted from 0: what host h sends
 * first is its own chunk h. Every chunk is cut into the same number of segments, and the messages
 * from host to host follow each other in the order of (step, segment). */
int hvdl_ring_send_chunk(int host, int step, int num_hosts);
int hvdl_ring_recv_chunk(int host, int step, int num_hosts);

/* Recursive doubling on H hosts, of which P = 2^R is the largest power of two. In step s, host h and
 * host h ^ 2^s give each other what they have and add it up, so that after R steps everyone has the
 * sum of all P. Each sum is taken as that of the lower half of a group plus that of the upper half, so
 * that it has the same bits on all hosts. The other H - P hosts are folded in: before the first step
 * host h >= P gives its data to h - P, and after the last one it gets the result from there. These are
 * a step more at either end, in which the hosts without such a partner do nothing.
 *
 *   H = 3:  step 0: 2 -> 0    step 1: 0 <-> 1    step 2: 0 -> 2
 */
typedef struct {
    int peer; /* -1: this host has nothing to do in the step */
    bool sends, receives;
    bool adds;       /* what is received is added; else it replaces what the host has */
    bool peer_first; /* the peer's data comes first in the sum */
    bool completes;  /* after this addition the sum is that of all hosts */
} hvdl_doubling_step;

int hvdl_doubling_num_steps(int num_hosts);
hvdl_doubling_step hvdl_doubling_step_of(int host, int step, int num_hosts);

#endif
