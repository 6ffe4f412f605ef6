/* What goes between hosts: MPI point to point, without mpi.h.
 *
 * The functions are called through addresses that were found at run time. Handles are 4-byte integers
 * in the MPICH family and pointers in Open MPI; both are passed as machine words, and a request is
 * stored in a word of its own, of which the library uses as many bytes as its handle has. Counts are
 * int in these functions: no message is larger than HVDL_MAX_MESSAGE_BYTES.
 *
 * Only the thread that drives the engine calls these. A receive's buffer must stay until the receive
 * has completed or hvdl_wire_cancel said that it was cancelled; a send's until it has completed. */
#ifndef HVDL_WIRE_H
#define HVDL_WIRE_H

#include <stdatomic.h>

#include "types.h"

#define HVDL_MAX_MESSAGE_BYTES (1u << 30)

typedef uintptr_t hvdl_word;

typedef struct {
    int (*isend)(const void *buf, int count, hvdl_word type, int dest, int tag, hvdl_word comm,
                 hvdl_word *request);
    int (*irecv)(void *buf, int count, hvdl_word type, int source, int tag, hvdl_word comm,
                 hvdl_word *request);
    int (*test)(hvdl_word *request, int *flag, void *status);
    int (*cancel)(hvdl_word *request);
    hvdl_word comm, byte;
    int tag_ub;
    /* Sent; counted by the driver, read by anybody. */
    _Atomic uint64_t data_messages, data_bytes, control_messages;
} hvdl_wire;

typedef struct {
    hvdl_word word;
    bool active;
} hvdl_request;

hvdl_err hvdl_wire_send(hvdl_wire *wire, const void *buf, size_t bytes, int dest, int tag,
                        hvdl_request *request);
hvdl_err hvdl_wire_recv(hvdl_wire *wire, void *buf, size_t bytes, int source, int tag,
                        hvdl_request *request);

/* *done: it has completed, and its buffer is the caller's again. True of an inactive request. */
hvdl_err hvdl_wire_test(hvdl_wire *wire, hvdl_request *request, bool *done);

/* Cancels a receive and waits until it has ended either way. False if it does not end in time (it
 * was matched and its sender is gone): then its buffer must be kept for ever. */
bool hvdl_wire_cancel_recv(hvdl_wire *wire, hvdl_request *request);

#endif
