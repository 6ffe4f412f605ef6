/* The extension module `hvdlite._core`: the only file that knows Python. Its interface is described in
 * _core.pyi. Three steps, always: validate and convert; call without the GIL where it may block; one
 * place that turns an error code into an exception. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <pthread.h>
#include <string.h>

#include "engine.h"
#include "exit.h"
#include "reduce.h"
#include "shm.h"

typedef struct {
    PyTypeObject *engine_type, *operation_type, *plan_type;
} module_state;

typedef struct {
    PyObject_HEAD hvdl_engine *engine; /* NULL until __init__ has succeeded */
    long forks; /* num_forks when it was made: a forked child may not touch it */
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

/* How often this process was forked off another one since the module was loaded. */
static long num_forks;

static void count_fork(void)
{
    num_forks++;
}

/* ---- errors ---- */

static void raise_error(hvdl_err err, const char *what, const char *name)
{
    switch (err) {
    case HVDL_ENOMEM: PyErr_NoMemory(); break;
    case HVDL_EDUP:
        PyErr_Format(PyExc_ValueError,
                     "%s '%s': an operation of this kind and name is in flight already; "
                     "wait for it first, or give this one another name",
                     what, name);
        break;
    case HVDL_ECLOSED: PyErr_SetString(PyExc_RuntimeError, "the engine is closed"); break;
    case HVDL_EMPI: PyErr_Format(PyExc_RuntimeError, "%s: MPI reported an error", what); break;
    default: PyErr_Format(PyExc_ValueError, "%s: unusable arguments", what); break;
    }
}

/* The engine, or NULL and an exception. */
static hvdl_engine *engine_of(EngineObject *self)
{
    if (!self->engine || self->closed) {
        PyErr_SetString(PyExc_RuntimeError, "the engine is closed");
        return NULL;
    }
    if (self->forks != num_forks) {
        PyErr_SetString(PyExc_RuntimeError,
                        "this is a forked child of a rank: only the rank itself takes part in "
                        "operations");
        return NULL;
    }
    return self->engine;
}

/* Drops the buffers' owners of operations that ended after their callers had gone. */
static void reap(hvdl_engine *engine)
{
    PyObject *owner;
    while ((owner = hvdl_engine_reap(engine)))
        Py_DECREF(owner);
}

/* ---- conversions ---- */

static int to_int(PyObject *object, const char *name, long least, long most, int *to)
{
    long value = PyLong_AsLong(object);
    if (value == -1 && PyErr_Occurred())
        return -1;
    if (value < least || value > most) {
        PyErr_Format(PyExc_ValueError, "%s is %ld, not within %ld .. %ld", name, value, least,
                     most);
        return -1;
    }
    *to = (int)value;
    return 0;
}

static int to_pointer(PyObject *object, void **to)
{
    size_t value = PyLong_AsSize_t(object);
    if (value == (size_t)-1 && PyErr_Occurred())
        return -1;
    *to = (void *)value;
    return 0;
}

static int to_double(PyObject *object, double *to)
{
    *to = PyFloat_AsDouble(object);
    return *to == -1.0 && PyErr_Occurred() ? -1 : 0;
}

/* Fills count, ndim, dims and rows. */
static int put_shape(PyObject *shape, hvdl_posting *posting)
{
    hvdl_desc *desc = &posting->desc;
    if (!PyTuple_Check(shape)) {
        PyErr_SetString(PyExc_TypeError, "shape must be a tuple");
        return -1;
    }
    Py_ssize_t ndim = PyTuple_Size(shape);
    bool gathers = desc->kind == HVDL_ALLGATHER;
    if (gathers && !ndim) {
        PyErr_SetString(PyExc_ValueError, "allgather takes no scalars: give it a first dimension");
        return -1;
    }
    desc->ndim = (uint8_t)(ndim < 255 ? ndim : 255);
    desc->count = 1;
    for (Py_ssize_t i = 0; i < ndim; i++) {
        long long dim = PyLong_AsLongLong(PyTuple_GetItem(shape, i));
        if (dim < 0) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_ValueError, "a dimension is negative");
            return -1;
        }
        bool is_rows = gathers && i == 0;
        if (is_rows)
            posting->rows = dim;
        else
            desc->count *= dim;
        /* What does not fit is folded into the last one, so that it is still compared. */
        if (i < HVDL_MAX_DIMS)
            desc->dims[i] = is_rows ? -1 : dim;
        else
            desc->dims[HVDL_MAX_DIMS - 1] = desc->dims[HVDL_MAX_DIMS - 1] * 1000003 + dim;
    }
    return 0;
}

