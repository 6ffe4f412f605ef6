/* A network in memory, over which the core's own exchanges run between up to hundreds of hosts in one
 * thread: for network.py, which compiles it together with them.
 *
 * A message is matched with a receive of its sender, receiver and tag in the order of posting. It is
 * read when it is delivered, and the sender hears of that later; until then its buffer must be as it
 * was when it was sent. */
#include <stdlib.h>
#include <string.h>

#include "net/exchange.h"
#include "net/streams.h"

typedef struct {
    const void *from;
    void *to, *as_sent; /* as_sent: a copy */
    size_t sent_bytes, room_bytes;
    bool delivered, released; /* what the receiver hears, and the sender */
    uint64_t tick;            /* when it was sent */
} message;

/* What goes from one host to another with one tag. */
typedef struct {
    message **messages;
    size_t num_sent, num_awaited, num_delivered, num_released, room;
} channel;

#define TAGS 2

typedef struct {
    int hosts;
    channel *channels;          /* by sender, receiver, tag */
    uint64_t tick, num_pending; /* messages sent and not released */
    uint64_t *messages, *bytes; /* by sender and receiver */
    bool wrong_size, overwritten;
} network;

/* A host's communicator is its address here. */
typedef struct {
    network *network;
    int host;
} endpoint;

static channel *channel_of(network *n, int from, int to, int tag)
{
    return &n->channels[((size_t)from * (size_t)n->hosts + (size_t)to) * TAGS + (size_t)tag];
}

static message *message_at(channel *c, size_t index)
{
    if (index >= c->room) {
        size_t room = c->room ? 2 * c->room : 8;
        c->messages = realloc(c->messages, room * sizeof *c->messages);
        memset(c->messages + c->room, 0, (room - c->room) * sizeof *c->messages);
        c->room = room;
    }
    if (!c->messages[index])
        c->messages[index] = calloc(1, sizeof(message));
    return c->messages[index];
}

/* In a request's word, beside the message's address. */
#define IS_SEND ((hvdl_word)1)

static int simulated_isend(const void *buf, int count, hvdl_word type, int dest, int tag,
                           hvdl_word comm, void *request)
{
    endpoint *self = (endpoint *)comm;
    network *n = self->network;
    channel *c = channel_of(n, self->host, dest, tag);
    message *m = message_at(c, c->num_sent++);
    (void)type;
    m->from = buf;
    m->sent_bytes = (size_t)count;
    m->as_sent = malloc((size_t)count + 1);
    memcpy(m->as_sent, buf, (size_t)count);
    m->tick = n->tick;
    n->num_pending++;
    n->messages[self->host * n->hosts + dest]++;
    n->bytes[self->host * n->hosts + dest] += (uint64_t)count;
    *(hvdl_word *)request = (hvdl_word)m | IS_SEND;
    return 0;
}

static int simulated_irecv(void *buf, int count, hvdl_word type, int source, int tag,
                           hvdl_word comm, void *request)
{
    endpoint *self = (endpoint *)comm;
    channel *c = channel_of(self->network, source, self->host, tag);
    message *m = message_at(c, c->num_awaited++);
    (void)type;
    m->to = buf;
    m->room_bytes = (size_t)count;
    *(hvdl_word *)request = (hvdl_word)m;
    return 0;
}

static int simulated_testsome(int count, void *requests, int *num_ended, int *ended, void *statuses)
{
    const hvdl_word *words = requests;
    (void)statuses;
    *num_ended = 0;
    for (int i = 0; i < count; i++) {
        const message *m = (const message *)(words[i] & ~IS_SEND);
        if (words[i] & IS_SEND ? m->released : m->delivered)
            ended[(*num_ended)++] = i;
    }
    return 0;
}

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static bool comes_late(uint64_t *random)
{
    return *random && next_random(random) % 2;
}

/* Delivers messages that were sent before this tick: one of each channel, or, with a seed, as many as
 * chance wants. Returns whether there was any. */
static bool deliver(network *n, uint64_t *random)
{
    bool any = false;
    size_t num_channels = (size_t)n->hosts * (size_t)n->hosts * TAGS;
    for (size_t i = 0; n->num_pending && i < num_channels; i++) {
        channel *c = &n->channels[i];
        size_t last = *random ? c->num_sent : c->num_delivered + 1;
        while (c->num_delivered < last && c->num_delivered < c->num_sent &&
               c->num_delivered < c->num_awaited) {
            message *m = c->messages[c->num_delivered];
            if (m->tick == n->tick || comes_late(random))
                break;
            n->wrong_size |= m->sent_bytes != m->room_bytes;
            memcpy(m->to, m->from, m->sent_bytes < m->room_bytes ? m->sent_bytes : m->room_bytes);
            m->delivered = true;
            c->num_delivered++;
            any = true;
        }
        while (c->num_released < c->num_delivered && !comes_late(random)) {
            message *m = c->messages[c->num_released++];
            n->overwritten |= memcmp(m->from, m->as_sent, m->sent_bytes) != 0;
            m->released = true;
            n->num_pending--;
            any = true;
        }
    }
    return any;
}

enum { WELL, NO_MEMORY, STUCK, WRONG_SIZE, LEFT_OVER, OVERWRITTEN };

/* Every host makes one step after the other, until nothing moves; then messages arrive; and so on.
 * *ticks: how often they did. With a seed in `random`, hosts and messages are late by chance. */
