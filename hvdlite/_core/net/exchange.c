#include "net/exchange_state.h"

#include <stdlib.h>
#include <string.h>

#include "base/schedule.h"
#include "base/sizes.h"

hvdl_algorithm hvdl_choose_algorithm(const hvdl_rule *rules, int num_rules, size_t slice_bytes)
{
    for (int i = 0; i < num_rules; i++)
        if (slice_bytes <= rules[i].up_to_bytes)
            return rules[i].algorithm;
    return HVDL_RING;
}

/* ---- where things lie ---- */

/* Not cut into chunks. */
static bool sends_whole_slice(const hvdl_exchange_spec *spec)
{
    return spec->algorithm == HVDL_CHAIN || spec->algorithm == HVDL_DOUBLING;
}

hvdl_range hvdl_segment_at(const hvdl_exchange *x, int chunk, size_t segment)
{
    const hvdl_exchange_spec *spec = &x->spec;
    if (x->chunks) {
        size_t offset = x->chunks[chunk], bytes = x->chunks[spec->num_hosts + chunk];
        hvdl_range part = hvdl_part(bytes, x->num_segments, segment, x->esize);
        return (hvdl_range){offset + part.begin, offset + part.end};
    }
    hvdl_range whole = {0, spec->count};
    if (!sends_whole_slice(spec))
        whole = hvdl_chunk(spec->count, spec->num_hosts, chunk, x->esize);
    hvdl_range part = hvdl_part(hvdl_range_size(whole), x->num_segments, segment, 1);
    return (hvdl_range){(whole.begin + part.begin) * x->esize, (whole.begin + part.end) * x->esize};
}

static size_t largest_chunk_bytes(const hvdl_exchange *x)
{
    const hvdl_exchange_spec *spec = &x->spec;
    if (sends_whole_slice(spec))
        return spec->count * x->esize;
    if (!x->chunks) /* the first chunk is never smaller than another */
        return hvdl_range_size(hvdl_chunk(spec->count, spec->num_hosts, 0, x->esize)) * x->esize;
    size_t largest = 0;
    for (int h = 0; h < spec->num_hosts; h++)
        if (x->chunks[spec->num_hosts + h] > largest)
            largest = x->chunks[spec->num_hosts + h];
    return largest;
}

/* Where hosts scatter, both know which segments are empty, and leave them out. */
hvdl_err hvdl_send_segment(hvdl_exchange *x, hvdl_stream *stream, hvdl_range at, int host, int tag)
{
    if (x->spec.scatters && !hvdl_range_size(at)) {
        hvdl_stream_skip(x->wire, stream);
        return HVDL_OK;
    }
    return hvdl_stream_send(x->wire, stream, x->spec.buffer + at.begin, hvdl_range_size(at),
                            x->spec.peers[host], tag);
}

hvdl_err hvdl_recv_segment(hvdl_exchange *x, hvdl_stream *stream, hvdl_range at, void *to, int host,
                           int tag)
{
    if (x->spec.scatters && !hvdl_range_size(at)) {
        hvdl_stream_skip(x->wire, stream);
        return HVDL_OK;
    }
    return hvdl_stream_recv(x->wire, stream, to, hvdl_range_size(at), x->spec.peers[host], tag);
}

/* ---- ring and gather ---- */

static hvdl_range ring_sends(const hvdl_exchange *x, size_t message)
{
    const hvdl_exchange_spec *spec = &x->spec;
    int step = (int)(message / x->num_segments) + spec->scatters;
    int chunk = hvdl_ring_send_chunk(spec->host, step, spec->num_hosts);
    return hvdl_segment_at(x, chunk, message % x->num_segments);
}

static hvdl_range ring_receives(const hvdl_exchange *x, size_t message)
{
    const hvdl_exchange_spec *spec = &x->spec;
    int step = (int)(message / x->num_segments) + spec->scatters;
    int chunk = hvdl_ring_recv_chunk(spec->host, step, spec->num_hosts);
    return hvdl_segment_at(x, chunk, message % x->num_segments);
}

static void ring_received(hvdl_exchange *x, size_t message)
{
    const hvdl_exchange_spec *spec = &x->spec;
    if (message >= x->num_reducing)
        return; /* it was received in place */
    int step = (int)(message / x->num_segments);
    hvdl_range at = ring_receives(x, message);
    const void *inputs[2] = {spec->buffer + at.begin,
                             x->scratch + message % HVDL_WINDOW * x->segment_room};
    /* The last addition to a chunk completes its sum. */
    hvdl_scale none = HVDL_UNSCALED;
    hvdl_reduce(spec->dtype, spec->op, spec->buffer + at.begin, inputs, 2,
                hvdl_range_size(at) / x->esize, step == spec->num_hosts - 2 ? &spec->scale : &none);
}