static int check_posting(const hvdl_posting *posting)
{
    const hvdl_desc *desc = &posting->desc;
    bool gathers = desc->kind == HVDL_ALLGATHER;
    bool has_data = desc->kind != HVDL_BARRIER && desc->count && (!gathers || posting->rows);
    if (has_data && (!posting->input || (!gathers && !posting->output))) {
        PyErr_Format(PyExc_ValueError, "%s '%s': the tensor has no memory",
                     hvdl_kind_name(desc->kind), posting->name);
        return -1;
    }
    if (desc->dtype == HVDL_BOOL && (desc->prescale != 1.0 || desc->postscale != 1.0)) {
        PyErr_Format(PyExc_ValueError, "%s '%s': bool takes no scale factors",
                     hvdl_kind_name(desc->kind), posting->name);
        return -1;
    }
    return 0;
}

enum {
    POST_KIND,
    POST_NAME,
    POST_UNNAMED,
    POST_DTYPE,
    POST_OP,
    POST_ROOT,
    POST_INPUT,
    POST_OUTPUT,
    POST_SHAPE,
    POST_PRESCALE,
    POST_POSTSCALE,
    POST_OWNER,
    POST_PROCESS_SET,
    POST_WAKE,
    POST_MAX
};

static int to_posting(PyObject *const *args, Py_ssize_t num_args, hvdl_posting *posting)
{
    memset(posting, 0, sizeof *posting);
    hvdl_desc *desc = &posting->desc;
    int kind, dtype, op, root, unnamed;
    void *input;
    if (num_args < POST_PROCESS_SET || num_args > POST_MAX) {
        PyErr_Format(PyExc_TypeError, "12 to 14 arguments expected, got %zd", num_args);
        return -1;
    }
    Py_ssize_t name_bytes = 0;
    posting->name = PyUnicode_AsUTF8AndSize(args[POST_NAME], &name_bytes);
    if (posting->name && strlen(posting->name) != (size_t)name_bytes) {
        PyErr_SetString(PyExc_ValueError, "a name may not contain a NUL character");
        return -1;
    }
    unnamed = PyObject_IsTrue(args[POST_UNNAMED]);
    if (!posting->name || unnamed < 0 || to_int(args[POST_KIND], "kind", 0, HVDL_BARRIER, &kind) ||
        to_int(args[POST_DTYPE], "dtype", 0, HVDL_NUM_DTYPES - 1, &dtype) ||
        to_int(args[POST_OP], "op", 0, HVDL_NUM_OPS - 1, &op) ||
        to_int(args[POST_ROOT], "root", -1, INT32_MAX, &root) ||
        to_pointer(args[POST_INPUT], &input) || to_pointer(args[POST_OUTPUT], &posting->output) ||
        to_double(args[POST_PRESCALE], &desc->prescale) ||
        to_double(args[POST_POSTSCALE], &desc->postscale))
        return -1;
    posting->input = input;
    posting->unnamed = unnamed;
    desc->kind = (uint8_t)kind;
    desc->dtype = (uint8_t)dtype;
    desc->op = (uint8_t)op;
    desc->root = kind == HVDL_BROADCAST ? root : -1;
    if (num_args > POST_PROCESS_SET &&
        to_int(args[POST_PROCESS_SET], "process_set", 0, 0, &posting->process_set))
        return -1;
    return put_shape(args[POST_SHAPE], posting) || check_posting(posting) ? -1 : 0;
}

/* ---- Operation ---- */

static PyObject *new_operation_object(EngineObject *engine, PyObject *plan, PyObject *shape,
                                      hvdl_operation *operation)
{
    module_state *state = PyType_GetModuleState(Py_TYPE(engine));
    OperationObject *self = PyObject_New(OperationObject, state->operation_type);
    if (!self) {
        hvdl_operation_release(engine->engine, operation); /* the owner comes back by reap */
        return NULL;
    }
    Py_INCREF(engine);
    Py_XINCREF(plan);
    Py_XINCREF(shape);
    self->engine = engine;
    self->plan = plan;
    self->shape = shape;
    self->operation = operation;
    return (PyObject *)self;
}

