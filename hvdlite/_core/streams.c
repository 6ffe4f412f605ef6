#include "streams.h"

hvdl_err hvdl_stream_test(hvdl_wire *wire, hvdl_stream *s, bool *completed)
{
    *completed = false;
    if (s->done == s->posted)
        return HVDL_OK;
    hvdl_err err = hvdl_wire_test(wire, &s->requests[s->done % HVDL_WINDOW], completed);
    if (!err && *completed)
        s->done++;
    return err;
}

hvdl_err hvdl_stream_send(hvdl_wire *wire, hvdl_stream *s, const void *from, size_t bytes, int peer,
                          int tag)
{
    hvdl_err err =
        hvdl_wire_send(wire, from, bytes, peer, tag, &s->requests[s->posted % HVDL_WINDOW]);
    if (!err) {
        s->posted++;
        wire->data_messages++;
        wire->data_bytes += bytes;
    }
    return err;
}

hvdl_err hvdl_stream_recv(hvdl_wire *wire, hvdl_stream *s, void *to, size_t bytes, int peer,
                          int tag)
{
    hvdl_err err =
        hvdl_wire_recv(wire, to, bytes, peer, tag, &s->requests[s->posted % HVDL_WINDOW]);
    if (!err)
        s->posted++;
    return err;
}

void hvdl_stream_skip(hvdl_stream *s)
{
    s->requests[s->posted++ % HVDL_WINDOW].active = false;
}

bool hvdl_stream_end(hvdl_wire *wire, hvdl_stream *s, bool receiving)
{
    bool ended = true;
    for (size_t m = s->done; m < s->posted; m++) {
        hvdl_request *request = &s->requests[m % HVDL_WINDOW];
        bool done = false;
        if (receiving)
            ended &= hvdl_wire_cancel_recv(wire, request);
        else
            ended &= !hvdl_wire_test(wire, request, &done) && done;
    }
    return ended;
}
