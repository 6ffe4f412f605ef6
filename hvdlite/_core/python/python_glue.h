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

#define HVDL_PY_NUM_FIELDS 13 /* of a Posting */

typedef struct {
    PyTypeObject *engine_type, *operation_type, *plan_type, *posting_type;
    /* What use_tensors was given. */
    PyObject *tensor_types, *op_type, *tensor_changed;
    PyObject *is_alone; /* what use_alone was given; NULL: it was not called */
    int (*describe_tensor)(void *tensor, dl_tensor *to); /* NULL: it was not called */
    /* The names of methods of tensors and storages. */
    PyObject *is_neg, *storage_offset, *untyped_storage, *nbytes;
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
        posting; /* its pointers, but for the name, are set when it is posted */
    PyObject *name;
    PyObject *source, *result, *splits; /* tensors, or NULL */
    PyObject *shape;                    /* the source's, or NULL */
} PostingObject;

/* How often this process was forked off another one since the module was loaded. */
extern long hvdl_py_num_forks;

extern PyType_Spec hvdl_py_engine_spec, hvdl_py_operation_spec, hvdl_py_plan_spec,
    hvdl_py_posting_spec;

/* ---- python_posting.c ---- */

void hvdl_py_raise(hvdl_err err, const char *what, const char *name);
/* The engine, or NULL and an exception. */
hvdl_engine *hvdl_py_engine(EngineObject *self);
/* Drops the buffers' owners of operations that ended after their callers had gone. */
void hvdl_py_reap(hvdl_engine *engine);
/* Conversions: 0, or -1 and an exception. */
int hvdl_py_int(PyObject *object, const char *name, long least, long most, int *to);
int hvdl_py_pointer(PyObject *object, void **to);
/* Tensors whose storage was freed lie at 0, or, where they began within it, a little above. */
static inline bool hvdl_py_is_memory(const void *address)
{
    return (uintptr_t)address >= 4096;
}
/* A scale factor: 0.0 and -0.0, which are compared bytewise, as the same. */
double hvdl_py_factor(double value);
/* Makes a Posting: `posting` of the module. */
PyObject *hvdl_py_posting(PyObject *module, PyObject *const *args, Py_ssize_t num_args,
                          PyObject *keywords);
/* The names of its arguments, once. */
int hvdl_py_intern_fields(hvdl_py_state *state);
/* Posts a Posting, which the engine keeps with its tensors until the operation has ended. NULL: an
 * exception. */
hvdl_operation *hvdl_py_post_object(hvdl_py_state *state, hvdl_engine *engine, PyObject *posting,
                                    bool wake);
/* Posts it, with a reference to the owner for the engine. NULL: an exception. */
hvdl_operation *hvdl_py_post(hvdl_engine *engine, hvdl_posting *posting, PyObject *owner,
                             bool wake);

/* ---- python_tensor.c ---- */

PyObject *hvdl_py_use_tensors(PyObject *module, PyObject *args);
PyObject *hvdl_py_dtype_of(PyObject *module, PyObject *object);
PyObject *hvdl_py_allreduce_in_place(PyObject *engine, PyObject *const *args, Py_ssize_t num_args);

/* ---- python_operation.c ---- */

/* 0: it is done. -1: an exception (a signal handler's). */
int hvdl_py_wait(EngineObject *engine, hvdl_operation *operation);
/* Has it called once a wait lasts: whether no other thread can post an operation. */
PyObject *hvdl_py_use_alone(PyObject *module, PyObject *is_alone);
/* Of one that is done: None, or the text of its failure. */
PyObject *hvdl_py_outcome(hvdl_operation *operation);

/* Takes the operation over, also where it fails. */
PyObject *hvdl_py_operation(EngineObject *engine, PyObject *plan, PyObject *shape,
                            hvdl_operation *operation);

#endif
