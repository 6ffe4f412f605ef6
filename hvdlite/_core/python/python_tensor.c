/* The short ways of what is called most: a blocking allreduce, in place, of an ordinary tensor in host
 * memory. What a tensor is takes Python several calls to find out, more than the rest of a small
 * operation takes; its library's DLPack functions tell all of it at once. */
#include <string.h>

#include "python/python_glue.h"

#define API_NAME "dlpack_exchange_api"
#define API_MAJOR 1
#define API_LEAST_MINOR 3 /* since then the table has its last fields */

/* No program of the usual kind has memory below; where one has, its tensors are asked. */
#define LOW_ADDRESS ((uint64_t)1 << 40)
#define ASKED_BYTES (64 << 10)

PyObject *hvdl_py_use_tensors(PyObject *module, PyObject *args)
{
    hvdl_py_state *state = PyModule_GetState(module);
    PyObject *capsule, *types, *op_type, *changed;
    if (!PyArg_ParseTuple(args, "OO!OO:use_tensors", &capsule, &PyTuple_Type, &types, &op_type,
                          &changed))
        return NULL;
    const dl_exchange_api *api = PyCapsule_GetPointer(capsule, API_NAME);
    if (!api)
        return NULL;
    if (api->version.major != API_MAJOR || api->version.minor < API_LEAST_MINOR)
        Py_RETURN_FALSE;
    hvdl_py_keep(&state->tensor_types, types);
    hvdl_py_keep(&state->op_type, op_type);
    hvdl_py_keep(&state->tensor_changed, changed);
    state->describe_tensor = api->describe;
    Py_RETURN_TRUE;
}

bool hvdl_py_is_tensor(const hvdl_py_state *state, PyObject *object)
{
    for (Py_ssize_t i = 0; i < PyTuple_Size(state->tensor_types); i++)
        if ((PyObject *)Py_TYPE(object) == PyTuple_GetItem(state->tensor_types, i))
            return true;
    return false;
}

/* -1: none of the engine's. */
static int dtype_of(const dl_tensor *tensor)
{
    static const struct {
        uint8_t code, bits;
    } dtypes[HVDL_NUM_DTYPES] = {
        [HVDL_UINT8] = {DL_UINT, 8},       [HVDL_INT8] = {DL_INT, 8},
        [HVDL_INT16] = {DL_INT, 16},       [HVDL_INT32] = {DL_INT, 32},
        [HVDL_INT64] = {DL_INT, 64},       [HVDL_FLOAT16] = {DL_FLOAT, 16},
        [HVDL_BFLOAT16] = {DL_BFLOAT, 16}, [HVDL_FLOAT32] = {DL_FLOAT, 32},
        [HVDL_FLOAT64] = {DL_FLOAT, 64},   [HVDL_BOOL] = {DL_BOOL, 8},
    };
    if (tensor->dtype.lanes == 1)
        for (int dtype = 0; dtype < HVDL_NUM_DTYPES; dtype++)
            if (tensor->dtype.code == dtypes[dtype].code &&
                tensor->dtype.bits == dtypes[dtype].bits)
                return dtype;
    return -1;
}

/* Fills the shape and the memory. False: it is not contiguous, or larger than what can be. */
static bool put_tensor(const dl_tensor *tensor, hvdl_posting *posting)
{
    hvdl_desc *desc = &posting->desc;
    int64_t count = 1;
    char *memory = (char *)tensor->data + tensor->byte_offset;
    if (tensor->ndim > HVDL_MAX_DIMS)
        return false;
    for (int i = tensor->ndim - 1; i >= 0; i--) {
        int64_t dim = tensor->shape[i];
        if (dim != 1 && tensor->strides && tensor->strides[i] != count)
            return false;
        if (__builtin_mul_overflow(count, dim, &count))
            return false;
        desc->dims[i] = dim;
    }
    desc->ndim = (uint8_t)tensor->ndim;
    desc->count = count;
    posting->output = memory;
    posting->input = memory;
    return count > 0; /* without elements strides say nothing, and there may be no memory */
}

int hvdl_py_holds_values(PyObject *tensor, PyObject *is_neg)
{
    PyObject *negated = PyObject_CallMethodObjArgs(tensor, is_neg, NULL);
    int is = negated ? PyObject_Not(negated) : -1;
    Py_XDECREF(negated);
    return is;
}

