/* Driving the engine: moving everything as far as it goes, waiting without holding a core, the progress
 * thread and the callers that wait. */
#define _GNU_SOURCE
#include "engine/drive.h"

#include <sched.h>
#include <signal.h>

#include "collectives/pieces.h"
#include "engine/fatal.h"
#include "engine/drain.h"
#include "engine/failing.h"
#include "engine/giving_up.h"
#include "engine/state.h"
#include "engine/waking.h"
#include "matching/announcing.h"
#include "matching/control.h"
#include "matching/leaving.h"
#include "matching/messages.h"
#include "matching/replay.h"
#include "net/streams.h"
#include "operations/black_box.h"
#include "transfers/transfers.h"
#include "watching/stall.h"

/* ---- driving ---- */

#define SWEEPS_BETWEEN_STALL_LOOKS 4096 /* where it never sleeps */

static void look_for_late(hvdl_engine *e)
{
    if (hvdl_stall_look(e))
        hvdl_transfers_stall_look(e, hvdl_now_ns());
}

/* What a sweep does not see: ranks of this host that died or were broken, and what is late. */
static void look_around(hvdl_engine *e, bool for_dead)
{
    if (for_dead)
        hvdl_look_for_dead(e);
    look_for_late(e);
    hvdl_end_broken(e);
}

/* What most engines never have. */
static __attribute__((noinline)) bool step_more(hvdl_engine *e)
{
    bool any = false;
    atomic_store(&e->driving.has_more, e->transfers.used); /* whoever wants more sets it again */
    if (atomic_load(&e->giving_up.wanted))
        any = hvdl_giving_up_step(e);
    if (atomic_load(&e->stall.wanted))
        hvdl_stall_ask_for_callers(e);
    if (e->transfers.used)
        any |= hvdl_transfers_step(e);
    return any;
}

/* Moves everything as far as it can go now. Returns whether anything moved. */
bool hvdl_sweep(hvdl_engine *e)
{
    hvdl_box_forget_time(&e->black_box);
    bool has_more = atomic_load_explicit(&e->driving.has_more, memory_order_relaxed);
    if (has_more && atomic_load(&e->giving_up.wanted))
        hvdl_giving_up_step(e); /* before what its caller has posted since, which fails, too */
    bool progressed = hvdl_drain_queue(e);
    if (e->announcing.deferred)
        progressed |= hvdl_append_deferred(e);
    progressed |= hvdl_read_log(e);
    bool between_hosts = e->config.num_hosts > 1;
    if (between_hosts) {
        hvdl_err err = hvdl_wire_poll(&e->wire);
        if (err)
            hvdl_fatal_for_wire(e, err);
        hvdl_control_step(e, &progressed);
        hvdl_step_exchanges(e, &progressed);
        hvdl_control_flush(e); /* before the block, which takes longer */
    }
    if (e->stall.calls)
        hvdl_stall_step(e);
    if (++e->driving.sweeps % SWEEPS_BETWEEN_STALL_LOOKS == 0)
        look_for_late(e);
    if (atomic_load_explicit(&e->driving.has_more, memory_order_relaxed))
        progressed |= step_more(e);
    hvdl_pass *finished;
    progressed |= hvdl_pipeline_step(&e->pipeline, &finished);
    if (finished)
        hvdl_pass_finished(e, finished);
    if (between_hosts)
        hvdl_control_flush(e);
    if (e->failure.broken)
        hvdl_end_broken(e); /* which tells the other hosts: those sends are work, too */
    bool busy = e->announcing.deferred || e->stall.calls;
    if (between_hosts)
        busy |= e->transfers.sendings || hvdl_control_busy(e);
    atomic_store_explicit(&e->driving.busy, busy, memory_order_relaxed);
    if (progressed) {
        e->driving.idle_looks = 0;
        e->driving.pause_ns = 0;
    }
    return progressed;
}

bool hvdl_sweep_twice(hvdl_engine *e)
{
    return hvdl_sweep(e) || hvdl_sweep(e);
}

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#define LOOKS 32   /* that keep the core */
#define YIELDS 500 /* looks that give up the core to other threads, before sleeping */
/* With other hosts, where a look is a call of MPI: until then. */
#define WIRE_LOOKS_NS 50000
#define WIRE_YIELDS_NS 150000
/* Messages that are in flight for so long keep the wire busy while this rank sleeps a part of that. */
#define LONG_FLIGHT_NS 1000000
#define FIRST_PAUSE_NS 20000
#define PAUSES_PER_FLIGHT 32
#define LONGEST_WIRE_PAUSE_NS 1000000 /* MPI can't wake a sleeper */
#define LONGEST_PAUSE_NS 100000000
#define LOOKS_BETWEEN_HEALTH_CHECKS 64

