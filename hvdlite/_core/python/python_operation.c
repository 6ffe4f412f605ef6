/* Operation, and its result. */
#include <stdatomic.h>
#include <stdlib.h>

#include "python/python_glue.h"

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
    self->engine = (EngineObject *)Py_NewRef((PyObject *)engine);
    self->plan = Py_XNewRef(plan);
    self->shape = Py_XNewRef(shape);
    self->operation = operation;
    return (PyObject *)self;
}

hvdl_operation *hvdl_py_own_operation(OperationObject *self)
{
    if (self->engine->forks == hvdl_py_num_forks)
        return self->operation;
    hvdl_py_engine(self->engine); /* raises */
    return NULL;
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

static PyObject *operation_label(PyObject *object, PyObject *unused)
{
    OperationObject *self = (OperationObject *)object;
    hvdl_operation *operation = self->operation;
    (void)unused;
    if (self->engine->forks != hvdl_py_num_forks) /* the operation is the parent's */
        return Py_BuildValue("(ss)", "", "");
    const char *kind = hvdl_facts_of(hvdl_operation_desc(operation))->name;
    return Py_BuildValue("(sN)", kind, hvdl_py_decode(hvdl_operation_name(operation)));
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
    PyObject *list = PyList_New(0);
    for (int r = 0; list && r < count; r++)
        hvdl_py_append(&list, PyLong_FromLongLong(rows[r]));
    PyObject *all = list ? PyList_AsTuple(list) : NULL;
    Py_XDECREF(list);
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
    /* Of an ordered one the rows are its sequence number, and it may have no shape. */
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
    HVDL_PY_METHOD("wait", hvdl_py_operation_wait, HVDL_PY_KEYWORDS),
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