/* From the first to the last byte; without elements none. -1: more than can be counted. */
static int64_t extent_bytes(const dl_tensor *tensor)
{
    int64_t last = 0, stride = 1, extent;
    for (int i = tensor->ndim - 1; i >= 0; i--) {
        int64_t dim = tensor->shape[i], reach;
        if (dim == 0)
            return 0;
        if (__builtin_mul_overflow(dim - 1, tensor->strides ? tensor->strides[i] : stride,
                                   &reach) ||
            __builtin_add_overflow(last, reach, &last) ||
            __builtin_mul_overflow(stride, dim, &stride))
            return -1;
    }
    return __builtin_mul_overflow(last + 1, tensor->dtype.bits / 8, &extent) ? -1 : extent;
}

/* What a method without arguments returns; -1: an exception. */
static int64_t ask(PyObject *object, PyObject *method)
{
    PyObject *answer = object ? PyObject_CallMethodObjArgs(object, method, NULL) : NULL;
    int64_t value = answer ? PyLong_AsLongLong(answer) : -1;
    Py_XDECREF(answer);
    return value;
}

/* Whether the tensor's storage, which can be freed or shrunk under it, holds all of it. Asks it where
 * that may not be, as asking takes a fifth of a small operation: where the tensor lies as low as a view
 * of a storage that was freed and begins at 0; and where it is so large that asking takes no time to
 * speak of. So a small one whose storage was shrunk, but not freed, passes.
 * 1: it does; 0: it does not; -1: an exception. */
static int is_backed(hvdl_py_state *state, PyObject *object, const dl_tensor *tensor)
{
    uint64_t address = (uintptr_t)tensor->data + tensor->byte_offset;
    int64_t extent = extent_bytes(tensor), begin;
    if (extent <= 0 || (address >= LOW_ADDRESS && extent < ASKED_BYTES))
        return extent >= 0;
    if (!hvdl_py_is_memory((void *)(uintptr_t)address))
        return 0;
    int64_t offset = ask(object, state->storage_offset);
    if (offset < 0)
        return -1;
    PyObject *storage = PyObject_CallMethodObjArgs(object, state->untyped_storage, NULL);
    int64_t held = ask(storage, state->nbytes);
    Py_XDECREF(storage);
    if (held < 0)
        return -1;
    return !__builtin_mul_overflow(offset, tensor->dtype.bits / 8, &begin) && begin <= held &&
           extent <= held - begin;
}

PyObject *hvdl_py_dtype_of(PyObject *module, PyObject *object)
{
    hvdl_py_state *state = PyModule_GetState(module);
    dl_tensor tensor;
    int dtype = -1;
    if (state->describe_tensor && hvdl_py_is_tensor(state, object) &&
        !state->describe_tensor(object, &tensor) && tensor.device.device_type == DL_CPU &&
        is_backed(state, object, &tensor) > 0)
        dtype = dtype_of(&tensor);
    PyErr_Clear(); /* what has no description, or no storage, is for others to say */
    return PyLong_FromLong(dtype);
}

/* Fills in the tensor, and all but the name, the op and the factors of an allreduce of it. 1: filled; 0:
 * it is none of the short ways' tensors; -1: an exception. */
static int fill(hvdl_py_state *state, PyObject *object, hvdl_posting *posting)
{
    hvdl_desc *desc = &posting->desc;
    dl_tensor tensor;
    if (!state->describe_tensor || !hvdl_py_is_tensor(state, object))
        return 0;
    if (state->describe_tensor(object, &tensor)) { /* sparse, quantized, ... */
        PyErr_Clear();
        return 0;
    }
    int dtype = dtype_of(&tensor);
    if (tensor.device.device_type != DL_CPU || dtype < 0 || dtype == HVDL_BOOL ||
        !put_tensor(&tensor, posting))
        return 0;
    desc->kind = HVDL_ALLREDUCE;
    desc->dtype = (uint8_t)dtype;
    desc->root = -1;
    desc->place = HVDL_ON_HOST;
    desc->prescale = desc->postscale = 1.0;
    int holds = hvdl_py_holds_values(object, state->is_neg);
    return holds > 0 ? is_backed(state, object, &tensor) : holds;
}

static PyObject *not_implemented(void)
{
    Py_INCREF(Py_NotImplemented);
    return Py_NotImplemented;
}

enum { ARG_TENSOR, ARG_NAME, ARG_OP, ARG_PRESCALE, ARG_POSTSCALE, NUM_ARGS };

