#include "net/streams.h"

bool hvdl_stream_take(hvdl_wire *wire, hvdl_stream *s)
{
    hvdl_request *oldest = &s->requests[s->done % HVDL_WINDOW];
    if (s->done == s->posted || oldest->active)
        return false;
    s->done++;
    wire->streaming--;
    wire->streamed++;
    return true;
}

hvdl_err hvdl_stream_send(hvdl_wire *wire, hvdl_stream *s, const void *from, size_t bytes, int peer,
                          int tag)
{
    hvdl_err err =
        hvdl_wire_send(wire, from, bytes, peer, tag, &s->requests[s->posted % HVDL_WINDOW]);
    if (!err) {
        s->posted++;
        wire->streaming++;
        hvdl_wire_count(wire, peer, bytes);
    }
    return err;
}

hvdl_err hvdl_stream_recv(hvdl_wire *wire, hvdl_stream *s, void *to, size_t bytes, int peer,
                          int tag)
{
    hvdl_err err =
        hvdl_wire_recv(wire, to, bytes, peer, tag, &s->requests[s->posted % HVDL_WINDOW]);
    if (!err) {
        s->posted++;
        wire->streaming++;
    }
    return err;
}

#define REMEMBERED 128
#define LONGEST_GAP_NS 2000000

void hvdl_streams_begin(hvdl_wire *wire, uint64_t now_ns)
{
    wire->streaming = wire->streamed = wire->seen_streamed = 0;
    wire->streaming_since_ns = wire->seen_ns = now_ns;
}

uint64_t hvdl_streams_flight_ns(hvdl_wire *wire, uint64_t now_ns)
{
    uint64_t gap_ns = now_ns - wire->seen_ns;
    uint64_t too_long_ns = gap_ns > LONGEST_GAP_NS ? gap_ns - LONGEST_GAP_NS : 0;
    uint64_t elapsed_ns = now_ns - too_long_ns - wire->streaming_since_ns;
    if (wire->streamed != wire->seen_streamed) { /* the gap is over */
        wire->streaming_since_ns += too_long_ns;
        wire->seen_ns = now_ns;
        if (wire->streamed > REMEMBERED) { /* the older half counts half from now on */
            wire->streamed /= 2;
            elapsed_ns /= 2;
            wire->streaming_since_ns += elapsed_ns;
        }
        wire->seen_streamed = wire->streamed;
    }
    return wire->streaming * elapsed_ns / (wire->streamed ? wire->streamed : 1);
}

void hvdl_stream_skip(hvdl_wire *wire, hvdl_stream *s)
{
    s->requests[s->posted++ % HVDL_WINDOW].active = false;
    wire->streaming++;
}

bool hvdl_stream_end(hvdl_wire *wire, hvdl_stream *s, bool receiving)
{
    bool ended = true;
    for (size_t m = s->done; m < s->posted; m++) {
        hvdl_request *request = &s->requests[m % HVDL_WINDOW];
        ended &= receiving ? hvdl_wire_cancel_recv(wire, request) : !request->active;
    }
    return ended;
}