/* Returns false when it is time to sleep. waited_ns: only with other hosts. */
static bool wait_awake(const hvdl_engine *e, uint64_t waited_ns)
{
    bool keeps = e->driving.idle_looks <= LOOKS, yields = e->driving.idle_looks <= LOOKS + YIELDS;
    if (e->config.num_hosts > 1) {
        keeps = waited_ns < WIRE_LOOKS_NS;
        yields = waited_ns < WIRE_YIELDS_NS;
    }
    if (keeps)
        relax();
    else if (yields)
        sched_yield();
    return yields;
}

/* Nothing moved: look again soon, let others run, or sleep, the longer it lasts. Gives up the core
 * where there are more ranks than cores, or the wait is long. `wanted`: somebody else wants to drive. */
void hvdl_pause(hvdl_engine *e, bool (*wanted)(hvdl_engine *))
{
    bool between_hosts = e->config.num_hosts > 1;
    uint64_t now_ns = between_hosts ? hvdl_now_ns() : 0;
    int looks = ++e->driving.idle_looks;
    if (looks == 1)
        e->driving.idle_since_ns = now_ns;
    uint64_t waited_ns = now_ns - e->driving.idle_since_ns;
    uint64_t flight_ns = e->pieces.exchanges ? hvdl_streams_flight_ns(&e->wire, now_ns) : 0;
    /* If nothing has come for so long, it is not the wire that is awaited. */
    bool flying = flight_ns > LONG_FLIGHT_NS && waited_ns < flight_ns;
    if (!flying && wait_awake(e, waited_ns))
        return;
    long longest = LONGEST_PAUSE_NS,
         pause = e->driving.pause_ns ? 2 * e->driving.pause_ns : FIRST_PAUSE_NS;
    if (flying)
        pause = (long)(flight_ns / PAUSES_PER_FLIGHT);
    if (between_hosts || e->announcing.deferred) /* nobody rings when the shared log has room */
        longest = LONGEST_WIRE_PAUSE_NS;
    pause = pause < longest ? pause : longest;
    uint32_t doorbell = hvdl_shm_sleep_prepare(&e->shm);
    if (!hvdl_sweep(e) && !wanted(e)) {
        hvdl_shm_sleep(&e->shm, doorbell, pause);
        e->driving.pause_ns = pause;
        e->driving.idle_looks = looks;
    }
    hvdl_shm_sleep_done(&e->shm);
    look_around(e, pause >= LONGEST_PAUSE_NS || looks % LOOKS_BETWEEN_HEALTH_CHECKS == 0);
}

static bool stopping(hvdl_engine *e)
{
    return atomic_load_explicit(&e->driving.stop, memory_order_relaxed);
}

bool hvdl_nobody(hvdl_engine *e)
{
    (void)e;
    return false;
}

static bool thread_unwanted(hvdl_engine *e)
{
    return atomic_load(&e->driving.num_waiting) > 0 || stopping(e);
}

/* Callers that wait for the lock sleep on done_count. */
static void stop_driving(hvdl_engine *e)
{
    pthread_mutex_unlock(&e->driving.lock);
    hvdl_wake_waiting(e);
}

static bool has_work(hvdl_engine *e)
{
    return atomic_load(&e->queue.num_in_flight) > 0 || atomic_load(&e->driving.busy) ||
           atomic_load(&e->queue.queued) || atomic_load(&e->giving_up.wanted);
}

#define QUIET_PAUSES 20

/* What others want of this rank, which does nothing itself. Other hosts may have more to say: a sweep
 * takes one message of each, and MPI may hold back the next ones until this one is received. */
static void serve_others(hvdl_engine *e)
{
    int pauses = hvdl_sweep_twice(e) && e->config.num_hosts > 1 ? 0 : QUIET_PAUSES;
    while (pauses < QUIET_PAUSES && !thread_unwanted(e)) {
        if (hvdl_sweep(e)) {
            pauses = 0;
            continue;
        }
        hvdl_pause(e, thread_unwanted);
        pauses += e->driving.pause_ns > 0;
    }
}

static void *progress_main(void *argument)
{
    hvdl_engine *e = argument;
    _Atomic uint32_t *doorbell = &e->shm.control->ranks[e->placement.local].idle_doorbell;
    /* Messages ring no doorbell. */
    bool hears = e->config.num_hosts > 1 && e->placement.is_leader;
    long idle_look_ns = hears ? HVDL_LEADER_IDLE_LOOK_NS : HVDL_IDLE_LOOK_NS;
    while (!stopping(e)) {
        uint32_t seen = atomic_load(doorbell);
        atomic_store(&e->driving.thread_idle, true);
        if (thread_unwanted(e) || !has_work(e)) {
            /* For what others may want of this rank meanwhile. */
            hvdl_futex_wait(doorbell, seen, idle_look_ns);
            atomic_store(&e->driving.thread_idle, false);
            if (!thread_unwanted(e) && !has_work(e) && !pthread_mutex_trylock(&e->driving.lock)) {
                serve_others(e);
                look_around(e, true);
                stop_driving(e);
            }
            continue;
        }
        atomic_store(&e->driving.thread_idle, false);
        pthread_mutex_lock(&e->driving.lock);
        while (!thread_unwanted(e) && has_work(e))
            if (!hvdl_sweep(e))
                hvdl_pause(e, thread_unwanted);
        stop_driving(e);
    }
    return NULL;
}

