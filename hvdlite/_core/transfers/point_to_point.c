/* Sends and receives as their callers see them: any thread posts and withdraws them. */
#define _GNU_SOURCE
#include <sched.h>
#include <string.h>

#include "engine/drive.h"
#include "engine/state.h"
#include "engine/waking.h"
#include "operations/operations.h"
#include "operations/queue.h"
#include "transfers/transfer_texts.h"

#define WITHDRAWAL_LOOK_NS 1000000L
/* A rank of another host answers only if it has ever received from this one. */
#define LONGEST_WITHDRAWAL_NS 5000000000ull

/* In a world of one no thread drives the engine. */
static void drive_alone(hvdl_engine *e)
{
    while (atomic_load(&e->queue.queued)) {
        hvdl_shm_kick(&e->shm);
        if (pthread_mutex_trylock(&e->driving.lock)) {
            sched_yield();
            continue;
        }
        while (!atomic_load(&e->driving.stop) && hvdl_sweep(e))
            ;
        pthread_mutex_unlock(&e->driving.lock);
        hvdl_wake_waiting(e);
        if (atomic_load(&e->driving.stop))
            return;
    }
}

static hvdl_transfer *new_transfer(hvdl_engine *e, const hvdl_message_posting *posting)
{
    hvdl_transfer *t = calloc(1, sizeof *t);
    if (!t)
        return NULL;
    t->id = atomic_fetch_add(&e->transfers.last_id, 1) + 1;
    t->is_send = posting->is_send;
    t->peer = t->posted_peer = posting->peer;
    t->tag = posting->tag;
    t->bytes = posting->bytes;
    t->memory = posting->memory;
    return t;
}

hvdl_err hvdl_engine_post_message(hvdl_engine *e, const hvdl_message_posting *posting, bool wake,
                                  hvdl_operation **out)
{
    char name[64];
    bool any = posting->peer == HVDL_ANY_SOURCE;
    if (posting->peer >= e->config.num_ranks || posting->peer < HVDL_ANY_SOURCE ||
        (any && posting->is_send) || posting->tag < 0)
        return HVDL_EINVAL;
    hvdl_name_transfer(posting->is_send, any ? -1 : hvdl_world_rank(e, posting->peer), posting->tag,
                       name, sizeof name);
    hvdl_posting made = {.name = name,
                         .site = posting->site,
                         .input = posting->memory,
                         .output = posting->memory,
                         .owner = posting->owner};
    made.desc.kind = posting->is_send ? HVDL_SEND : HVDL_RECV;
    made.desc.root = -1;
    made.desc.ndim = 1;
    made.desc.count = made.desc.dims[0] = (int64_t)posting->bytes;
    made.desc.prescale = made.desc.postscale = 1.0;
    hvdl_operation *op = hvdl_operation_new(&made);
    hvdl_transfer *t = op ? new_transfer(e, posting) : NULL;
    if (!t) {
        if (op)
            hvdl_operation_free(op);
        return HVDL_ENOMEM;
    }
    op->transfer = t;
    t->operation = op;
    /* Its own, so that any number of one name are in flight. */
    op->key = (hvdl_key){t->id * 0x9e3779b97f4a7c15ull, t->id};
    hvdl_err err = hvdl_enqueue(e, op, wake && e->config.num_ranks > 1);
    if (err) {
        hvdl_operation_free(op);
        return err;
    }
    *out = op;
    if (e->config.num_ranks == 1)
        drive_alone(e);
    return HVDL_OK;
}

/* For the driver. */
static hvdl_err ask(hvdl_engine *e, const hvdl_transfer *t)
{
    hvdl_transfers *all = &e->transfers;
    hvdl_err err = HVDL_OK;
    pthread_mutex_lock(&e->queue.lock);
    if (all->num_withdrawals == all->room_withdrawals) {
        size_t room = 2 * all->room_withdrawals + 16;
        uint64_t *larger = realloc(all->withdrawals, room * sizeof *larger);
        if (larger) {
            all->withdrawals = larger;
            all->room_withdrawals = room;
        } else {
            err = HVDL_ENOMEM;
        }
    }
    if (!err) {
        all->withdrawals[all->num_withdrawals++] = t->id;
        atomic_store(&e->queue.queued, true);
    }
    pthread_mutex_unlock(&e->queue.lock);
    hvdl_shm_kick(&e->shm);
    return err;
}

bool hvdl_operation_withdraw(hvdl_engine *e, hvdl_operation *op)
{
    hvdl_transfer *t = op->transfer;
    uint64_t deadline = hvdl_now_ns() + LONGEST_WITHDRAWAL_NS;
    if (!t || hvdl_operation_done(op) || ask(e, t))
        return t && hvdl_operation_done(op) && t->withdrawn;
    while (!hvdl_operation_done(op)) {
        if (atomic_load_explicit(&t->matched, memory_order_acquire) || hvdl_now_ns() > deadline)
            return false;
        hvdl_operation_wait(e, op, WITHDRAWAL_LOOK_NS);
    }
    return t->withdrawn;
}