static void operation_dealloc(PyObject *object)
{
    OperationObject *self = (OperationObject *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->engine->forks == num_forks) {
        PyObject *owner = hvdl_operation_release(self->engine->engine, self->operation);
        Py_XDECREF(owner);
    }
    Py_XDECREF(self->plan);
    Py_XDECREF(self->shape);
    Py_DECREF(self->engine);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *operation_poll(PyObject *object, PyObject *unused)
{
    OperationObject *self = (OperationObject *)object;
    (void)unused;
    if (self->engine->forks == num_forks && !hvdl_operation_done(self->operation)) {
        Py_BEGIN_ALLOW_THREADS hvdl_engine_poll(self->engine->engine);
        Py_END_ALLOW_THREADS
    }
    return PyBool_FromLong(hvdl_operation_done(self->operation));
}

#define SIGNAL_CHECK_NS 50000000L /* how long Ctrl-C may have to wait */

/* 0: it is done. -1: an exception (a signal handler's). */
static int wait_for(hvdl_engine *engine, hvdl_operation *operation)
{
    while (!hvdl_operation_done(operation)) {
        Py_BEGIN_ALLOW_THREADS hvdl_operation_wait(engine, operation, SIGNAL_CHECK_NS);
        Py_END_ALLOW_THREADS if (PyErr_CheckSignals()) return -1;
    }
    return 0;
}

static PyObject *outcome(hvdl_operation *operation)
{
    const char *error = hvdl_operation_error(operation);
    if (error)
        return PyUnicode_DecodeUTF8(error, (Py_ssize_t)strlen(error), "replace");
    Py_RETURN_NONE;
}

static PyObject *operation_wait(PyObject *object, PyObject *unused)
{
    OperationObject *self = (OperationObject *)object;
    (void)unused;
    if (self->engine->forks != num_forks)
        return engine_of(self->engine) ? NULL : NULL; /* raises */
    if (wait_for(self->engine->engine, self->operation))
        return NULL;
    return outcome(self->operation);
}

/* The operation if it is an allgather that succeeded, else NULL and an exception. */
static hvdl_operation *gathered(OperationObject *self)
{
    hvdl_operation *operation = self->operation;
    if (!hvdl_operation_done(operation) || hvdl_operation_error(operation) ||
        !hvdl_operation_rows(operation)) {
        PyErr_SetString(PyExc_RuntimeError, "only an allgather that has succeeded has a result");
        return NULL;
    }
    return operation;
}

static PyObject *operation_rows(PyObject *object, PyObject *unused)
{
    OperationObject *self = (OperationObject *)object;
    hvdl_operation *operation = gathered(self);
    (void)unused;
    if (!operation)
        return NULL;
    int num_ranks = hvdl_engine_num_ranks(self->engine->engine);
    const int64_t *rows = hvdl_operation_rows(operation);
    PyObject *all = PyTuple_New(num_ranks);
    for (int r = 0; all && r < num_ranks; r++) {
        PyObject *value = PyLong_FromLongLong(rows[r]);
        if (!value) {
            Py_DECREF(all);
            return NULL;
        }
        PyTuple_SetItem(all, r, value);
    }
    return all;
}

/* ---- DLPack: its version-0 structures, which every consumer takes ---- */

typedef struct {
    void *data;
    struct {
        int32_t device_type, device_id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} dl_tensor;

typedef struct dl_managed {
    dl_tensor tensor;
    void *context;
    void (*deleter)(struct dl_managed *);
    int64_t shape[];
} dl_managed;

static void dl_delete(dl_managed *managed)
{
    free(managed->tensor.data);
    free(managed);
}

static void capsule_delete(PyObject *capsule)
{
    if (PyCapsule_IsValid(capsule, "dltensor")) { /* nobody has taken it over */
        dl_managed *managed = PyCapsule_GetPointer(capsule, "dltensor");
        managed->deleter(managed);
    }
}

static PyObject *operation_capsule(PyObject *object, PyObject *unused)
{
    static const uint8_t codes[HVDL_NUM_DTYPES] = {1, 0, 0, 0, 0, 2, 4, 2, 2, 6};
    OperationObject *self = (OperationObject *)object;
    hvdl_operation *operation = gathered(self);
    (void)unused;
    if (!operation)
        return NULL;
    Py_ssize_t ndim = PyTuple_Size(self->shape);
    dl_managed *managed = calloc(1, sizeof *managed + (size_t)ndim * sizeof(int64_t));
    if (!managed)
        return PyErr_NoMemory();
    const hvdl_desc *desc = hvdl_operation_desc(operation);
    const int64_t *rows = hvdl_operation_rows(operation);
    for (int r = 0; r < hvdl_engine_num_ranks(self->engine->engine); r++)
        managed->shape[0] += rows[r];
    for (Py_ssize_t i = 1; i < ndim; i++)
        managed->shape[i] = PyLong_AsLongLong(PyTuple_GetItem(self->shape, i));
    managed->tensor.data = hvdl_operation_take_output(operation);
    managed->tensor.device.device_type = 1; /* CPU */
    managed->tensor.ndim = (int32_t)ndim;
    managed->tensor.dtype.code = codes[desc->dtype];
    managed->tensor.dtype.bits = (uint8_t)(8 * hvdl_dtype_bytes(desc->dtype));
    managed->tensor.dtype.lanes = 1;
    managed->tensor.shape = managed->shape;
    managed->deleter = dl_delete;
    if (!managed->tensor.data) {
        free(managed);
        PyErr_SetString(PyExc_RuntimeError, "the result was taken already");
        return NULL;
    }
    PyObject *capsule = PyCapsule_New(managed, "dltensor", capsule_delete);
    if (!capsule)
        dl_delete(managed);
    return capsule;
}

static PyMethodDef operation_methods[] = {
    {"poll", operation_poll, METH_NOARGS, NULL},
    {"wait", operation_wait, METH_NOARGS, NULL},
    {"rows", operation_rows, METH_NOARGS, NULL},
    {"capsule", operation_capsule, METH_NOARGS, NULL},
    {0},
};

static PyType_Slot operation_slots[] = {
    {Py_tp_dealloc, operation_dealloc},
    {Py_tp_methods, operation_methods},
    {Py_tp_doc, "One run of a collective; ends as DONE or FAILED."},
    {0, NULL},
};

static PyType_Spec operation_spec = {
    .name = "hvdlite._core.Operation",
    .basicsize = sizeof(OperationObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = operation_slots,
};

/* ---- Plan ---- */

static PyObject *plan_start(PyObject *object, PyObject *owner)
{
    PlanObject *self = (PlanObject *)object;
    hvdl_engine *engine = engine_of(self->engine);
    hvdl_operation *operation;
    if (!engine)
        return NULL;
    reap(engine);
    Py_INCREF(owner);
    hvdl_err err = hvdl_plan_start(engine, self->plan, owner, &operation);
    if (err) {
        Py_DECREF(owner);
        if (err == HVDL_EDUP)
            PyErr_SetString(PyExc_RuntimeError, "the plan's run before has not ended");
        else
            raise_error(err, "plan", "");
        return NULL;
    }
    return new_operation_object(self->engine, object, NULL, operation);
}

static void plan_dealloc(PyObject *object)
{
    PlanObject *self = (PlanObject *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->engine->forks == num_forks)
        hvdl_plan_release(self->engine->engine, self->plan);
    Py_DECREF(self->engine);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyMethodDef plan_methods[] = {
    {"start", plan_start, METH_O, NULL},
    {0},
};

static PyType_Slot plan_slots[] = {
    {Py_tp_dealloc, plan_dealloc},
    {Py_tp_methods, plan_methods},
    {Py_tp_doc, "A collective prepared once and started many times."},
    {0, NULL},
};

static PyType_Spec plan_spec = {
    .name = "hvdlite._core.Plan",
    .basicsize = sizeof(PlanObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = plan_slots,
};

/* ---- Engine: making it ---- */

/* The arrays that the configuration points to. */
typedef struct {
    int *sizes, *members;
    const char **names;
} geometry;

static void free_geometry(geometry *g)
{
    free(g->sizes);
    free(g->members);
    free(g->names);
}

/* hosts: sequences of ranks; names: strings. Every rank stands in exactly one host. */
static int to_geometry(PyObject *hosts, PyObject *names, geometry *g, hvdl_engine_config *config)
{
    Py_ssize_t num_hosts = PySequence_Size(hosts), num_names = PySequence_Size(names);
    int num_ranks = 0, at = 0;
    if (num_hosts < 0 || num_names < 0)
        return -1;
    if (num_hosts < 1 || num_hosts != num_names) {
        PyErr_SetString(PyExc_ValueError, "there must be a host, and a name for each");
        return -1;
    }
    g->sizes = calloc((size_t)num_hosts, sizeof *g->sizes);
    g->names = calloc((size_t)num_hosts, sizeof *g->names);
    if (!g->sizes || !g->names) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t h = 0; h < num_hosts; h++) {
        PyObject *ranks = PySequence_GetItem(hosts, h), *name = PySequence_GetItem(names, h);
        Py_ssize_t size = ranks ? PySequence_Size(ranks) : -1;
        /* `names` is a sequence that the caller holds: the text lives as long as it. */
        g->names[h] = name ? PyUnicode_AsUTF8AndSize(name, NULL) : NULL;
        Py_XDECREF(ranks);
        Py_XDECREF(name);
        if (size < 0 || !g->names[h])
            return -1;
        g->sizes[h] = (int)size;
        num_ranks += (int)size;
    }
    g->members = calloc((size_t)num_ranks + 1, sizeof *g->members);
    char *seen = calloc((size_t)num_ranks + 1, 1);
    if (!g->members || !seen) {
        free(seen);
        PyErr_NoMemory();
        return -1;
    }
    bool valid = true;
    for (Py_ssize_t h = 0; h < num_hosts; h++) {
        PyObject *ranks = PySequence_GetItem(hosts, h);
        for (int i = 0; ranks && i < g->sizes[h]; i++) {
            PyObject *item = PySequence_GetItem(ranks, i);
            long rank = item ? PyLong_AsLong(item) : -1;
            Py_XDECREF(item);
            valid = valid && rank >= 0 && rank < num_ranks && !seen[rank];
            if (valid) {
                seen[rank] = 1;
                g->members[at++] = (int)rank;
            }
        }
        valid = valid && ranks && g->sizes[h] > 0;
        Py_XDECREF(ranks);
    }
    free(seen);
    if (!valid || config->rank < 0 || config->rank >= num_ranks) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError,
                            "every rank from 0 to size-1 must stand in exactly one host");
        return -1;
    }
    config->num_hosts = (int)num_hosts;
    config->num_ranks = num_ranks;
    config->host_sizes = g->sizes;
    config->members = g->members;
    config->host_names = g->names;
    return 0;
}

/* Machine words (addresses, handles) are given as integers, signed or not. */
static int word_of(PyObject *wire, const char *key, hvdl_word *to)
{
    PyObject *item = PyDict_GetItemString(wire, key);
    if (!item) {
        PyErr_Format(PyExc_ValueError, "the wire lacks '%s'", key);
        return -1;
    }
    *to = (hvdl_word)PyLong_AsUnsignedLongLongMask(item);
    return PyErr_Occurred() ? -1 : 0;
}

static int to_wire(PyObject *from, hvdl_wire *wire)
{
    hvdl_word isend, irecv, test, cancel, tag_ub;
    memset(wire, 0, sizeof *wire);
    if (word_of(from, "isend", &isend) || word_of(from, "irecv", &irecv) ||
        word_of(from, "test", &test) || word_of(from, "cancel", &cancel) ||
        word_of(from, "comm", &wire->comm) || word_of(from, "byte", &wire->byte) ||
        word_of(from, "tag_ub", &tag_ub))
        return -1;
    /* C has no conversion from an integer to a function that -Wpedantic would accept. */
    memcpy(&wire->isend, &isend, sizeof isend);
    memcpy(&wire->irecv, &irecv, sizeof irecv);
    memcpy(&wire->test, &test, sizeof test);
    memcpy(&wire->cancel, &cancel, sizeof cancel);
    wire->tag_ub = tag_ub > INT32_MAX ? INT32_MAX : (int)tag_ub;
    return 0;
}

static int engine_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"rank",
                            "hosts",
                            "host_names",
                            "memory_fd",
                            "wire",
                            "progress_thread",
                            "inline_bytes",
                            "block_bytes",
                            "segment_bytes",
                            "piece_bytes",
                            "deterministic",
                            "event_capacity",
                            NULL};
    EngineObject *self = (EngineObject *)object;
    hvdl_engine_config config = {0};
    hvdl_wire wire;
    geometry g = {0};
    PyObject *hosts, *host_names, *wire_dict;
    int progress_thread, deterministic;
    Py_ssize_t inline_bytes, block_bytes, segment_bytes, piece_bytes, event_capacity;
    if (self->engine) {
        PyErr_SetString(PyExc_RuntimeError, "the engine was made already");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$iOOiOpnnnnpn:Engine", names, &config.rank,
                                     &hosts, &host_names, &config.memory_fd, &wire_dict,
                                     &progress_thread, &inline_bytes, &block_bytes, &segment_bytes,
                                     &piece_bytes, &deterministic, &event_capacity))
        return -1;
    if (inline_bytes < 0 || block_bytes < 64 || segment_bytes < 1 || piece_bytes < 64 ||
        event_capacity < 0 || segment_bytes > HVDL_MAX_MESSAGE_BYTES) {
        PyErr_SetString(PyExc_ValueError,
                        "inline_bytes and event_capacity must be at least 0, block_bytes and "
                        "piece_bytes 64, segment_bytes 1 and at most 2^30");
        return -1;
    }
    config.progress_thread = progress_thread;
    config.deterministic = deterministic;
    config.inline_bytes = (size_t)inline_bytes;
    config.block_bytes = (size_t)block_bytes;
    config.segment_bytes = (size_t)segment_bytes;
    config.piece_bytes = (size_t)piece_bytes;
    config.event_capacity = (size_t)event_capacity;
    if (wire_dict != Py_None) {
        if (to_wire(wire_dict, &wire))
            return -1;
        config.wire = &wire;
    }
    int result = to_geometry(hosts, host_names, &g, &config);
    if (!result && config.num_hosts > 1 && !config.wire) {
        PyErr_SetString(PyExc_ValueError, "several hosts need a wire");
        result = -1;
    }
    if (!result) {
        hvdl_err err = hvdl_engine_create(&self->engine, &config);
        self->forks = num_forks;
        if (err) {
            raise_error(err, "Engine", "");
            result = -1;
        }
    }
    free_geometry(&g);
    return result;
}

