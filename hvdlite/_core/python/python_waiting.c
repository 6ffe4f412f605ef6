/* Waiting for an operation, also with a limit; and giving up. */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "python/python_glue.h"

#include "host/shm.h"

/* ---- rounds of a wait ---- */

#define SIGNAL_CHECK_NS 50000000L /* how long Ctrl-C may have to wait */

/* For how long to wait before the next look at signals; 0: the time is over. */
static long round_ns(uint64_t deadline_ns)
{
    uint64_t now = deadline_ns ? hvdl_now_ns() : 0;
    if (!deadline_ns || deadline_ns > now + SIGNAL_CHECK_NS)
        return SIGNAL_CHECK_NS;
    return now < deadline_ns ? (long)(deadline_ns - now) : 0;
}

/* The thread that comes back from no wait any more, by the kernel's number, as a later thread may get what
 * pthread_self returned; 0: none. */
static _Atomic int parked;

PyObject *hvdl_py_park(PyObject *module, PyObject *number)
{
    int thread;
    (void)module;
    if (hvdl_py_int(number, "thread", 0, INT32_MAX, &thread))
        return NULL;
    atomic_store(&parked, thread);
    Py_RETURN_NONE;
}

/* Without the GIL: if Python ends meanwhile, asking for it would end the thread, and C++ below it the
 * process. */
static void stay_if_parked(void)
{
    int thread = atomic_load_explicit(&parked, memory_order_relaxed);
    while (thread && thread == (int)syscall(SYS_gettid))
        pause();
}

/* 0: it is done, or that time of CLOCK_MONOTONIC (0: never) has come. -1: an exception (a signal
 * handler's). */
static int wait_for(EngineObject *self, hvdl_operation *operation, uint64_t deadline_ns)
{
    hvdl_engine *engine = self->engine;
    int failed = 0;
    long limit_ns;
    while (!failed && !hvdl_operation_done(operation) && (limit_ns = round_ns(deadline_ns))) {
        Py_BEGIN_ALLOW_THREADS hvdl_operation_wait(engine, operation, limit_ns);
        stay_if_parked();
        Py_END_ALLOW_THREADS failed = PyErr_CheckSignals();
    }
    return failed;
}

/* ---- the limit ---- */

#define LONGEST_S 1e9 /* a limit of 30 years is none */

int hvdl_py_limit(PyObject *given, double *seconds)
{
    *seconds = given ? PyFloat_AsDouble(given) : -1.0;
    return *seconds == -1.0 && PyErr_Occurred() ? -1 : 0;
}

/* 0: never. */
static uint64_t deadline_of(double seconds)
{
    return seconds >= 0.0 && seconds < LONGEST_S ? hvdl_now_ns() + (uint64_t)(seconds * 1e9) : 0;
}

static PyObject *outcome_of(hvdl_operation *operation)
{
    const char *error = hvdl_operation_error(operation);
    return error ? hvdl_py_decode(error) : Py_NewRef(Py_None);
}

/* Raises TimeoutError, unless the operation ends meanwhile. */
static PyObject *time_is_over(hvdl_engine *engine, hvdl_operation *operation, double seconds)
{
    char text[HVDL_TEXT_BYTES];
    Py_BEGIN_ALLOW_THREADS hvdl_describe_timeout(engine, operation, seconds, text);
    Py_END_ALLOW_THREADS if (hvdl_operation_done(operation)) return outcome_of(operation);
    PyObject *decoded = hvdl_py_decode(text);
    if (decoded)
        PyErr_SetObject(PyExc_TimeoutError, decoded);
    Py_XDECREF(decoded);
    return NULL;
}

PyObject *hvdl_py_wait_until(EngineObject *self, hvdl_operation *operation, double seconds)
{
    if (!hvdl_operation_done(operation) && wait_for(self, operation, deadline_of(seconds)))
        return NULL;
    if (hvdl_operation_done(operation))
        return outcome_of(operation);
    return time_is_over(self->engine, operation, seconds);
}

/* ---- Operation ---- */

/* wait(timeout_s=-1.0) */
PyObject *hvdl_py_operation_wait(PyObject *object, PyObject *const *args, Py_ssize_t num_args,
                                 PyObject *keywords)
{
    static const hvdl_py_keyword name = NAME("timeout_s");
    static const hvdl_py_signature signature = {"wait", 0, 1, &name};
    OperationObject *self = (OperationObject *)object;
    PyObject *given = NULL;
    double seconds = -1.0;
    if (!hvdl_py_own_operation(self) ||
        ((num_args || keywords) && (hvdl_py_gather(&signature, args, num_args, keywords, &given) ||
                                    hvdl_py_limit(given, &seconds))))
        return NULL;
    return hvdl_py_wait_until(self->engine, self->operation, seconds);
}

/* drive(limit_s) */
PyObject *hvdl_py_operation_drive(PyObject *object, PyObject *limit)
{
    OperationObject *self = (OperationObject *)object;
    double seconds;
    if (hvdl_py_limit(limit, &seconds) || !hvdl_py_own_operation(self) ||
        wait_for(self->engine, self->operation, deadline_of(seconds)))
        return NULL;
    return PyBool_FromLong(hvdl_operation_done(self->operation));
}

/* ---- Engine ---- */

PyObject *hvdl_py_ends(PyObject *object, PyObject *unused)
{
    EngineObject *self = (EngineObject *)object;
    (void)unused;
    return PyLong_FromUnsignedLong(self->engine ? hvdl_engine_ends(self->engine) : 0);
}

#define LONGEST_SLEEP_NS 1000000000L

/* await_end(seen). Also of an engine that was closed meanwhile. */
PyObject *hvdl_py_await_end(PyObject *object, PyObject *seen)
{
    EngineObject *self = (EngineObject *)object;
    unsigned long count = PyLong_AsUnsignedLong(seen);
    if (PyErr_Occurred())
        return NULL;
    if (!self->engine) {
        hvdl_py_engine(self); /* raises */
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS hvdl_engine_await_end(self->engine, (uint32_t)count, LONGEST_SLEEP_NS);
    Py_END_ALLOW_THREADS Py_RETURN_NONE;
}

PyObject *hvdl_py_wake(PyObject *object, PyObject *unused)
{
    EngineObject *self = (EngineObject *)object;
    (void)unused;
    if (self->engine && self->forks == hvdl_py_num_forks)
        hvdl_engine_wake(self->engine);
    Py_RETURN_NONE;
}

PyObject *hvdl_py_give_up(PyObject *object, PyObject *text)
{
    hvdl_engine *engine = hvdl_py_engine((EngineObject *)object);
    const char *bytes = engine ? PyUnicode_AsUTF8AndSize(text, NULL) : NULL;
    if (!bytes)
        return NULL;
    Py_BEGIN_ALLOW_THREADS hvdl_engine_give_up(engine, bytes);
    Py_END_ALLOW_THREADS Py_RETURN_NONE;
}