static hvdl_err ring_step(hvdl_exchange *x, bool *progressed, bool *done)
{
    const hvdl_exchange_spec *spec = &x->spec;
    int hosts = spec->num_hosts;
    int next = (spec->host + 1) % hosts, previous = (spec->host + hosts - 1) % hosts;
    bool again = true;
    while (again) {
        hvdl_err err = HVDL_OK;
        again = hvdl_stream_take(x->wire, &x->recv);
        if (again)
            ring_received(x, x->recv.done - 1);
        again |= hvdl_stream_take(x->wire, &x->send);
        /* What is received in place overwrites a segment that was sent num_reducing messages ago
         * (the same chunk, on its first way round): that send must have left the buffer. */
        while (!err && x->recv.posted < x->num_messages && hvdl_stream_has_room(&x->recv) &&
               (x->recv.posted < x->num_reducing ||
                x->send.done > x->recv.posted - x->num_reducing || !x->num_reducing)) {
            size_t message = x->recv.posted;
            hvdl_range at = ring_receives(x, message);
            void *to = message < x->num_reducing
                           ? x->scratch + message % HVDL_WINDOW * x->segment_room
                           : spec->buffer + at.begin;
            err = hvdl_recv_segment(x, &x->recv, at, to, previous, spec->tag);
            again = true;
        }
        /* A segment is sent on one step after it was received: message m after m - num_segments. */
        while (!err && x->send.posted < x->num_messages && hvdl_stream_has_room(&x->send) &&
               x->send.posted < x->recv.done + x->num_segments) {
            hvdl_range at = ring_sends(x, x->send.posted);
            err = hvdl_send_segment(x, &x->send, at, next, spec->tag);
            again = true;
        }
        if (err)
            return err;
        *progressed |= again;
    }
    *done = x->recv.done == x->num_messages && x->send.done == x->num_messages;
    return HVDL_OK;
}

static bool take_streams(hvdl_exchange *x)
{
    bool received = hvdl_stream_take(x->wire, &x->recv);
    return hvdl_stream_take(x->wire, &x->send) || received;
}

/* ---- chain ---- */

static hvdl_err chain_step(hvdl_exchange *x, bool *progressed, bool *done)
{
    const hvdl_exchange_spec *spec = &x->spec;
    int hosts = spec->num_hosts, place = (spec->host - spec->root + hosts) % hosts;
    size_t to_recv = place > 0 ? x->num_segments : 0;
    size_t to_send = place < hosts - 1 ? x->num_segments : 0;
    bool again = true;
    while (again) {
        hvdl_err err = HVDL_OK;
        again = take_streams(x);
        while (!err && x->recv.posted < to_recv && hvdl_stream_has_room(&x->recv)) {
            hvdl_range at = hvdl_segment_at(x, 0, x->recv.posted);
            err = hvdl_stream_recv(x->wire, &x->recv, spec->buffer + at.begin, hvdl_range_size(at),
                                   spec->peers[(spec->host + hosts - 1) % hosts], spec->tag);
            again = true;
        }
        while (!err && x->send.posted < to_send && hvdl_stream_has_room(&x->send) &&
               (place == 0 || x->send.posted < x->recv.done)) {
            hvdl_range at = hvdl_segment_at(x, 0, x->send.posted);
            err = hvdl_stream_send(x->wire, &x->send, spec->buffer + at.begin, hvdl_range_size(at),
                                   spec->peers[(spec->host + 1) % hosts], spec->tag);
            again = true;
        }
        if (err)
            return err;
        *progressed |= again;
    }
    *done = x->recv.done == to_recv && x->send.done == to_send;
    return HVDL_OK;
}

/* ---- recursive doubling ---- */

/* Message m is segment m % num_segments of step m / num_segments: sent from `buffer`, received beside
 * it, and added when both have ended. What a host does not send or receive in a step is skipped. */
static hvdl_doubling_step doubling_step_of(const hvdl_exchange *x, size_t message)
{
    return hvdl_doubling_step_of(x->spec.host, (int)(message / x->num_segments), x->spec.num_hosts);
}

