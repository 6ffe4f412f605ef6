/* From Python to the engine: errors, and the arguments of a posting. */
#include <string.h>

#include "python/python_glue.h"

/* ---- errors ---- */

void hvdl_py_raise(hvdl_err err, const char *what, const char *name)
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

hvdl_engine *hvdl_py_engine(EngineObject *self)
{
    if (!self->engine || self->closed) {
        PyErr_SetString(PyExc_RuntimeError, "the engine is closed");
        return NULL;
    }
    if (self->forks != hvdl_py_num_forks) {
        PyErr_SetString(PyExc_RuntimeError,
                        "this is a forked child of a rank: only the rank itself takes part in "
                        "operations");
        return NULL;
    }
    return self->engine;
}

void hvdl_py_reap(hvdl_engine *engine)
{
    PyObject *owner;
    while ((owner = hvdl_engine_reap(engine)))
        Py_DECREF(owner);
}

/* ---- conversions ---- */

int hvdl_py_int(PyObject *object, const char *name, long least, long most, int *to)
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

int hvdl_py_pointer(PyObject *object, void **to)
{
    size_t value = PyLong_AsSize_t(object);
    if (value == (size_t)-1 && PyErr_Occurred())
        return -1;
    *to = (void *)value;
    return 0;
}

double hvdl_py_factor(double value)
{
    return value == 0.0 ? 0.0 : value;
}

static int to_factor(PyObject *object, double *to)
{
    *to = hvdl_py_factor(PyFloat_AsDouble(object));
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
    const hvdl_kind_facts *facts = hvdl_facts_of(desc);
    if (hvdl_works_on_rows(facts) && !ndim) {
        PyErr_Format(PyExc_ValueError, "%s takes no scalars: give it a first dimension",
                     facts->name);
        return -1;
    }
    desc->ndim = (uint8_t)(ndim < 255 ? ndim : 255);
    int64_t count = 1;
    bool overflows = false, has_zero = false;
    for (Py_ssize_t i = 0; i < ndim; i++) {
        long long dim = PyLong_AsLongLong(PyTuple_GetItem(shape, i));
        if (dim < 0) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_ValueError, "a dimension is negative");
            return -1;
        }
        bool is_rows = facts->rows != HVDL_ROWS_SAME && i == 0;
        if (is_rows)
            posting->rows = dim;
        else
            overflows |= __builtin_mul_overflow(count, (int64_t)dim, &count);
        has_zero |= dim == 0;
        /* What does not fit is folded into the last one, so that it is still compared. */
        if (i < HVDL_MAX_DIMS)
            desc->dims[i] = is_rows ? -1 : dim;
        else
            desc->dims[HVDL_MAX_DIMS - 1] =
                (int64_t)((uint64_t)desc->dims[HVDL_MAX_DIMS - 1] * 1000003 + (uint64_t)dim);
    }
    if (overflows && !has_zero) {
        PyErr_SetString(PyExc_ValueError, "the tensor has 2^63 elements or more");
        return -1;
    }
    /* Where rows would be larger than any memory, no rank has one. */
    desc->count = overflows ? 0 : count;
    return 0;
}

static int check_posting(const hvdl_posting *posting)
{
    const hvdl_desc *desc = &posting->desc;
    const hvdl_kind_facts *facts = hvdl_facts_of(desc);
    bool needs_output = facts->result == HVDL_RESULT_WHOLE; /* a share may have no rows */
    bool has_data = hvdl_moves_data(facts) && desc->count && desc->place != HVDL_ORDERED &&
                    (facts->rows == HVDL_ROWS_SAME || posting->rows);
    if (has_data && (!hvdl_py_is_memory(posting->input) ||
                     (needs_output && !hvdl_py_is_memory(posting->output)))) {
        PyErr_Format(PyExc_ValueError, "%s '%s': the tensor has no memory", facts->name,
                     posting->name);
        return -1;
    }
    if (hvdl_sends_splits(desc) && !posting->splits) {
        PyErr_Format(PyExc_ValueError, "%s '%s': splits are missing", facts->name, posting->name);
        return -1;
    }
    if (desc->dtype == HVDL_BOOL && (desc->prescale != 1.0 || desc->postscale != 1.0)) {
        PyErr_Format(PyExc_ValueError, "%s '%s': bool takes no scale factors", facts->name,
                     posting->name);
        return -1;
    }
    return 0;
}

