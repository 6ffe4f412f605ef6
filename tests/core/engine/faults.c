/* A program of operations, in which one thing fails (failing.h): the first of its kind, the second, and so on,
 * until there are no more. All ranks of all hosts are engines of this process, driven by turns in one thread,
 * for test_faults.py, which compiles it together with the core. Nothing is timed: what hangs is what has not
 * ended after so many rounds in which every engine looks once. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <sys/mman.h>
#include <unistd.h>

#include "failing.h"
#include "operations/black_box.h"

#define MOST_RANKS 8
#define ROUNDS 6000
#define ROUNDS_ANYWAY 1500
#define BLOCK_BYTES 256
#define INLINE_BYTES 64

/* ---- engines ---- */

static int num_hosts, local_size, num_ranks;
static hvdl_engine *engines[MOST_RANKS];
static hvdl_box_memory boxes[MOST_RANKS];

static void say_nothing(const char *line)
{
    (void)line;
}

static int make_region(void)
{
    size_t bytes;
    int fd = memfd_create("faults", 0);
    size_t payload = hvdl_posted_payload(num_ranks, INLINE_BYTES);
    if (fd < 0 || hvdl_shm_bytes(local_size, payload, BLOCK_BYTES, &bytes) ||
        ftruncate(fd, (off_t)bytes))
        return -1;
    return fd;
}

