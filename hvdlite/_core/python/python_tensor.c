/* What a tensor is: its shape and its memory. Of torch's own classes the library's DLPack functions tell all at
 * once; Python takes several calls to find it out, more than the rest of a small operation takes. Of other
 * objects `shape` and `data_ptr()` are asked. */
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
    PyObject *capsule, *types, *changed;
    if (!PyArg_ParseTuple(args, "OO!O:use_tensors", &capsule, &PyTuple_Type, &types, &changed))
        return NULL;
    const dl_exchange_api *api = PyCapsule_GetPointer(capsule, API_NAME);
    if (!api)
        return NULL;
    if (api->version.major != API_MAJOR || api->version.minor < API_LEAST_MINOR)
        Py_RETURN_FALSE;
    hvdl_py_keep(&state->tensor_types, types);
    hvdl_py_keep(&state->tensor_changed, changed);
    state->describe_tensor = api->describe;
    Py_RETURN_TRUE;
}

static bool is_tensor(const hvdl_py_state *state, PyObject *object)
{
    for (Py_ssize_t i = 0; i < PyTuple_Size(state->tensor_types); i++)
        if ((PyObject *)Py_TYPE(object) == PyTuple_GetItem(state->tensor_types, i))
            return true;
    return false;
}

bool hvdl_py_describe(const hvdl_py_state *state, PyObject *object, dl_tensor *to)
{
    if (!state->describe_tensor || !is_tensor(state, object))
        return false;
    if (!state->describe_tensor(object, to))
        return true;
    PyErr_Clear(); /* sparse, quantized, ... */
    return false;
}

/* ---- shapes ---- */

int hvdl_py_put_shape(PyObject *tuple, bool has_rows, hvdl_desc *desc, int64_t *rows)
{
    bool overflows = false, has_zero = false;
    if (!PyTuple_Check(tuple)) {
        PyErr_SetString(PyExc_TypeError, "shape must be a tuple");
        return -1;
    }
    Py_ssize_t ndim = PyTuple_Size(tuple);
    int64_t count = 1;
    for (Py_ssize_t i = 0; i < ndim; i++) {
        long long dim = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
        if (dim < 0) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_ValueError, "a dimension is negative");
            return -1;
        }
        bool is_rows = has_rows && i == 0;
        if (is_rows)
            *rows = dim;
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
    desc->ndim = (uint8_t)(ndim < 255 ? ndim : 255);
    /* Where rows would be larger than any memory, no rank has one. */
    desc->count = overflows ? 0 : count;
    return 0;
}

int64_t hvdl_py_count_of(const hvdl_py_state *state, PyObject *tensor)
{
    hvdl_desc desc;
    PyObject *tuple = PyObject_GetAttr(tensor, state->shape);
    int failed = !tuple || hvdl_py_put_shape(tuple, false, &desc, NULL);
    Py_XDECREF(tuple);
    return failed ? -1 : desc.count;
}

/* ---- memory ---- */

int hvdl_py_address_of(const hvdl_py_state *state, PyObject *tensor, void **to)
{
    dl_tensor described;
    *to = NULL;
    if (!tensor)
        return 0;
    if (hvdl_py_describe(state, tensor, &described)) {
        *to = (char *)described.data + described.byte_offset;
        return 0;
    }
    PyObject *address = PyObject_CallMethodObjArgs(tensor, state->data_ptr, NULL);
    int failed = !address || hvdl_py_pointer(address, to);
    Py_XDECREF(address);
    return failed ? -1 : 0;
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
static int is_backed(const hvdl_py_state *state, PyObject *object, const dl_tensor *tensor)
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

/* ---- all of it ---- */

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

PyObject *hvdl_py_dtype_of(PyObject *module, PyObject *object)
{
    hvdl_py_state *state = PyModule_GetState(module);
    dl_tensor tensor;
    int dtype = -1;
    if (hvdl_py_describe(state, object, &tensor) && tensor.device.device_type == DL_CPU &&
        is_backed(state, object, &tensor) > 0)
        dtype = dtype_of(&tensor);
    PyErr_Clear(); /* what has no storage is for others to say */
    return PyLong_FromLong(dtype);
}

int hvdl_py_put_plain(const hvdl_py_state *state, PyObject *object, hvdl_desc *desc, void **memory)
{
    dl_tensor tensor;
    int64_t count = 1;
    if (!hvdl_py_describe(state, object, &tensor) || tensor.device.device_type != DL_CPU ||
        tensor.ndim > HVDL_MAX_DIMS)
        return 0;
    int dtype = dtype_of(&tensor);
    if (dtype < 0)
        return 0;
    for (int i = tensor.ndim - 1; i >= 0; i--) {
        int64_t dim = tensor.shape[i];
        if ((dim != 1 && tensor.strides && tensor.strides[i] != count) ||
            __builtin_mul_overflow(count, dim, &count))
            return 0;
        desc->dims[i] = dim;
    }
    desc->dtype = (uint8_t)dtype;
    desc->ndim = (uint8_t)tensor.ndim;
    desc->count = count;
    *memory = (char *)tensor.data + tensor.byte_offset;
    if (!count) /* strides say nothing, and there may be no memory */
        return 0;
    int holds = hvdl_py_holds_values(object, state->is_neg);
    return holds > 0 ? is_backed(state, object, &tensor) : holds;
}
