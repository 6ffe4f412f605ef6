/* Waiting for an operation: with a limit, or in one call with its posting; and giving up. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "python/python_glue.h"

#include "host/shm.h"

/* ---- the limit ---- */

#define LONGEST_S 1e9 /* a limit of 30 years is none */

/* The argument timeout_s, at that place or as a keyword; negative, also NaN: there is none. -1: an exception. */
static int limit_of(PyObject *const *args, Py_ssize_t num_args, PyObject *keywords,
                    Py_ssize_t place, double *seconds)
{
    Py_ssize_t num_keywords = keywords ? PyTuple_Size(keywords) : 0;
    *seconds = -1.0;
    if (num_args == place && !num_keywords)
        return 0;
    bool is_named = num_keywords &&
                    !PyUnicode_CompareWithASCIIString(PyTuple_GetItem(keywords, 0), "timeout_s");
    if (num_args + num_keywords != place + 1 || (num_keywords && !is_named)) {
        PyErr_SetString(PyExc_TypeError, "the only option is timeout_s");
        return -1;
    }
    *seconds = PyFloat_AsDouble(args[place]);
    return *seconds == -1.0 && PyErr_Occurred() ? -1 : 0;
}

/* 0: never. */
static uint64_t deadline_of(double seconds)
{
    return seconds >= 0.0 && seconds < LONGEST_S ? hvdl_now_ns() + (uint64_t)(seconds * 1e9) : 0;
}

/* Raises TimeoutError, unless the operation ends meanwhile. */
static PyObject *time_is_over(hvdl_engine *engine, hvdl_operation *operation, double seconds)
{
    char text[HVDL_TEXT_BYTES];
    Py_BEGIN_ALLOW_THREADS hvdl_describe_timeout(engine, operation, seconds, text);
    Py_END_ALLOW_THREADS if (hvdl_operation_done(operation)) return hvdl_py_outcome(operation);
    PyObject *decoded = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
    if (decoded)
        PyErr_SetObject(PyExc_TimeoutError, decoded);
    Py_XDECREF(decoded);
    return NULL;
}

static inline PyObject *wait_until(EngineObject *self, hvdl_operation *operation, double seconds)
{
    if (hvdl_operation_done(operation))
        return hvdl_py_outcome(operation);
    if (hvdl_py_wait(self, operation, deadline_of(seconds)))
        return NULL;
    if (hvdl_operation_done(operation))
        return hvdl_py_outcome(operation);
    return time_is_over(self->engine, operation, seconds);
}

/* ---- Operation ---- */

/* wait(timeout_s=-1.0) */
PyObject *hvdl_py_operation_wait(PyObject *object, PyObject *const *args, Py_ssize_t num_args,
                                 PyObject *keywords)
{
    OperationObject *self = (OperationObject *)object;
    double seconds = -1.0;
    if (self->engine->forks != hvdl_py_num_forks)
        return hvdl_py_engine(self->engine) ? NULL : NULL; /* raises */
    if ((num_args || keywords) && limit_of(args, num_args, keywords, 0, &seconds))
        return NULL;
    return wait_until(self->engine, self->operation, seconds);
}

/* drive(limit_s) */
PyObject *hvdl_py_operation_drive(PyObject *object, PyObject *limit)
{
    OperationObject *self = (OperationObject *)object;
    double seconds = PyFloat_AsDouble(limit);
    if (seconds == -1.0 && PyErr_Occurred())
        return NULL;
    if (self->engine->forks != hvdl_py_num_forks)
        return hvdl_py_engine(self->engine) ? NULL : NULL; /* raises */
    if (hvdl_py_wait(self->engine, self->operation, deadline_of(seconds)))
        return NULL;
    return PyBool_FromLong(hvdl_operation_done(self->operation));
}

/* ---- Engine ---- */

static PyObject *wait_and_release(EngineObject *self, hvdl_operation *operation, double seconds)
{
    PyObject *result = wait_until(self, operation, seconds);
    /* One in flight goes on, and its owner comes back by hvdl_py_reap. */
    PyObject *owner = hvdl_operation_release(self->engine, operation);
    Py_XDECREF(owner);
    return result;
}

PyObject *hvdl_py_run_posting(EngineObject *self, hvdl_posting *posting, PyObject *owner,
                              double seconds)
{
    hvdl_operation *operation = hvdl_py_post(self->engine, posting, owner, false);
    return operation ? wait_and_release(self, operation, seconds) : NULL;
}

/* run(posting, timeout_s=-1.0) */
PyObject *hvdl_py_run(PyObject *object, PyObject *const *args, Py_ssize_t num_args,
                      PyObject *keywords)
{
    EngineObject *self = (EngineObject *)object;
    hvdl_engine *engine = hvdl_py_engine(self);
    hvdl_py_state *state = PyType_GetModuleState(Py_TYPE(object));
    double seconds;
    if (!engine)
        return NULL;
    if (num_args < 1) {
        PyErr_SetString(PyExc_TypeError, "run: a posting is expected");
        return NULL;
    }
    if (limit_of(args, num_args, keywords, 1, &seconds))
        return NULL;
    if (Py_TYPE(args[0]) == state->posting_type &&
        hvdl_facts_of(&((PostingObject *)args[0])->posting.desc)->result == HVDL_RESULT_GATHERED) {
        PyErr_SetString(PyExc_ValueError, "run: post an operation whose result the engine makes");
        return NULL;
    }
    hvdl_operation *operation = hvdl_py_post_object(state, engine, args[0], false);
    return operation ? wait_and_release(self, operation, seconds) : NULL;
}

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
    if (!self->engine)
        return hvdl_py_engine(self) ? NULL : NULL; /* raises */
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
