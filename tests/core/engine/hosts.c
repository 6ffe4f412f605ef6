/* Many hosts in one process, one rank each: whole engines over a network in memory, driven by turns in
 * one thread, for test_many_hosts.py, which compiles it together with the core.
 *
 * A message is copied when it is sent. Those of one sender, receiver and tag are received in the order in
 * which they were sent; some come later than others, by tag and receiver, so that the hosts end their
 * operations in different orders. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/control.h"

#define MOST_HOSTS 1024

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

/* What goes from one host to another one. */
typedef struct pair {
    message *messages;
    receive *receives;
} pair;

static int num_hosts;
static pair *pairs; /* by receiver and sender */
static uint64_t tick, num_moved;
static uint64_t longest_delay;
static receive sent; /* every send's request: it has left at once */

static pair *pair_of(int to, int from)
{
    return &pairs[(size_t)to * (size_t)num_hosts + (size_t)from];
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

/* ---- engines ---- */

#define ELEMS 100 /* more than travel with a posting */

typedef struct {
    float *data;
    hvdl_operation *operation;
} call;

static hvdl_engine **engines;

static void print_line(const char *line)
{
    fputs(line, stderr);
}

static hvdl_err make_engines(int tag_ub)
{
    int *ones = calloc((size_t)num_hosts, sizeof(int)),
        *ranks = calloc((size_t)num_hosts, sizeof(int));
    const char **names = calloc((size_t)num_hosts, sizeof *names);
    hvdl_err err = ones && ranks && names ? HVDL_OK : HVDL_ENOMEM;
    for (int h = 0; !err && h < num_hosts; h++) {
        ones[h] = 1;
        ranks[h] = h;
        names[h] = "host";
    }
    for (int h = 0; !err && h < num_hosts; h++) {
        hvdl_wire wire = {.isend = network_isend,
                          .irecv = network_irecv,
                          .test = network_test,
                          .testsome = network_testsome,
                          .cancel = network_cancel,
                          .comm = (hvdl_word)h,
                          .tag_ub = tag_ub,
                          .handle_bytes = sizeof(receive *)};
        hvdl_engine_config config = {.rank = h,
                                     .num_ranks = num_hosts,
                                     .num_hosts = num_hosts,
                                     .host_sizes = ones,
                                     .members = ranks,
                                     .world_ranks = ranks,
                                     .host_names = names,
                                     .memory_fd = -1,
                                     .wire = &wire,
                                     .inline_bytes = 64,
                                     .block_bytes = 256,
                                     .segment_bytes = 4096,
                                     .piece_bytes = 1 << 20,
                                     .say = print_line,
                                     .rules = {{SIZE_MAX, HVDL_DOUBLING}},
                                     .num_rules = 1};
        err = hvdl_engine_create(&engines[h], &config);
    }
    free(ones);
    free(ranks);
    free(names);
    return err;
}

/* Every engine looks once. */
static void look(void)
{
    tick++;
    for (int h = 0; h < num_hosts; h++)
        hvdl_engine_poll(engines[h]);
}

static hvdl_posting posting_of(const char *name, float *data)
{
    hvdl_posting posting = {.name = name, .input = data, .output = data};
    posting.desc = (hvdl_desc){.kind = HVDL_ALLREDUCE,
                               .dtype = HVDL_FLOAT32,
                               .op = HVDL_SUM,
                               .ndim = 1,
                               .root = -1,
                               .prescale = 1,
                               .postscale = 1,
                               .count = ELEMS,
                               .dims = {ELEMS}};
    return posting;
}

/* The i-th name whose operations of this kind have host 0 for their coordinator. */
static void name_of(char name[32], int kind, int i)
{
    for (int n = 0, found = -1;; n++) {
        snprintf(name, 32, "operation %d", n);
        hvdl_key key = hvdl_make_key(kind, name);
        found += hvdl_coordinator_of(engines[0], key) == 0;
        if (found == i && hvdl_coordinator_of(engines[0], key) == 0)
            return;
    }
}

/* No two hosts have the same, and no two operations. */
static float value_of(int host, int number)
{
    return (float)(host * (host + 1) + number);
}

static hvdl_err post(int host, int number, call *c)
{
    char name[32];
    name_of(name, HVDL_ALLREDUCE, number);
    for (int i = 0; i < ELEMS; i++)
        c->data[i] = value_of(host, number);
    hvdl_posting posting = posting_of(name, c->data);
    return hvdl_engine_post(engines[host], &posting, false, &c->operation);
}

/* Prints on how many hosts a plan can't be made, with the last text. */
static hvdl_err make_plans(int num_plans)
{
    static float data[ELEMS]; /* they are not run */
    const char *text = "";
    int num_failed = 0;
    hvdl_err err = HVDL_OK;
    char name[32];
    for (int i = 0; !err && i < num_plans; i++) {
        hvdl_plan *plans[MOST_HOSTS];
        name_of(name, HVDL_PLAN, i);
        for (int h = 0; !err && h < num_hosts; h++) {
            hvdl_posting posting = posting_of(name, data);
            err = hvdl_plan_create(engines[h], &posting, &plans[h]);
        }
        for (int n = 0; n < 8; n++)
            look();
        for (int h = 0; !err && h < num_hosts; h++)
            if (plans[h]->error) {
                num_failed++;
                text = plans[h]->error;
            }
    }
    printf("plans failed %d: %s\n", num_failed, text);
    return err;
}

/* Whether it has the sum of what all hosts gave. */
static bool is_right(const call *c, int number)
{
    float sum = 0;
    bool right = !hvdl_operation_error(c->operation);
    for (int h = 0; h < num_hosts; h++)
        sum += value_of(h, number);
    for (int i = 0; i < ELEMS; i++)
        right &= c->data[i] == sum;
    return right;
}

/* Plans that stay, and then operations, all of one coordinator. Each host posts the latter in an order and
 * at times of its own. Prints how many operations have ended when nothing moves any more. */
static int agree(int tag_ub, int num_plans, int num_calls)
{
    hvdl_err err = make_engines(tag_ub);
    size_t total = (size_t)num_hosts * (size_t)num_calls;
    call *calls = calloc(total, sizeof *calls);
    int *num_posted = calloc((size_t)num_hosts, sizeof(int));
    if (!err)
        err = make_plans(num_plans);
    for (uint64_t moved_at = tick; !err && tick < moved_at + 2 * longest_delay + 64;) {
        uint64_t moved = num_moved;
        for (int h = 0; h < num_hosts; h++)
            while (!err && num_posted[h] < num_calls &&
                   (!longest_delay || scrambled(tick * 4096 + (uint64_t)h) % 2)) {
                int number = (num_posted[h]++ + h) % num_calls;
                call *c = &calls[h * num_calls + number];
                c->data = malloc(ELEMS * sizeof(float));
                err = post(h, number, c);
            }
        look();
        if (moved != num_moved)
            moved_at = tick;
    }
    int num_right = 0, num_ended = 0;
    for (size_t i = 0; !err && i < total; i++)
        if (hvdl_operation_done(calls[i].operation)) {
            num_ended++;
            num_right += is_right(&calls[i], (int)(i % (size_t)num_calls));
        }
    printf("error %d, ended %d of %zu, right %d\n", (int)err, num_ended, total, num_right);
    return 0;
}

/* Operations that nobody else has posted, when everything fails. */
static int fail(int num_calls)
{
    if (make_engines(1 << 20))
        return 1;
    char name[32];
    int num_failed = 0;
    hvdl_operation **operations = calloc((size_t)num_calls, sizeof *operations);
    for (int i = 0; i < num_calls; i++) {
        snprintf(name, sizeof name, "%d", i);
        hvdl_posting posting = posting_of(name, NULL);
        if (hvdl_engine_post(engines[0], &posting, false, &operations[i]))
            return 1;
    }
    hvdl_break_on_all(engines[0], "everything fails");
    hvdl_end_broken(engines[0]);
    for (int i = 0; i < num_calls; i++)
        num_failed += hvdl_operation_error(operations[i]) != NULL;
    printf("failed %d\n", num_failed);
    return 0;
}

int main(int argc, char **argv)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc < 3)
        return 2;
    num_hosts = atoi(argv[2]);
    if (num_hosts > MOST_HOSTS)
        return 2;
    pairs = calloc((size_t)num_hosts * (size_t)num_hosts, sizeof *pairs);
    engines = calloc((size_t)num_hosts, sizeof(hvdl_engine *));
    if (!strcmp(argv[1], "fail"))
        return fail(atoi(argv[3]));
    longest_delay = strtoull(argv[6], NULL, 10);
    return agree(atoi(argv[3]), atoi(argv[4]), atoi(argv[5]));
}
