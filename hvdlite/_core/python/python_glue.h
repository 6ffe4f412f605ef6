/* What the glue to Python shares. Only the files python_*.c and module.c know Python.
 *
 * Three steps, always: validate and convert; call without the GIL where it may block; one place that
 * turns an error code into an exception. */
#ifndef HVDL_PYTHON_H
#define HVDL_PYTHON_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "engine/engine.h"
#include "python/python_dlpack.h"

#define HVDL_PY_NUM_FIELDS 14 /* of a Posting */

typedef struct {
    PyTypeObject *engine_type, *operation_type, *plan_type, *posting_type;
    PyTypeObject *arrivals_type, *count_type, *gradient_type;
    /* What use_tensors was given. */
    PyObject *tensor_types, *op_type, *tensor_changed;
    int (*describe_tensor)(void *tensor, dl_tensor *to); /* NULL: it was not called */
    /* The names of methods of tensors and storages. */
    PyObject *is_neg, *storage_offset, *untyped_storage, *nbytes;
    /* What hooks of gradients ask of tensors. */
    PyObject *grad, *requires_grad, *version, *copy_;
    /* What a posting asks of a tensor, and the names of its own fields. */
    PyObject *shape, *data_ptr, *field_names[HVDL_PY_NUM_FIELDS];
} hvdl_py_state;

typedef struct {
    PyObject_HEAD hvdl_engine *engine; /* NULL until __init__ has succeeded */
    long forks; /* hvdl_py_num_forks when it was made: a forked child may not touch it */
    bool closed;
} EngineObject;

typedef struct {
    PyObject_HEAD EngineObject *engine;
    PyObject *plan;  /* the Plan it is a run of, or NULL */
    PyObject *shape; /* of the input; allgather */
    hvdl_operation *operation;
} OperationObject;

typedef struct {
    PyObject_HEAD EngineObject *engine;
    hvdl_plan *plan;
} PlanObject;

/* What is to be done, and with which tensors. Never changed once it is made. */
typedef struct {
    PyObject_HEAD hvdl_posting
        posting;               /* its pointers, but for the name, are set when it is posted */
    PyObject *name, *site;     /* site: or NULL */
    PyObject *source, *result; /* tensors, tuples of tensors (python_parts.c), or NULL */
    PyObject *splits;          /* a tensor or a tuple, or NULL */
    PyObject *shape;           /* the source's, or NULL: there is none */
} PostingObject;

/* How often this process was forked off another one since the module was loaded. */
extern long hvdl_py_num_forks;

extern PyType_Spec hvdl_py_engine_spec, hvdl_py_operation_spec, hvdl_py_plan_spec,
    hvdl_py_posting_spec, hvdl_py_arrivals_spec, hvdl_py_count_spec, hvdl_py_gradient_spec;

/* A field holds another object from now on, or none. */
static inline void hvdl_py_keep(PyObject **field, PyObject *object)
{
    PyObject *former = *field;
    Py_XINCREF(object);
    *field = object;
    Py_XDECREF(former);
}

/* ---- python_conversions.c ---- */

void hvdl_py_raise(hvdl_err err, const char *what, const char *name);

/* To the user, from any thread, also while another one holds the GIL. */
void hvdl_py_say(const char *line);
/* The engine, or NULL and an exception. */
hvdl_engine *hvdl_py_engine(EngineObject *self);
/* Drops the buffers' owners of operations that ended after their callers had gone. */
void hvdl_py_reap(hvdl_engine *engine);
/* Conversions: 0, or -1 and an exception. */
int hvdl_py_int(PyObject *object, const char *name, long least, long most, int *to);
int hvdl_py_pointer(PyObject *object, void **to);
/* 0: there is no tensor. */
int hvdl_py_address_of(const hvdl_py_state *state, PyObject *tensor, void **to);
/* Tensors whose storage was freed lie at 0, or, where they began within it, a little above. */
static inline bool hvdl_py_is_memory(const void *address)
{
    return (uintptr_t)address >= 4096;
}
/* A scale factor: 0.0 and -0.0, which are compared bytewise, as the same. */
double hvdl_py_factor(double value);
/* The string's own text, without a NUL; what: for the exception. NULL: an exception. */
const char *hvdl_py_text(PyObject *object, const char *what);
/* The name, and the words that it may have: `hvdlite.words`. -1: an exception. */
int hvdl_py_name(PyObject *object, hvdl_posting *to);
/* A site; empty: NULL. -1: an exception. */
int hvdl_py_site(PyObject *object, const char **to);

/* ---- python_posting.c ---- */

/* Makes a Posting: `posting` of the module. */
PyObject *hvdl_py_posting(PyObject *module, PyObject *const *args, Py_ssize_t num_args,
                          PyObject *keywords);
/* The names of its arguments, once. */
int hvdl_py_intern_fields(hvdl_py_state *state);

/* ---- python_post.c ---- */

/* Posts a Posting, which the engine keeps with its tensors until the operation has ended. NULL: an
 * exception. */
hvdl_operation *hvdl_py_post_object(hvdl_py_state *state, hvdl_engine *engine, PyObject *posting,
                                    bool wake);
