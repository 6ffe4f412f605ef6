/* A stream: messages from one peer, or to one, with one tag, in order, a few of them in flight. */
#ifndef HVDL_STREAMS_H
#define HVDL_STREAMS_H

#include "net/wire.h"

#define HVDL_WINDOW 4

/* Message m has slot m % HVDL_WINDOW. done <= posted <= done + HVDL_WINDOW */
typedef struct {
    size_t posted, done;
    hvdl_request requests[HVDL_WINDOW];
} hvdl_stream;

/* How far an exchange is: messages that have ended, both ways, of how many; and the rank, in the wire's
 * communicator, whose message it waits for, or which has not taken one; -1: none. */
typedef struct {
    size_t done, total;
    int peer;
} hvdl_headway;

static inline bool hvdl_stream_has_room(const hvdl_stream *stream)
{
    return stream->posted - stream->done < HVDL_WINDOW;
}

/* Removes the oldest message in flight if the last poll found that it has ended. */
bool hvdl_stream_take(hvdl_wire *wire, hvdl_stream *stream);

/* Posts the next message; there must be room. peer: a rank of the wire's communicator. */
hvdl_err hvdl_stream_send(hvdl_wire *wire, hvdl_stream *stream, const void *from, size_t bytes,
                          int peer, int tag);
hvdl_err hvdl_stream_recv(hvdl_wire *wire, hvdl_stream *stream, void *to, size_t bytes, int peer,
                          int tag);

/* Begins a new measurement: only messages from now on count for hvdl_streams_flight_ns. */
void hvdl_streams_begin(hvdl_wire *wire, uint64_t now_ns);

/* How long messages have been in flight on average lately, by Little's law: the number in flight over the
 * number that end per ns. Until one has ended, one counts as ended now. The driver asks whenever nothing
 * moves. Of each time in which none ends only the first 2 ms count: beyond that a rank is late, and the
 * wire is not slow. */
uint64_t hvdl_streams_flight_ns(hvdl_wire *wire, uint64_t now_ns);

/* Skips the next message: it counts as posted, and as done in its turn. There must be room. */
void hvdl_stream_skip(hvdl_wire *wire, hvdl_stream *stream);

/* Cancels receives; sends are never cancelled, as no MPI ends a large one that way. False: a message
 * can't be ended, and its memory must stay for the life of the process. */
bool hvdl_stream_end(hvdl_wire *wire, hvdl_stream *stream, bool receiving);

#endif