static void doubling_add(hvdl_exchange *x)
{
    const hvdl_exchange_spec *spec = &x->spec;
    hvdl_doubling_step step = doubling_step_of(x, x->reduced);
    hvdl_range at = hvdl_segment_at(x, 0, x->reduced % x->num_segments);
    char *own = spec->buffer + at.begin;
    const char *received = x->scratch + x->reduced % HVDL_WINDOW * x->segment_room;
    x->reduced++;
    if (step.receives && !step.adds)
        memcpy(own, received, hvdl_range_size(at));
    if (!step.adds)
        return;
    const void *inputs[2] = {step.peer_first ? received : own, step.peer_first ? own : received};
    hvdl_scale none = HVDL_UNSCALED;
    hvdl_reduce(spec->dtype, spec->op, own, inputs, 2, hvdl_range_size(at) / x->esize,
                step.completes ? &spec->scale : &none);
}

static hvdl_err doubling_send(hvdl_exchange *x)
{
    hvdl_doubling_step step = doubling_step_of(x, x->send.posted);
    hvdl_range at = hvdl_segment_at(x, 0, x->send.posted % x->num_segments);
    if (step.sends)
        return hvdl_stream_send(x->wire, &x->send, x->spec.buffer + at.begin, hvdl_range_size(at),
                                x->spec.peers[step.peer], x->spec.tag);
    hvdl_stream_skip(x->wire, &x->send);
    return HVDL_OK;
}

static hvdl_err doubling_recv(hvdl_exchange *x)
{
    hvdl_doubling_step step = doubling_step_of(x, x->recv.posted);
    hvdl_range at = hvdl_segment_at(x, 0, x->recv.posted % x->num_segments);
    if (step.receives)
        return hvdl_stream_recv(x->wire, &x->recv,
                                x->scratch + x->recv.posted % HVDL_WINDOW * x->segment_room,
                                hvdl_range_size(at), x->spec.peers[step.peer], x->spec.tag);
    hvdl_stream_skip(x->wire, &x->recv);
    return HVDL_OK;
}

static hvdl_err doubling_step(hvdl_exchange *x, bool *progressed, bool *done)
{
    bool again = true;
    while (again) {
        hvdl_err err = HVDL_OK;
        again = take_streams(x);
        /* The sum replaces what was sent: that send must have left the buffer. */
        while (!err && x->reduced < x->recv.done && x->reduced < x->send.done) {
            doubling_add(x);
            again = true;
        }
        while (!err && x->recv.posted < x->num_messages && hvdl_stream_has_room(&x->recv) &&
               x->recv.posted < x->reduced + HVDL_WINDOW) {
            err = doubling_recv(x);
            again = true;
        }
        while (!err && x->send.posted < x->num_messages && hvdl_stream_has_room(&x->send) &&
               x->send.posted < x->reduced + x->num_segments) {
            err = doubling_send(x);
            again = true;
        }
        if (err)
            return err;
        *progressed |= again;
    }
    *done = x->reduced == x->num_messages;
    return HVDL_OK;
}

/* ---- life ---- */

static hvdl_err allocate(hvdl_exchange *x)
{
    const hvdl_exchange_spec *spec = &x->spec;
    size_t hosts = (size_t)spec->num_hosts;
    if (spec->algorithm == HVDL_PAIRWISE) {
        hvdl_pairwise_spec pairwise = {.rank = spec->host,
                                       .num_ranks = spec->num_hosts,
                                       .tag = spec->tag,
                                       .pairs = spec->pairs,
                                       .segment_bytes = spec->segment_bytes};
        return hvdl_pairwise_create(&x->pairwise, &pairwise);
    }
    if (spec->algorithm == HVDL_RING_GATHER || spec->scatters) {
        x->chunks = hvdl_new_array(2 * hosts, sizeof *x->chunks);
        if (!x->chunks)
            return HVDL_ENOMEM;
        memcpy(x->chunks, spec->chunk_offsets, hosts * sizeof *x->chunks);
        memcpy(x->chunks + hosts, spec->chunk_bytes, hosts * sizeof *x->chunks);
    }
    size_t largest = largest_chunk_bytes(x);
    if (!largest)
        return HVDL_OK; /* nothing to exchange on any host: no segments, no messages */
    x->num_segments = hvdl_ceil_div(hvdl_part_bytes(x, largest), spec->segment_bytes);
    /* A segment is a whole number of elements, so it may be one element more than its share. Each
     * begins at a cache line. */
    x->segment_room = hvdl_part_bytes(x, hvdl_ceil_div(largest, x->num_segments) + x->esize);
    x->segment_room = (x->segment_room + 63) / 64 * 64;
    if (spec->algorithm == HVDL_RING)
        x->num_reducing = (hosts - 1) * x->num_segments;
    if (spec->algorithm == HVDL_RING || spec->algorithm == HVDL_RING_GATHER)
        x->num_messages = x->num_reducing + (spec->scatters ? 0 : (hosts - 1) * x->num_segments);
    if (spec->algorithm == HVDL_DOUBLING)
        x->num_messages = (size_t)hvdl_doubling_num_steps(spec->num_hosts) * x->num_segments;
    if (spec->algorithm == HVDL_RING || spec->algorithm == HVDL_DOUBLING) {
        x->scratch = hvdl_new_array(HVDL_WINDOW, x->segment_room);
        return x->scratch ? HVDL_OK : HVDL_ENOMEM;
    }
    if (spec->algorithm == HVDL_DIRECT)
        return hvdl_direct_allocate(x);
    return HVDL_OK;
}

