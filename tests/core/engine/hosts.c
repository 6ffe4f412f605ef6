/* Many hosts in one process, one rank each: whole engines over a network in memory, driven by turns in
 * one thread, for test_many_hosts.py, which compiles it together with the core. */
#define _GNU_SOURCE
#include "engine/fatal.h"
#include "engine/failing.h"
#include "operations/facts.h"
#include "network.h"
#include "postings.h"

#define MOST_HOSTS 1024

static int num_hosts;

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
        hvdl_wire wire = network_wire(h, tag_ub);
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
                                     .launcher = {.fd = -1},
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
    hvdl_posting posting = sum_posting(name, c->data, ELEMS);
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
            hvdl_posting posting = sum_posting(name, data, ELEMS);
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
        hvdl_posting posting = sum_posting(name, NULL, ELEMS);
        if (hvdl_engine_post(engines[0], &posting, false, &operations[i]))
            return 1;
    }
    hvdl_fatal_on_all(engines[0], "everything fails");
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
    engines = calloc((size_t)num_hosts, sizeof(hvdl_engine *));
    if (!engines || !network_begin(num_hosts))
        return 1;
    if (!strcmp(argv[1], "fail"))
        return fail(atoi(argv[3]));
    longest_delay = strtoull(argv[6], NULL, 10);
    return agree(atoi(argv[3]), atoi(argv[4]), atoi(argv[5]));
}
