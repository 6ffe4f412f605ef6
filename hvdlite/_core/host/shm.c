#define _GNU_SOURCE
#include "host/shm.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "host/mailbox.h"
#include "kernels/reduce.h"
#include "base/sizes.h"

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

/* ---- layout ---- */

typedef struct {
    uint64_t ring_bytes;
    size_t stamps, ring, staging, mail, total; /* offsets; all pages of their own */
} layout;

static size_t round_up(size_t bytes, size_t to)
{
    return (bytes + to - 1) / to * to;
}

static hvdl_err round_up_checked(size_t bytes, size_t to, size_t *rounded)
{
    return hvdl_add(bytes, (to - bytes % to) % to, rounded);
}

/* A block must hold a cache line for each rank's slice. */
static hvdl_err usable_block_bytes(int local_size, size_t block_bytes, size_t *usable)
{
    size_t least = (size_t)local_size * 64;
    return round_up_checked(block_bytes < least ? least : block_bytes, 64, usable);
}

/* Room for four tiny operations of all ranks before the slowest reader must have moved on. */
static hvdl_err make_ring(int local_size, size_t payload_bytes, uint64_t *ring_bytes)
{
    size_t wanted = 0, bytes = 1 << 20;
    hvdl_err err = hvdl_add(payload_bytes, 4 * HVDL_ENTRY_ALIGN, &wanted);
    if (!err)
        err = hvdl_multiply(wanted, 4 * (size_t)local_size, &wanted);
    while (!err && bytes < wanted)
        err = hvdl_multiply(bytes, 2, &bytes);
    if (!err)
        *ring_bytes = bytes;
    return err;
}

static hvdl_err make_layout(int local_size, size_t payload_bytes, size_t block_bytes, layout *to)
{
    layout at;
    size_t ranks = (size_t)local_size, staging = 0, mail = 0;
    hvdl_err err = make_ring(local_size, payload_bytes, &at.ring_bytes);
    if (err)
        return err;
    size_t control = sizeof(hvdl_shm_control) + ranks * sizeof(hvdl_shm_rank);
    size_t stamps = at.ring_bytes / HVDL_ENTRY_ALIGN * sizeof(uint64_t);
    at.stamps = round_up(control, 4096);
    err = hvdl_add(at.stamps, stamps, &at.ring);
    if (!err)
        err = round_up_checked(at.ring, 4096, &at.ring);
    if (!err)
        err = hvdl_add(at.ring, at.ring_bytes, &at.staging);
    if (!err && local_size > 1)
        err = usable_block_bytes(local_size, block_bytes, &staging);
    if (!err)
        err = hvdl_multiply(staging, ranks * HVDL_NUM_BUFFERS, &staging);
    if (!err)
        err = hvdl_mail_bytes(local_size, staging / ranks / HVDL_NUM_BUFFERS, &mail);
    if (!err)
        err = hvdl_add(at.staging, staging, &at.mail);
    if (!err)
        err = round_up_checked(at.mail, 4096, &at.mail);
    if (!err)
        err = hvdl_add(at.mail, mail, &at.total);
    if (!err)
        *to = at;
    return err;
}

hvdl_err hvdl_shm_bytes(int local_size, size_t payload_bytes, size_t block_bytes, size_t *bytes)
{
    layout at;
    hvdl_err err = make_layout(local_size, payload_bytes, block_bytes, &at);
    if (!err)
        *bytes = at.total;
    return err;
}

/* 0 without /proc. */
static uint64_t own_pid_namespace(void)
{
    struct stat status;
    return stat("/proc/self/ns/pid", &status) ? 0 : (uint64_t)status.st_ino;
}

