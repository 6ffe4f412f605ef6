/* Engine.send, Engine.recv and Operation.withdraw. */
#include <string.h>

#include "python/python_glue.h"

enum { TENSOR, PEER, TAG, SITE, WAKE, NUM_ARGUMENTS };
static const hvdl_py_keyword names_of_recv[NUM_ARGUMENTS] = {
    NAME("tensor"), NAME("source"), NAME("tag"), NAME("site"), NAME("wake")};
static const hvdl_py_keyword names_of_send[NUM_ARGUMENTS] = {
    NAME("tensor"), NAME("to"), NAME("tag"), NAME("site"), NAME("wake")};
static const hvdl_py_signature signatures[] = {{"recv", TAG + 1, NUM_ARGUMENTS, names_of_recv},
                                               {"send", TAG + 1, NUM_ARGUMENTS, names_of_send}};

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
    if (hvdl_py_address_of(state, tensor, &posting->memory))
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
    const hvdl_py_signature *signature = &signatures[is_send];
    EngineObject *self = (EngineObject *)object;
    hvdl_engine *engine = hvdl_py_engine(self);
    hvdl_message_posting posting = {.is_send = is_send};
    PyObject *given[NUM_ARGUMENTS];
    int wake = 1;
    if (!engine || hvdl_py_gather(signature, args, num_args, keywords, given))
        return NULL;
    int last = hvdl_engine_num_ranks(engine) - 1;
    if (hvdl_py_int(given[PEER], signature->names[PEER].text, is_send ? 0 : -1, last,
                    &posting.peer) ||
        hvdl_py_int(given[TAG], "tag", 0, INT32_MAX, &posting.tag))
        return NULL;
    if (given[SITE] && hvdl_py_site(given[SITE], &posting.site))
        return NULL;
    if (given[WAKE] && (wake = hvdl_py_truth(given[WAKE])) < 0)
        return NULL;
    if (put_tensor(PyType_GetModuleState(Py_TYPE(object)), signature->function, given[TENSOR],
                   &posting))
        return NULL;
    hvdl_operation *operation;
    posting.owner = hvdl_py_lend(engine, given[TENSOR]);
    hvdl_err err = hvdl_engine_post_message(engine, &posting, wake, &operation);
    if (hvdl_py_refused(err, given[TENSOR], signature->function, ""))
        return NULL;
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
    if (!hvdl_py_own_operation(self))
        return NULL;
    Py_BEGIN_ALLOW_THREADS withdrawn =
        hvdl_operation_withdraw(self->engine->engine, self->operation);
    Py_END_ALLOW_THREADS return PyBool_FromLong(withdrawn);
}