static int run(network *n, hvdl_wire *wires, hvdl_exchange **exchanges, uint64_t random,
               uint64_t *ticks)
{
    bool seeded = random != 0;
    int num_done = 0, quiet = 0;
    bool *finished = calloc((size_t)n->hosts, sizeof *finished);
    while (num_done < n->hosts && quiet < 64) {
        bool moved = false;
        for (int h = 0; h < n->hosts; h++) {
            if (finished[h] || (seeded && next_random(&random) % 4 == 0))
                continue;
            if (hvdl_wire_poll(&wires[h]) || hvdl_exchange_step(exchanges[h], &moved, &finished[h]))
                return STUCK;
            num_done += finished[h];
        }
        if (moved || num_done == n->hosts)
            continue;
        n->tick++;
        quiet = deliver(n, &random) ? 0 : quiet + 1;
    }
    free(finished);
    *ticks = n->tick;
    return num_done == n->hosts ? WELL : STUCK;
}

/* The number that `algorithm` is given by here: ring, direct, recursive doubling, gather, chain,
 * pairwise; and ring and direct that scatter. */
#define FIRST_SCATTERING 6
static const hvdl_algorithm algorithms[] = {HVDL_RING,        HVDL_DIRECT, HVDL_DOUBLING,
                                            HVDL_RING_GATHER, HVDL_CHAIN,  HVDL_PAIRWISE,
                                            HVDL_RING,        HVDL_DIRECT};

/* Runs one exchange of `hosts` hosts. By host: buffers; inputs and the four tables of a pairwise
 * exchange (by host and then by peer: offsets and sizes of what is sent, then of what is received),
 * the last two also those of a gather and of what scatters. messages and bytes are added to, by sender and receiver.
 * seed 0: everything in step; then *ticks is the number of messages that wait for each other. */
int simulate(int algorithm, int hosts, int dtype, int op, int64_t divisor, size_t count, int root,
             size_t segment_bytes, char *const *buffers, const char *const *inputs,
             const size_t *const *tables, uint64_t seed, uint64_t *messages, uint64_t *bytes,
             uint64_t *ticks)
{
    hvdl_exchange_spec common = {.algorithm = algorithms[algorithm],
                                 .dtype = (hvdl_dtype)dtype,
                                 .op = (hvdl_op)op,
                                 .scatters = algorithm >= FIRST_SCATTERING,
                                 .scale = {1.0, divisor, 1.0},
                                 .count = count,
                                 .root = root,
                                 .segment_bytes = segment_bytes};
    size_t num = (size_t)hosts;
    network n = {.hosts = hosts, .messages = messages, .bytes = bytes};
    n.channels = calloc(num * num * TAGS, sizeof *n.channels);
    endpoint *endpoints = calloc(num, sizeof *endpoints);
    hvdl_wire *wires = calloc(num, sizeof *wires);
    hvdl_exchange **exchanges = calloc(num, sizeof(hvdl_exchange *));
    int *peers = calloc(num, sizeof *peers);
    hvdl_pair *pairs = calloc(num, sizeof *pairs);
    int result = WELL;
    for (int h = 0; h < hosts; h++)
        peers[h] = h;
    for (int h = 0; h < hosts && result == WELL; h++) {
        endpoints[h] = (endpoint){&n, h};
        wires[h] = (hvdl_wire){.isend = simulated_isend,
                               .irecv = simulated_irecv,
                               .testsome = simulated_testsome,
                               .handle_bytes = sizeof(hvdl_word),
                               .comm = (hvdl_word)&endpoints[h]};
        if (hvdl_wire_open(&wires[h], hosts))
            result = NO_MEMORY;
        hvdl_exchange_spec own = common;
        own.host = h;
        own.num_hosts = hosts;
        own.peers = peers;
        own.buffer = buffers[h];
        own.chunk_offsets = tables[2];
        own.chunk_bytes = tables[3];
        for (int peer = 0; own.algorithm == HVDL_PAIRWISE && peer < hosts; peer++) {
            int at = h * hosts + peer;
            pairs[peer] = (hvdl_pair){inputs[h] + tables[0][at], tables[1][at],
                                      buffers[h] + tables[2][at], tables[3][at]};
        }
        own.pairs = pairs;
        if (hvdl_exchange_create(&exchanges[h], &wires[h], &own))
            result = NO_MEMORY;
    }
    if (result == WELL)
        result = run(&n, wires, exchanges, seed, ticks);
    for (size_t i = 0; i < num * num * TAGS; i++) {
        channel *c = &n.channels[i];
        if (result == WELL && (c->num_sent != c->num_released || c->num_awaited != c->num_sent))
            result = LEFT_OVER;
        for (size_t m = 0; m < c->room; m++) {
            if (c->messages[m])
                free(c->messages[m]->as_sent);
            free(c->messages[m]);
        }
        free(c->messages);
    }
    if (result == WELL && n.wrong_size)
        result = WRONG_SIZE;
    if (result == WELL && n.overwritten)
        result = OVERWRITTEN;
    for (int h = 0; h < hosts && result == WELL; h++)
        hvdl_exchange_destroy(exchanges[h]);
    for (int h = 0; h < hosts; h++)
        hvdl_wire_close(&wires[h]);
    free(n.channels);
    free(endpoints);
    free(wires);
    free(exchanges);
    free(peers);
    free(pairs);
    return result;
}

/* How long a message is in flight as streams see it, of which so many are at any time: the other side
 * is late, then one ends every gap_ns. */
uint64_t flight_ns(uint64_t in_flight, uint64_t late_ns, uint64_t gap_ns, uint64_t num_ended)
{
    hvdl_wire wire = {0};
    hvdl_streams_begin(&wire, 0);
    wire.streaming = in_flight;
    uint64_t now_ns = 0, found_ns = 0;
    for (; now_ns < late_ns; now_ns += 1000000)
        hvdl_streams_flight_ns(&wire, now_ns);
    while (num_ended--) {
        now_ns += gap_ns;
        wire.streamed++;
        found_ns = hvdl_streams_flight_ns(&wire, now_ns);
    }
    return found_ns;
}
