/* Black boxes are read while they are written: two ranks of one host, each with a thread that calls
 * operations and one that reads its box, for test_black_box.py, which compiles it together with the core.
 *
 * More operations than a box has entries, so that entries are read while newer operations take them. What an
 * operation is called says how large it is: an entry of which a part is another one's is found. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "engine/engine.h"
#include "host/shm.h"
#include "operations/black_box.h"

#include "../engine/postings.h"

#define RANKS 2
#define NAMES 37
#define BLOCK_BYTES 4096
#define INLINE_BYTES 64

typedef struct {
    int rank;
    hvdl_engine *engine;
    hvdl_box_memory *box;
    _Atomic bool done;
    uint64_t num_read, num_wrong;
    pthread_t caller, reader;
} member;

static member members[RANKS];
static int num_operations;

static void say(const char *line)
{
    fputs(line, stderr);
}

static bool open_all(void)
{
    const int size = RANKS, ranks[RANKS] = {0, 1};
    const char *name = "here";
    size_t bytes, payload = hvdl_posted_payload(RANKS, INLINE_BYTES);
    int fd = memfd_create("box readers", 0);
    bool failed = fd < 0 || hvdl_shm_bytes(RANKS, payload, BLOCK_BYTES, &bytes) ||
                  ftruncate(fd, (off_t)bytes);
    for (int r = 0; r < RANKS && !failed; r++) {
        members[r].rank = r;
        members[r].box = calloc(1, sizeof *members[r].box);
        hvdl_engine_config config = {.rank = r,
                                     .num_ranks = RANKS,
                                     .num_hosts = 1,
                                     .host_sizes = &size,
                                     .members = ranks,
                                     .world_ranks = ranks,
                                     .host_names = &name,
                                     .memory_fd = fd,
                                     .inline_bytes = INLINE_BYTES,
                                     .block_bytes = BLOCK_BYTES,
                                     .segment_bytes = 256,
                                     .piece_bytes = 1024,
                                     .say = say,
                                     .launcher = {.fd = -1},
                                     .black_box = members[r].box};
        failed = !members[r].box || hvdl_engine_create(&members[r].engine, &config);
    }
    close(fd);
    return !failed;
}

static void *call(void *given)
{
    member *own = given;
    float values[NAMES];
    for (int i = 0; i < num_operations; i++) {
        char name[2 * HVDL_BOX_NAME_BYTES];
        int count = 1 + i % NAMES;
        snprintf(name, sizeof name,
                 "%d of them, a name that is longer than the room that an entry has for one, which "
                 "is much, and so it is cut in its middle, or not%s",
                 count, count % 2 ? "" : ", or is");
        for (int k = 0; k < count; k++)
            values[k] = 1;
        hvdl_posting posting = sum_posting(name, values, count);
        hvdl_operation *operation;
        if (hvdl_engine_post(own->engine, &posting, false, &operation))
            abort();
        while (!hvdl_operation_done(operation)) {
            hvdl_engine_poll(own->engine);
            sched_yield();
        }
        if (hvdl_operation_error(operation) || values[count - 1] != RANKS)
            abort();
        hvdl_operation_release(own->engine, operation);
    }
    atomic_store_explicit(&own->done, true, memory_order_relaxed);
    return NULL;
}

typedef struct {
    uint64_t times[4], bytes;
    uint32_t members;
    uint8_t kind;
    union {
        char text[HVDL_BOX_NAME_BYTES];
        uint64_t words[HVDL_BOX_NAME_BYTES / sizeof(uint64_t)];
    } name;
} entry_read;

/* Whether it was complete, and has not changed meanwhile. */
static bool read_entry(hvdl_box_entry *entry, entry_read *to)
{
    uint64_t ticket = atomic_load_explicit(&entry->ticket, memory_order_acquire);
    _Atomic uint64_t *times[] = {&entry->posted_ns, &entry->matched_ns, &entry->started_ns,
                                 &entry->ended_ns};
    if (!ticket)
        return false;
    /* Each an acquire, so that the second look at the ticket comes after them. The last time first. */
    for (int i = 3; i >= 0; i--)
        to->times[i] = atomic_load_explicit(times[i], memory_order_acquire);
    to->bytes = atomic_load_explicit(&entry->bytes, memory_order_acquire);
    to->members = atomic_load_explicit(&entry->members, memory_order_acquire);
    to->kind = atomic_load_explicit(&entry->kind, memory_order_acquire);
    for (size_t i = 0; i < sizeof to->name.words / sizeof to->name.words[0]; i++)
        to->name.words[i] = atomic_load_explicit(&entry->name[i], memory_order_acquire);
    return atomic_load_explicit(&entry->ticket, memory_order_relaxed) == ticket;
}

static bool is_right(const entry_read *found)
{
    uint64_t count = strtoul(found->name.text, NULL, 10);
    const char *end = found->name.text + HVDL_BOX_NAME_BYTES - 5;
    bool right = found->bytes == count * sizeof(float) && count && found->members == RANKS &&
                 found->kind == HVDL_ALLREDUCE && found->times[0] &&
                 !memcmp(end, count % 2 ? "r not" : "or is", 5);
    for (int i = 1; i < 4; i++)
        if (found->times[i] && found->times[i] < found->times[i - 1])
            right = false;
    return right;
}

static void *look(void *given)
{
    member *own = given;
    bool done;
    do {
        done = atomic_load_explicit(&own->done, memory_order_relaxed);
        for (int i = 0; i < HVDL_BOX_ENTRIES; i++) {
            entry_read found;
            if (!read_entry(&own->box->entries[i], &found))
                continue;
            own->num_read++;
            own->num_wrong += !is_right(&found);
        }
    } while (!done);
    return NULL;
}

int main(int argc, char **argv)
{
    num_operations = argc > 1 ? atoi(argv[1]) : 0;
    if (!open_all())
        return 2;
    for (int r = 0; r < RANKS; r++)
        if (pthread_create(&members[r].caller, NULL, call, &members[r]) ||
            pthread_create(&members[r].reader, NULL, look, &members[r]))
            return 2;
    for (int r = 0; r < RANKS; r++) {
        pthread_join(members[r].caller, NULL);
        pthread_join(members[r].reader, NULL);
    }
    uint64_t num_wrong = 0;
    bool all = true;
    for (int r = 0; r < RANKS; r++) {
        num_wrong += members[r].num_wrong;
        all &= members[r].num_read >= HVDL_BOX_ENTRIES;
        hvdl_engine_close(members[r].engine, false);
    }
    for (int r = 0; r < RANKS; r++) {
        hvdl_engine_free(members[r].engine);
        free(members[r].box);
    }
    printf("%s entries read, %llu wrong\n", all ? "all" : "not all", (unsigned long long)num_wrong);
    return 0;
}
