/* Methods of Engine that look into it: its latest events, and its counters. */
#include <stdlib.h>

#include "python/python_glue.h"

/* Also of an engine that is closed: what happened last is known only then. NULL: an exception. */
static hvdl_engine *recording_engine(EngineObject *self)
{
    if (self->engine && self->forks == hvdl_py_num_forks)
        return self->engine;
    hvdl_py_engine(self); /* raises */
    return NULL;
}

static PyObject *short_event(const hvdl_event *event)
{
    return Py_BuildValue("(Kss)", (unsigned long long)event->time_ns, event->name,
                         hvdl_state_name(event->state));
}

static PyObject *full_event(const hvdl_event *event)
{
    return Py_BuildValue("(KKsssK)", (unsigned long long)event->time_ns,
                         (unsigned long long)event->operation, hvdl_kind_name(event->kind),
                         event->name, hvdl_state_name(event->state),
                         (unsigned long long)event->bytes);
}

/* Frees the events. */
static PyObject *to_list(hvdl_events *events, PyObject *(*convert)(const hvdl_event *))
{
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < events->count; i++)
        hvdl_py_append(&list, convert(&events->ring[(events->first + i) % events->capacity]));
    free(events->ring);
    return list;
}

PyObject *hvdl_py_record(PyObject *object, PyObject *args)
{
    Py_ssize_t capacity;
    hvdl_engine *engine = recording_engine((EngineObject *)object);
    if (!engine || !PyArg_ParseTuple(args, "n:record", &capacity))
        return NULL;
    if (capacity < 0) {
        PyErr_SetString(PyExc_ValueError, "record: capacity must be at least 0");
        return NULL;
    }
    if (hvdl_engine_record(engine, (size_t)capacity))
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

PyObject *hvdl_py_events(PyObject *object, PyObject *unused)
{
    hvdl_engine *engine = recording_engine((EngineObject *)object);
    hvdl_events events;
    (void)unused;
    if (!engine)
        return NULL;
    if (hvdl_engine_events(engine, &events))
        return PyErr_NoMemory();
    return to_list(&events, short_event);
}

PyObject *hvdl_py_drain_events(PyObject *object, PyObject *unused)
{
    hvdl_engine *engine = recording_engine((EngineObject *)object);
    hvdl_events events;
    (void)unused;
    if (!engine)
        return NULL;
    if (hvdl_engine_drain_events(engine, &events))
        return PyErr_NoMemory();
    unsigned long long lost = events.lost;
    PyObject *list = to_list(&events, full_event);
    return list ? Py_BuildValue("(NK)", list, lost) : NULL;
}

PyObject *hvdl_py_counters(PyObject *object, PyObject *unused)
{
    hvdl_engine *engine = hvdl_py_engine((EngineObject *)object);
    (void)unused;
    if (!engine)
        return NULL;
    hvdl_counters c = hvdl_engine_counters(engine);
    return Py_BuildValue(
        "{s:K,s:K,s:K,s:K,s:K,s:K}", "operations", (unsigned long long)c.operations,
        "control_messages", (unsigned long long)c.control_messages, "data_messages",
        (unsigned long long)c.data_messages, "data_bytes", (unsigned long long)c.data_bytes,
        "past_cache_bytes", (unsigned long long)c.past_cache_bytes, "late_wakings",
        (unsigned long long)c.late_wakings);
}