/* Posts it, with a reference to the owner for the engine. NULL: an exception. */
hvdl_operation *hvdl_py_post(hvdl_engine *engine, hvdl_posting *posting, PyObject *owner,
                             bool wake);

/* ---- python_exit.c: functions of the module ---- */

PyObject *hvdl_py_finish_on_exit(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *hvdl_py_receive_on_exit(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *hvdl_py_close_on_exit(PyObject *module, PyObject *engines);

/* ---- python_parts.c ---- */

/* What a posting points to while it is posted. */
typedef struct {
    void *memory; /* of both, for free() */
    int64_t *splits;
    void **addresses;
} hvdl_py_parts;

/* Elements of all tensors; -1: an exception. */
int64_t hvdl_py_count_of_tuple(const hvdl_py_state *state, PyObject *tensors);
/* Whether hvdl_py_put_parts must fill it. */
bool hvdl_py_is_in_parts(const PostingObject *self);
/* Fills in the addresses and splits, and what the descriptor says of the latter, after all sizes were
 * checked. -1: an exception; parts->memory must be freed in any case. */
int hvdl_py_put_parts(const hvdl_py_state *state, hvdl_engine *engine, const PostingObject *self,
                      hvdl_posting *to, hvdl_py_parts *parts);

/* From a sequence of (begin, end, address), in elements of a buffer of `count`. -1: an exception; else the
 * list is the caller's to free(). */
int hvdl_py_to_extents(PyObject *object, Py_ssize_t count, size_t elem_bytes, hvdl_extents *to);

/* ---- python_planning.c: methods of Engine ---- */

PyObject *hvdl_py_plan(PyObject *engine, PyObject *args, PyObject *kwargs);
PyObject *hvdl_py_owned(PyObject *engine, PyObject *args);
PyObject *hvdl_py_cut_bytes(PyObject *engine, PyObject *unused);

/* ---- python_tensor.c ---- */

PyObject *hvdl_py_use_tensors(PyObject *module, PyObject *args);
PyObject *hvdl_py_dtype_of(PyObject *module, PyObject *object);
/* Whether it is one that describe_tensor can describe: of torch's own classes. */
bool hvdl_py_is_tensor(const hvdl_py_state *state, PyObject *object);
/* 1: whether the memory holds the values themselves; 0: it does not; -1: an exception. */
int hvdl_py_holds_values(PyObject *tensor, PyObject *is_neg);
PyObject *hvdl_py_allreduce_in_place(PyObject *engine, PyObject *const *args, Py_ssize_t num_args);
PyObject *hvdl_py_run_allreduce(PyObject *engine, PyObject *const *args, Py_ssize_t num_args);

/* ---- python_point_to_point.c ---- */

PyObject *hvdl_py_send(PyObject *engine, PyObject *const *args, Py_ssize_t num_args,
                       PyObject *keywords);
PyObject *hvdl_py_recv(PyObject *engine, PyObject *const *args, Py_ssize_t num_args,
                       PyObject *keywords);
PyObject *hvdl_py_withdraw(PyObject *operation, PyObject *unused);

/* ---- python_operation.c ---- */

/* 0: it is done, or that time of CLOCK_MONOTONIC (0: never) has come. -1: an exception (a signal
 * handler's). */
int hvdl_py_wait(EngineObject *engine, hvdl_operation *operation, uint64_t deadline_ns);
PyObject *hvdl_py_park(PyObject *module, PyObject *number);
/* Of one that is done: None, or the text of its failure. */
PyObject *hvdl_py_outcome(hvdl_operation *operation);

/* Takes the operation over, also where it fails. */
PyObject *hvdl_py_operation(EngineObject *engine, PyObject *plan, PyObject *shape,
                            hvdl_operation *operation);

/* ---- python_waiting.c ---- */

PyObject *hvdl_py_operation_wait(PyObject *operation, PyObject *const *args, Py_ssize_t num_args,
                                 PyObject *keywords);
PyObject *hvdl_py_operation_drive(PyObject *operation, PyObject *limit_s);
PyObject *hvdl_py_run(PyObject *engine, PyObject *const *args, Py_ssize_t num_args,
                      PyObject *keywords);
/* Posts it and waits: None, or the text of the failure. seconds: negative: no limit. NULL: an exception. */
PyObject *hvdl_py_run_posting(EngineObject *self, hvdl_posting *posting, PyObject *owner,
                              double seconds);
PyObject *hvdl_py_give_up(PyObject *engine, PyObject *text);
PyObject *hvdl_py_ends(PyObject *engine, PyObject *unused);
PyObject *hvdl_py_await_end(PyObject *engine, PyObject *seen);
PyObject *hvdl_py_wake(PyObject *engine, PyObject *unused);

/* ---- python_recording.c ---- */

PyObject *hvdl_py_record(PyObject *engine, PyObject *args);
PyObject *hvdl_py_events(PyObject *engine, PyObject *unused);
PyObject *hvdl_py_drain_events(PyObject *engine, PyObject *unused);
PyObject *hvdl_py_counters(PyObject *engine, PyObject *unused);

/* ---- python_traffic.c ---- */

PyObject *hvdl_py_sent_bytes(PyObject *engine, PyObject *unused);
PyObject *hvdl_py_tcp_connection(PyObject *module, PyObject *fd);

#endif
