/* The life of an engine: who is where, its thread, leaving; and what it says of itself. */
#define _GNU_SOURCE
#include "engine/engine.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "engine/state.h"

/* ---- making it ---- */

static void free_geometry(hvdl_engine *e)
{
    for (int h = 0; e->host_names && h < e->config.num_hosts; h++)
        free(e->host_names[h]);
    free(e->host_names);
    free(e->name_of);
    free(e->host_sizes);
    free(e->members);
    free(e->world_ranks);
    free(e->host_of);
    free(e->local_of);
    free(e->host_first);
    free(e->rail_peers);
    free(e->all_ranks);
    free(e->events);
    free(e->scratch);
    free(e->joined);
}

static void *copy_of(const void *from, size_t bytes)
{
    void *to = malloc(bytes ? bytes : 1);
    if (to)
        memcpy(to, from, bytes);
    return to;
}

/* Who is where, and who speaks with whom. */
static hvdl_err set_geometry(hvdl_engine *e, const hvdl_engine_config *config)
{
    size_t ranks = (size_t)config->num_ranks, hosts = (size_t)config->num_hosts;
    e->config = *config;
    e->host_sizes = copy_of(config->host_sizes, hosts * sizeof(int));
    e->members = copy_of(config->members, ranks * sizeof(int));
    e->world_ranks = copy_of(config->world_ranks, ranks * sizeof(int));
    e->host_of = calloc(ranks, sizeof(int));
    e->local_of = calloc(ranks, sizeof(int));
    e->host_first = calloc(hosts, sizeof(int));
    e->name_of = calloc(ranks, sizeof *e->name_of);
    e->host_names = calloc(hosts, sizeof *e->host_names);
    e->rail_peers = calloc(hosts, sizeof(int));
    e->all_ranks = calloc(ranks, sizeof(int));
    size_t scratch_bytes;
    e->scratch = hvdl_largest_payload(config, &scratch_bytes) ? NULL : malloc(scratch_bytes);
    if (!e->host_sizes || !e->members || !e->world_ranks || !e->host_of || !e->local_of ||
        !e->host_first || !e->name_of || !e->host_names || !e->rail_peers || !e->all_ranks ||
        !e->scratch)
        return HVDL_ENOMEM;
    e->config.host_sizes = e->host_sizes;
    e->config.members = e->members;
    e->config.world_ranks = e->world_ranks;
    e->naming = (hvdl_naming){e->world_ranks, e->name_of};
    for (int rank = 0; rank < config->num_ranks; rank++)
        e->all_ranks[rank] = rank;
    e->num_rails = config->num_ranks;
    for (int h = 0, first = 0; h < config->num_hosts; first += config->host_sizes[h++]) {
        e->host_first[h] = first;
        e->host_names[h] = strdup(config->host_names[h]);
        if (!e->host_names[h])
            return HVDL_ENOMEM;
        if (config->host_sizes[h] < e->num_rails)
            e->num_rails = config->host_sizes[h];
        if (config->host_sizes[h] > e->max_local_size)
            e->max_local_size = config->host_sizes[h];
        for (int local = 0; local < config->host_sizes[h]; local++) {
            int rank = e->members[first + local];
            e->host_of[rank] = h;
            e->local_of[rank] = local;
            e->name_of[rank] = e->host_names[h];
        }
    }
    e->config.host_names = (const char *const *)e->host_names;
    e->host = e->host_of[config->rank];
    e->local = e->local_of[config->rank];
    e->local_size = e->host_sizes[e->host];
    e->joined = calloc((size_t)e->local_size, sizeof *e->joined);
    if (!e->joined)
        return HVDL_ENOMEM;
    e->is_leader = e->local == 0;
    e->last_joined = -1;
    for (int h = 0; h < config->num_hosts && e->local < e->num_rails; h++)
        e->rail_peers[h] = e->members[e->host_first[h] + e->local];
    if (config->wire)
        e->wire = *config->wire;
    return HVDL_OK;
}

static hvdl_err start_thread(hvdl_engine *e)
{
    if (!e->config.progress_thread || e->config.num_ranks == 1)
        return HVDL_OK;
    /* Signals are for the user's threads. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    e->has_thread = true; /* before there is one that may read it */
    int failed = pthread_create(&e->thread, NULL, hvdl_progress_main, e);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed)
        return HVDL_ENOMEM;
    pthread_setname_np(e->thread, "hvdlite");
    return HVDL_OK;
}

hvdl_err hvdl_engine_create(hvdl_engine **out, const hvdl_engine_config *config)
{
    hvdl_engine *e = calloc(1, sizeof *e);
    if (!e)
        return HVDL_ENOMEM;
    pthread_mutex_init(&e->queue_lock, NULL);
    pthread_mutex_init(&e->driving, NULL);
    pthread_mutex_init(&e->events_lock, NULL);
    hvdl_err err = set_geometry(e, config);
    if (!err)
        err = hvdl_engine_record(e, config->event_capacity);
    if (!err)
        err = hvdl_shm_open(&e->shm, config->memory_fd, e->local_size, e->local,
                            hvdl_posted_payload(config->num_ranks, config->inline_bytes),
                            config->block_bytes);
    if (err) {
        free_geometry(e);
        free(e);
        return err;
    }
    hvdl_conveyor_init(&e->conveyor, &e->shm);
    if (config->num_hosts > 1)
        err = hvdl_control_create(e);
    if (!err)
        err = start_thread(e);
    if (err) {
        hvdl_control_destroy(e);
        hvdl_wire_close(&e->wire);
        hvdl_shm_close(&e->shm);
        free_geometry(e);
        free(e);
        return err;
    }
    *out = e;
    return HVDL_OK;
}

