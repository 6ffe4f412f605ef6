/* Circles: rank 0 waits in broadcast 'x', which rank 1 has not posted; and rank 1 waits in allreduce 'x', which
 * rank 0 has not. A thread that has waited for some time says so, and its engine publishes it to the ranks of the
 * host. Each of them looks for a circle among those waits.
 *
 * A circle is named when it is late. If none of its ranks has another thread that could post what is
 * missing, it can't end: its operations fail at once, as an entry of the journal, on all ranks that posted
 * them. Then they are as if no rank had posted them, and the engine goes on.
 *
 * That it can't end is certain if all its waits and all that is missing hold at one time. A rank whose
 * wait is still the same later has posted nothing in between. So this rank reads the waits, then the journal as
 * far as it went then, where what those ranks posted before they waited must stand; it finds what is missing; and
 * then it looks whether the waits are the same. */
#define _GNU_SOURCE
#include "watching/circle.h"

#include <string.h>

#include "engine/state.h"
#include "matching/announcing.h"
#include "matching/meetings.h"
#include "matching/replay.h"
#include "operations/operations.h"
#include "operations/plans.h"
#include "watching/report.h"
#include "watching/stall.h"

#define LOOK_NS 20000000ull

typedef struct {
    int32_t count;
    int32_t unused;
    struct {
        hvdl_key key;
        uint64_t meeting;
    } waits[]; /* the text follows */
} circle_body;

/* ---- what this rank publishes ---- */