static PyObject *engine_close(PyObject *object, PyObject *args)
{
    EngineObject *self = (EngineObject *)object;
    int linger = 0;
    if (!PyArg_ParseTuple(args, "|p:close", &linger))
        return NULL;
    if (self->engine && !self->closed && self->forks == num_forks) {
        self->closed = true;
        Py_BEGIN_ALLOW_THREADS hvdl_engine_close(self->engine, linger);
        Py_END_ALLOW_THREADS reap(self->engine);
    }
    Py_RETURN_NONE;
}

static void engine_dealloc(PyObject *object)
{
    EngineObject *self = (EngineObject *)object;
    PyTypeObject *type = Py_TYPE(object);
    /* In a forked child nothing is freed: the locks may have been held by another thread. */
    if (self->engine && self->forks == num_forks) {
        Py_BEGIN_ALLOW_THREADS hvdl_engine_close(self->engine, false);
        Py_END_ALLOW_THREADS reap(self->engine);
        hvdl_engine_free(self->engine);
    }
    PyObject_Free(self);
    Py_DECREF(type);
}

/* ---- Engine: posting ---- */

/* Posts what the arguments say, and gives the engine a reference to the owner. */
static hvdl_operation *post_args(EngineObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    hvdl_engine *engine = engine_of(self);
    hvdl_posting posting;
    hvdl_operation *operation;
    if (!engine || to_posting(args, num_args, &posting))
        return NULL;
    int wake = num_args > POST_WAKE ? PyObject_IsTrue(args[POST_WAKE]) : 1;
    if (wake < 0)
        return NULL;
    reap(engine);
    PyObject *owner = args[POST_OWNER];
    Py_INCREF(owner);
    posting.owner = owner;
    hvdl_err err = hvdl_engine_post(engine, &posting, wake, &operation);
    if (err) {
        Py_DECREF(owner);
        raise_error(err, hvdl_kind_name(posting.desc.kind), posting.name);
        return NULL;
    }
    return operation;
}

