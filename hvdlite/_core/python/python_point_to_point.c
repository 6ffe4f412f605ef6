/* Engine.send, Engine.recv and Operation.withdraw. */
#include <string.h>

#include "python/python_glue.h"

enum { TENSOR, PEER, TAG, SITE, WAKE, NUM_ARGUMENTS };
#define NUM_NEEDED (TAG + 1)

/* Fills `given` with the arguments, positional ones and keywords; NULL where there is none. */
static int gather(const char *function, const char *const names[NUM_ARGUMENTS],
                  PyObject *const *args, Py_ssize_t num_args, PyObject *keywords,
                  PyObject *given[NUM_ARGUMENTS])
{
    Py_ssize_t num_keywords = keywords ? PyTuple_Size(keywords) : 0;
    if (num_args > NUM_ARGUMENTS) {
        PyErr_Format(PyExc_TypeError, "%s: at most %d arguments expected, got %zd", function,
                     NUM_ARGUMENTS, num_args);
        return -1;
    }
    for (Py_ssize_t i = 0; i < NUM_ARGUMENTS; i++)
        given[i] = i < num_args ? args[i] : NULL;
    for (Py_ssize_t i = 0; i < num_keywords; i++) {
        PyObject *keyword = PyTuple_GetItem(keywords, i);
        int at = 0;
        while (at < NUM_ARGUMENTS && PyUnicode_CompareWithASCIIString(keyword, names[at]))
            at++;
        if (at == NUM_ARGUMENTS || given[at]) {
            PyErr_Format(PyExc_TypeError, "%s has no argument '%U', or has it already", function,
                         keyword);
            return -1;
        }
        given[at] = args[num_args + i];
    }
    for (int i = 0; i < NUM_NEEDED; i++)
        if (!given[i]) {
            PyErr_Format(PyExc_TypeError, "%s: the argument '%s' is missing", function, names[i]);
            return -1;
        }
    return 0;
}

/* Fills its memory and size. */
static int put_tensor(const hvdl_py_state *state, const char *function, PyObject *tensor,
                      hvdl_message_posting *posting)
{
    PyObject *is_contiguous = PyObject_CallMethod(tensor, "is_contiguous", NULL);
    int contiguous = is_contiguous ? PyObject_IsTrue(is_contiguous) : -1;
    Py_XDECREF(is_contiguous);
    if (contiguous < 0)
        return -1;
    if (!contiguous) {
        PyErr_Format(PyExc_ValueError, "%s: the tensor is not contiguous", function);
        return -1;
    }
    PyObject *address = PyObject_CallMethodObjArgs(tensor, state->data_ptr, NULL);
    int failed = !address || hvdl_py_pointer(address, &posting->memory);
    Py_XDECREF(address);
    if (failed)
        return -1;
    PyObject *nbytes = PyObject_GetAttr(tensor, state->nbytes);
    posting->bytes = nbytes ? PyLong_AsSize_t(nbytes) : (size_t)-1;
    Py_XDECREF(nbytes);
    if (PyErr_Occurred())
        return -1;
    if (posting->bytes && !hvdl_py_is_memory(posting->memory)) {
        PyErr_Format(PyExc_ValueError, "%s: the tensor has no memory", function);
        return -1;
    }
    return 0;
}

static PyObject *post(PyObject *object, bool is_send, PyObject *const *args, Py_ssize_t num_args,
                      PyObject *keywords)
{
    static const char *const names[2][NUM_ARGUMENTS] = {{"tensor", "source", "tag", "site", "wake"},
                                                        {"tensor", "to", "tag", "site", "wake"}};
    const char *function = is_send ? "send" : "recv";
    EngineObject *self = (EngineObject *)object;
    hvdl_engine *engine = hvdl_py_engine(self);
    hvdl_message_posting posting = {.is_send = is_send};
    PyObject *given[NUM_ARGUMENTS];
    int wake = 1;
    if (!engine || gather(function, names[is_send], args, num_args, keywords, given))
        return NULL;
    int last = hvdl_engine_num_ranks(engine) - 1;
    if (hvdl_py_int(given[PEER], names[is_send][PEER], is_send ? 0 : -1, last, &posting.peer) ||
        hvdl_py_int(given[TAG], "tag", 0, INT32_MAX, &posting.tag))
        return NULL;
    if (given[SITE] && hvdl_py_site(given[SITE], &posting.site))
        return NULL;
    if (given[WAKE] && (wake = PyObject_IsTrue(given[WAKE])) < 0)
        return NULL;
    if (put_tensor(PyType_GetModuleState(Py_TYPE(object)), function, given[TENSOR], &posting))
        return NULL;
    hvdl_py_reap(engine);
    hvdl_operation *operation;
    Py_INCREF(given[TENSOR]);
    posting.owner = given[TENSOR];
    hvdl_err err = hvdl_engine_post_message(engine, &posting, wake, &operation);
    if (err) {
        Py_DECREF(given[TENSOR]);
        hvdl_py_raise(err, function, "");
        return NULL;
    }
    return hvdl_py_operation(self, NULL, NULL, operation);
}

PyObject *hvdl_py_send(PyObject *engine, PyObject *const *args, Py_ssize_t num_args,
                       PyObject *keywords)
{
    return post(engine, true, args, num_args, keywords);
}

PyObject *hvdl_py_recv(PyObject *engine, PyObject *const *args, Py_ssize_t num_args,
                       PyObject *keywords)
{
    return post(engine, false, args, num_args, keywords);
}

PyObject *hvdl_py_withdraw(PyObject *object, PyObject *unused)
{
    OperationObject *self = (OperationObject *)object;
    bool withdrawn;
    (void)unused;
    if (self->engine->forks != hvdl_py_num_forks)
        return hvdl_py_engine(self->engine) ? NULL : NULL; /* raises */
    Py_BEGIN_ALLOW_THREADS withdrawn =
        hvdl_operation_withdraw(self->engine->engine, self->operation);
    Py_END_ALLOW_THREADS return PyBool_FromLong(withdrawn);
}
