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

/* Objects of the module. */
typedef struct {
    PyTypeObject *engine_type, *operation_type, *plan_type, *posting_type;
    PyTypeObject *arrivals_type, *count_type, *gradient_type;
    PyObject *tensor_types, *tensor_changed; /* what use_tensors was given */
    /* The names of methods of tensors and storages. */
    PyObject *is_neg, *storage_offset, *untyped_storage, *nbytes, *shape, *data_ptr;
    /* What hooks of gradients ask of tensors. */
    PyObject *grad, *requires_grad, *version, *copy_;
    /* At the end, being no object. */
    int (*describe_tensor)(void *tensor, dl_tensor *to); /* NULL: use_tensors was not called */
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
    union {
        struct {
            PyObject *name, *site;     /* site: or NULL */
            PyObject *source, *result; /* tensors, tuples of tensors (python_parts.c), or NULL */
            PyObject *splits;          /* a tensor or a tuple, or NULL */
            PyObject *shape;           /* the source's, or NULL: there is none */
        };
        PyObject *objects[6]; /* all of them */
    };
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

/* Functions that Python calls: of the module, or methods of its types; and their rows in tables of methods. */
typedef PyObject *hvdl_py_function(PyObject *self, PyObject *argument);
typedef PyObject *hvdl_py_function_of_dict(PyObject *self, PyObject *args, PyObject *keywords);
typedef PyObject *hvdl_py_fast(PyObject *self, PyObject *const *args, Py_ssize_t num_args);
typedef PyObject *hvdl_py_fast_of_keywords(PyObject *self, PyObject *const *args,
                                           Py_ssize_t num_args, PyObject *keywords);
#define HVDL_PY_METHOD(name, function, flags)                                                      \
    {name, (PyCFunction)(void (*)(void))(function), flags, NULL}
#define HVDL_PY_DICT (METH_VARARGS | METH_KEYWORDS)
#define HVDL_PY_KEYWORDS (METH_FASTCALL | METH_KEYWORDS)

hvdl_py_function hvdl_py_use_tensors, hvdl_py_dtype_of, hvdl_py_park, hvdl_py_close_on_exit,
    hvdl_py_tcp_connection;
hvdl_py_function_of_dict hvdl_py_finish_on_exit, hvdl_py_receive_on_exit;
hvdl_py_fast_of_keywords hvdl_py_posting;
/* Engine */
hvdl_py_function hvdl_py_give_up, hvdl_py_ends, hvdl_py_await_end, hvdl_py_wake, hvdl_py_cut_bytes,
    hvdl_py_owned, hvdl_py_record, hvdl_py_events, hvdl_py_drain_events, hvdl_py_counters,
    hvdl_py_sent_bytes;
hvdl_py_function_of_dict hvdl_py_plan;
hvdl_py_fast hvdl_py_post, hvdl_py_run_allreduce;
hvdl_py_fast_of_keywords hvdl_py_run, hvdl_py_send, hvdl_py_recv;
/* Operation */
hvdl_py_function hvdl_py_operation_drive, hvdl_py_withdraw;
hvdl_py_fast_of_keywords hvdl_py_operation_wait;

/* ---- python_conversions.c ---- */

/* what: a kind or function; name: an operation's; NULL: it is a run of a plan. */
void hvdl_py_raise(hvdl_err err, const char *what, const char *name);
/* ValueError: the posting's title, and what is wrong with it. Returns -1. */
int hvdl_py_refuse(const hvdl_posting *posting, const char *format, ...);

/* To the user, from any thread, also while another one holds the GIL. */
void hvdl_py_say(const char *line);
/* The engine, or NULL and an exception. */
hvdl_engine *hvdl_py_engine(EngineObject *self);
/* Drops the buffers' owners of operations that ended after their callers had gone. */
void hvdl_py_reap(hvdl_engine *engine);
/* Conversions: 0, or -1 and an exception. */
int hvdl_py_int(PyObject *object, const char *name, long least, long most, int *to);
int hvdl_py_pointer(PyObject *object, void **to);
/* For PyArg_Parse's O&. to: an hvdl_word or a function, which C has no conversion to that -Wpedantic would
 * accept; given as an integer, signed or not. */
int hvdl_py_word(PyObject *object, void *to);
/* Takes the item over. *list: NULL, and an exception, where it or the item fails. */
void hvdl_py_append(PyObject **list, PyObject *item);
/* Tensors whose storage was freed lie at 0, or, where they began within it, a little above. */
static inline bool hvdl_py_is_memory(const void *address)
{
    return (uintptr_t)address >= 4096;
}
/* A scale factor: 0.0 and -0.0, which are compared bytewise, as the same. */
double hvdl_py_factor(double value);
/* A str of what may not be UTF-8. */
PyObject *hvdl_py_decode(const char *text);
/* As PyObject_IsTrue. */
static inline int hvdl_py_truth(PyObject *object)
{
    return object == Py_False ? 0 : object == Py_True ? 1 : PyObject_IsTrue(object);
}
/* The string's own text, without a NUL; what: for the exception. NULL: an exception. */
const char *hvdl_py_text(PyObject *object, const char *what);
/* The name, and the words that it may have: `hvdlite.words`. -1: an exception. */
int hvdl_py_name(PyObject *object, hvdl_posting *to);
/* A site; empty: NULL. -1: an exception. */
int hvdl_py_site(PyObject *object, const char **to);

/* The arguments of a function, which may be given by position or as keywords. */
typedef struct {
    const char *text;
    Py_ssize_t length;
} hvdl_py_keyword;
#define NAME(text) {text, sizeof text - 1}

typedef struct {
    const char *function;
    int num_needed, num;
    const hvdl_py_keyword *names;
} hvdl_py_signature;

/* Fills given[signature->num]; NULL where there is none. -1: an exception. */
int hvdl_py_gather(const hvdl_py_signature *signature, PyObject *const *args, Py_ssize_t num_args,
                   PyObject *keywords, PyObject **given);

/* ---- python_post.c ---- */

/* A reference for the engine, before it is called; and after it: whether it has refused it, which raises. */
PyObject *hvdl_py_lend(hvdl_engine *engine, PyObject *owner);
bool hvdl_py_refused(hvdl_err err, PyObject *owner, const char *what, const char *name);

/* ---- python_parts.c ---- */

/* Whether hvdl_py_put_parts must fill it. */
bool hvdl_py_is_in_parts(const PostingObject *self);
/* Fills in the addresses and splits, and what the descriptor says of the latter, after all sizes were
 * checked. *memory: of what it then points to, for free() in any case. -1: an exception. */
int hvdl_py_put_parts(const hvdl_py_state *state, hvdl_engine *engine, const PostingObject *self,
                      hvdl_posting *to, void **memory);

/* From a sequence of (begin, end, address), in elements of a buffer of `count`. -1: an exception; else the
 * list is the caller's to free(). */
int hvdl_py_to_extents(PyObject *object, Py_ssize_t count, size_t elem_bytes, hvdl_extents *to);

/* ---- python_tensor.c ---- */

/* Whether it is one of torch's own classes, and dense. Never an exception. */
bool hvdl_py_describe(const hvdl_py_state *state, PyObject *object, dl_tensor *to);
/* 1: whether the memory holds the values themselves; 0: it does not; -1: an exception. */
int hvdl_py_holds_values(PyObject *tensor, PyObject *is_neg);
/* NULL: there is no tensor. -1: an exception. */
int hvdl_py_address_of(const hvdl_py_state *state, PyObject *tensor, void **to);

/* Fills ndim, dims and count. has_rows: the first dimension does not count, and is *rows. -1: an exception. */
int hvdl_py_put_shape(PyObject *tuple, bool has_rows, hvdl_desc *desc, int64_t *rows);
/* Its elements; -1: an exception. */
int64_t hvdl_py_count_of(const hvdl_py_state *state, PyObject *tensor);
/* Of a contiguous, dense tensor with elements in host memory that holds their values: dtype and shape, and where
 * it lies. 1: it is one; 0: it is none; -1: an exception. */
int hvdl_py_put_plain(const hvdl_py_state *state, PyObject *object, hvdl_desc *desc, void **memory);

/* ---- python_operation.c ---- */

/* Takes the operation over, also where it fails. */
PyObject *hvdl_py_operation(EngineObject *engine, PyObject *plan, PyObject *shape,
                            hvdl_operation *operation);
/* NULL, and an exception: it is the parent's of this forked child. */
hvdl_operation *hvdl_py_own_operation(OperationObject *self);

/* ---- python_waiting.c ---- */

/* None, or the text of the failure. seconds: negative: no limit. NULL: an exception. */
PyObject *hvdl_py_wait_until(EngineObject *engine, hvdl_operation *operation, double seconds);
/* given: the argument timeout_s, or NULL. Negative, also NaN: there is no limit. -1: an exception. */
int hvdl_py_limit(PyObject *given, double *seconds);

#endif
