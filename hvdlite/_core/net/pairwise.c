#include "net/pairwise.h"

#include <stdlib.h>
#include <string.h>

/* One direction. Step s has slot s % HVDL_ACTIVE; steps are opened in order, and ended in order. */
typedef struct {
    bool sends;
    int opened, ended; /* steps, from 1 */
    hvdl_stream streams[HVDL_ACTIVE];
} direction;

struct hvdl_pairwise {
    hvdl_pairwise_spec spec;
    direction send, recv;
    hvdl_pair pairs[];
};

hvdl_err hvdl_pairwise_create(hvdl_pairwise **out, const hvdl_pairwise_spec *spec)
{
    size_t bytes = (size_t)spec->num_ranks * sizeof(hvdl_pair);
    hvdl_pairwise *p = calloc(1, sizeof *p + bytes);
    if (!p)
        return HVDL_ENOMEM;
    p->spec = *spec;
    memcpy(p->pairs, spec->pairs, bytes);
    p->send.sends = true;
    p->send.opened = p->recv.opened = p->send.ended = p->recv.ended = 1;
    *out = p;
    return HVDL_OK;
}

static int peer_of(const hvdl_pairwise *p, const direction *d, int step)
{
    int ranks = p->spec.num_ranks;
    return (p->spec.rank + (d->sends ? step : ranks - step)) % ranks;
}

static size_t bytes_with(const hvdl_pairwise *p, const direction *d, int peer)
{
    return d->sends ? p->pairs[peer].send_bytes : p->pairs[peer].recv_bytes;
}

/* Posts what there is room for of one step's segments. */
static hvdl_err post_segments(hvdl_pairwise *p, direction *d, hvdl_wire *wire, int step, bool *any)
{
    hvdl_stream *stream = &d->streams[step % HVDL_ACTIVE];
    int peer = peer_of(p, d, step);
    const hvdl_pair *pair = &p->pairs[peer];
    size_t total = bytes_with(p, d, peer), unit = p->spec.segment_bytes;
    hvdl_err err = HVDL_OK;
    while (!err && hvdl_stream_has_room(stream) && stream->posted * unit < total) {
        size_t begin = stream->posted * unit, left = total - begin;
        size_t bytes = left < unit ? left : unit;
        err = d->sends
                  ? hvdl_stream_send(wire, stream, pair->from + begin, bytes, peer, p->spec.tag)
                  : hvdl_stream_recv(wire, stream, pair->to + begin, bytes, peer, p->spec.tag);
        *any = true;
    }
    return err;
}

static hvdl_err step_direction(hvdl_pairwise *p, direction *d, hvdl_wire *wire, bool *any)
{
    int ranks = p->spec.num_ranks;
    hvdl_err err = HVDL_OK;
    while (d->opened < ranks && d->opened - d->ended < HVDL_ACTIVE)
        d->streams[d->opened++ % HVDL_ACTIVE] = (hvdl_stream){0};
    for (int step = d->ended; !err && step < d->opened; step++) {
        *any |= hvdl_stream_take(wire, &d->streams[step % HVDL_ACTIVE]);
        err = post_segments(p, d, wire, step, any);
    }
    while (!err && d->ended < d->opened) {
        const hvdl_stream *oldest = &d->streams[d->ended % HVDL_ACTIVE];
        size_t total = bytes_with(p, d, peer_of(p, d, d->ended));
        if (oldest->done * p->spec.segment_bytes < total)
            break;
        d->ended++;
        *any = true;
    }
    return err;
}

hvdl_err hvdl_pairwise_step(hvdl_pairwise *p, hvdl_wire *wire, bool *progressed, bool *done)
{
    hvdl_err err = HVDL_OK;
    bool any = true;
    while (!err && any) {
        any = false;
        err = step_direction(p, &p->recv, wire, &any);
        if (!err)
            err = step_direction(p, &p->send, wire, &any);
        *progressed |= any;
    }
    *done = p->send.ended == p->spec.num_ranks && p->recv.ended == p->spec.num_ranks;
    return err;
}

/* Adds one direction; the peer is that of its oldest step. */
static void add_headway(const hvdl_pairwise *p, const direction *d, hvdl_headway *to)
{
    size_t unit = p->spec.segment_bytes;
    for (int step = 1; step < p->spec.num_ranks; step++) {
        size_t messages = (bytes_with(p, d, peer_of(p, d, step)) + unit - 1) / unit;
        to->total += messages;
        if (step < d->ended)
            to->done += messages;
        else if (step < d->opened)
            to->done += d->streams[step % HVDL_ACTIVE].done;
    }
    if (to->peer < 0 && d->ended < d->opened)
        to->peer = peer_of(p, d, d->ended);
}

hvdl_headway hvdl_pairwise_headway(const hvdl_pairwise *p)
{
    hvdl_headway headway = {.peer = -1};
    add_headway(p, &p->recv, &headway);
    add_headway(p, &p->send, &headway);
    return headway;
}

bool hvdl_pairwise_destroy(hvdl_pairwise *p, hvdl_wire *wire)
{
    bool ended = true;
    for (int step = p->send.ended; step < p->send.opened; step++)
        ended &= hvdl_stream_end(wire, &p->send.streams[step % HVDL_ACTIVE], false);
    for (int step = p->recv.ended; step < p->recv.opened; step++)
        ended &= hvdl_stream_end(wire, &p->recv.streams[step % HVDL_ACTIVE], true);
    if (ended)
        free(p);
    return ended;
}
