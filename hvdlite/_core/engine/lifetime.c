/* The life of an engine: making it, leaving, closing; and its counters. */
#define _GNU_SOURCE
#include <stdio.h>
#include <time.h>

#include "engine/fatal.h"
#include "engine/callbacks.h"
#include "engine/drain.h"
#include "engine/drive.h"
#include "engine/failing.h"
#include "engine/giving_up.h"
#include "engine/placement.h"
#include "engine/state.h"
#include "engine/waking.h"
#include "matching/announcing.h"
#include "matching/control.h"
#include "matching/join.h"
#include "matching/matches.h"
#include "matching/messages.h"
#include "net/faulty_wire.h"
#include "operations/black_box.h"
#include "operations/plans.h"
#include "operations/queue.h"
#include "operations/recording.h"
#include "transfers/transfers.h"
#include "watching/report.h"
#include "watching/stall.h"

/* ---- making it ---- */

/* Of one that may not have everything yet. */
static void free_parts(hvdl_engine *e)
{
    hvdl_control_destroy(e);
    hvdl_wire_close(&e->wire);
    hvdl_join_free(e);
    hvdl_stall_free(e);
    hvdl_transfers_free(e);
    hvdl_recording_free(&e->recording);
    hvdl_box_free(&e->black_box);
    hvdl_placement_free(&e->placement, e->config.num_hosts);
    hvdl_queue_free(&e->queue);
    pthread_mutex_destroy(&e->driving.lock);
    pthread_mutex_destroy(&e->stall.lock);
    pthread_mutex_destroy(&e->giving_up.lock);
    free(e);
}

hvdl_err hvdl_engine_create(hvdl_engine **out, const hvdl_engine_config *config)
{
    hvdl_engine *e = calloc(1, sizeof *e);
    if (!e)
        return HVDL_ENOMEM;
    pthread_mutex_init(&e->queue.lock, NULL);
    pthread_mutex_init(&e->driving.lock, NULL);
    pthread_mutex_init(&e->recording.lock, NULL);
    pthread_mutex_init(&e->stall.lock, NULL);
    pthread_mutex_init(&e->giving_up.lock, NULL);
    e->config = *config;
    e->callbacks = &hvdl_engine_callbacks;
    hvdl_err err = hvdl_placement_make(&e->placement, &e->config);
    if (!err && config->wire) {
        e->wire = *config->wire;
        hvdl_wire_may_fail(&e->wire);
        err = hvdl_wire_open(&e->wire, config->num_ranks);
    }
    if (!err)
        err = hvdl_join_make(e);
    if (!err)
        err = hvdl_stall_make(e);
    if (!err)
        err = hvdl_transfers_make(e);
    if (!err)
        err = hvdl_engine_record(e, config->event_capacity);
    if (!err)
        err = hvdl_box_open(&e->black_box, config->black_box);
    if (!err)
        err = hvdl_shm_open(&e->shm, config->memory_fd, e->placement.local_size, e->placement.local,
                            hvdl_posted_payload(config->num_ranks, config->inline_bytes),
                            config->block_bytes);
    if (err) {
        free_parts(e);
        return err;
    }
    hvdl_pipeline_init(&e->pipeline, &e->shm);
    atomic_store(&e->shm.control->ranks[e->placement.local].looked_ns, hvdl_now_ns());
    if (config->num_hosts > 1)
        err = hvdl_control_create(e);
    if (!err)
        err = hvdl_driving_start(e);
    if (err) {
        hvdl_control_destroy(e); /* it still uses what is shared */
        hvdl_shm_close(&e->shm);
        free_parts(e);
        return err;
    }
    *out = e;
    return HVDL_OK;
}

static void leave(hvdl_engine *e)
{
    hvdl_shm_rank *self = &e->shm.control->ranks[e->placement.local];
    uint64_t deadline = hvdl_now_ns() + HVDL_DRAIN_NS;
    hvdl_announce(e,
                  (hvdl_entry){.type = HVDL_ENTRY_LEAVE, .id = (uint64_t)e->config.rank, .arg = 1},
                  NULL, 0);
    hvdl_sweep(e);
    /* What is matched needs this rank: it ends that first. */
    while ((e->announcing.deferred || e->matches.by_id.count || e->pieces.exchanges ||
            hvdl_transfers_under_way(e)) &&
           !e->failure.broken && hvdl_now_ns() < deadline)
        if (!hvdl_sweep(e))
            hvdl_pause(e, hvdl_nobody);
    bool clean = !e->matches.by_id.count && !e->pieces.exchanges && !e->announcing.deferred &&
                 !hvdl_transfers_under_way(e);
    if (!atomic_load(&self->left)) /* else the others know of worse */
        atomic_store(&self->left, clean ? 1 : HVDL_LEFT_BROKEN + (uint32_t)e->config.rank);
    /* The shared log need not wait for this rank any more. */
    atomic_store(&self->cursor, UINT64_MAX - 2 * e->shm.ring_bytes);
    if (e->config.num_hosts > 1)
        hvdl_control_leave(e, e->config.rank, clean);
}

