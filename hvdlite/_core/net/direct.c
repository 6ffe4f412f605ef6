/* The direct exchange: see exchange.h. */
#include "net/exchange_state.h"

#include <string.h>

#include "base/sizes.h"

/* Message m of a host's parts of a chunk is of segment m / partials, and of its partial m % partials. */
static char *received_part(const hvdl_exchange *x, int h, size_t message)
{
    const direct_peer *peer = &x->directs[h];
    return peer->parts + message % (HVDL_WINDOW * peer->partials) * x->segment_room;
}

static char *own_part(const hvdl_exchange *x, hvdl_range at, size_t partial)
{
    const hvdl_exchange_spec *spec = &x->spec;
    char *begin = spec->tree ? spec->own_partials + partial * spec->partial_stride : spec->buffer;
    return begin + hvdl_part_bytes(x, at.begin);
}

static hvdl_err send_part(hvdl_exchange *x, direct_peer *peer, int host)
{
    size_t message = peer->send_part.posted, own = x->directs[x->spec.host].partials;
    hvdl_range at = hvdl_segment_at(x, host, message / own);
    if (x->spec.scatters && !hvdl_range_size(at)) {
        hvdl_stream_skip(x->wire, &peer->send_part);
        return HVDL_OK;
    }
    return hvdl_stream_send(x->wire, &peer->send_part, own_part(x, at, message % own),
                            hvdl_part_bytes(x, hvdl_range_size(at)), x->spec.peers[host],
                            x->spec.tag);
}

static hvdl_err recv_part(hvdl_exchange *x, direct_peer *peer, int host)
{
    size_t message = peer->recv_part.posted;
    hvdl_range at = hvdl_segment_at(x, x->spec.host, message / peer->partials);
    if (x->spec.scatters && !hvdl_range_size(at)) {
        hvdl_stream_skip(x->wire, &peer->recv_part);
        return HVDL_OK;
    }
    return hvdl_stream_recv(x->wire, &peer->recv_part, received_part(x, host, message),
                            hvdl_part_bytes(x, hvdl_range_size(at)), x->spec.peers[host],
                            x->spec.tag);
}

static void direct_reduce_partials(hvdl_exchange *x, hvdl_range at)
{
    const hvdl_exchange_spec *spec = &x->spec;
    const hvdl_sum_tree *tree = spec->tree;
    const void *inputs[tree->num_partials];
    size_t seen[spec->num_hosts]; /* partials of each host before this one */
    memset(seen, 0, sizeof seen);
    for (int p = 0; p < tree->num_partials; p++) {
        int host = tree->partials[p].host;
        size_t partial = seen[host]++;
        inputs[p] = host == spec->host
                        ? own_part(x, at, partial)
                        : received_part(x, host, x->reduced * x->directs[host].partials + partial);
    }
    hvdl_reduce_tree(spec->part_dtype, spec->dtype, spec->op, spec->buffer + at.begin, inputs,
                     tree->merges, tree->num_partials, hvdl_range_size(at) / x->esize,
                     &spec->scale);
}

static void direct_reduce(hvdl_exchange *x)
{
    const hvdl_exchange_spec *spec = &x->spec;
    hvdl_range at = hvdl_segment_at(x, spec->host, x->reduced);
    if (spec->tree) {
        direct_reduce_partials(x, at);
        x->reduced++;
        return;
    }
    const void *inputs[spec->num_hosts];
    for (int h = 0; h < spec->num_hosts; h++)
        inputs[h] = h == spec->host
                        ? spec->buffer + at.begin
                        : x->directs[h].parts + x->reduced % HVDL_WINDOW * x->segment_room;
    hvdl_reduce(spec->dtype, spec->op, spec->buffer + at.begin, inputs, spec->num_hosts,
                hvdl_range_size(at) / x->esize, &spec->scale);
    x->reduced++;
}