static PyObject *engine_post(PyObject *object, PyObject *const *args, Py_ssize_t num_args)
{
    hvdl_operation *operation = post_args((EngineObject *)object, args, num_args);
    if (!operation)
        return NULL;
    return new_operation_object((EngineObject *)object, NULL, args[POST_SHAPE], operation);
}

static PyObject *engine_plan(PyObject *object, PyObject *args)
{
    EngineObject *self = (EngineObject *)object;
    hvdl_engine *engine = engine_of(self);
    hvdl_posting posting = {0};
    hvdl_desc *desc = &posting.desc;
    int dtype, op, process_set = 0;
    Py_ssize_t count;
    PyObject *input, *output, *owner;
    void *address;
    if (!engine ||
        !PyArg_ParseTuple(args, "siiOOnddO|i:plan", &posting.name, &dtype, &op, &input, &output,
                          &count, &desc->prescale, &desc->postscale, &owner, &process_set))
        return NULL;
    if (dtype < 0 || dtype >= HVDL_NUM_DTYPES || op < 0 || op >= HVDL_NUM_OPS || count < 0 ||
        process_set != 0) {
        PyErr_SetString(PyExc_ValueError, "plan: dtype, op, count or process_set out of range");
        return NULL;
    }
    if (to_pointer(input, &address) || to_pointer(output, &posting.output))
        return NULL;
    posting.input = address;
    desc->kind = HVDL_ALLREDUCE;
    desc->dtype = (uint8_t)dtype;
    desc->op = (uint8_t)op;
    desc->root = -1;
    desc->ndim = 1;
    desc->dims[0] = desc->count = count;
    module_state *state = PyType_GetModuleState(Py_TYPE(object));
    PlanObject *plan = PyObject_New(PlanObject, state->plan_type);
    if (!plan)
        return NULL;
    reap(engine);
    Py_INCREF(owner);
    posting.owner = owner;
    hvdl_err err = hvdl_plan_create(engine, &posting, &plan->plan);
    if (err) {
        PyTypeObject *type = Py_TYPE(plan);
        Py_DECREF(owner);
        PyObject_Free(plan);
        Py_DECREF(type);
        raise_error(err, "plan", posting.name);
        return NULL;
    }
    Py_INCREF(self);
    plan->engine = self;
    return (PyObject *)plan;
}