#define LONGEST_LINGER_PAUSE_NS 20000000L

static void linger_for_others(hvdl_engine *e)
{
    struct timespec pause = {0, 100000};
    while (!e->failure.broken && !hvdl_control_all_left(e)) {
        if (hvdl_sweep_twice(e))
            continue;
        nanosleep(&pause, NULL);
        if (pause.tv_nsec < LONGEST_LINGER_PAUSE_NS)
            pause.tv_nsec *= 2;
    }
}

void hvdl_engine_close(hvdl_engine *e, bool linger)
{
    if (hvdl_queue_close(e))
        return;
    hvdl_driving_stop(e);
    hvdl_shm_kick(&e->shm);
    pthread_mutex_lock(&e->driving.lock);
    if (!e->failure.broken && e->config.num_ranks > 1) {
        hvdl_drain_queue(e);
        leave(e);
        if (linger && e->config.num_hosts > 1 && e->placement.is_leader)
            linger_for_others(e);
        hvdl_end_broken(e);
    }
    char text[HVDL_TEXT_BYTES];
    snprintf(text, sizeof text, "rank %d called shutdown before the operation had ended",
             hvdl_own_number(e));
    hvdl_fatal_on_all(e, text);
    hvdl_fail_all(e, text);
    if (e->config.num_ranks > 1)
        hvdl_plans_end(e);
    hvdl_headers_end(e);
    hvdl_control_destroy(e);
    pthread_mutex_unlock(&e->driving.lock);
    hvdl_wake_waiting(e);
}

void hvdl_engine_free(hvdl_engine *e)
{
    hvdl_shm_close(&e->shm);
    hvdl_plans_free(e);
    hvdl_matches_free(e);
    hvdl_announcing_free(e);
    free_parts(e);
}

/* ---- giving up ---- */

void hvdl_engine_give_up(hvdl_engine *e, const char *text)
{
    pthread_mutex_lock(&e->giving_up.lock);
    if (!*e->giving_up.text) {
        hvdl_writer to = {e->giving_up.text, sizeof e->giving_up.text, 0};
        hvdl_put(&to, "%s", *text ? text : HVDL_NO_REASON);
        if (e->config.num_ranks == 1)
            hvdl_fatal_on_all(e, e->giving_up.text);
        else
            atomic_store(&e->giving_up.wanted, true);
        atomic_store(&e->driving.has_more, true);
    }
    pthread_mutex_unlock(&e->giving_up.lock);
    if (e->config.num_ranks == 1)
        return;
    hvdl_shm_kick(&e->shm);
    hvdl_wake_thread(e);
    hvdl_engine_poll(e);
}

/* ---- what it says of itself ---- */

int hvdl_engine_num_ranks(const hvdl_engine *e)
{
    return e->config.num_ranks;
}

int hvdl_engine_rank(const hvdl_engine *e)
{
    return e->config.rank;
}

int hvdl_engine_num_hosts(const hvdl_engine *e)
{
    return e->config.num_hosts;
}

bool hvdl_engine_weighs(const hvdl_engine *e)
{
    return e->config.num_hosts == 1 && !e->config.deterministic;
}

int hvdl_engine_world_rank(const hvdl_engine *e, int rank)
{
    return hvdl_world_rank(e, rank);
}

hvdl_counters hvdl_engine_counters(hvdl_engine *e)
{
    hvdl_counters counters = {0};
    pthread_mutex_lock(&e->queue.lock);
    counters.operations = e->queue.num_operations;
    pthread_mutex_unlock(&e->queue.lock);
    counters.control_messages = e->wire.control_messages;
    counters.data_messages = e->wire.data_messages;
    counters.data_bytes = e->wire.data_bytes;
    counters.past_cache_bytes = e->shm.past_cache_bytes;
    counters.late_wakings = e->driving.late_wakings;
    return counters;
}

uint64_t hvdl_engine_sent_bytes(hvdl_engine *e, int rank)
{
    return e->wire.sent_to ? atomic_load_explicit(&e->wire.sent_to[rank], memory_order_relaxed) : 0;
}