static hvdl_err direct_step_peer(hvdl_exchange *x, int h, bool *again)
{
    direct_peer *peer = &x->directs[h];
    const hvdl_exchange_spec *spec = &x->spec;
    size_t own = x->directs[spec->host].partials;
    hvdl_stream *all[] = {&peer->recv_part, &peer->recv_sum, &peer->send_part, &peer->send_sum};
    hvdl_err err = HVDL_OK;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        *again |= hvdl_stream_take(x->wire, all[i]);
    /* A part's slot is free once the segment before the last HVDL_WINDOW ones has been added. */
    while (!err && peer->recv_part.posted < x->num_segments * peer->partials &&
           hvdl_stream_has_room(&peer->recv_part) &&
           peer->recv_part.posted < (x->reduced + HVDL_WINDOW) * peer->partials) {
        err = recv_part(x, peer, h);
        *again = true;
    }
    while (!err && peer->send_part.posted < x->num_segments * own &&
           hvdl_stream_has_room(&peer->send_part)) {
        err = send_part(x, peer, h);
        *again = true;
    }
    while (!err && peer->send_sum.posted < x->reduced && peer->send_sum.posted < x->num_sums &&
           hvdl_stream_has_room(&peer->send_sum)) {
        hvdl_range at = hvdl_segment_at(x, spec->host, peer->send_sum.posted);
        err = hvdl_send_segment(x, &peer->send_sum, at, h, spec->tag + 1);
        *again = true;
    }
    /* The sum replaces the part that was sent: that send must have left the buffer. */
    while (!err && peer->recv_sum.posted < x->num_sums && hvdl_stream_has_room(&peer->recv_sum) &&
           peer->send_part.done >= (peer->recv_sum.posted + 1) * own) {
        hvdl_range at = hvdl_segment_at(x, h, peer->recv_sum.posted);
        err = hvdl_recv_segment(x, &peer->recv_sum, at, spec->buffer + at.begin, h, spec->tag + 1);
        *again = true;
    }
    return err;
}

hvdl_err hvdl_direct_step(hvdl_exchange *x, bool *progressed, bool *done)
{
    const hvdl_exchange_spec *spec = &x->spec;
    bool again = true;
    while (again) {
        again = false;
        size_t arrived = x->num_segments;
        bool finished = true;
        for (int h = 0; h < spec->num_hosts; h++) {
            if (h == spec->host)
                continue;
            hvdl_err err = direct_step_peer(x, h, &again);
            if (err)
                return err;
            const direct_peer *peer = &x->directs[h];
            if (peer->recv_part.done < arrived * peer->partials)
                arrived = peer->recv_part.done / peer->partials;
            finished &= peer->send_part.done == x->num_segments * x->directs[spec->host].partials &&
                        peer->recv_sum.done == x->num_sums && peer->send_sum.done == x->num_sums;
        }
        if (x->reduced < arrived) {
            direct_reduce(x);
            again = true;
        }
        *progressed |= again;
        *done = finished && x->reduced == x->num_segments;
    }
    return HVDL_OK;
}

/* ---- life ---- */

hvdl_err hvdl_direct_allocate(hvdl_exchange *x)
{
    const hvdl_exchange_spec *spec = &x->spec;
    size_t hosts = (size_t)spec->num_hosts;
    x->num_sums = spec->scatters ? 0 : x->num_segments;
    x->directs = calloc(hosts, sizeof *x->directs);
    size_t partials = 0;
    for (size_t h = 0; x->directs && h < hosts; h++) {
        x->directs[h].partials = spec->tree ? (size_t)spec->tree->num_of[h] : 1;
        partials += x->directs[h].partials;
    }
    x->scratch = hvdl_new_array(partials * HVDL_WINDOW, x->segment_room);
    if (!x->directs || !x->scratch)
        return HVDL_ENOMEM;
    char *parts = x->scratch;
    for (size_t h = 0; h < hosts; h++) {
        x->directs[h].parts = parts;
        parts += x->directs[h].partials * HVDL_WINDOW * x->segment_room;
    }
    return HVDL_OK;
}

bool hvdl_direct_end(hvdl_exchange *x)
{
    bool ended = true;
    for (int h = 0; x->directs && h < x->spec.num_hosts; h++) {
        ended &= hvdl_stream_end(x->wire, &x->directs[h].recv_part, true);
        ended &= hvdl_stream_end(x->wire, &x->directs[h].recv_sum, true);
        ended &= hvdl_stream_end(x->wire, &x->directs[h].send_part, false);
        ended &= hvdl_stream_end(x->wire, &x->directs[h].send_sum, false);
    }
    return ended;
}

/* The host that is awaited is the one from which least has come. */
hvdl_headway hvdl_direct_headway(const hvdl_exchange *x)
{
    const hvdl_exchange_spec *spec = &x->spec;
    hvdl_headway headway = {.peer = -1};
    size_t own = x->directs[spec->host].partials, least = SIZE_MAX;
    for (int h = 0; h < spec->num_hosts; h++) {
        const direct_peer *peer = &x->directs[h];
        size_t all = x->num_segments * (own + peer->partials) + 2 * x->num_sums;
        size_t done =
            peer->recv_part.done + peer->recv_sum.done + peer->send_part.done + peer->send_sum.done;
        if (h == spec->host)
            continue;
        headway.total += all;
        headway.done += done;
        if (done < all && done < least) {
            least = done;
            headway.peer = spec->peers[h];
        }
    }
    return headway;
}
