/* A program of operations, of which one allocation fails: the first, the second, and so on, until there are
 * no more. All ranks of all hosts are engines of this process, driven by turns in one thread, for
 * test_out_of_memory.py, which compiles it together with the core.
 *
 * The linker wraps the core's allocations. They fail only while `armed`, which the network is not. */
#define _GNU_SOURCE
#include <sys/mman.h>
#include <unistd.h>

#include "network.h"
#include "operations/black_box.h"

#define MOST_RANKS 8
#define ROUNDS 6000
#define ROUNDS_ANYWAY 1500
#define BLOCK_BYTES 256
#define INLINE_BYTES 64

/* ---- the allocator ---- */

static volatile bool armed; /* the compiler takes malloc for one that does not look at it */
static volatile long failing, num_allocations; /* since the program began; 0: none fails */

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__real_realloc(void *memory, size_t bytes);
int __real_posix_memalign(void **to, size_t alignment, size_t bytes);
char *__real_strdup(const char *text);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_realloc(void *memory, size_t bytes);
int __wrap_posix_memalign(void **to, size_t alignment, size_t bytes);
char *__wrap_strdup(const char *text);
int __real_clock_gettime(clockid_t clock, struct timespec *to);
int __wrap_clock_gettime(clockid_t clock, struct timespec *to);

static bool fails(void)
{
    return armed && ++num_allocations == failing;
}

void *__wrap_malloc(size_t bytes)
{
    return fails() ? NULL : __real_malloc(bytes);
}

void *__wrap_calloc(size_t count, size_t bytes)
{
    return fails() ? NULL : __real_calloc(count, bytes);
}

void *__wrap_realloc(void *memory, size_t bytes)
{
    return fails() ? NULL : __real_realloc(memory, bytes);
}

int __wrap_posix_memalign(void **to, size_t alignment, size_t bytes)
{
    return fails() ? 1 : __real_posix_memalign(to, alignment, bytes);
}

char *__wrap_strdup(const char *text)
{
    return fails() ? NULL : __real_strdup(text);
}

/* An engine that is closed waits some seconds for the others, which nobody drives meanwhile: time runs so much
 * faster here. */
#define HASTE 100