hvdl_err hvdl_shm_open(hvdl_shm *shm, int fd, int local_size, int local_rank, size_t payload_bytes,
                       size_t block_bytes)
{
    if (local_size < 1 || local_size > HVDL_MAX_LOCAL || (fd < 0 && local_size > 1))
        return HVDL_EINVAL;
    layout at;
    size_t usable_bytes;
    hvdl_err err = make_layout(local_size, payload_bytes, block_bytes, &at);
    if (!err)
        err = usable_block_bytes(local_size, block_bytes, &usable_bytes);
    if (err)
        return err;
    int *pidfds = malloc((size_t)local_size * sizeof *pidfds);
    if (!pidfds)
        return HVDL_ENOMEM;
    for (int r = 0; r < local_size; r++)
        pidfds[r] = -1;
    int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED;
    char *base = mmap(NULL, at.total, PROT_READ | PROT_WRITE, flags, fd, 0);
    if (base == MAP_FAILED) {
        free(pidfds);
        return HVDL_ENOMEM;
    }
    memset(shm, 0, sizeof *shm);
    shm->local_size = local_size;
    shm->local_rank = local_rank;
    shm->block_bytes = usable_bytes;
    shm->control = (hvdl_shm_control *)base;
    shm->stamps = (_Atomic uint64_t *)(base + at.stamps);
    shm->ring = base + at.ring;
    shm->staging = base + at.staging;
    shm->mail = base + at.mail;
    shm->ring_bytes = at.ring_bytes;
    shm->write_limit = at.ring_bytes;
    shm->mapping = base;
    shm->mapping_bytes = at.total;
    shm->pidfds = pidfds;
    if (local_size > 1) {
        /* The first touch decides on which memory node a rank's own blocks lie. */
        char *own = hvdl_staging(shm, local_rank, 0);
        for (size_t i = 0; i < HVDL_NUM_BUFFERS * shm->block_bytes; i += 4096)
            ((volatile char *)own)[i] = 0;
    }
    /* The shared log is mapped now: else each page costs a fault in the first thousands of operations,
     * which took more than twice as long. */
    for (size_t i = 0; i < at.staging; i += 4096) {
        volatile char *page = base + i;
        if (fd < 0)
            *page = 0; /* private memory is there only when it is written */
        else
            (void)*page;
    }
    hvdl_shm_rank *self = &shm->control->ranks[local_rank];
    atomic_store_explicit(&self->pid_namespace, own_pid_namespace(), memory_order_relaxed);
    atomic_store_explicit(&self->pid, (int32_t)getpid(), memory_order_release);
    return HVDL_OK;
}

void hvdl_shm_close(hvdl_shm *shm)
{
    if (!shm->mapping)
        return;
    for (int r = 0; r < shm->local_size; r++)
        if (shm->pidfds[r] >= 0)
            close(shm->pidfds[r]);
    free(shm->pidfds);
    munmap(shm->mapping, shm->mapping_bytes);
    shm->mapping = NULL;
}

/* ---- doorbells ---- */

void hvdl_futex_wait(_Atomic uint32_t *word, uint32_t value, long timeout_ns)
{
    struct timespec timeout = {timeout_ns / 1000000000L, timeout_ns % 1000000000L};
    syscall(SYS_futex, word, FUTEX_WAIT, value, &timeout, NULL, 0);
}

