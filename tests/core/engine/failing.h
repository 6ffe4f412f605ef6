/* What fails in faults.c, once in a program of operations or from then on, and only while `armed`:
 *
 *   allocation  one allocation of the core; the linker wraps them, and the network is not concerned
 *   call        one call of MPI returns an error, and has done nothing
 *   calls       that call and every later one of the same rank do
 *   message     one message is lost: its sender is not told
 *
 * The n-th of them is chosen by `failing`; 0: none. `num_seen` counts them. */
#include <stdbool.h>
#include <string.h>
#include <time.h>

#include "base/allocations.h"
#include "network.h"

typedef enum {
    FAULT_ALLOCATION,
    FAULT_CALL,
    FAULT_CALLS,
    FAULT_MESSAGE,
    NUM_FAULTS,
} fault_kind;

static const char *const fault_names[NUM_FAULTS] = {"allocation", "call", "calls", "message"};

static volatile bool armed; /* the compiler takes malloc for one that does not look at it */
static volatile fault_kind fault;
static volatile long failing, num_seen;
static int acting;       /* the rank that is in the core */
static int failed = -1;  /* the rank to which it has happened */
static const char *what; /* that has failed */

/* One more that could fail: whether it is the one that does. */
static bool is_chosen(fault_kind kind, const char *name)
{
    if (!armed || kind != fault || ++num_seen != failing)
        return false;
    failed = acting;
    what = name;
    return true;
}

/* ---- allocations ---- */

int __real_clock_gettime(clockid_t clock, struct timespec *to);
int __wrap_clock_gettime(clockid_t clock, struct timespec *to);
int __wrap_nanosleep(const struct timespec *pause, struct timespec *left);

void *__wrap_malloc(size_t bytes)
{
    return is_chosen(FAULT_ALLOCATION, "malloc") ? NULL : __real_malloc(bytes);
}

void *__wrap_calloc(size_t count, size_t bytes)
{
    return is_chosen(FAULT_ALLOCATION, "calloc") ? NULL : __real_calloc(count, bytes);
}

void *__wrap_realloc(void *memory, size_t bytes)
{
    return is_chosen(FAULT_ALLOCATION, "realloc") ? NULL : __real_realloc(memory, bytes);
}

int __wrap_posix_memalign(void **to, size_t alignment, size_t bytes)
{
    return is_chosen(FAULT_ALLOCATION, "posix_memalign")
               ? 1
               : __real_posix_memalign(to, alignment, bytes);
}

char *__wrap_strdup(const char *text)
{
    return is_chosen(FAULT_ALLOCATION, "strdup") ? NULL : __real_strdup(text);
}

/* An engine that is closed waits some seconds for the others, which are not driven meanwhile: time runs so much
 * faster here. */
#define HASTE 100

int __wrap_clock_gettime(clockid_t clock, struct timespec *to)
{
    struct timespec now;
    int error = __real_clock_gettime(clock, &now);
    uint64_t ns = HASTE * ((uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec);
    *to = (struct timespec){(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    return error;
}

/* A test has one thread: sleeping would change nothing. */
int __wrap_nanosleep(const struct timespec *pause, struct timespec *left)
{
    (void)pause;
    (void)left;
    return 0;
}

/* ---- calls of MPI, and messages ---- */

static bool call_fails(const char *name)
{
    bool is_later = armed && fault == FAULT_CALLS && failed == acting;
    return is_chosen(FAULT_CALL, name) || is_chosen(FAULT_CALLS, name) || is_later;
}

/* The network's own allocations do not fail. */
static bool disarm(void)
{
    bool was_armed = armed;
    armed = false;
    return was_armed;
}

static int failing_isend(const void *buf, int count, hvdl_word type, int dest, int tag,
                         hvdl_word comm, void *request)
{
    if (call_fails("MPI_Isend"))
        return 1;
    if (is_chosen(FAULT_MESSAGE, "message")) {
        *(receive **)request = &sent;
        return 0;
    }
    bool was_armed = disarm();
    int error = network_isend(buf, count, type, dest, tag, comm, request);
    armed = was_armed;
    return error;
}

static int failing_irecv(void *buf, int count, hvdl_word type, int source, int tag, hvdl_word comm,
                         void *request)
{
    if (call_fails("MPI_Irecv"))
        return 1;
    bool was_armed = disarm();
    int error = network_irecv(buf, count, type, source, tag, comm, request);
    armed = was_armed;
    return error;
}

static int failing_testsome(int count, void *requests, int *num_ended, int *ended, void *statuses)
{
    if (call_fails("MPI_Testsome"))
        return 1;
    return network_testsome(count, requests, num_ended, ended, statuses);
}

static int failing_test(void *request, int *flag, void *status)
{
    return call_fails("MPI_Test") ? 1 : network_test(request, flag, status);
}

static int failing_cancel(void *request)
{
    return call_fails("MPI_Cancel") ? 1 : network_cancel(request);
}

static hvdl_wire failing_wire(int rank)
{
    hvdl_wire wire = network_wire(rank, 1 << 20);
    wire.isend = failing_isend;
    wire.irecv = failing_irecv;
    wire.testsome = failing_testsome;
    wire.test = failing_test;
    wire.cancel = failing_cancel;
    return wire;
}
