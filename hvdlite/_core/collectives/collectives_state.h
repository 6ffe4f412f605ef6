/* How far an operation that moves data is. The driver. */
#ifndef HVDL_COLLECTIVES_STATE_H
#define HVDL_COLLECTIVES_STATE_H

#include "base/schedule.h"
#include "engine/engine.h"
#include "host/pipeline.h"

typedef struct hvdl_collective hvdl_collective; /* phases.h */

#define HVDL_PIECE_WINDOW 4 /* pieces of an operation in flight at once, at most */
/* A slower rank of the host may still be at earlier pieces than the leader that opens new ones: by as
 * many passes as it may be blocks behind on the pipeline, which is HVDL_NUM_BUFFERS. */
#define HVDL_PIECE_SLOTS 16
_Static_assert(HVDL_PIECE_SLOTS > HVDL_PIECE_WINDOW + HVDL_NUM_BUFFERS, "pieces share no slot");

/* A piece is finished on a rank when its phase A is over there, all rails have done its exchange, and
 * its phase C is over there. Those it does not have are over at once. */
typedef struct {
    bool a_over, c_over, finished;
    int num_ready; /* rails that have done the exchange */
} hvdl_piece;

/* How far an operation is. Written by pieces.c. */
typedef struct {
    int tag;
    uint64_t num_pieces, started, finished, announced;
    uint64_t first_unfinished;           /* all pieces below it are finished */
    hvdl_piece pieces[HVDL_PIECE_SLOTS]; /* piece k, if it is in flight, at k % HVDL_PIECE_SLOTS */
    bool exchange_waits; /* allgather: its exchange is due once the earlier pieces are done */
} hvdl_progress;

typedef struct hvdl_running_exchange hvdl_running_exchange;

/* Of all operations. Written by pieces.c. */
typedef struct {
    hvdl_running_exchange *exchanges;
    bool pinned; /* MPI may still use an operation's buffers: they are kept for ever */
} hvdl_pieces;

/* Of an operation. Written by partials.c. */
typedef struct {
    char *memory;  /* of this rail, by piece; NULL: this host's only partial lies where sums do */
    size_t stride; /* bytes from a partial to the next one of the same piece */
    bool scaled; /* the others' inputs have a factor, which is left out of those of a joined rank */
} hvdl_partial_sums;

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

/* Written by reducescatter.c. */
typedef struct {
    size_t *begins; /* by member, and the end: elements */
    size_t unit;    /* elements of each share that a piece takes: piece k those from k * unit on */
} hvdl_shares;

/* Written by adasum.c. */
typedef struct {
    int level, num_levels;
    size_t elems;   /* of a slice */
    double *slices; /* by member */
    double *dots;   /* by pair of this level: a.b, |a|^2, |b|^2 */
    char *result;   /* the own slice of it */
} hvdl_adasum;

#endif