void hvdl_futex_wake(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static void ring_doorbell(_Atomic uint32_t *doorbell)
{
    atomic_fetch_add_explicit(doorbell, 1, memory_order_seq_cst);
    hvdl_futex_wake(doorbell);
}

void hvdl_shm_ring(hvdl_shm *shm)
{
    if (shm->local_size == 1)
        return;
    atomic_thread_fence(memory_order_seq_cst); /* pairs with the one in hvdl_shm_sleep_prepare */
    for (int word = 0; word * 64 < shm->local_size; word++) {
        uint64_t bits = atomic_load_explicit(&shm->control->sleepers[word], memory_order_relaxed);
        if (word == shm->local_rank / 64)
            bits &= ~(1ull << (shm->local_rank % 64));
        for (; bits; bits &= bits - 1)
            ring_doorbell(&shm->control->ranks[word * 64 + __builtin_ctzll(bits)].doorbell);
    }
}

void hvdl_shm_ring_one(hvdl_shm *shm, int local)
{
    atomic_thread_fence(memory_order_seq_cst); /* pairs with the one in hvdl_shm_sleep_prepare */
    uint64_t bits = atomic_load_explicit(&shm->control->sleepers[local / 64], memory_order_relaxed);
    if (bits >> (local % 64) & 1)
        ring_doorbell(&shm->control->ranks[local].doorbell);
}

void hvdl_shm_ring_idle(hvdl_shm *shm, int local)
{
    ring_doorbell(&shm->control->ranks[local].idle_doorbell);
}

uint32_t hvdl_shm_sleep_prepare(hvdl_shm *shm)
{
    int r = shm->local_rank;
    uint32_t doorbell =
        atomic_load_explicit(&shm->control->ranks[r].doorbell, memory_order_relaxed);
    atomic_fetch_or_explicit(&shm->control->sleepers[r / 64], 1ull << (r % 64),
                             memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst); /* pairs with hvdl_shm_ring and hvdl_shm_kick */
    return doorbell;
}

void hvdl_shm_sleep(hvdl_shm *shm, uint32_t doorbell, long timeout_ns)
{
    hvdl_futex_wait(&shm->control->ranks[shm->local_rank].doorbell, doorbell, timeout_ns);
}

void hvdl_shm_sleep_done(hvdl_shm *shm)
{
    int r = shm->local_rank;
    atomic_fetch_and_explicit(&shm->control->sleepers[r / 64], ~(1ull << (r % 64)),
                              memory_order_relaxed);
}

void hvdl_shm_kick(hvdl_shm *shm)
{
    hvdl_shm_ring_one(shm, shm->local_rank);
}

/* ---- past the caches ---- */

static _Atomic int force_past_cache = -1;

void hvdl_force_past_cache(int force)
{
    force_past_cache = force;
}

bool hvdl_past_cache_is_forced(void)
{
    return force_past_cache >= 0;
}

bool hvdl_goes_past_cache(hvdl_shm *shm, size_t bytes)
{
    if (!HVDL_HAS_PAST_CACHE || bytes < HVDL_PAST_CACHE_BYTES || shm->local_size == 1)
        return false;
    bool past = hvdl_past_cache_is_forced()
                    ? force_past_cache == 1
                    : atomic_load_explicit(&shm->control->past_cache, memory_order_relaxed);
    shm->past_cache_bytes += past ? bytes : 0;
    return past;
}

void hvdl_shm_copy(hvdl_shm *shm, void *to, const void *from, size_t bytes)
{
    if (hvdl_goes_past_cache(shm, bytes))
        hvdl_copy_past_cache(to, from, bytes);
    else if (to != from)
        memcpy(to, from, bytes);
}

static void copy_large(hvdl_shm *shm, void *to, const void *from, size_t bytes)
{
    if (hvdl_goes_past_cache(shm, bytes))
        hvdl_copy_past_cache_fetching(to, from, bytes);
    else
        hvdl_copy_fetching(to, from, bytes);
}

void hvdl_shm_copy_timed(hvdl_shm *shm, void *to, const void *from, size_t bytes, bool is_of_large,
                         hvdl_timed *timed)
{
    bool times = timed && bytes >= HVDL_PAST_CACHE_BYTES;
    uint64_t begun_ns = times ? hvdl_now_ns() : 0;
    if (is_of_large)
        copy_large(shm, to, from, bytes);
    else
        hvdl_shm_copy(shm, to, from, bytes);
    if (times) {
        timed->bytes += bytes;
        timed->ns += hvdl_now_ns() - begun_ns;
    }
}

/* ---- shared log ---- */

static size_t entry_bytes(size_t body_bytes)
{
    return round_up(sizeof(hvdl_entry) + body_bytes, HVDL_ENTRY_ALIGN);
}

static char *ring_at(const hvdl_shm *shm, uint64_t position)
{
    return shm->ring + (position & (shm->ring_bytes - 1));
}

static _Atomic uint64_t *stamp_at(const hvdl_shm *shm, uint64_t position)
{
    return &shm->stamps[(position & (shm->ring_bytes - 1)) / HVDL_ENTRY_ALIGN];
}

/* Finds how far all ranks have read; wakes idle ranks that hold up the ring. */
static void update_write_limit(hvdl_shm *shm, uint64_t wanted)
{
    uint64_t slowest = UINT64_MAX;
    for (int r = 0; r < shm->local_size; r++) {
        hvdl_shm_rank *rank = &shm->control->ranks[r];
        /* Acquire: pairs with the release in hvdl_log_advance; the reader is done with what
         * lies below its cursor. */
        uint64_t cursor = atomic_load_explicit(&rank->cursor, memory_order_acquire);
        if (cursor < slowest)
            slowest = cursor;
        if (cursor + shm->ring_bytes < wanted && r != shm->local_rank)
            ring_doorbell(&rank->idle_doorbell);
    }
    shm->write_limit = slowest + shm->ring_bytes;
}

hvdl_err hvdl_log_append(hvdl_shm *shm, hvdl_entry head, const void *body, size_t body_bytes,
                         const void *more, size_t more_bytes)
{
    size_t bytes = entry_bytes(body_bytes + more_bytes);
    if (bytes > shm->ring_bytes / 2)
        return HVDL_EINVAL;
    uint64_t position = atomic_load_explicit(&shm->control->tail, memory_order_relaxed);
    uint64_t begin, end;
    do {
        /* An entry is contiguous: where it would pass the end of the ring, padding comes first. */
        uint64_t left = shm->ring_bytes - (position & (shm->ring_bytes - 1));
        begin = bytes <= left ? position : position + left;
        end = begin + bytes;
        if (end > shm->write_limit) {
            update_write_limit(shm, end);
            if (end > shm->write_limit)
                return HVDL_EAGAIN;
        }
    } while (!atomic_compare_exchange_weak_explicit(&shm->control->tail, &position, end,
                                                    memory_order_relaxed, memory_order_relaxed));
    head.from = (uint16_t)shm->local_rank;
    if (begin != position) {
        hvdl_entry pad = {.type = HVDL_ENTRY_PAD, .from = head.from, .position = position};
        pad.body_bytes = (uint32_t)(begin - position - sizeof pad);
        memcpy(ring_at(shm, position), &pad, sizeof pad);
        atomic_store_explicit(stamp_at(shm, position), position + 1, memory_order_release);
    }
    head.body_bytes = (uint32_t)(body_bytes + more_bytes);
    head.position = begin;
    char *to = ring_at(shm, begin);
    memcpy(to, &head, sizeof head);
    if (body_bytes)
        memcpy(to + sizeof head, body, body_bytes);
    if (more_bytes)
        hvdl_shm_copy(shm, to + sizeof head + body_bytes, more, more_bytes);
    /* Release: pairs with the acquire in hvdl_log_next. */
    atomic_store_explicit(stamp_at(shm, begin), begin + 1, memory_order_release);
    hvdl_shm_ring(shm);
    return HVDL_OK;
}

const hvdl_entry *hvdl_log_next(hvdl_shm *shm)
{
    for (;;) {
        uint64_t position = shm->read_position;
        if (atomic_load_explicit(stamp_at(shm, position), memory_order_acquire) != position + 1)
            return NULL;
        const hvdl_entry *entry = (const hvdl_entry *)ring_at(shm, position);
        if (entry->type != HVDL_ENTRY_PAD)
            return entry;
        hvdl_log_advance(shm, entry);
    }
}

void hvdl_log_advance(hvdl_shm *shm, const hvdl_entry *entry)
{
    shm->read_position += entry_bytes(entry->body_bytes);
    atomic_store_explicit(&shm->control->ranks[shm->local_rank].cursor, shm->read_position,
                          memory_order_release);
}

/* ---- stages ---- */

bool hvdl_stage_reached(hvdl_shm *shm, hvdl_stage stage, uint64_t count)
{
    if (shm->seen[stage] >= count)
        return true;
    uint64_t slowest = UINT64_MAX;
    for (int r = 0; r < shm->local_size; r++) {
        uint64_t value =
            atomic_load_explicit(&shm->control->ranks[r].stages[stage], memory_order_acquire);
        if (value < count)
            return false;
        if (value < slowest)
            slowest = value;
    }
    shm->seen[stage] = slowest;
    return true;
}

void hvdl_stage_publish(hvdl_shm *shm, hvdl_stage stage, uint64_t count, bool ring)
{
    atomic_store_explicit(&shm->control->ranks[shm->local_rank].stages[stage], count,
                          memory_order_release);
    if (ring)
        hvdl_shm_ring(shm);
}

/* ---- are the others alive? ---- */

int hvdl_shm_find_dead(hvdl_shm *shm)
{
    for (int r = 0; r < shm->local_size; r++) {
        hvdl_shm_rank *rank = &shm->control->ranks[r];
        int32_t pid = atomic_load_explicit(&rank->pid, memory_order_acquire);
        if (r == shm->local_rank || !pid || atomic_load_explicit(&rank->left, memory_order_acquire))
            continue;
        const hvdl_shm_rank *self = &shm->control->ranks[shm->local_rank];
        if (rank->pid_namespace != self->pid_namespace)
            continue;
        if (shm->pidfds[r] == -1) {
            shm->pidfds[r] = (int)syscall(SYS_pidfd_open, pid, 0);
            if (shm->pidfds[r] < 0) {
                /* Without /proc the namespaces are not known, and may differ. */
                if (errno == ESRCH && self->pid_namespace)
                    return r;
                shm->pidfds[r] = -2; /* or an old kernel, or no file descriptors left */
            }
        }
        struct pollfd ended = {.fd = shm->pidfds[r], .events = POLLIN};
        if (shm->pidfds[r] >= 0 && poll(&ended, 1, 0) == 1)
            return r;
    }
    return -1;
}