/* ---- Engine: looking in ---- */

static PyObject *engine_events(PyObject *object, PyObject *unused)
{
    EngineObject *self = (EngineObject *)object;
    hvdl_engine *engine = self->engine;
    (void)unused;
    if (!engine || self->forks != num_forks)
        return engine_of(self) ? NULL : NULL; /* raises */
    size_t room = hvdl_engine_event_capacity(engine);
    hvdl_event *events = malloc((room + 1) * sizeof *events);
    if (!events)
        return PyErr_NoMemory();
    size_t count = hvdl_engine_events(engine, events, room);
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list && i < count; i++) {
        PyObject *name = PyUnicode_DecodeUTF8(events[i].name, (Py_ssize_t)strlen(events[i].name),
                                              "replace"); /* a cut may split a character */
        PyObject *item = name ? Py_BuildValue("(KNs)", (unsigned long long)events[i].time_ns, name,
                                              events[i].what)
                              : NULL;
        if (!item) {
            Py_DECREF(list);
            list = NULL;
        } else {
            PyList_SetItem(list, (Py_ssize_t)i, item);
        }
    }
    free(events);
    return list;
}

static PyObject *engine_counters(PyObject *object, PyObject *unused)
{
    hvdl_engine *engine = engine_of((EngineObject *)object);
    (void)unused;
    if (!engine)
        return NULL;
    hvdl_counters c = hvdl_engine_counters(engine);
    return Py_BuildValue("{s:K,s:K,s:K,s:K}", "operations", (unsigned long long)c.operations,
                         "control_messages", (unsigned long long)c.control_messages,
                         "data_messages", (unsigned long long)c.data_messages, "data_bytes",
                         (unsigned long long)c.data_bytes);
}