/* group: None, or (number of tensors, hash of their shapes). */
static int put_group(PyObject *group, hvdl_desc *desc)
{
    unsigned long long layout;
    if (group == Py_None)
        return 0;
    if (!PyTuple_Check(group)) {
        PyErr_SetString(PyExc_TypeError, "group must be a tuple or None");
        return -1;
    }
    if (!PyArg_ParseTuple(group, "iK:group", &desc->num_tensors, &layout))
        return -1;
    desc->layout = layout;
    return 0;
}

int hvdl_py_posting(PyObject *const *args, Py_ssize_t num_args, hvdl_posting *posting)
{
    memset(posting, 0, sizeof *posting);
    hvdl_desc *desc = &posting->desc;
    int kind, dtype, op, root, unnamed, place = HVDL_ON_HOST;
    void *input, *splits = NULL;
    if (num_args <= POST_OWNER || num_args > POST_MAX) {
        PyErr_Format(PyExc_TypeError, "12 to 16 arguments expected, got %zd", num_args);
        return -1;
    }
    Py_ssize_t name_bytes = 0;
    posting->name = PyUnicode_AsUTF8AndSize(args[POST_NAME], &name_bytes);
    if (posting->name && strlen(posting->name) != (size_t)name_bytes) {
        PyErr_SetString(PyExc_ValueError, "a name may not contain a NUL character");
        return -1;
    }
    unnamed = PyObject_IsTrue(args[POST_UNNAMED]);
    if (!posting->name || unnamed < 0 ||
        hvdl_py_int(args[POST_KIND], "kind", 0, HVDL_PLAN - 1, &kind) ||
        hvdl_py_int(args[POST_DTYPE], "dtype", 0, HVDL_NUM_DTYPES - 1, &dtype) ||
        hvdl_py_int(args[POST_OP], "op", 0, HVDL_NUM_OPS - 1, &op) ||
        hvdl_py_int(args[POST_ROOT], "root", -1, INT32_MAX, &root) ||
        hvdl_py_pointer(args[POST_INPUT], &input) ||
        hvdl_py_pointer(args[POST_OUTPUT], &posting->output) ||
        to_factor(args[POST_PRESCALE], &desc->prescale) ||
        to_factor(args[POST_POSTSCALE], &desc->postscale))
        return -1;
    posting->input = input;
    posting->unnamed = unnamed;
    desc->kind = (uint8_t)kind;
    desc->dtype = (uint8_t)dtype;
    desc->op = (uint8_t)op;
    desc->root = hvdl_facts_of(desc)->has_root ? root : -1;
    if (num_args > POST_PLACE && hvdl_py_int(args[POST_PLACE], "place", 0, HVDL_ORDERED, &place))
        return -1;
    desc->place = (uint8_t)place;
    if (num_args > POST_SPLITS && hvdl_py_pointer(args[POST_SPLITS], &splits))
        return -1;
    posting->splits = splits;
    if (num_args > POST_GROUP && put_group(args[POST_GROUP], desc))
        return -1;
    return put_shape(args[POST_SHAPE], posting) || check_posting(posting) ? -1 : 0;
}

hvdl_operation *hvdl_py_post(hvdl_engine *engine, hvdl_posting *posting, PyObject *owner, bool wake)
{
    hvdl_operation *operation;
    hvdl_py_reap(engine);
    Py_INCREF(owner);
    posting->owner = owner;
    hvdl_err err = hvdl_engine_post(engine, posting, wake, &operation);
    if (!err)
        return operation;
    Py_DECREF(owner);
    hvdl_py_raise(err, hvdl_kind_name(posting->desc.kind), posting->name);
    return NULL;
}
