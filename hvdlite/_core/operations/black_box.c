/* The black box: what the driver writes into it. No system call but for the clock, no lock, no memory. */
#define _GNU_SOURCE
#include "operations/black_box.h"

#include <stdlib.h>
#include <string.h>

#include "engine/state.h"

_Static_assert(sizeof(hvdl_box_entry) == 128, "read by other programs");
_Static_assert(offsetof(hvdl_box_memory, entries) == HVDL_BOX_HEAD_BYTES, "the same");

/* ---- rounds: names come again, and ranks need not agree on the order of what they post ---- */

#define SETS 64 /* a power of two */
#define WAYS 4

typedef struct {
    uint64_t key;
    uint32_t epoch, count;
} round_count;

struct hvdl_box_rounds {
    round_count sets[SETS][WAYS]; /* in each, the latest first */
};

/* Of a name that has not come for long the count begins anew; then all ranks have forgotten it. */
static uint32_t next_round(hvdl_box_rounds *rounds, uint64_t key, uint32_t epoch)
{
    round_count *set = rounds->sets[key % SETS], found = {key, epoch, 0};
    int way = 0;
    while (way < WAYS - 1 && (set[way].key != key || set[way].epoch != epoch))
        way++;
    if (set[way].key == key && set[way].epoch == epoch)
        found = set[way];
    found.count++;
    memmove(set + 1, set, (size_t)way * sizeof *set);
    set[0] = found;
    return found.count;
}

/* ---- entries ---- */

#define SKIPPED 16 /* entries of operations that have not ended, for which newer ones make way */

/* Tickets are given once, so that no two engines write the same entry. */
static hvdl_box_entry *take_entry(hvdl_box_memory *memory, uint64_t *ticket)
{
    hvdl_box_entry *entry = NULL;
    for (int tries = 0; tries <= SKIPPED; tries++) {
        *ticket = 1 + atomic_fetch_add_explicit(&memory->last_ticket, 1, memory_order_relaxed);
        entry = &memory->entries[*ticket % HVDL_BOX_ENTRIES];
        if (!atomic_load_explicit(&entry->ticket, memory_order_relaxed) ||
            atomic_load_explicit(&entry->ended_ns, memory_order_relaxed))
            break;
    }
    return entry;
}

/* NULL: newer ones have taken its place. */
static hvdl_box_entry *entry_of(const hvdl_engine *e, const hvdl_operation *op)
{
    hvdl_box_entry *entry = &e->black_box.memory->entries[op->ticket % HVDL_BOX_ENTRIES];
    bool is_its =
        op->ticket && atomic_load_explicit(&entry->ticket, memory_order_relaxed) == op->ticket;
    return is_its ? entry : NULL;
}

/* The ends of long names differ, and their beginnings say what they are of. */
static void put_name(char *to, const char *name)
{
    static const char dots[] = "...";
    enum { FRONT = 14, BACK = HVDL_BOX_NAME_BYTES - FRONT - (sizeof dots - 1) };
    size_t length = strlen(name);
    if (length <= HVDL_BOX_NAME_BYTES) {
        memcpy(to, name, length);
        if (length < HVDL_BOX_NAME_BYTES)
            to[length] = 0; /* what a former name leaves behind it is not read */
        return;
    }
    memcpy(to, name, FRONT);
    memcpy(to + FRONT, dots, sizeof dots - 1);
    memcpy(to + FRONT + sizeof dots - 1, name + length - BACK, BACK);
}

/* One look at the clock per sweep, which takes less than what a reader cares about. */
static uint64_t sweeps_now(hvdl_black_box *box)
{
    if (!box->now_ns)
        box->now_ns = hvdl_now_ns();
    return box->now_ns;
}

void hvdl_box_write_posted(hvdl_engine *e, hvdl_operation *op)
{
    uint64_t ticket;
    hvdl_box_entry *entry = take_entry(e->black_box.memory, &ticket);
    uint32_t epoch = (uint32_t)e->join.epoch;
    atomic_store_explicit(&entry->ticket, 0, memory_order_relaxed);
    atomic_thread_fence(memory_order_release); /* before all that follows */
    entry->key = op->key.lo;
    entry->posted_ns = op->posted_ns;
    atomic_store_explicit(&entry->matched_ns, 0, memory_order_relaxed);
    atomic_store_explicit(&entry->started_ns, 0, memory_order_relaxed);
    atomic_store_explicit(&entry->ended_ns, 0, memory_order_relaxed);
    entry->bytes = hvdl_tensor_bytes(op);
    entry->team = e->config.team;
    entry->round = next_round(e->black_box.rounds, op->key.lo, epoch);
    entry->epoch = epoch;
    entry->members = (uint32_t)e->config.num_ranks;
    bool has_peer = op->transfer && op->transfer->posted_peer >= 0;
    atomic_store_explicit(&entry->peer,
                          has_peer ? hvdl_world_rank(e, op->transfer->posted_peer) : -1,
                          memory_order_relaxed);
    entry->kind = op->desc.kind;
    atomic_store_explicit(&entry->failed, 0, memory_order_relaxed);
    put_name(entry->name, op->name);
    atomic_store_explicit(&entry->ticket, ticket, memory_order_release);
    op->ticket = ticket;
}

void hvdl_box_write_state(hvdl_engine *e, const hvdl_operation *op, int state)
{
    hvdl_box_entry *entry = entry_of(e, op);
    if (!entry)
        return;
    /* A failure may come long after the last sweep. */
    uint64_t now_ns = state == HVDL_FAILED ? hvdl_now_ns() : sweeps_now(&e->black_box);
    _Atomic uint64_t *time = state == HVDL_MATCHED   ? &entry->matched_ns
                             : state == HVDL_RUNNING ? &entry->started_ns
                                                     : &entry->ended_ns;
    if (state == HVDL_FAILED)
        atomic_store_explicit(&entry->failed, 1, memory_order_relaxed);
    atomic_store_explicit(time, now_ns, memory_order_release);
}

void hvdl_box_write_peer(hvdl_engine *e, const hvdl_operation *op, int peer)
{
    hvdl_box_entry *entry = entry_of(e, op);
    if (entry)
        atomic_store_explicit(&entry->peer, peer, memory_order_relaxed);
}

/* ---- life ---- */

size_t hvdl_box_bytes(void)
{
    return sizeof(hvdl_box_memory);
}

hvdl_err hvdl_box_open(hvdl_black_box *box, hvdl_box_memory *memory)
{
    if (!memory)
        return HVDL_OK;
    box->rounds = calloc(1, sizeof *box->rounds);
    box->memory = box->rounds ? memory : NULL;
    return box->rounds ? HVDL_OK : HVDL_ENOMEM;
}

void hvdl_box_free(hvdl_black_box *box)
{
    free(box->rounds);
}
