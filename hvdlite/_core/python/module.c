/* The extension module `hvdlite._core`, whose interface is described in _core.pyi. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "base/descriptors.h"
#include "base/faults.h"
#include "host/pipeline.h"
#include "python/python_glue.h"
#include "kernels/fingerprint.h"
#include "kernels/reduce.h"
#include "host/shm.h"

long hvdl_py_num_forks;

static void count_fork(void)
{
    hvdl_py_num_forks++;
}

/* ---- module functions ---- */

static PyObject *memory_bytes(PyObject *module, PyObject *args)
{
    int local_size, num_ranks;
    Py_ssize_t inline_bytes, block_bytes;
    (void)module;
    if (!PyArg_ParseTuple(args, "iinn:memory_bytes", &local_size, &num_ranks, &inline_bytes,
                          &block_bytes))
        return NULL;
    if (local_size < 1 || local_size > HVDL_MAX_LOCAL || num_ranks < local_size ||
        inline_bytes < 0 || block_bytes < 64) {
        PyErr_Format(PyExc_ValueError,
                     "local_size must be within 1 .. %d, num_ranks not less, inline_bytes at least "
                     "0, block_bytes 64",
                     HVDL_MAX_LOCAL);
        return NULL;
    }
    size_t bytes, payload_bytes = hvdl_posted_payload(num_ranks, (size_t)inline_bytes);
    if (hvdl_shm_bytes(local_size, payload_bytes, (size_t)block_bytes, &bytes))
        return PyErr_NoMemory();
    return PyLong_FromSize_t(bytes);
}

static PyObject *cpu_features(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    return PyUnicode_FromString(hvdl_reduce_variants()->name);
}

static PyObject *kernel_variants(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    PyObject *names = PyList_New(0);
    for (const hvdl_reduce_variant *variant = hvdl_reduce_variants(); names && variant->name;
         variant++)
        hvdl_py_append(&names, PyUnicode_FromString(variant->name));
    return names;
}

/* For PyArg_Parse's O&: of the kernels with that name; its own is NULL if this CPU has none. */
static int to_variant(PyObject *name, void *to)
{
    const char *text = PyUnicode_AsUTF8AndSize(name, NULL);
    const hvdl_reduce_variant *variant = hvdl_reduce_variants();
    while (text && variant->name && strcmp(variant->name, text) != 0)
        variant++;
    *(const hvdl_reduce_variant **)to = variant;
    return text != NULL;
}

typedef struct {
    const void *all[HVDL_MAX_LOCAL];
    Py_ssize_t count; /* 0: none, or too many */
} addresses;

static int to_addresses(PyObject *tuple, void *to)
{
    addresses *found = to;
    Py_ssize_t count = PyTuple_Size(tuple);
    found->count = count <= HVDL_MAX_LOCAL ? count : 0;
    for (Py_ssize_t i = 0; i < found->count; i++)
        found->all[i] = PyLong_AsVoidPtr(PyTuple_GetItem(tuple, i));
    return !PyErr_Occurred();
}

/* reduce(variant, dtype, op, output, inputs, count, prescale, divisor, postscale, factors=()) */
static PyObject *reduce(PyObject *module, PyObject *args)
{
    const hvdl_reduce_variant *variant;
    int dtype, op;
    hvdl_word output;
    addresses inputs;
    PyObject *factors = NULL;
    Py_ssize_t count;
    long long divisor;
    hvdl_scale scale = HVDL_UNSCALED;
    (void)module;
    if (!PyArg_ParseTuple(args, "O&iiO&O&ndLd|O!:reduce", to_variant, &variant, &dtype, &op,
                          hvdl_py_word, &output, to_addresses, &inputs, &count, &scale.prescale,
                          &divisor, &scale.postscale, &PyTuple_Type, &factors))
        return NULL;
    scale.divisor = divisor;
    double each[HVDL_MAX_LOCAL];
    Py_ssize_t num_factors = factors ? PyTuple_Size(factors) : 0;
    if (!variant->name || dtype < 0 || dtype >= HVDL_NUM_DTYPES || op < 0 || op >= HVDL_NUM_OPS ||
        op == HVDL_ADASUM || (hvdl_is_bitwise(op) && hvdl_is_float(dtype)) || !inputs.count ||
        count < 0 || divisor < 1 ||
        (num_factors && (num_factors != inputs.count || !hvdl_is_float(dtype) ||
                         (op != HVDL_SUM && op != HVDL_AVERAGE)))) {
        PyErr_SetString(PyExc_ValueError, "reduce: no such variant, dtype, op or number of inputs, "
                                          "or a negative count, or a divisor below 1, or factors "
                                          "that are not one for each input of a sum of floats");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < num_factors; i++)
        each[i] = PyFloat_AsDouble(PyTuple_GetItem(factors, i));
    scale.factors = num_factors ? each : NULL;
    if (PyErr_Occurred())
        return NULL;
    Py_BEGIN_ALLOW_THREADS hvdl_reduce_with(variant, (hvdl_dtype)dtype, (hvdl_op)op, (void *)output,
                                            inputs.all, (int)inputs.count, (size_t)count, &scale);
    Py_END_ALLOW_THREADS Py_RETURN_NONE;
}