/* Under circle.lock. Odd while it is written; a reader that sees a change reads again. */
static void publish(hvdl_engine *e, const hvdl_shm_wait *wait)
{
    hvdl_shm_rank *self = &e->shm.control->ranks[e->placement.local];
    uint32_t sequence = atomic_load_explicit(&self->wait_sequence, memory_order_relaxed);
    atomic_store_explicit(&self->wait_sequence, sequence + 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    self->wait = *wait;
    atomic_store_explicit(&self->wait_sequence, sequence + 2, memory_order_release);
    e->circle.published = wait->waits;
}

static void withdraw(hvdl_engine *e)
{
    if (e->circle.published)
        publish(e, &(hvdl_shm_wait){0});
}

static hvdl_shm_wait read_wait(hvdl_engine *e, int local)
{
    if (local == e->placement.local) { /* written by another thread of this process */
        pthread_mutex_lock(&e->circle.lock);
        hvdl_shm_wait own = e->shm.control->ranks[local].wait;
        pthread_mutex_unlock(&e->circle.lock);
        return own;
    }
    const hvdl_shm_rank *rank = &e->shm.control->ranks[local];
    for (int tries = 0; tries < 1000; tries++) {
        uint32_t before = atomic_load_explicit(&rank->wait_sequence, memory_order_acquire);
        hvdl_shm_wait wait = rank->wait;
        atomic_thread_fence(memory_order_acquire);
        if (!(before & 1) &&
            before == atomic_load_explicit(&rank->wait_sequence, memory_order_relaxed))
            return wait;
    }
    return (hvdl_shm_wait){0};
}

void hvdl_operation_waits(hvdl_engine *e, const hvdl_operation *op, bool alone)
{
    hvdl_circle *circle = &e->circle;
    pthread_mutex_lock(&circle->lock);
    bool is_new = !circle->waits_in; /* else another thread waits too, and one of them is enough */
    if (is_new || (circle->waits_in == op->number && circle->alone != alone)) {
        withdraw(e);
        circle->id++;
        circle->waits_in = op->number;
        circle->alone = alone;
    }
    pthread_mutex_unlock(&circle->lock);
}

void hvdl_operation_waits_no_more(hvdl_engine *e, const hvdl_operation *op)
{
    hvdl_circle *circle = &e->circle;
    pthread_mutex_lock(&circle->lock);
    if (circle->waits_in == op->number) {
        circle->waits_in = 0;
        withdraw(e);
    }
    pthread_mutex_unlock(&circle->lock);
}

/* Under both locks. NULL: it has ended. */
static hvdl_operation *operation_by_number(const hvdl_engine *e, uint64_t number)
{
    for (size_t i = 0; i < e->queue.in_flight.num_slots; i++)
        for (hvdl_node *node = e->queue.in_flight.slots[i]; node; node = node->next) {
            hvdl_operation *op = HVDL_CONTAINER(node, hvdl_operation, by_key);
            if (op->number == number)
                return op;
        }
    return NULL;
}

/* All that this rank has posted stands in the journal, and the operation lacks a rank of this host. */
static bool can_be_published(const hvdl_engine *e, const hvdl_operation *op)
{
    return op && op->meeting && op->meeting->collecting && !e->announcing.posts &&
           !e->announcing.deferred && !atomic_load(&e->queue.queued) && !e->plans.num_waiting_runs;
}

/* Returns whether this rank's wait is known to the others. */
static bool publish_wait(hvdl_engine *e)
{
    hvdl_circle *circle = &e->circle;
    pthread_mutex_lock(&circle->lock);
    if (circle->waits_in && !circle->published) {
        pthread_mutex_lock(&e->queue.lock);
        const hvdl_operation *op = operation_by_number(e, circle->waits_in);
        bool stands_there = can_be_published(e, op);
        pthread_mutex_unlock(&e->queue.lock);
        if (stands_there) { /* it is ended by the driver alone, which this is */
            hvdl_shm_wait wait = {.id = circle->id,
                                  .meeting = op->meeting->id,
                                  .key_lo = op->key.lo,
                                  .key_hi = op->key.hi,
                                  .since_ns = op->posted_ns,
                                  .waits = true,
                                  .kind = op->desc.kind,
                                  .alone = circle->alone,
                                  .in_words = op->words != NULL,
                                  .comes_again = hvdl_comes_again(e, op)};
            hvdl_copy_name(wait.name, sizeof wait.name, hvdl_shown(op));
            publish(e, &wait);
        }
    }
    bool published = circle->published;
    pthread_mutex_unlock(&circle->lock);
    return published;
}

/* ---- finding a circle ---- */

static hvdl_key key_of(const hvdl_shm_wait *wait)
{
    return (hvdl_key){wait->key_lo, wait->key_hi};
}

/* NULL: the operation does not lack a rank of this host any more. */
static hvdl_meeting *collecting_meeting(hvdl_engine *e, hvdl_key key, uint64_t id)
{
    hvdl_plan *plan = hvdl_plan_by_key(e, key);
    hvdl_meeting *meeting = plan ? plan->collecting : hvdl_meeting_by_key(e, key);
    return meeting && meeting->id == id ? meeting : NULL;
}

/* The next rank of the circle after each, by local rank; -1: it is in none. alone: of ranks alone. */
static void find_next(hvdl_engine *e, const hvdl_shm_wait *waits, bool alone, int *next)
{
    int ranks = e->placement.local_size;
    hvdl_meeting *meetings[ranks];
    for (int r = 0; r < ranks; r++) {
        meetings[r] = NULL;
        if (waits[r].waits && (!alone || waits[r].alone))
            meetings[r] = collecting_meeting(e, key_of(&waits[r]), waits[r].meeting);
        next[r] = meetings[r] ? r : -1;
    }
    /* Those that wait for none of the others that are left are in no circle. */
    for (bool again = true; again;) {
        again = false;
        for (int r = 0; r < ranks; r++) {
            if (next[r] < 0)
                continue;
            next[r] = -1;
            for (int q = 0; q < ranks && next[r] < 0; q++)
                if (q != r && meetings[q] && !meetings[r]->posted_by[q])
                    next[r] = q;
            if (next[r] < 0) {
                meetings[r] = NULL;
                again = true;
            }
        }
    }
}

/* The ranks of a circle, the lowest first, into `members`. Returns how many; 0: there is none. */
static int find_circle(hvdl_engine *e, const hvdl_shm_wait *waits, bool alone, int *members)
{
    int ranks = e->placement.local_size, next[ranks], at = 0, lowest, count = 0;
    find_next(e, waits, alone, next);
    while (at < ranks && next[at] < 0)
        at++;
    if (at == ranks)
        return 0;
    for (int i = 0; i < ranks; i++) /* into the circle */
        at = next[at];
    lowest = at;
    for (int r = next[at]; r != at; r = next[r])
        lowest = r < lowest ? r : lowest;
    members[count++] = lowest;
    for (int r = next[lowest]; r != lowest; r = next[r])
        members[count++] = r;
    return count;
}

static void describe(const hvdl_engine *e, const hvdl_shm_wait *waits, const int *members,
                     int count, hvdl_writer *to)
{
    for (int i = 0; i < count; i++) {
        const hvdl_shm_wait *wait = &waits[members[i]];
        int rank = hvdl_rank_of_local(e, members[i]);
        int awaited = hvdl_rank_of_local(e, members[(i + 1) % count]);
        char title[HVDL_TITLE_BYTES];
        if (!i)
            hvdl_put(to, "rank %d", hvdl_world_rank(e, rank));
        hvdl_put_title(title, sizeof title, hvdl_kind_name(wait->kind), wait->in_words, wait->name);
        hvdl_put(to, "%s waits in %s for rank %d", i ? ", which" : "", title,
                 hvdl_world_rank(e, awaited));
    }
}

/* In a circle of hvdlite's own operations, such as those of two optimizers, no rank has
 * come to the end of its batches. */
static void put_question(const hvdl_shm_wait *waits, const int *members, int count, hvdl_writer *to)
{
    bool any = false;
    for (int i = 0; i < count; i++)
        any |= waits[members[i]].comes_again && !waits[members[(i + 1) % count]].in_words;
    if (any)
        hvdl_put(to, "; %s", hvdl_uneven);
}

/* ---- what follows ---- */

/* Since they were read, each has waited and posted nothing. */
static bool still_wait(hvdl_engine *e, const hvdl_shm_wait *waits, const int *members, int count)
{
    for (int i = 0; i < count; i++) {
        hvdl_shm_wait now = read_wait(e, members[i]);
        if (!now.waits || now.id != waits[members[i]].id)
            return false;
    }
    return true;
}

static void announce_circle(hvdl_engine *e, const hvdl_shm_wait *waits, const int *members,
                            int count)
{
    char text[HVDL_TEXT_BYTES];
    hvdl_writer to = {text, sizeof text, 0};
    size_t head = sizeof(circle_body) + (size_t)count * sizeof((circle_body *)0)->waits[0];
    circle_body *body = calloc(1, head + sizeof text);
    if (!body)
        return; /* the stall check reports it later */
    body->count = count;
    for (int i = 0; i < count; i++) {
        body->waits[i].key = key_of(&waits[members[i]]);
        body->waits[i].meeting = waits[members[i]].meeting;
    }
    describe(e, waits, members, count, &to);
    hvdl_put(&to,
             ": they wait in a circle, and no other thread can call what is missing; call the same "
             "operations in the same order on every rank");
    put_question(waits, members, count, &to);
    memcpy((char *)body + head, text, to.used + 1);
    hvdl_announce(e, (hvdl_entry){.type = HVDL_ENTRY_CIRCLE}, body, head + to.used + 1);
    free(body);
}

void hvdl_read_circle(hvdl_engine *e, const hvdl_entry *entry)
{
    const circle_body *body = hvdl_entry_body(entry);
    const char *text = (const char *)&body->waits[body->count];
    /* Another rank has found the same one, or a part of it, before. */
    for (int i = 0; i < body->count; i++)
        if (!collecting_meeting(e, body->waits[i].key, body->waits[i].meeting))
            return;
    for (int i = 0; i < body->count; i++) {
        hvdl_meeting *meeting = collecting_meeting(e, body->waits[i].key, body->waits[i].meeting);
        if (!meeting)
            continue; /* two ranks of the circle wait in the same operation */
        if (meeting->operation)
            hvdl_finish(e, meeting->operation, text);
        hvdl_meeting_drop(e, meeting);
    }
}

/* One that can end, once: the lowest of its ranks speaks. */
static void report(hvdl_engine *e, const hvdl_shm_wait *waits, const int *members, int count)
{
    uint64_t now = hvdl_now_ns(), limit = e->config.stall_warning_ns, sum = 1;
    char text[HVDL_TEXT_BYTES + 32] = "hvdlite: ";
    hvdl_writer to = {text, HVDL_TEXT_BYTES, strlen(text)};
    for (int i = 0; i < count; i++) {
        const hvdl_shm_wait *wait = &waits[members[i]];
        sum += wait->meeting;
        if (!limit || now < wait->since_ns + limit)
            return;
    }
    if (members[0] != e->placement.local || sum == e->circle.told)
        return;
    e->circle.told = sum;
    describe(e, waits, members, count, &to);
    hvdl_put(&to, ": a circle; call the same operations in the same order on every rank");
    put_question(waits, members, count, &to);
    strcat(text, "\n");
    e->config.say(text);
}

void hvdl_circle_look(hvdl_engine *e)
{
    int ranks = e->placement.local_size, members[ranks];
    hvdl_shm_wait waits[ranks];
    uint64_t now = hvdl_now_ns();
    if (ranks == 1 || now < e->circle.next_look_ns || e->failure.broken)
        return;
    e->circle.next_look_ns = now + LOOK_NS;
    if (!publish_wait(e))
        return;
    for (int r = 0; r < ranks; r++)
        waits[r] = read_wait(e, r);
    uint64_t tail = atomic_load_explicit(&e->shm.control->tail, memory_order_acquire);
    hvdl_read_journal(e);
    if (e->shm.read_position < tail || e->failure.broken)
        return; /* a rank is just writing to it */
    int count = find_circle(e, waits, true, members);
    if (count && still_wait(e, waits, members, count)) {
        announce_circle(e, waits, members, count);
        return;
    }
    count = find_circle(e, waits, false, members);
    if (count)
        report(e, waits, members, count);
}