hvdl_err hvdl_driving_start(hvdl_engine *e)
{
    if (!e->config.progress_thread || e->config.num_ranks == 1)
        return HVDL_OK;
    /* Signals are for the user's threads. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    e->driving.has_thread = true; /* before there is one that may read it */
    int failed = pthread_create(&e->driving.thread, NULL, progress_main, e);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed)
        return HVDL_ENOMEM;
    pthread_setname_np(e->driving.thread, "hvdlite");
    return HVDL_OK;
}

void hvdl_driving_stop(hvdl_engine *e)
{
    atomic_store(&e->driving.stop, true);
    if (!e->driving.has_thread)
        return;
    hvdl_shm_kick(&e->shm);
    atomic_fetch_add(&e->shm.control->ranks[e->placement.local].idle_doorbell, 1);
    hvdl_futex_wake(&e->shm.control->ranks[e->placement.local].idle_doorbell);
    pthread_join(e->driving.thread, NULL);
}

/* *deadline: 0: the time begins now. */
static bool is_over(uint64_t *deadline, long timeout_ns)
{
    uint64_t now = hvdl_now_ns();
    if (!*deadline)
        *deadline = now + (uint64_t)timeout_ns;
    return now >= *deadline;
}

bool hvdl_operation_wait(hvdl_engine *e, hvdl_operation *op, long timeout_ns)
{
    if (hvdl_operation_done(op))
        return true;
    if (stopping(e)) { /* close is about to end it */
        hvdl_futex_wait(&e->driving.done_count, atomic_load(&e->driving.done_count), 10000000L);
        return hvdl_operation_done(op);
    }
    uint64_t deadline = 0; /* short waits do without the clock */
    atomic_fetch_add(&e->driving.num_waiting, 1);
    bool nobody_rang = false;
    while (!hvdl_operation_done(op) && !stopping(e)) {
        uint32_t seen = atomic_load(&e->driving.done_count);
        if (!pthread_mutex_trylock(&e->driving.lock)) {
            int looks = 0;
            if (nobody_rang)
                atomic_fetch_add(&e->driving.late_wakings, 1);
            nobody_rang = false;
            while (!hvdl_operation_done(op) && !stopping(e)) {
                if (!hvdl_sweep(e))
                    hvdl_pause(e, stopping);
                if ((++looks % 64 == 0 || e->driving.pause_ns) && is_over(&deadline, timeout_ns))
                    break;
            }
            stop_driving(e);
        } else {
            if (is_over(&deadline, timeout_ns))
                break;
            hvdl_shm_kick(&e->shm); /* the thread makes way for callers */
            atomic_fetch_add(&e->driving.num_sleeping, 1);
            if (!hvdl_operation_done(op))
                hvdl_futex_wait(&e->driving.done_count, seen, 10000000L);
            atomic_fetch_sub(&e->driving.num_sleeping, 1);
            nobody_rang = atomic_load(&e->driving.done_count) == seen;
        }
        if (hvdl_operation_done(op) || is_over(&deadline, timeout_ns))
            break;
    }
    if (atomic_fetch_sub(&e->driving.num_waiting, 1) == 1 && has_work(e))
        hvdl_wake_thread(e);
    return hvdl_operation_done(op);
}

uint32_t hvdl_engine_ends(const hvdl_engine *e)
{
    return atomic_load(&e->driving.done_count);
}

void hvdl_engine_await_end(hvdl_engine *e, uint32_t seen, long timeout_ns)
{
    atomic_fetch_add(&e->driving.num_sleeping, 1);
    hvdl_futex_wait(&e->driving.done_count, seen, timeout_ns);
    atomic_fetch_sub(&e->driving.num_sleeping, 1);
}

void hvdl_engine_wake(hvdl_engine *e)
{
    hvdl_wake_waiting(e);
}

void hvdl_engine_poll(hvdl_engine *e)
{
    if (e->driving.has_thread || e->config.num_ranks == 1 ||
        pthread_mutex_trylock(&e->driving.lock))
        return;
    /* The lock shows what close did: it stops, then takes down what a sweep needs. */
    if (!stopping(e) && !hvdl_sweep_twice(e))
        look_around(e, true);
    stop_driving(e);
}
