/* Sends and receives, and what they wait for. */
#ifndef HVDL_TRANSFERS_STATE_H
#define HVDL_TRANSFERS_STATE_H

#include <stdatomic.h>

#include "base/table.h"
#include "host/shm.h"
#include "net/wire.h"
#include "operations/operations_state.h"

#define HVDL_ANY_SOURCE (-1)
/* So much travels with the announcement. */
#define HVDL_EAGER_BYTES 4096
#define HVDL_TRANSFER_WINDOW 4 /* messages on the wire at once, per peer and direction */

typedef enum {
    HVDL_HEADER_SEND,   /* a send, and its data where that is small */
    HVDL_HEADER_TAKEN,  /* its receive has the data */
    HVDL_HEADER_GO,     /* its receive waits for the data */
    HVDL_HEADER_REFUSE, /* its receive has another size */
    HVDL_HEADER_CANCEL, /* the sender has withdrawn it, unless it is matched */
    HVDL_HEADER_CANCELLED
} hvdl_match_header_type;

typedef struct {
    int32_t type, from, to, tag; /* members; from: that writes this header */
    uint64_t send, receive;      /* transfers, by the numbers that their own ranks gave them */
    uint64_t bytes;              /* SEND: of the message; REFUSE: of the receive */
    uint64_t payload_bytes;
} hvdl_match_header;

struct hvdl_transfer {
    hvdl_node by_id; /* in transfers.by_id, from its posting until its end */
    uint64_t id;
    hvdl_operation *operation;
    bool is_send;
    int posted_peer; /* constant */
    int peer;        /* the driver's: HVDL_ANY_SOURCE until it is matched */
    int tag;
    size_t bytes;
    char *memory;
    _Atomic bool matched;                /* release by the driver */
    bool withdrawn;                      /* before its operation ends */
    bool is_asked;                       /* CANCEL is on its way */
    bool is_told;                        /* a receive: its GO is in the shared log, and read */
    int num_reports;                     /* of the stall check */
    uint64_t seen_moves, still_since_ns; /* the stall check's, once it is matched */
    uint64_t order;                      /* in which they began on this rank; 0: it has not */
    uint64_t partner;                    /* matched: the other side's number */
    size_t begun, done;                  /* bytes under way or moved; moved */
    /* in the line of its key, or of what moves */
    struct hvdl_line *line;
    struct hvdl_transfer *next, *previous;
};

/* Transfers in the order in which they came. */
typedef struct hvdl_line {
    hvdl_transfer *first, *last;
} hvdl_line;

/* A send that no receive waits for yet. */
typedef struct hvdl_arrival {
    struct hvdl_arrival *next;
    uint64_t number; /* in the order in which they arrived */
    hvdl_match_header header;
    char payload[];
} hvdl_arrival;

/* What waits for its other side under one source and tag. (Receives from any source have a key of their own,
 * and no arrivals.) Of a key that is not -1, one of the two is empty. */
typedef struct {
    hvdl_node by_key;
    hvdl_line receives;
    hvdl_arrival *first, *last;
} hvdl_pending;

/* A header that MPI has not sent yet. */
typedef struct hvdl_sending {
    struct hvdl_sending *next;
    hvdl_request request;
    hvdl_match_header header; /* and its payload: what is sent */
    char payload[];
} hvdl_sending;

/* To a rank of another host; made when the first transfer wants one. */
typedef struct {
    int peer;
    hvdl_request header;
    struct {
        hvdl_match_header header;
        char payload[HVDL_EAGER_BYTES];
    } received;
    /* In the order of the GO headers, which both ends know. The first alone moves. */
    hvdl_line sends, receives;
    hvdl_request outgoing[HVDL_TRANSFER_WINDOW], incoming[HVDL_TRANSFER_WINDOW];
    uint64_t moved_ns; /* when a message of them last ended; only where the peer has left */
} hvdl_channel;

/* Written by transfers.c and transfers_leaving.c, but for what match_headers.c and moving.c are named for. */
typedef struct {
    hvdl_table by_id, pending;
    uint64_t last_arrival, last_order;
    bool *gone; /* by member: has left */
    uint64_t
        grace_ends_ns; /* then what waits for members of other hosts that have left fails; 0: never */
    bool leaves;       /* this rank */
    bool used;         /* a transfer has begun: before, a sweep has nothing to do here */
    _Atomic uint64_t last_id;
    /* Under queue.lock. */
    uint64_t *withdrawals;
    size_t room_withdrawals;
    _Atomic size_t num_withdrawals; /* the driver reads it without the lock */
    /* match_headers.c */
    hvdl_channel **channels; /* by member, or NULL */
    int *open, num_open;     /* members that have one */
    hvdl_sending *sendings;
    /* moving.c */
    hvdl_line outgoing; /* to ranks of this host, in turns */
    hvdl_line incoming; /* from ranks of this host */
    hvdl_line own;      /* receives from this rank itself */
    int *num_incoming;  /* by local rank */
    int num_on_wire;
    uint64_t *moves; /* blocks and segments that went to or from each member, ever */
} hvdl_transfers;

#endif
