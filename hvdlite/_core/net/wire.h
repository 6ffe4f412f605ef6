/* Messages between hosts: MPI point to point, without mpi.h.
 *
 * The functions are called through addresses that were found at run time. Handles are 4-byte integers
 * in the MPICH family and pointers in Open MPI; communicators and types are passed as machine words,
 * and requests are stored in an array of as many bytes each as a handle has. Counts are int in these
 * functions: no message is larger than HVDL_MAX_MESSAGE_BYTES.
 *
 * All requests under way stand side by side in that array, so that one call of MPI looks at them:
 * each call also makes MPI look at its sockets, and gives up the core if it was told to.
 *
 * Only the thread that drives the engine calls these. A receive's buffer must stay until the receive
 * has completed or hvdl_wire_cancel said that it was cancelled; a send's until it has completed. */
#ifndef HVDL_WIRE_H
#define HVDL_WIRE_H

#include <stdatomic.h>

#include "base/types.h"

#define HVDL_MAX_MESSAGE_BYTES (1u << 30)

/* Tags. From HVDL_TAG_DATA on, the messages are data. */
#define HVDL_TAG_CONTROL 1
/* 2: the last message on a communicator (world/match/communicators.py) */
#define HVDL_TAG_HEADER 3 /* of sends and receives: transfers.h */
#define HVDL_TAG_DATA 4
#define HVDL_TAG_FIRST 16 /* of exchanges */

typedef uintptr_t hvdl_word;

typedef struct {
    size_t slot; /* of the wire, while it is active */
    bool active;
    bool ended; /* a poll found it ended; the owner clears it */
} hvdl_request;

typedef struct {
    int (*isend)(const void *buf, int count, hvdl_word type, int dest, int tag, hvdl_word comm,
                 void *request);
    int (*irecv)(void *buf, int count, hvdl_word type, int source, int tag, hvdl_word comm,
                 void *request);
    int (*test)(void *request, int *flag, void *status);
    int (*testsome)(int count, void *requests, int *num_ended, int *ended, void *statuses);
    int (*cancel)(void *request);
    hvdl_word comm, byte;
    int tag_ub, proc_null;
    size_t handle_bytes; /* of an MPI_Request */
    /* Sent; counted by the driver, read by anybody. */
    _Atomic uint64_t data_messages, data_bytes, control_messages;
    /* By rank of the communicator: the part of data_bytes that went there. */
    _Atomic uint64_t *sent_to;
    /* The driver's own. By slot: the handles of active requests, and where they are known. */
    char *handles;
    hvdl_request **owners;
    size_t num_active, room;
    /* Messages of streams in flight, both ways, and how many have ended since. */
    uint64_t streaming, streamed, streaming_since_ns;
    uint64_t seen_streamed,
        seen_ns; /* at the last look that found ended messages: how many, and when */
} hvdl_wire;

/* To be called once, before the first message. num_ranks: of the communicator. */
hvdl_err hvdl_wire_open(hvdl_wire *wire, int num_ranks);

/* A message of data has been started. Only the driver writes, so nothing is lost between load and store. */
static inline void hvdl_wire_count(hvdl_wire *wire, int dest, size_t bytes)
{
    wire->data_messages++;
    wire->data_bytes += bytes;
    uint64_t before = atomic_load_explicit(&wire->sent_to[dest], memory_order_relaxed);
    atomic_store_explicit(&wire->sent_to[dest], before + bytes, memory_order_relaxed);
}

/* Start a message. The request must stay where it is while it is active. */
hvdl_err hvdl_wire_send(hvdl_wire *wire, const void *buf, size_t bytes, int dest, int tag,
                        hvdl_request *request);
hvdl_err hvdl_wire_recv(hvdl_wire *wire, void *buf, size_t bytes, int source, int tag,
                        hvdl_request *request);

/* Lets MPI move messages. Requests that have ended are not active afterwards, and their buffers are
 * their owners' again. */
hvdl_err hvdl_wire_poll(hvdl_wire *wire);

/* Cancels a receive and waits until it has ended either way. False if it does not end in time (it
 * was matched and its sender is gone): then its buffer must be kept for ever. */
bool hvdl_wire_cancel_recv(hvdl_wire *wire, hvdl_request *request);

/* Forgets the requests that are still active, and what was sent to whom. */
void hvdl_wire_close(hvdl_wire *wire);

#endif