static void leave(hvdl_engine *e)
{
    hvdl_shm_rank *self = &e->shm.control->ranks[e->local];
    uint64_t deadline = hvdl_now_ns() + HVDL_DRAIN_NS;
    hvdl_announce(e,
                  (hvdl_entry){.type = HVDL_ENTRY_LEAVE, .id = (uint64_t)e->config.rank, .arg = 1},
                  NULL, 0);
    hvdl_sweep(e);
    /* What is matched needs this rank: it ends that first. */
    while ((e->deferred || e->meetings_by_id.count || e->exchanges) && !e->failure.broken &&
           hvdl_now_ns() < deadline)
        if (!hvdl_sweep(e))
            hvdl_pause(e, hvdl_nobody);
    bool clean = !e->meetings_by_id.count && !e->exchanges && !e->deferred;
    if (!atomic_load(&self->left)) /* else the others know of worse */
        atomic_store(&self->left, clean ? 1 : HVDL_LEFT_BROKEN + (uint32_t)e->config.rank);
    /* The journal need not wait for this rank any more. */
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
    pthread_mutex_lock(&e->queue_lock);
    bool was_closed = e->closed;
    e->closed = true;
    pthread_mutex_unlock(&e->queue_lock);
    if (was_closed)
        return;
    atomic_store(&e->stop, true);
    if (e->has_thread) {
        hvdl_shm_kick(&e->shm);
        atomic_fetch_add(&e->shm.control->ranks[e->local].idle_bell, 1);
        hvdl_futex_wake(&e->shm.control->ranks[e->local].idle_bell);
        pthread_join(e->thread, NULL);
    }
    if (e->config.num_ranks == 1)
        return;
    hvdl_shm_kick(&e->shm);
    pthread_mutex_lock(&e->driving);
    if (!e->failure.broken) {
        hvdl_drain_queue(e);
        leave(e);
        if (linger && e->config.num_hosts > 1 && e->is_leader)
            linger_for_others(e);
        hvdl_end_broken(e);
    }
    char text[HVDL_TEXT_BYTES];
    snprintf(text, sizeof text, "rank %d called shutdown before the operation had ended",
             hvdl_own_number(e));
    hvdl_break_on_all(e, text);
    hvdl_fail_all(e, text);
    hvdl_plans_end(e);
    hvdl_control_destroy(e);
    pthread_mutex_unlock(&e->driving);
    hvdl_wake_waiting(e);
}

void hvdl_engine_free(hvdl_engine *e)
{
    hvdl_shm_close(&e->shm);
    hvdl_wire_close(&e->wire);
    for (size_t i = 0; i < e->plans.num_slots; i++)
        for (hvdl_node *node = e->plans.slots[i], *next; node; node = next) {
            hvdl_plan *plan = HVDL_CONTAINER(node, hvdl_plan, by_id);
            next = node->next;
            if (plan->collecting)
                hvdl_meeting_free(plan->collecting);
            free(plan->name);
            free(plan->error);
            free(plan);
        }
    for (size_t i = 0; i < e->meetings.num_slots; i++)
        for (hvdl_node *node = e->meetings.slots[i], *next; node; node = next) {
            next = node->next;
            hvdl_meeting_free(HVDL_CONTAINER(node, hvdl_meeting, by_key));
        }
    while (e->deferred) {
        hvdl_deferred *next = e->deferred->next;
        free(e->deferred);
        e->deferred = next;
    }
    free(e->plans.slots);
    free(e->meetings.slots);
    free(e->meetings_by_id.slots);
    free(e->in_flight.slots);
    hvdl_stall_free(e);
    free(e->dead_owners);
    pthread_mutex_destroy(&e->queue_lock);
    pthread_mutex_destroy(&e->driving);
    pthread_mutex_destroy(&e->events_lock);
    free_geometry(e);
    free(e);
}

/* ---- what it says of itself ---- */

int hvdl_engine_num_ranks(const hvdl_engine *e)
{
    return e->config.num_ranks;
}

hvdl_counters hvdl_engine_counters(hvdl_engine *e)
{
    hvdl_counters counters = {0};
    pthread_mutex_lock(&e->queue_lock);
    counters.operations = e->num_operations;
    pthread_mutex_unlock(&e->queue_lock);
    counters.control_messages = e->wire.control_messages;
    counters.data_messages = e->wire.data_messages;
    counters.data_bytes = e->wire.data_bytes;
    counters.past_cache_bytes = e->shm.past_cache_bytes;
    counters.late_wakings = e->late_wakings;
    return counters;
}
