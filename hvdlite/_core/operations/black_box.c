/* The black box: what the driver writes into it. No lock, and no system call but for the clock, and for memory
 * when an engine has seen twice as many names as before. */
#define _GNU_SOURCE
#include "operations/black_box.h"

#include <stdlib.h>
#include <string.h>

#include "engine/state.h"

_Static_assert(sizeof(hvdl_box_entry) == 192, "read by other programs");
_Static_assert(offsetof(hvdl_box_memory, entries) == HVDL_BOX_HEAD_BYTES, "the same");

/* ---- rounds: names come again, and ranks need not agree on the order of what they post ---- */

/* A count that began anew on one rank alone would make different operations the same. So none is
 * ever dropped: a key for which there is no room is not counted at all, until the next epoch.
 * Messages and unnamed operations have keys that never come again: they need no count. */
#define FIRST_SLOTS 256 /* a power of two */
#define MOST_KEYS 16384

typedef struct {
    uint64_t key;
    uint32_t count; /* 0: the slot is empty */
} round_count;

/* Open addressing, at most half full. */
struct hvdl_box_rounds {
    round_count *slots;
    size_t num_slots, num_keys;
    uint32_t epoch;
    bool is_full; /* new keys get no slot in this epoch */
};

/* The key's slot, or the empty one where it belongs. */
static round_count *slot_of(round_count *slots, size_t num_slots, uint64_t key)
{
    size_t at = (size_t)(key * 0x9E3779B97F4A7C15u >> 32);
    while (slots[at & (num_slots - 1)].count && slots[at & (num_slots - 1)].key != key)
        at++;
    return &slots[at & (num_slots - 1)];
}

/* Whether there is room for one more key. */
static bool make_room(hvdl_box_rounds *rounds)
{
    if (rounds->is_full || 2 * rounds->num_keys < rounds->num_slots)
        return !rounds->is_full;
    size_t num_slots = rounds->num_slots ? 2 * rounds->num_slots : FIRST_SLOTS;
    round_count *slots =
        num_slots > 2 * MOST_KEYS ? NULL : calloc(num_slots, sizeof *rounds->slots);
    if (!slots) {
        rounds->is_full = true;
        return false;
    }
    for (size_t i = 0; i < rounds->num_slots; i++)
        if (rounds->slots[i].count)
            *slot_of(slots, num_slots, rounds->slots[i].key) = rounds->slots[i];
    free(rounds->slots);
    rounds->slots = slots;
    rounds->num_slots = num_slots;
    return true;
}

static void begin_epoch(hvdl_box_rounds *rounds, uint32_t epoch)
{
    if (rounds->num_keys)
        memset(rounds->slots, 0, rounds->num_slots * sizeof *rounds->slots);
    rounds->num_keys = 0;
    rounds->is_full = false;
    rounds->epoch = epoch;
}

/* 0: it is not counted. */
static uint32_t next_round(hvdl_box_rounds *rounds, uint64_t key, uint32_t epoch)
{
    if (rounds->epoch != epoch)
        begin_epoch(rounds, epoch);
    round_count *slot = rounds->slots ? slot_of(rounds->slots, rounds->num_slots, key) : NULL;
    if (!slot || !slot->count) {
        if (!make_room(rounds))
            return 0;
        slot = slot_of(rounds->slots, rounds->num_slots, key);
        slot->key = key;
        rounds->num_keys++;
    }
    if (slot->count == UINT32_MAX)
        return 0;
    return ++slot->count;
}

/* ---- entries ---- */

#define SKIPPED 16 /* entries of operations that have not ended, for which newer ones make way */

/* A ticket is given once. Two engines write the same entry only if one of them is held up between its ticket and
 * its entry while others take a whole round of tickets; then that entry may mix two operations. */
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

/* Who reads the entry meanwhile sees by its ticket that it is not complete. */
#define PUT(field, value) atomic_store_explicit(&(field), (value), memory_order_relaxed)

/* The ends of long names differ, and their beginnings say what they are of. */
static void put_name(hvdl_box_entry *entry, const char *name)
{
    static const char dots[] = "...";
    enum { FRONT = 40, BACK = HVDL_BOX_NAME_BYTES - FRONT - (sizeof dots - 1) };
    union {
        char text[HVDL_BOX_NAME_BYTES];
        uint64_t words[HVDL_BOX_NAME_BYTES / sizeof(uint64_t)];
    } shown = {{0}};
    size_t length = strlen(name);
    if (length <= HVDL_BOX_NAME_BYTES) {
        memcpy(shown.text, name, length);
    } else {
        memcpy(shown.text, name, FRONT);
        memcpy(shown.text + FRONT, dots, sizeof dots - 1);
        memcpy(shown.text + FRONT + sizeof dots - 1, name + length - BACK, BACK);
    }
    for (size_t i = 0; i < sizeof shown.words / sizeof shown.words[0]; i++)
        PUT(entry->name[i], shown.words[i]);
}

void hvdl_box_write_posted(hvdl_engine *e, hvdl_operation *op)
{
    uint64_t ticket;
    hvdl_box_entry *entry = take_entry(e->black_box.memory, &ticket);
    uint32_t epoch = (uint32_t)e->join.epoch;
    PUT(entry->ticket, 0);
    atomic_thread_fence(memory_order_release); /* before all that follows */
    PUT(entry->key, op->key.lo);
    PUT(entry->posted_ns, op->posted_ns);
    PUT(entry->matched_ns, 0);
    PUT(entry->started_ns, 0);
    PUT(entry->ended_ns, 0);
    PUT(entry->bytes, hvdl_tensor_bytes(op));
    PUT(entry->team, e->config.team);
    bool comes_once = op->unnamed || op->transfer;
    PUT(entry->round, comes_once ? 1 : next_round(e->black_box.rounds, op->key.lo, epoch));
    PUT(entry->epoch, epoch);
    PUT(entry->members, (uint32_t)e->config.num_ranks);
    bool has_peer = op->transfer && op->transfer->posted_peer >= 0;
    PUT(entry->peer, has_peer ? hvdl_world_rank(e, op->transfer->posted_peer) : -1);
    PUT(entry->kind, op->desc.kind);
    PUT(entry->failed, 0);
    PUT(entry->in_words, op->words != NULL);
    put_name(entry, hvdl_shown(op));
    atomic_store_explicit(&entry->ticket, ticket, memory_order_release);
    op->ticket = ticket;
}

void hvdl_box_write_state(hvdl_engine *e, const hvdl_operation *op, int state)
{
    hvdl_box_entry *entry = entry_of(e, op);
    if (!entry)
        return;
    /* A failure may come long after the last sweep. */
    uint64_t now_ns = state == HVDL_FAILED ? hvdl_now_ns() : hvdl_box_now(&e->black_box);
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
    if (box->rounds)
        free(box->rounds->slots);
    free(box->rounds);
}
