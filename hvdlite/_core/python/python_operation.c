/* Operation and Plan. */
#define _GNU_SOURCE
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "python/python_glue.h"

#include "host/shm.h"

/* ---- Operation ---- */

PyObject *hvdl_py_operation(EngineObject *engine, PyObject *plan, PyObject *shape,
                            hvdl_operation *operation)
{
    hvdl_py_state *state = PyType_GetModuleState(Py_TYPE(engine));
    OperationObject *self = PyObject_New(OperationObject, state->operation_type);
    if (!self) {
        /* Of one in flight the owner comes back by hvdl_py_reap. */
        PyObject *owner = hvdl_operation_release(engine->engine, operation);
        Py_XDECREF(owner);
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
    if (self->engine->forks == hvdl_py_num_forks) {
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
    if (self->engine->forks == hvdl_py_num_forks && !hvdl_operation_done(self->operation)) {
        Py_BEGIN_ALLOW_THREADS hvdl_engine_poll(self->engine->engine);
        Py_END_ALLOW_THREADS
    }
    return PyBool_FromLong(hvdl_operation_done(self->operation));
}

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

int hvdl_py_wait(EngineObject *self, hvdl_operation *operation, uint64_t deadline_ns)
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

PyObject *hvdl_py_outcome(hvdl_operation *operation)
{
    const char *error = hvdl_operation_error(operation);
    if (error)
        return PyUnicode_DecodeUTF8(error, (Py_ssize_t)strlen(error), "replace");
    Py_RETURN_NONE;
}

static PyObject *operation_label(PyObject *object, PyObject *unused)
{
    OperationObject *self = (OperationObject *)object;
    hvdl_operation *operation = self->operation;
    (void)unused;
    if (self->engine->forks != hvdl_py_num_forks) /* the operation is the parent's */
        return Py_BuildValue("(ss)", "", "");
    const char *kind = hvdl_facts_of(hvdl_operation_desc(operation))->name;
    const char *name = hvdl_operation_name(operation);
    return Py_BuildValue("(sN)", kind,
                         PyUnicode_DecodeUTF8(name, (Py_ssize_t)strlen(name), "replace"));
}

/* The operation if it succeeded and has said something, else NULL and an exception. */
static hvdl_operation *gathered(OperationObject *self)
{
    hvdl_operation *operation = self->operation;
    int count;
    if (!hvdl_operation_done(operation) || hvdl_operation_error(operation) ||
        !hvdl_operation_rows(operation, &count)) {
        PyErr_SetString(PyExc_RuntimeError, "only an operation that has succeeded has a result");
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
    int count;
    const int64_t *rows = hvdl_operation_rows(operation, &count);
    PyObject *all = PyTuple_New(count);
    for (int r = 0; all && r < count; r++) {
        PyObject *value = PyLong_FromLongLong(rows[r]);
        if (!value) {
            Py_DECREF(all);
            return NULL;
        }
        PyTuple_SetItem(all, r, value);
    }
    return all;
}

/* ---- DLPack ---- */

typedef struct dl_managed {
    dl_tensor tensor;
    void *context;
    void (*deleter)(struct dl_managed *);
    /* our own: the capsule and the data, each of which may go first, in any thread */
    _Atomic int num_holders;
    _Atomic bool deleted;
    int64_t shape[];
} dl_managed;

static void dl_let_go(dl_managed *managed)
{
    if (atomic_fetch_sub(&managed->num_holders, 1) == 1)
        free(managed);
}

/* Twice does no harm while there is the capsule: a consumer that fails may have deleted the data and
 * left the capsule's name as if it had taken nothing. (torch does so.) */
static void dl_delete(dl_managed *managed)
{
    if (atomic_exchange(&managed->deleted, true))
        return;
    free(managed->tensor.data);
    dl_let_go(managed);
}

static void capsule_delete(PyObject *capsule)
{
    dl_managed *managed = PyCapsule_GetPointer(capsule, PyCapsule_GetName(capsule));
    if (PyCapsule_IsValid(capsule, "dltensor")) /* nobody has taken it over */
        dl_delete(managed);
    dl_let_go(managed);
}

/* The number of rows that came from all ranks; -1: an exception. */
static int64_t sum_rows(hvdl_operation *operation)
{
    int count;
    const int64_t *rows = hvdl_operation_rows(operation, &count);
    int64_t sum = 0;
    for (int r = 0; r < count; r++)
        if (__builtin_add_overflow(sum, rows[r], &sum)) {
            PyErr_SetString(PyExc_OverflowError, "the result has 2^63 rows or more");
            return -1;
        }
    return sum;
}

/* The input's, but for the first dimension. */
static PyObject *result_shape(PyObject *input, int64_t num_rows)
{
    Py_ssize_t ndim = PyTuple_Size(input);
    PyObject *shape = PyTuple_New(ndim);
    for (Py_ssize_t i = 0; shape && i < ndim; i++) {
        PyObject *dim = i ? PyTuple_GetItem(input, i) : PyLong_FromLongLong(num_rows);
        if (i)
            Py_XINCREF(dim);
        if (!dim || PyTuple_SetItem(shape, i, dim)) {
            Py_DECREF(shape);
            return NULL;
        }
    }
    return shape;
}

static PyObject *operation_capsule(PyObject *object, PyObject *unused)
{
    static const uint8_t codes[HVDL_NUM_DTYPES] = {
        DL_UINT, DL_INT, DL_INT, DL_INT, DL_INT, DL_FLOAT, DL_BFLOAT, DL_FLOAT, DL_FLOAT, DL_BOOL};
    OperationObject *self = (OperationObject *)object;
    hvdl_operation *operation = gathered(self);
    (void)unused;
    if (!operation)
        return NULL;
    const hvdl_desc *desc = hvdl_operation_desc(operation);
    /* Of an ordered one the rows are its turn, and it may have no shape. */
    if (hvdl_facts_of(desc)->result != HVDL_RESULT_GATHERED || desc->place == HVDL_ORDERED) {
        PyErr_SetString(PyExc_RuntimeError, "only an allgather or alltoall has a result to take");
        return NULL;
    }
    Py_ssize_t ndim = PyTuple_Size(self->shape);
    int64_t num_rows = sum_rows(operation);
    if (num_rows < 0)
        return NULL;
    if (!num_rows || !desc->count)
        return result_shape(self->shape, num_rows);
    dl_managed *managed = calloc(1, sizeof *managed + (size_t)ndim * sizeof(int64_t));
    if (!managed)
        return PyErr_NoMemory();
    managed->shape[0] = num_rows;
    for (Py_ssize_t i = 1; i < ndim; i++)
        managed->shape[i] = PyLong_AsLongLong(PyTuple_GetItem(self->shape, i));
    managed->tensor.data = hvdl_operation_move_output(operation);
    managed->tensor.device.device_type = DL_CPU;
    managed->tensor.ndim = (int32_t)ndim;
    managed->tensor.dtype.code = codes[desc->dtype];
    managed->tensor.dtype.bits = (uint8_t)(8 * hvdl_dtype_bytes(desc->dtype));
    managed->tensor.dtype.lanes = 1;
    managed->tensor.shape = managed->shape;
    managed->deleter = dl_delete;
    managed->num_holders = 2;
    if (!managed->tensor.data) {
        free(managed);
        PyErr_SetString(PyExc_RuntimeError, "the result was already taken");
        return NULL;
    }
    PyObject *capsule = PyCapsule_New(managed, "dltensor", capsule_delete);
    if (!capsule) {
        dl_delete(managed);
        dl_let_go(managed);
    }
    return capsule;
}

static PyMethodDef operation_methods[] = {
    {"poll", operation_poll, METH_NOARGS, NULL},
    {"wait", (PyCFunction)(void (*)(void))hvdl_py_operation_wait, METH_FASTCALL | METH_KEYWORDS,
     NULL},
    {"drive", hvdl_py_operation_drive, METH_O, NULL},
    {"label", operation_label, METH_NOARGS, NULL},
    {"rows", operation_rows, METH_NOARGS, NULL},
    {"capsule", operation_capsule, METH_NOARGS, NULL},
    {"withdraw", hvdl_py_withdraw, METH_NOARGS, NULL},
    {0},
};

static PyType_Slot operation_slots[] = {
    {Py_tp_dealloc, operation_dealloc},
    {Py_tp_methods, operation_methods},
    {Py_tp_doc, "One run of a collective; ends as DONE or FAILED."},
    {0, NULL},
};

PyType_Spec hvdl_py_operation_spec = {
    .name = "hvdlite._core.Operation",
    .basicsize = sizeof(OperationObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = operation_slots,
};

/* ---- Plan ---- */

/* start(owner, weight=None, is_in_input=False) */
static PyObject *plan_start(PyObject *object, PyObject *const *args, Py_ssize_t num_args)
{
    PlanObject *self = (PlanObject *)object;
    hvdl_engine *engine = hvdl_py_engine(self->engine);
    hvdl_operation *operation;
    if (!engine)
        return NULL;
    if (num_args < 1 || num_args > 3) {
        PyErr_Format(PyExc_TypeError, "start: 1 to 3 arguments expected, got %zd", num_args);
        return NULL;
    }
    PyObject *owner = args[0];
    bool has_weight = num_args > 1 && args[1] != Py_None;
    hvdl_weight weight = {0.0, num_args > 2 && args[2] == Py_True};
    if (has_weight)
        weight.value = PyFloat_AsDouble(args[1]);
    if (PyErr_Occurred())
        return NULL;
    if (!(weight.value >= 0.0 && weight.value < (double)INFINITY)) {
        PyErr_SetString(PyExc_ValueError, "start: a weight is 0 or a positive, finite number");
        return NULL;
    }
    hvdl_py_reap(engine);
    Py_INCREF(owner);
    hvdl_err err =
        hvdl_plan_start(engine, self->plan, has_weight ? &weight : NULL, owner, &operation);
    if (err) {
        Py_DECREF(owner);
        if (err == HVDL_EDUP)
            PyErr_SetString(PyExc_RuntimeError, "the plan's previous run has not ended");
        else
            hvdl_py_raise(err, "plan", "");
        return NULL;
    }
    return hvdl_py_operation(self->engine, object, NULL, operation);
}

static void plan_dealloc(PyObject *object)
{
    PlanObject *self = (PlanObject *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->engine->forks == hvdl_py_num_forks) {
        hvdl_plan_release(self->engine->engine, self->plan);
        hvdl_py_reap(self->engine->engine);
    }
    Py_DECREF(self->engine);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyMethodDef plan_methods[] = {
    {"start", (PyCFunction)(void (*)(void))plan_start, METH_FASTCALL, NULL},
    {0},
};

static PyType_Slot plan_slots[] = {
    {Py_tp_dealloc, plan_dealloc},
    {Py_tp_methods, plan_methods},
    {Py_tp_doc, "A collective prepared once and started many times."},
    {0, NULL},
};

PyType_Spec hvdl_py_plan_spec = {
    .name = "hvdlite._core.Plan",
    .basicsize = sizeof(PlanObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = plan_slots,
};