static PyMethodDef engine_methods[] = {
    {"post", (PyCFunction)(void (*)(void))engine_post, METH_FASTCALL, NULL},
    {"plan", engine_plan, METH_VARARGS, NULL},
    {"events", engine_events, METH_NOARGS, NULL},
    {"counters", engine_counters, METH_NOARGS, NULL},
    {"close", engine_close, METH_VARARGS, NULL},
    {0},
};

static PyType_Slot engine_slots[] = {
    {Py_tp_init, engine_init},
    {Py_tp_dealloc, engine_dealloc},
    {Py_tp_methods, engine_methods},
    {Py_tp_doc,
     "The engine of one process: a queue of operations and the thread that drives them."},
    {0, NULL},
};

static PyType_Spec engine_spec = {
    .name = "hvdlite._core.Engine",
    .basicsize = sizeof(EngineObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = engine_slots,
};

/* ---- module functions ---- */

static PyObject *memory_bytes(PyObject *module, PyObject *args)
{
    int local_size;
    Py_ssize_t inline_bytes, block_bytes;
    (void)module;
    if (!PyArg_ParseTuple(args, "inn:memory_bytes", &local_size, &inline_bytes, &block_bytes))
        return NULL;
    if (local_size < 1 || local_size > HVDL_MAX_LOCAL || inline_bytes < 0 || block_bytes < 64) {
        PyErr_Format(PyExc_ValueError,
                     "local_size must be within 1 .. %d, inline_bytes at least 0, block_bytes 64",
                     HVDL_MAX_LOCAL);
        return NULL;
    }
    return PyLong_FromSize_t(hvdl_shm_bytes(local_size, (size_t)inline_bytes, (size_t)block_bytes));
}

static PyObject *cpu_features(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    return PyUnicode_FromString(hvdl_reduce_variant());
}

static PyObject *finish_on_exit(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"abort",    "ibarrier", "test",       "finalized",
                            "finalize", "comm",     "supervised", NULL};
    unsigned long long abort_, ibarrier, test, finalized, finalize, comm;
    int supervised;
    hvdl_exit_functions functions;
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$KKKKKKp:finish_on_exit", names, &abort_,
                                     &ibarrier, &test, &finalized, &finalize, &comm, &supervised))
        return NULL;
    hvdl_word words[] = {(hvdl_word)abort_, (hvdl_word)ibarrier, (hvdl_word)test,
                         (hvdl_word)finalized, (hvdl_word)finalize};
    memcpy(&functions.abort, &words[0], sizeof words[0]);
    memcpy(&functions.ibarrier, &words[1], sizeof words[1]);
    memcpy(&functions.test, &words[2], sizeof words[2]);
    memcpy(&functions.finalized, &words[3], sizeof words[3]);
    memcpy(&functions.finalize, &words[4], sizeof words[4]);
    functions.comm = (hvdl_word)comm;
    functions.supervised = supervised;
    if (hvdl_exit_set(&functions))
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *close_on_exit(PyObject *module, PyObject *object)
{
    /* Held past the end of Python: the exit handlers run after it. */
    static PyObject *kept;
    module_state *state = PyModule_GetState(module);
    if (object != Py_None && Py_TYPE(object) != state->engine_type) {
        PyErr_SetString(PyExc_TypeError, "close_on_exit: expected an Engine or None");
        return NULL;
    }
    PyObject *former = kept;
    kept = object == Py_None ? NULL : object;
    Py_XINCREF(kept);
    hvdl_exit_close(kept ? ((EngineObject *)kept)->engine : NULL);
    Py_XDECREF(former);
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"memory_bytes", memory_bytes, METH_VARARGS, NULL},
    {"cpu_features", cpu_features, METH_NOARGS, NULL},
    {"close_on_exit", close_on_exit, METH_O, NULL},
    {"finish_on_exit", (PyCFunction)(void (*)(void))finish_on_exit, METH_VARARGS | METH_KEYWORDS,
     NULL},
    {0},
};