int __wrap_clock_gettime(clockid_t clock, struct timespec *to)
{
    struct timespec now;
    int error = __real_clock_gettime(clock, &now);
    uint64_t ns = HASTE * ((uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec);
    *to = (struct timespec){(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    return error;
}

/* ---- the network takes no part in it ---- */

static int isend(const void *buf, int count, hvdl_word type, int dest, int tag, hvdl_word comm,
                 void *request)
{
    bool was_armed = armed;
    armed = false;
    int error = network_isend(buf, count, type, dest, tag, comm, request);
    armed = was_armed;
    return error;
}

static int irecv(void *buf, int count, hvdl_word type, int source, int tag, hvdl_word comm,
                 void *request)
{
    bool was_armed = armed;
    armed = false;
    int error = network_irecv(buf, count, type, source, tag, comm, request);
    armed = was_armed;
    return error;
}

/* ---- engines ---- */

static int num_hosts, num_ranks;
static hvdl_engine *engines[MOST_RANKS];
static hvdl_box_memory boxes[MOST_RANKS];

static void say_nothing(const char *line)
{
    (void)line;
}

static int make_region(int local_size)
{
    size_t bytes;
    int fd = memfd_create("out of memory", 0);
    size_t payload = hvdl_posted_payload(num_ranks, INLINE_BYTES);
    if (fd < 0 || hvdl_shm_bytes(local_size, payload, BLOCK_BYTES, &bytes) ||
        ftruncate(fd, (off_t)bytes))
        return -1;
    return fd;
}

static hvdl_err make_engines(int local_size)
{
    int sizes[MOST_RANKS], ranks[MOST_RANKS], fds[MOST_RANKS];
    const char *names[MOST_RANKS];
    hvdl_err err = HVDL_OK;
    for (int h = 0; h < num_hosts; h++) {
        sizes[h] = local_size;
        names[h] = "host";
        fds[h] = make_region(local_size);
    }
    for (int r = 0; r < num_ranks; r++)
        ranks[r] = r;
    for (int r = 0; !err && r < num_ranks; r++) {
        hvdl_wire wire = network_wire(r, 1 << 20);
        wire.isend = isend;
        wire.irecv = irecv;
        hvdl_engine_config config = {.rank = r,
                                     .num_ranks = num_ranks,
                                     .num_hosts = num_hosts,
                                     .host_sizes = sizes,
                                     .members = ranks,
                                     .world_ranks = ranks,
                                     .host_names = names,
                                     .memory_fd = fds[r / local_size],
                                     .wire = num_hosts > 1 ? &wire : NULL,
                                     .inline_bytes = INLINE_BYTES,
                                     .block_bytes = BLOCK_BYTES,
                                     .segment_bytes = 256,
                                     .piece_bytes = 1024,
                                     .say = say_nothing,
                                     .launcher = {.fd = -1},
                                     .black_box = &boxes[r],
                                     .rules = {{SIZE_MAX, HVDL_DOUBLING}},
                                     .num_rules = 1};
        err = hvdl_engine_create(&engines[r], &config);
    }
    for (int h = 0; h < num_hosts; h++)
        close(fds[h]);
    return err;
}

/* ---- the program ---- */

#define ELEMS 1000
#define CALLS 16

typedef struct {
    hvdl_operation *operations[CALLS];
    hvdl_plan *plan;
    int num_operations, num_failed;
    bool refused; /* something was not posted: the caller has learned of it */
    const char *text;
    float in[ELEMS], out[ELEMS * MOST_RANKS];
    int64_t splits[2 * MOST_RANKS];
    void *parts[MOST_RANKS];
} rank_state;

static rank_state *states;

static hvdl_posting posting_of(rank_state *state, const char *name, int kind, int op, int count)
{
    hvdl_posting posting = {.name = name, .input = state->in, .output = state->out};
    bool gathers = kind == HVDL_ALLGATHER || kind == HVDL_ALLTOALL;
    posting.desc = (hvdl_desc){.kind = (uint8_t)kind,
                               .dtype = HVDL_FLOAT32,
                               .op = (uint8_t)op,
                               .ndim = 1,
                               .root = kind == HVDL_BROADCAST ? 0 : -1,
                               .prescale = 1,
                               .postscale = 1,
                               .count = gathers ? 1 : count,
                               .dims = {gathers ? -1 : count}};
    posting.rows = gathers ? count : 0;
    posting.splits = kind == HVDL_ALLTOALL ? state->splits : NULL;
    return posting;
}

static void post(int rank, const char *name, int kind, int op, int count)
{
    rank_state *state = &states[rank];
    hvdl_posting posting = posting_of(state, name, kind, op, count);
    if (hvdl_engine_post(engines[rank], &posting, false, &state->operations[state->num_operations]))
        state->refused = true;
    else
        state->num_operations++;
}

/* Kinds whose parts lie in the caller's memory: `count` elements of each rank for each. */
static void post_parts(int rank, const char *name, int kind, int count)
{
    rank_state *state = &states[rank];
    hvdl_posting posting = posting_of(state, name, kind, HVDL_SUM, count);
    bool cut = kind == HVDL_ALLTOALL_INTO;
    for (int r = 0; r < num_ranks; r++) {
        state->splits[r] = state->splits[num_ranks + r] = count;
        state->parts[r] = state->out + r * count;
    }
    posting.desc.root = kind == HVDL_GATHER || kind == HVDL_SCATTER ? 0 : -1;
    posting.splits = cut ? state->splits : NULL;
    posting.rows = cut ? count * num_ranks : 0;
    if (cut)
        posting.desc.dims[0] = -1;
    if (cut)
        posting.desc.count = 1;
    if (kind == HVDL_ALLGATHER_INTO)
        posting.outputs = state->parts;
    if (hvdl_engine_post(engines[rank], &posting, false, &state->operations[state->num_operations]))
        state->refused = true;
    else
        state->num_operations++;
}

static void start(int rank)
{
    rank_state *state = &states[rank];
    const hvdl_weight weight = {1.0 + rank, false}; /* keeping them takes memory, too */
    if (!state->plan || hvdl_plan_start(engines[rank], state->plan, &weight, NULL,
                                        &state->operations[state->num_operations]))
        state->refused = true;
    else
        state->num_operations++;
}

static void make_plan(int rank)
{
    rank_state *state = &states[rank];
    hvdl_posting posting = posting_of(state, "plan", HVDL_ALLREDUCE, HVDL_SUM, ELEMS);
    if (hvdl_plan_create(engines[rank], &posting, &state->plan)) {
        state->plan = NULL;
        state->refused = true;
    }
}

/* Whether all that was posted so far has ended on this rank; its failures are counted. */
static bool all_done(int rank)
{
    const rank_state *state = &states[rank];
    for (int i = 0; i < state->num_operations; i++)
        if (!hvdl_operation_done(state->operations[i]))
            return false;
    return true;
}

static bool any_refused(void)
{
    bool any = false;
    for (int r = 0; r < num_ranks; r++)
        any |= states[r].refused;
    return any;
}

/* Where a rank could not post an operation, those of the others end when it leaves. */
static bool look_until_done(void)
{
    for (int round = 0; round < ROUNDS; round++) {
        if (round > ROUNDS_ANYWAY && any_refused())
            return true;
        bool done = true;
        tick++;
        for (int r = 0; r < num_ranks; r++) {
            hvdl_engine_poll(engines[r]);
            done &= all_done(r);
        }
        if (done)
            return true;
    }
    return false;
}

static bool step_collectives(void)
{
    for (int r = 0; r < num_ranks; r++) {
        post(r, "large", HVDL_ALLREDUCE, HVDL_SUM, ELEMS);
        post(r, "tiny", HVDL_ALLREDUCE, HVDL_SUM, 4);
        post(r, "gather", HVDL_ALLGATHER, HVDL_SUM, 100 + r);
        post(r, "all to all", HVDL_ALLTOALL, HVDL_SUM, 100 * num_ranks);
        post(r, "scatter", HVDL_REDUCESCATTER, HVDL_SUM, ELEMS);
        post(r, "adasum", HVDL_ALLREDUCE, HVDL_ADASUM, 300);
        post(r, "broadcast", HVDL_BROADCAST, HVDL_SUM, ELEMS);
        post_parts(r, "gather into", HVDL_ALLGATHER_INTO, 200);
        post_parts(r, "all to all into", HVDL_ALLTOALL_INTO, 60);
        post_parts(r, "gather to one", HVDL_GATHER, 60);
        post_parts(r, "scatter from one", HVDL_SCATTER, 60);
        make_plan(r);
        start(r);
    }
    return look_until_done();
}

/* The last rank joins after the others, which have something left to do for it. */
static bool step_join(void)
{
    for (int r = 0; r < num_ranks - 1; r++)
        post(r, "join", HVDL_JOIN, HVDL_SUM, 0);
    for (int i = 0; i < 40; i++) {
        tick++;
        for (int r = 0; r < num_ranks; r++)
            hvdl_engine_poll(engines[r]);
    }
    post(num_ranks - 1, "alone", HVDL_ALLREDUCE, HVDL_SUM, ELEMS);
    start(num_ranks - 1);
    post(num_ranks - 1, "join", HVDL_JOIN, HVDL_SUM, 0);
    return look_until_done();
}

/* Prints what is wrong with it. */
static bool count_failures(void)
{
    for (int r = 0; r < num_ranks; r++) {
        rank_state *state = &states[r];
        for (int i = 0; i < state->num_operations; i++) {
            const char *text = hvdl_operation_done(state->operations[i])
                                   ? hvdl_operation_error(state->operations[i])
                                   : NULL;
            if (!text)
                continue;
            state->num_failed++;
            state->text = text;
            if (!strstr(text, "memory") && !strstr(text, "has left") && !strstr(text, "shutdown")) {
                printf("allocation %ld: rank %d says: %s\n", failing, r, text);
                return false;
            }
        }
    }
    return true;
}

static bool end(void)
{
    bool right = true;
    for (int r = 0; r < num_ranks; r++)
        hvdl_engine_close(engines[r], false);
    armed = false;
    if (!count_failures())
        right = false;
    for (int r = 0; r < num_ranks; r++) {
        rank_state *state = &states[r];
        if (!all_done(r)) {
            printf("allocation %ld: an operation of rank %d is pending after close\n", failing, r);
            right = false;
        }
        for (int i = 0; i < state->num_operations; i++)
            hvdl_operation_release(engines[r], state->operations[i]);
        if (state->plan)
            hvdl_plan_release(engines[r], state->plan);
    }
    for (int r = 0; r < num_ranks; r++)
        hvdl_engine_free(engines[r]);
    return right;
}

static void forget_messages(void)
{
    for (int i = 0; i < num_ranks * num_ranks; i++) {
        while (pairs[i].messages) {
            message *next = pairs[i].messages->next;
            free(pairs[i].messages);
            pairs[i].messages = next;
        }
        pairs[i].receives = NULL;
    }
}

/* Whether all is as it must be. *any: an operation failed, or was not posted. */
static bool play(int local_size, bool *any)
{
    bool right = true;
    memset(states, 0, (size_t)num_ranks * sizeof *states);
    for (int r = 0; r < num_ranks; r++)
        for (int to = 0; to < num_ranks; to++)
            states[r].splits[to] = 100;
    forget_messages();
    if (make_engines(local_size))
        return false;
    num_allocations = 0;
    armed = true;
    if (!step_collectives() || (!any_refused() && !step_join())) {
        printf("allocation %ld: an operation never ends\n", failing);
        right = false;
    }
    right &= end();
    *any = any_refused();
    for (int r = 0; r < num_ranks; r++)
        *any |= states[r].num_failed > 0;
    return right;
}

int main(int argc, char **argv)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc < 3)
        return 2;
    num_hosts = atoi(argv[1]);
    int local_size = atoi(argv[2]), num_failures = 0;
    num_ranks = num_hosts * local_size;
    states = calloc((size_t)num_ranks, sizeof *states);
    if (num_ranks > MOST_RANKS || !states || !network_begin(num_ranks))
        return 2;
    bool any, right = play(local_size, &any);
    if (any || !right)
        return 1;
    long total = num_allocations, first = argc > 3 ? atol(argv[3]) : 1;
    for (failing = first; failing <= (argc > 3 ? first : total); failing++) {
        right &= play(local_size, &any);
        num_failures += any;
    }
    printf("%s, %s\n", total > 100 ? "many allocations" : "few", right ? "right" : "wrong");
    fprintf(stderr, "%ld allocations, of which %d failed something\n", total, num_failures);
    return 0;
}