static hvdl_err make_engines(void)
{
    int sizes[MOST_RANKS], ranks[MOST_RANKS], fds[MOST_RANKS];
    const char *names[MOST_RANKS];
    hvdl_err err = HVDL_OK;
    for (int h = 0; h < num_hosts; h++) {
        sizes[h] = local_size;
        names[h] = "host";
        fds[h] = make_region();
    }
    for (int r = 0; r < num_ranks; r++)
        ranks[r] = r;
    for (int r = 0; !err && r < num_ranks; r++) {
        hvdl_wire wire = failing_wire(r);
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
#define MOST_OPERATIONS 16

typedef struct {
    hvdl_operation *operations[MOST_OPERATIONS];
    hvdl_plan *plan;
    int num_operations, num_failed;
    bool refused; /* something was not posted: the caller has learned of it */
    float in[ELEMS], out[MOST_OPERATIONS][ELEMS * MOST_RANKS]; /* by operation */
    int summed
        [MOST_OPERATIONS]; /* so many elements of the result are the ranks' sums; 0: not looked at */
    int64_t splits[2 * MOST_RANKS];
    void *parts[MOST_RANKS];
} rank_state;

static rank_state *states;

static hvdl_posting posting_of(rank_state *state, const char *name, int kind, int op, int count)
{
    hvdl_posting posting = {
        .name = name, .input = state->in, .output = state->out[state->num_operations]};
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
    acting = rank;
    state->summed[state->num_operations] = kind == HVDL_ALLREDUCE && op == HVDL_SUM ? count : 0;
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
        state->parts[r] = state->out[state->num_operations] + r * count;
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
    acting = rank;
    if (hvdl_engine_post(engines[rank], &posting, false, &state->operations[state->num_operations]))
        state->refused = true;
    else
        state->num_operations++;
}

static void start(int rank)
{
    rank_state *state = &states[rank];
    const hvdl_weight weight = {1.0 + rank, false}; /* keeping them takes memory, too */
    acting = rank;
    state->summed[state->num_operations] = 0;
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
    acting = rank;
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

static bool every_rank_is_done(void)
{
    bool done = true;
    for (int r = 0; r < num_ranks; r++)
        done &= all_done(r);
    return done;
}

/* Every engine looks once. */
static void look(void)
{
    tick++;
    for (acting = 0; acting < num_ranks; acting++)
        hvdl_engine_poll(engines[acting]);
}

/* Whether a rank need not hear of it before the others leave: one could not post an operation, or a message is
 * lost, or MPI carries none from the host of the rank that has failed. */
static bool is_excused(int rank)
{
    bool on_its_host = rank / local_size == failed / local_size;
    return any_refused() || (failed >= 0 && fault == FAULT_MESSAGE) ||
           (failed >= 0 && fault == FAULT_CALLS && !on_its_host);
}

static bool look_until_done(void)
{
    for (int round = 0; round < ROUNDS; round++) {
        bool done = true;
        look();
        for (int r = 0; r < num_ranks; r++)
            done &= all_done(r) || (round > ROUNDS_ANYWAY && is_excused(r));
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
    for (int i = 0; i < 40; i++)
        look();
    int alone = states[num_ranks - 1].num_operations;
    post(num_ranks - 1, "alone", HVDL_ALLREDUCE, HVDL_SUM, ELEMS);
    states[num_ranks - 1].summed[alone] = 0; /* the others give zeros */
    start(num_ranks - 1);
    post(num_ranks - 1, "join", HVDL_JOIN, HVDL_SUM, 0);
    return look_until_done();
}

/* ---- what it has come to ---- */

__attribute__((format(printf, 1, 2))) static bool wrong(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    printf("%s %ld (%s, rank %d): ", fault_names[fault], failing, what ? what : "none", failed);
    vprintf(format, arguments);
    putchar('\n');
    va_end(arguments);
    return false;
}

static bool is_expected(const char *text)
{
    bool by_mpi = fault == FAULT_CALL || fault == FAULT_CALLS;
    return strstr(text, "has left") || strstr(text, "called shutdown") ||
           (fault == FAULT_ALLOCATION && strstr(text, "memory")) ||
           (by_mpi && strstr(text, "MPI reported an error"));
}

/* x[i] = rank + ranks i, so that no other sum is the same. */
static bool has_sums(const rank_state *state, int i)
{
    float ranks = (float)num_ranks;
    for (int e = 0; e < state->summed[i]; e++)
        if (state->out[i][e] != ranks * (ranks - 1) / 2 + ranks * ranks * (float)e)
            return false;
    return true;
}

/* Counts the failures of operations that have ended; those that succeed have the right result. */
static bool look_at_results(void)
{
    bool right = true;
    for (int r = 0; r < num_ranks; r++) {
        rank_state *state = &states[r];
        for (int i = 0; i < state->num_operations; i++) {
            if (!hvdl_operation_done(state->operations[i])) {
                right = wrong("operation %d of rank %d is pending after close", i, r);
                continue;
            }
            const char *text = hvdl_operation_error(state->operations[i]);
            state->num_failed += text != NULL;
            if (text && !is_expected(text))
                right = wrong("rank %d says: %s", r, text);
            if (!text && fault != FAULT_MESSAGE && !has_sums(state, i))
                right = wrong("operation %d of rank %d succeeds with a wrong result", i, r);
        }
    }
    return right;
}

static bool end(void)
{
    for (acting = 0; acting < num_ranks; acting++)
        hvdl_engine_close(engines[acting], false);
    armed = false;
    bool right = look_at_results();
    for (int r = 0; r < num_ranks; r++) {
        rank_state *state = &states[r];
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
static bool play(bool *any)
{
    bool right = true;
    memset(states, 0, (size_t)num_ranks * sizeof *states);
    for (int r = 0; r < num_ranks; r++)
        for (int to = 0; to < num_ranks; to++)
            states[r].splits[to] = 100;
    for (int r = 0; r < num_ranks; r++)
        for (int i = 0; i < ELEMS; i++)
            states[r].in[i] = (float)(r + num_ranks * i);
    forget_messages();
    failed = -1;
    what = NULL;
    if (make_engines())
        return false;
    num_seen = 0;
    armed = true;
    bool ended = step_collectives();
    if (ended && !any_refused() && every_rank_is_done())
        ended = step_join();
    if (!ended)
        right = wrong("an operation never ends");
    right &= end();
    *any = any_refused();
    for (int r = 0; r < num_ranks; r++)
        *any |= states[r].num_failed > 0;
    return right;
}

/* faults KIND HOSTS RANKS_PER_HOST [STEP [FIRST [LAST]]]: every STEP-th from the FIRST to the LAST. Prints what
 * is wrong, and how many there were; the exit code is 1 if anything is wrong. */
int main(int argc, char **argv)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc < 4)
        return 2;
    while (fault < NUM_FAULTS && strcmp(argv[1], fault_names[fault]))
        fault++;
    num_hosts = atoi(argv[2]);
    local_size = atoi(argv[3]);
    num_ranks = num_hosts * local_size;
    states = calloc((size_t)num_ranks, sizeof *states);
    if (fault == NUM_FAULTS || num_ranks > MOST_RANKS || !states || !network_begin(num_ranks))
        return 2;
    bool any, right = play(&any);
    if (any || !right)
        return 2;
    long step = argc > 4 ? atol(argv[4]) : 1, first = argc > 5 ? atol(argv[5]) : 1;
    long last = argc > 6 ? atol(argv[6]) : num_seen, num_played = 0, num_failures = 0;
    for (failing = first; failing <= last; failing += step) {
        right &= play(&any);
        num_played++;
        num_failures += any;
    }
    printf("%ld cases of %s, failures in %ld: %s\n", num_played, fault_names[fault], num_failures,
           right ? "right" : "wrong");
    return !right;
}
