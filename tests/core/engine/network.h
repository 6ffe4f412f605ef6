/* A network in memory between engines of one process: what MPI is to them.
 *
 * A message is copied when it is sent. Those of one sender, receiver and tag are received in the order in
 * which they were sent; some come later than others, by tag and receiver, so that the hosts end their
 * operations in different orders. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "matching/control.h"

typedef struct message {
    struct message *next;
    int tag;
    size_t bytes;
    uint64_t due; /* the tick in which it comes */
    char data[];
} message;

typedef struct receive {
    struct receive *next;
    int tag;
    bool done, cancelled;
    void *to;
    size_t room;
    struct pair *pair;
} receive;

/* What goes from one rank to another one. */
typedef struct pair {
    message *messages;
    receive *receives;
} pair;

static int num_members; /* ranks */
static pair *pairs;     /* by receiver and sender */
static uint64_t tick, num_moved;
static uint64_t longest_delay;
static receive sent; /* every send's request: it has left at once */

static pair *pair_of(int to, int from)
{
    return &pairs[(size_t)to * (size_t)num_members + (size_t)from];
}

static uint64_t scrambled(uint64_t x)
{
    x = (x ^ x >> 31) * 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 29) * 0xbf58476d1ce4e5b9ull;
    return x ^ x >> 32;
}

static uint64_t delay(int tag, int to)
{
    if (tag < HVDL_TAG_FIRST || !longest_delay)
        return 0;
    uint64_t number = (uint64_t)(tag - HVDL_TAG_FIRST) / HVDL_TAGS_PER_ID;
    return scrambled(number * 4096 + (uint64_t)to + 1) % longest_delay;
}

static int network_isend(const void *buf, int count, hvdl_word type, int dest, int tag,
                         hvdl_word comm, void *request)
{
    message *m = malloc(sizeof *m + (size_t)count), **at = &pair_of(dest, (int)comm)->messages;
    (void)type;
    if (!m)
        return 1;
    *m = (message){.tag = tag, .bytes = (size_t)count, .due = tick + delay(tag, dest)};
    memcpy(m->data, buf, (size_t)count);
    while (*at)
        at = &(*at)->next;
    *at = m;
    *(receive **)request = &sent;
    return 0;
}

static int network_irecv(void *buf, int count, hvdl_word type, int source, int tag, hvdl_word comm,
                         void *request)
{
    pair *p = pair_of((int)comm, source);
    receive *r = malloc(sizeof *r), **at = &p->receives;
    (void)type;
    if (!r)
        return 1;
    *r = (receive){.tag = tag, .to = buf, .room = (size_t)count, .pair = p};
    while (*at)
        at = &(*at)->next;
    *at = r;
    *(receive **)request = r;
    return 0;
}

static message **first_of(pair *p, int tag)
{
    message **at = &p->messages;
    while (*at && (*at)->tag != tag)
        at = &(*at)->next;
    return at;
}

/* Receives what has come, in the order of posting. */
static void deliver(pair *p)
{
    for (receive **at = &p->receives; p->messages && *at;) {
        receive *r = *at;
        message **from = first_of(p, r->tag), *m = *from;
        if (!m || m->due > tick) {
            at = &r->next;
            continue;
        }
        memcpy(r->to, m->data, m->bytes < r->room ? m->bytes : r->room);
        *at = r->next;
        *from = m->next;
        free(m);
        r->done = true;
        num_moved++;
    }
}

static int network_testsome(int count, void *requests, int *num_ended, int *ended, void *statuses)
{
    receive **handles = requests;
    (void)statuses;
    *num_ended = 0;
    for (int i = 0; i < count; i++) {
        receive *r = handles[i];
        if (r != &sent && !r->done)
            deliver(r->pair);
        if (r != &sent && !r->done)
            continue;
        if (r != &sent)
            free(r);
        ended[(*num_ended)++] = i;
    }
    return 0;
}

static int network_test(void *request, int *flag, void *status)
{
    receive *r = *(receive **)request;
    (void)status;
    *flag = r->cancelled || r->done;
    if (*flag)
        free(r);
    return 0;
}

static int network_cancel(void *request)
{
    receive *r = *(receive **)request, **at = &r->pair->receives;
    while (*at && *at != r)
        at = &(*at)->next;
    if (*at)
        *at = r->next;
    r->cancelled = true;
    return 0;
}

/* Before the engines are made. */
static bool network_begin(int ranks)
{
    num_members = ranks;
    pairs = calloc((size_t)ranks * (size_t)ranks, sizeof *pairs);
    return pairs != NULL;
}

static hvdl_wire network_wire(int rank, int tag_ub)
{
    return (hvdl_wire){.isend = network_isend,
                       .irecv = network_irecv,
                       .test = network_test,
                       .testsome = network_testsome,
                       .cancel = network_cancel,
                       .comm = (hvdl_word)rank,
                       .tag_ub = tag_ub,
                       .handle_bytes = sizeof(receive *)};
}