/* As fill, with what the caller gave. */
static int fill_all(hvdl_py_state *state, PyObject *const *args, hvdl_posting *posting)
{
    Py_ssize_t name_bytes;
    if (!PyUnicode_CheckExact(args[ARG_NAME]) ||
        (PyObject *)Py_TYPE(args[ARG_OP]) != state->op_type ||
        !PyFloat_CheckExact(args[ARG_PRESCALE]) || !PyFloat_CheckExact(args[ARG_POSTSCALE]))
        return 0;
    long op = PyLong_AsLong(args[ARG_OP]);
    posting->name = PyUnicode_AsUTF8AndSize(args[ARG_NAME], &name_bytes);
    if (!posting->name)
        return -1;
    if (op == HVDL_ADASUM || strlen(posting->name) != (size_t)name_bytes)
        return 0;
    int filled = fill(state, args[ARG_TENSOR], posting);
    posting->desc.op = (uint8_t)op;
    posting->desc.prescale = hvdl_py_factor(PyFloat_AsDouble(args[ARG_PRESCALE]));
    posting->desc.postscale = hvdl_py_factor(PyFloat_AsDouble(args[ARG_POSTSCALE]));
    return filled;
}

PyObject *hvdl_py_allreduce_in_place(PyObject *object, PyObject *const *args, Py_ssize_t num_args)
{
    EngineObject *self = (EngineObject *)object;
    hvdl_engine *engine = hvdl_py_engine(self);
    hvdl_py_state *state = PyType_GetModuleState(Py_TYPE(object));
    hvdl_posting posting = {0};
    if (!engine)
        return NULL;
    if (num_args != NUM_ARGS) {
        PyErr_Format(PyExc_TypeError, "%d arguments expected, got %zd", NUM_ARGS, num_args);
        return NULL;
    }
    int filled = fill_all(state, args, &posting);
    if (filled <= 0)
        return filled ? NULL : not_implemented();
    PyObject *tensor = args[ARG_TENSOR];
    /* Autograd must learn that a tensor that it may have saved changes. It is Python that may run here,
     * and so before anything is posted. */
    PyObject *result = PyObject_CallFunctionObjArgs(state->tensor_changed, tensor, NULL);
    if (!result)
        return NULL;
    Py_DECREF(result);
    return hvdl_py_run_posting(self, &posting, tensor, -1.0);
}

enum { RUN_TENSOR, RUN_NAME, RUN_OP, RUN_PRESCALE, RUN_TIMEOUT, RUN_SITE, NUM_RUN_ARGS };

/* A str, which the caller then holds; NULL: an exception. */
static PyObject *call_for_name(PyObject *next_name, const char **name)
{
    PyObject *made = PyObject_CallNoArgs(next_name);
    *name = made ? hvdl_py_text(made, "name") : NULL;
    if (made && !*name)
        Py_CLEAR(made);
    return made;
}

/* Of a process group, whose operations autograd hears nothing of: c10d does not tell it either. */
PyObject *hvdl_py_run_allreduce(PyObject *object, PyObject *const *args, Py_ssize_t num_args)
{
    EngineObject *self = (EngineObject *)object;
    hvdl_py_state *state = PyType_GetModuleState(Py_TYPE(object));
    hvdl_posting posting = {0};
    int op;
    if (!hvdl_py_engine(self))
        return NULL;
    if (num_args != NUM_RUN_ARGS) {
        PyErr_Format(PyExc_TypeError, "%d arguments expected, got %zd", NUM_RUN_ARGS, num_args);
        return NULL;
    }
    int filled = fill(state, args[RUN_TENSOR], &posting);
    if (filled <= 0)
        return filled ? NULL : not_implemented();
    double factor = PyFloat_AsDouble(args[RUN_PRESCALE]);
    double limit_s = PyFloat_AsDouble(args[RUN_TIMEOUT]);
    if (PyErr_Occurred() || hvdl_py_int(args[RUN_OP], "op", 0, HVDL_NUM_OPS - 1, &op) ||
        hvdl_py_site(args[RUN_SITE], &posting.site))
        return NULL;
    if (hvdl_is_bitwise(op) && hvdl_is_float(posting.desc.dtype))
        return not_implemented(); /* the long way says what is wrong */
    posting.desc.op = (uint8_t)op;
    posting.desc.prescale = hvdl_py_factor(factor);
    posting.unnamed = true;
    /* Last: what was refused takes no number. */
    PyObject *name = call_for_name(args[RUN_NAME], &posting.name);
    if (!name)
        return NULL;
    PyObject *result = hvdl_py_run_posting(self, &posting, args[RUN_TENSOR], limit_s);
    Py_DECREF(name);
    return result;
}