static bool has_tree_kernel(int dtype, int to_dtype)
{
    bool sixteen = dtype == HVDL_FLOAT16 || dtype == HVDL_BFLOAT16;
    bool to_sixteen = to_dtype == HVDL_FLOAT16 || to_dtype == HVDL_BFLOAT16;
    return hvdl_is_float(dtype) && (dtype == to_dtype || (sixteen && to_dtype == HVDL_FLOAT32) ||
                                    (to_sixteen && dtype == HVDL_FLOAT32));
}

/* reduce_tree(variant, dtype, to_dtype, op, output, inputs, merges, count, prescale, divisor, postscale) */
static PyObject *reduce_tree(PyObject *module, PyObject *args)
{
    const hvdl_reduce_variant *variant;
    const char *merges;
    int dtype, to_dtype, op;
    hvdl_word output;
    addresses inputs;
    Py_ssize_t num_merges, count, depth = 0, deepest = 0;
    long long divisor;
    hvdl_scale scale = HVDL_UNSCALED;
    (void)module;
    if (!PyArg_ParseTuple(args, "O&iiiO&O&y#ndLd:reduce_tree", to_variant, &variant, &dtype,
                          &to_dtype, &op, hvdl_py_word, &output, to_addresses, &inputs, &merges,
                          &num_merges, &count, &scale.prescale, &divisor, &scale.postscale))
        return NULL;
    scale.divisor = divisor;
    bool fits = variant->name && has_tree_kernel(dtype, to_dtype) && op >= 0 && op < HVDL_ADASUM &&
                inputs.count && inputs.count == num_merges && count >= 0 && divisor >= 1;
    for (Py_ssize_t i = 0; fits && i < inputs.count; i++) {
        fits = (unsigned char)merges[i] <= depth;
        depth += 1 - (unsigned char)merges[i];
        deepest = depth > deepest ? depth : deepest;
    }
    if (!fits || depth != 1 || deepest > HVDL_TREE_DEPTH) {
        PyErr_SetString(PyExc_ValueError, "reduce_tree: an argument is out of its range");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS hvdl_reduce_tree_with(
        variant, (hvdl_dtype)dtype, (hvdl_dtype)to_dtype, (hvdl_op)op, (void *)output, inputs.all,
        (const uint8_t *)merges, (int)inputs.count, (size_t)count, &scale);
    Py_END_ALLOW_THREADS Py_RETURN_NONE;
}

/* fingerprint(address, bytes) */
static PyObject *fingerprint(PyObject *module, PyObject *args)
{
    hvdl_word address;
    Py_ssize_t bytes;
    uint64_t found;
    (void)module;
    if (!PyArg_ParseTuple(args, "O&n:fingerprint", hvdl_py_word, &address, &bytes))
        return NULL;
    if (bytes < 0) {
        PyErr_SetString(PyExc_ValueError, "fingerprint: a negative number of bytes");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS found = hvdl_fingerprint((void *)address, (size_t)bytes);
    Py_END_ALLOW_THREADS return PyLong_FromUnsignedLongLong(found);
}

static PyObject *force_past_cache(PyObject *module, PyObject *value)
{
    int force;
    (void)module;
    if (value == Py_None)
        force = -1;
    else if ((force = PyObject_IsTrue(value)) < 0)
        return NULL;
    hvdl_force_past_cache(force);
    Py_RETURN_NONE;
}

static PyObject *fail_on_purpose(PyObject *module, PyObject *args)
{
    PyObject *list;
    int rank;
    (void)module;
    if (!PyArg_ParseTuple(args, "Oi:fail_on_purpose", &list, &rank))
        return NULL;
    hvdl_fault_remove_all();
    Py_ssize_t count = PyTuple_Check(list) ? PyTuple_Size(list) : -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        int kind;
        const char *name;
        unsigned long long nth, times;
        if (!PyArg_ParseTuple(PyTuple_GetItem(list, i), "isKK", &kind, &name, &nth, &times))
            return NULL;
        if (kind < 0 || kind >= HVDL_NUM_FAULTS ||
            hvdl_fault_add((hvdl_fault_kind)kind, name, nth, times, rank, hvdl_py_say)) {
            PyErr_Format(PyExc_ValueError, "there can be no more than %d", HVDL_MOST_FAULTS);
            return NULL;
        }
    }
    hvdl_allocations_may_fail();
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"memory_bytes", memory_bytes, METH_VARARGS, NULL},
    {"cpu_features", cpu_features, METH_NOARGS, NULL},
    {"kernel_variants", kernel_variants, METH_NOARGS, NULL},
    {"reduce", reduce, METH_VARARGS, NULL},
    {"reduce_tree", reduce_tree, METH_VARARGS, NULL},
    {"fingerprint", fingerprint, METH_VARARGS, NULL},
    {"close_on_exit", hvdl_py_close_on_exit, METH_O, NULL},
    HVDL_PY_METHOD("receive_on_exit", hvdl_py_receive_on_exit, HVDL_PY_DICT),
    HVDL_PY_METHOD("finish_on_exit", hvdl_py_finish_on_exit, HVDL_PY_DICT),
    {"fail_on_purpose", fail_on_purpose, METH_VARARGS, NULL},
    {"force_past_cache", force_past_cache, METH_O, NULL},
    {"dtype_of", hvdl_py_dtype_of, METH_O, NULL},
    HVDL_PY_METHOD("posting", hvdl_py_posting, HVDL_PY_KEYWORDS),
    {"use_tensors", hvdl_py_use_tensors, METH_VARARGS, NULL},
    {"park", hvdl_py_park, METH_O, NULL},
    {"tcp_connection", hvdl_py_tcp_connection, METH_O, NULL},
    {0},
};