static void free_memory(hvdl_exchange *x)
{
    free(x->chunks);
    free(x->directs);
    free(x->scratch);
    free(x);
}

hvdl_err hvdl_exchange_create(hvdl_exchange **out, hvdl_wire *wire, const hvdl_exchange_spec *spec)
{
    hvdl_exchange *x = calloc(1, sizeof *x);
    if (!x)
        return HVDL_ENOMEM;
    x->spec = *spec;
    x->wire = wire;
    x->esize = hvdl_dtype_bytes((int)spec->dtype);
    hvdl_err err = allocate(x);
    if (err) {
        free_memory(x);
        return err;
    }
    *out = x;
    return HVDL_OK;
}

hvdl_err hvdl_exchange_step(hvdl_exchange *x, bool *progressed, bool *done)
{
    if (x->pairwise)
        return hvdl_pairwise_step(x->pairwise, x->wire, progressed, done);
    if (!x->num_segments) {
        *done = true;
        return HVDL_OK;
    }
    switch (x->spec.algorithm) {
    case HVDL_DIRECT: return hvdl_direct_step(x, progressed, done);
    case HVDL_DOUBLING: return doubling_step(x, progressed, done);
    case HVDL_CHAIN: return chain_step(x, progressed, done);
    default: return ring_step(x, progressed, done);
    }
}

/* ---- how far it is ---- */

/* Of the two streams that all but direct and pairwise have. from, to: the hosts of their next messages, or
 * -1: none is needed for the next step. */
static hvdl_headway streams_headway(const hvdl_exchange *x, size_t to_recv, int from,
                                    size_t to_send, int to)
{
    const int *peers = x->spec.peers;
    hvdl_headway headway = {
        .done = x->recv.done + x->send.done, .total = to_recv + to_send, .peer = -1};
    if (x->recv.done < to_recv && from >= 0)
        headway.peer = peers[from];
    else if (x->send.done < to_send && to >= 0)
        headway.peer = peers[to];
    return headway;
}

static hvdl_headway doubling_headway(const hvdl_exchange *x)
{
    int from = -1, to = -1;
    if (x->recv.done < x->num_messages) {
        hvdl_doubling_step step = doubling_step_of(x, x->recv.done);
        from = step.receives ? step.peer : -1;
    }
    if (x->send.done < x->num_messages) {
        hvdl_doubling_step step = doubling_step_of(x, x->send.done);
        to = step.sends ? step.peer : -1;
    }
    return streams_headway(x, x->num_messages, from, x->num_messages, to);
}

hvdl_headway hvdl_exchange_headway(const hvdl_exchange *x)
{
    int hosts = x->spec.num_hosts, host = x->spec.host;
    int next = (host + 1) % hosts, previous = (host + hosts - 1) % hosts;
    if (x->pairwise)
        return hvdl_pairwise_headway(x->pairwise);
    if (x->spec.algorithm == HVDL_DIRECT && x->directs)
        return hvdl_direct_headway(x);
    if (x->spec.algorithm == HVDL_DOUBLING)
        return doubling_headway(x);
    if (x->spec.algorithm == HVDL_CHAIN) {
        int place = (host - x->spec.root + hosts) % hosts;
        return streams_headway(x, place > 0 ? x->num_segments : 0, previous,
                               place < hosts - 1 ? x->num_segments : 0, next);
    }
    return streams_headway(x, x->num_messages, previous, x->num_messages, next);
}

bool hvdl_exchange_destroy(hvdl_exchange *x)
{
    if (x->pairwise && !hvdl_pairwise_destroy(x->pairwise, x->wire))
        return false;
    bool ended = hvdl_stream_end(x->wire, &x->recv, true);
    ended &= hvdl_stream_end(x->wire, &x->send, false);
    ended &= hvdl_direct_end(x);
    if (ended)
        free_memory(x);
    return ended; /* else MPI may still use it */
}