static int module_exec(PyObject *module)
{
    static const struct {
        const char *name;
        int value;
    } constants[] = {
        {"ALLREDUCE", HVDL_ALLREDUCE},
        {"BROADCAST", HVDL_BROADCAST},
        {"ALLGATHER", HVDL_ALLGATHER},
        {"BARRIER", HVDL_BARRIER},
        {"AVERAGE", HVDL_AVERAGE},
        {"SUM", HVDL_SUM},
        {"MIN", HVDL_MIN},
        {"MAX", HVDL_MAX},
        {"PRODUCT", HVDL_PRODUCT},
        {"UINT8", HVDL_UINT8},
        {"INT8", HVDL_INT8},
        {"INT16", HVDL_INT16},
        {"INT32", HVDL_INT32},
        {"INT64", HVDL_INT64},
        {"FLOAT16", HVDL_FLOAT16},
        {"BFLOAT16", HVDL_BFLOAT16},
        {"FLOAT32", HVDL_FLOAT32},
        {"FLOAT64", HVDL_FLOAT64},
        {"BOOL", HVDL_BOOL},
        {"HEADER_BYTES", HVDL_HEADER_BYTES},
    };
    module_state *state = PyModule_GetState(module);
    for (size_t i = 0; i < sizeof constants / sizeof *constants; i++)
        if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value))
            return -1;
    PyObject *engine = PyType_FromModuleAndSpec(module, &engine_spec, NULL);
    PyObject *operation = PyType_FromModuleAndSpec(module, &operation_spec, NULL);
    PyObject *plan = PyType_FromModuleAndSpec(module, &plan_spec, NULL);
    state->engine_type = (PyTypeObject *)engine;
    state->operation_type = (PyTypeObject *)operation;
    state->plan_type = (PyTypeObject *)plan;
    if (!engine || !operation || !plan || PyModule_AddObjectRef(module, "Operation", operation) ||
        PyModule_AddObjectRef(module, "Plan", plan) ||
        PyModule_AddObjectRef(module, "Engine", engine))
        return -1;
    static bool counting; /* once per process: handlers can't be taken back */
    if (!counting && pthread_atfork(NULL, NULL, count_fork)) {
        PyErr_NoMemory();
        return -1;
    }
    counting = true;
    return 0;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    module_state *state = PyModule_GetState(module);
    Py_VISIT(state->engine_type);
    Py_VISIT(state->operation_type);
    Py_VISIT(state->plan_type);
    return 0;
}

static int module_clear(PyObject *module)
{
    module_state *state = PyModule_GetState(module);
    Py_CLEAR(state->engine_type);
    Py_CLEAR(state->operation_type);
    Py_CLEAR(state->plan_type);
    return 0;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "hvdlite._core",
    .m_doc = "The C core: plans, the engine that drives them, and what the ranks of a host share.",
    .m_size = sizeof(module_state),
    .m_methods = module_methods,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
};

PyMODINIT_FUNC PyInit__core(void)
{
    return PyModuleDef_Init(&module_def);
}