/* The kinds that callers can post, by number: KINDS, a Kind for each; and their numbers, ALLREDUCE ... */
static int add_kinds(PyObject *module)
{
    static PyStructSequence_Field fields[] = {
        {"name", NULL},     {"gathers", NULL},           {"shares", NULL}, {"reduces", NULL},
        {"has_root", NULL}, {"joined_takes_part", NULL}, {NULL, NULL}};
    static PyStructSequence_Desc desc = {"hvdlite._core.Kind",
                                         "What is true of all operations of a "
                                         "kind.",
                                         fields, 6};
    PyTypeObject *type = PyStructSequence_NewType(&desc);
    PyObject *all = type ? PyTuple_New(HVDL_PLAN) : NULL;
    int failed = !all;
    for (int number = 0; !failed && number < HVDL_PLAN; number++) {
        const hvdl_kind_facts *facts = hvdl_facts_of_kind(number);
        const bool truths[] = {facts->result == HVDL_RESULT_GATHERED,
                               facts->result == HVDL_RESULT_SHARE, facts->reduces, facts->has_root,
                               facts->joined_takes_part};
        char capitals[32] = {0};
        for (size_t i = 0; facts->name[i] && i + 1 < sizeof capitals; i++)
            capitals[i] = (char)(facts->name[i] - 'a' + 'A');
        const char *constant = facts->constant ? facts->constant : capitals;
        PyObject *kind = PyStructSequence_New(type), *name = PyUnicode_FromString(facts->name);
        failed = !kind || !name || PyModule_AddIntConstant(module, constant, number);
        if (kind && name) {
            PyStructSequence_SetItem(kind, 0, name);
            for (Py_ssize_t i = 0; i < 5; i++)
                PyStructSequence_SetItem(kind, i + 1, PyBool_FromLong(truths[i]));
            PyTuple_SetItem(all, number, kind);
        }
    }
    failed = failed || PyModule_AddObjectRef(module, "Kind", (PyObject *)type) ||
             PyModule_AddObjectRef(module, "KINDS", all);
    Py_XDECREF(all);
    Py_XDECREF(type);
    return failed ? -1 : 0;
}

/* KIND_NAMES: of all kinds, also those that callers can't post. */
static int add_kind_names(PyObject *module)
{
    PyObject *all = PyTuple_New(HVDL_NUM_KINDS);
    int failed = !all;
    for (int number = 0; !failed && number < HVDL_NUM_KINDS; number++) {
        PyObject *name = PyUnicode_FromString(hvdl_facts_of_kind(number)->name);
        failed = !name || PyTuple_SetItem(all, number, name);
    }
    failed = failed || PyModule_AddObjectRef(module, "KIND_NAMES", all);
    Py_XDECREF(all);
    return failed ? -1 : 0;
}

static int module_exec(PyObject *module)
{
    const struct {
        const char *name;
        int value;
    } constants[] = {
        {"AVERAGE", HVDL_AVERAGE},
        {"SUM", HVDL_SUM},
        {"MIN", HVDL_MIN},
        {"MAX", HVDL_MAX},
        {"PRODUCT", HVDL_PRODUCT},
        {"ADASUM", HVDL_ADASUM},
        {"BAND", HVDL_BAND},
        {"BOR", HVDL_BOR},
        {"BXOR", HVDL_BXOR},
        {"ON_HOST", HVDL_ON_HOST},
        {"STAGED", HVDL_STAGED},
        {"ORDERED", HVDL_ORDERED},
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
        {"PLAN_WHOLE", HVDL_ALLREDUCE},
        {"PLAN_TO_OWNERS", HVDL_REDUCE_TO_OWNERS},
        {"PLAN_TO_HOST_OWNERS", HVDL_REDUCE_TO_HOST_OWNERS},
        {"PLAN_UNITE", HVDL_UNITE},
        {"PLAN_UNITE_ON_HOST", HVDL_UNITE_ON_HOST},
        {"RING", HVDL_RING},
        {"DIRECT", HVDL_DIRECT},
        {"RECURSIVE_DOUBLING", HVDL_DOUBLING},
        {"CALLER_BYTES", HVDL_CALLER_BYTES},
        {"EVENT_BYTES", sizeof(hvdl_event)},
        {"BLACK_BOX_BYTES", (int)hvdl_box_bytes()},
    };
    hvdl_py_state *state = PyModule_GetState(module);
    for (size_t i = 0; i < sizeof constants / sizeof *constants; i++)
        if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value))
            return -1;
    if (PyModule_AddStringConstant(module, "SOME_WITHOUT_DATA", HVDL_SOME_WITHOUT_DATA))
        return -1;
    if (add_kinds(module) || add_kind_names(module))
        return -1;
    const struct {
        const char *name;
        PyType_Spec *spec;
        PyTypeObject **to;
    } types[] = {
        {"Engine", &hvdl_py_engine_spec, &state->engine_type},
        {"Operation", &hvdl_py_operation_spec, &state->operation_type},
        {"Plan", &hvdl_py_plan_spec, &state->plan_type},
        {"Posting", &hvdl_py_posting_spec, &state->posting_type},
        {"Arrivals", &hvdl_py_arrivals_spec, &state->arrivals_type},
        {"GradientCount", &hvdl_py_count_spec, &state->count_type},
        {"Gradient", &hvdl_py_gradient_spec, &state->gradient_type},
    };
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        PyObject *type = PyType_FromModuleAndSpec(module, types[i].spec, NULL);
        *types[i].to = (PyTypeObject *)type;
        if (!type || PyModule_AddObjectRef(module, types[i].name, type))
            return -1;
    }
    const struct {
        const char *text;
        PyObject **to;
    } attributes[] = {
        {"is_neg", &state->is_neg},
        {"storage_offset", &state->storage_offset},
        {"untyped_storage", &state->untyped_storage},
        {"nbytes", &state->nbytes},
        {"grad", &state->grad},
        {"requires_grad", &state->requires_grad},
        {"_version", &state->version},
        {"copy_", &state->copy_},
        {"shape", &state->shape},
        {"data_ptr", &state->data_ptr},
    };
    for (size_t i = 0; i < sizeof attributes / sizeof *attributes; i++)
        if (!(*attributes[i].to = PyUnicode_InternFromString(attributes[i].text)))
            return -1;
    static bool counting; /* once per process: handlers can't be taken back */
    if (!counting && pthread_atfork(NULL, NULL, count_fork)) {
        PyErr_NoMemory();
        return -1;
    }
    counting = true;
    return 0;
}

/* The state's objects, which come first in it. */
#define NUM_OBJECTS (offsetof(hvdl_py_state, describe_tensor) / sizeof(PyObject *))

static PyObject **object_of(PyObject *module, size_t i)
{
    return (PyObject **)((char *)PyModule_GetState(module) + i * sizeof(PyObject *));
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    for (size_t i = 0; i < NUM_OBJECTS; i++)
        Py_VISIT(*object_of(module, i));
    return 0;
}

static int module_clear(PyObject *module)
{
    for (size_t i = 0; i < NUM_OBJECTS; i++)
        Py_CLEAR(*object_of(module, i));
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
    .m_size = sizeof(hvdl_py_state),
    .m_methods = module_methods,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
};

PyMODINIT_FUNC PyInit__core(void)
{
    return PyModuleDef_Init(&module_def);
}
