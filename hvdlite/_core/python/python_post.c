/* The one way in. What is posted is an hvdl_posting: made from a Posting, with the addresses that its tensors have
 * now, or at once from the arguments of a blocking allreduce of ordinary tensors. It is handed to the engine with
 * an owner that keeps the tensors, and its caller waits for it in the same call, or gets an Operation. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "python/python_glue.h"

#include "host/shm.h"

/* ---- the gate ---- */

PyObject *hvdl_py_lend(hvdl_engine *engine, PyObject *owner)
{
    hvdl_py_reap(engine);
    return Py_NewRef(owner);
}

bool hvdl_py_refused(hvdl_err err, PyObject *owner, const char *what, const char *name)
{
    if (!err)
        return false;
    Py_DECREF(owner);
    hvdl_py_raise(err, what, name);
    return true;
}

static hvdl_operation *post(hvdl_engine *engine, hvdl_posting *posting, PyObject *owner, bool wake)
{
    hvdl_operation *operation;
    posting->owner = hvdl_py_lend(engine, owner);
    hvdl_err err = hvdl_engine_post(engine, posting, wake, &operation);
    bool refused = hvdl_py_refused(err, owner, hvdl_kind_name(posting->desc.kind), posting->name);
    return refused ? NULL : operation;
}

static PyObject *wait_and_release(EngineObject *self, hvdl_operation *operation, double seconds)
{
    PyObject *result = operation ? hvdl_py_wait_until(self, operation, seconds) : NULL;
    /* One in flight goes on, and its owner comes back by hvdl_py_reap. */
    PyObject *owner = operation ? hvdl_operation_release(self->engine, operation) : NULL;
    Py_XDECREF(owner);
    return result;
}

/* ---- from a Posting ---- */

/* The op and the factors against the dtype. */
static int check_arithmetic(const hvdl_posting *posting)
{
    const hvdl_desc *desc = &posting->desc;
    const char *problem = NULL;
    if (desc->dtype == HVDL_BOOL && (desc->prescale != 1.0 || desc->postscale != 1.0))
        problem = "bool takes no scale factors";
    else if (hvdl_is_bitwise(desc->op) && hvdl_is_float(desc->dtype))
        problem = "bitwise ops take integers and bool, not floats";
    return problem ? hvdl_py_refuse(posting, problem) : 0;
}

static int check_memory(const hvdl_posting *posting, const hvdl_engine *engine)
{
    const hvdl_desc *desc = &posting->desc;
    const hvdl_kind_facts *facts = hvdl_facts_of(desc);
    bool needs_output = facts->result == HVDL_RESULT_WHOLE; /* a share may have no rows */
    if (facts->has_root)
        needs_output &= !hvdl_root_gets(facts) || desc->root == hvdl_engine_rank(engine);
    bool has_data = hvdl_moves_data(facts) && desc->count && desc->place != HVDL_ORDERED &&
                    (facts->rows == HVDL_ROWS_SAME || posting->rows);
    if (has_data && (!hvdl_py_is_memory(posting->input) ||
                     (needs_output && !hvdl_py_is_memory(posting->output))))
        return hvdl_py_refuse(posting, "the tensor has no memory");
    if (hvdl_sends_splits(desc) && !posting->splits)
        return hvdl_py_refuse(posting, "splits are missing");
    return 0;
}

/* With the addresses of the tensors as they are now. */
static int fill(const hvdl_py_state *state, hvdl_engine *engine, const PostingObject *self,
                hvdl_posting *to, void **memory)
{
    void *input, *splits;
    const hvdl_kind_facts *facts = hvdl_facts_of(&self->posting.desc);
    *to = self->posting;
    if (facts->parts && hvdl_py_is_in_parts(self))
        return hvdl_py_put_parts(state, engine, self, to, memory) || check_arithmetic(to);
    if (!self->shape && hvdl_moves_data(facts))
        return hvdl_py_refuse(to, "the source is missing");
    if (hvdl_py_address_of(state, self->source, &input) ||
        hvdl_py_address_of(state, self->splits, &splits))
        return -1;
    to->input = input;
    to->output = input;
    to->splits = splits;
    if (self->result != self->source && hvdl_py_address_of(state, self->result, &to->output))
        return -1;
    return check_memory(to, engine) || check_arithmetic(to);
}

/* The engine keeps the Posting with its tensors until the operation has ended. */
static hvdl_operation *post_object(EngineObject *self, PyObject *object, bool wake)
{
    const hvdl_py_state *state = PyType_GetModuleState(Py_TYPE(self));
    hvdl_posting posting;
    void *memory = NULL;
    if (Py_TYPE(object) != state->posting_type) {
        PyErr_SetString(PyExc_TypeError, "expected a Posting");
        return NULL;
    }
    int failed = fill(state, self->engine, (PostingObject *)object, &posting, &memory);
    hvdl_operation *operation = failed ? NULL : post(self->engine, &posting, object, wake);
    free(memory);
    return operation;
}

/* post(posting, wake=True) */
PyObject *hvdl_py_post(PyObject *object, PyObject *const *args, Py_ssize_t num_args)
{
    EngineObject *self = (EngineObject *)object;
    if (!hvdl_py_engine(self))
        return NULL;
    if (num_args < 1 || num_args > 2) {
        PyErr_Format(PyExc_TypeError, "post: 1 or 2 arguments expected, got %zd", num_args);
        return NULL;
    }
    int wake = num_args > 1 ? hvdl_py_truth(args[1]) : 1;
    hvdl_operation *operation = wake < 0 ? NULL : post_object(self, args[0], wake);
    if (!operation)
        return NULL;
    return hvdl_py_operation(self, NULL, ((PostingObject *)args[0])->shape, operation);
}

/* run(posting, timeout_s=-1.0) */
PyObject *hvdl_py_run(PyObject *object, PyObject *const *args, Py_ssize_t num_args,
                      PyObject *keywords)
{
    static const hvdl_py_keyword names[] = {NAME("posting"), NAME("timeout_s")};
    static const hvdl_py_signature signature = {"run", 1, 2, names};
    EngineObject *self = (EngineObject *)object;
    PyObject *given[2];
    double seconds;
    if (!hvdl_py_engine(self) || hvdl_py_gather(&signature, args, num_args, keywords, given) ||
        hvdl_py_limit(given[1], &seconds))
        return NULL;
    hvdl_py_state *state = PyType_GetModuleState(Py_TYPE(object));
    if (Py_TYPE(given[0]) == state->posting_type &&
        hvdl_facts_of(&((PostingObject *)given[0])->posting.desc)->result == HVDL_RESULT_GATHERED) {
        PyErr_SetString(PyExc_ValueError, "run: post an operation whose result the engine makes");
        return NULL;
    }
    return wait_and_release(self, post_object(self, given[0], false), seconds);
}

/* ---- a blocking allreduce of ordinary tensors ---- */

enum { TENSOR, RESULT, CALLED, OP, PRESCALE, POSTSCALE, TIMEOUT, SITE, DUE, NUM_ARGS };

/* All but the name. 1: filled; 0: an argument is not an ordinary one; -1: an exception. */
static int fill_plain(const hvdl_py_state *state, PyObject *const *args, hvdl_posting *to)
{
    hvdl_desc *desc = &to->desc;
    void *memory;
    int overflows;
    long op = PyLong_Check(args[OP]) ? PyLong_AsLongAndOverflow(args[OP], &overflows) : -1;
    if (op < 0 || op >= HVDL_NUM_OPS || op == HVDL_ADASUM || !PyFloat_CheckExact(args[PRESCALE]) ||
        !PyFloat_CheckExact(args[POSTSCALE]) ||
        !(PyUnicode_CheckExact(args[CALLED]) || PyCallable_Check(args[CALLED])))
        return 0;
    to->posted_ns = hvdl_now_ns();
    if ((double)to->posted_ns >= PyFloat_AsDouble(args[DUE]) * 1e9)
        return PyErr_Occurred() ? -1 : 0;
    int filled = hvdl_py_put_plain(state, args[TENSOR], desc, &memory);
    to->input = to->output = memory;
    if (filled > 0 && args[RESULT] != Py_None && args[RESULT] != args[TENSOR]) {
        hvdl_desc result = {0};
        filled = hvdl_py_put_plain(state, args[RESULT], &result, &to->output);
        filled = filled > 0 ? !memcmp(desc, &result, sizeof result) : filled;
    }
    if (filled <= 0 || desc->dtype == HVDL_BOOL ||
        (hvdl_is_bitwise((int)op) && hvdl_is_float(desc->dtype)))
        return filled < 0 ? -1 : 0;
    desc->kind = HVDL_ALLREDUCE;
    desc->op = (uint8_t)op;
    desc->root = -1;
    desc->place = HVDL_ON_HOST;
    desc->prescale = hvdl_py_factor(PyFloat_AsDouble(args[PRESCALE]));
    desc->postscale = hvdl_py_factor(PyFloat_AsDouble(args[POSTSCALE]));
    to->unnamed = !PyUnicode_CheckExact(args[CALLED]);
    to->name = to->unnamed ? "" : hvdl_py_text(args[CALLED], "name");
    return !to->name || hvdl_py_site(args[SITE], &to->site) ? -1 : 1;
}

/* Autograd must learn that a tensor that it may have saved changes. It is Python that may run here, and so
 * before anything is posted. */
static int tell_change(const hvdl_py_state *state, PyObject *tensor)
{
    PyObject *changed = PyTuple_Pack(1, tensor);
    PyObject *told =
        changed ? PyObject_CallFunctionObjArgs(state->tensor_changed, changed, NULL) : NULL;
    Py_XDECREF(changed);
    Py_XDECREF(told);
    return told ? 0 : -1;
}

PyObject *hvdl_py_run_allreduce(PyObject *object, PyObject *const *args, Py_ssize_t num_args)
{
    EngineObject *self = (EngineObject *)object;
    const hvdl_py_state *state = PyType_GetModuleState(Py_TYPE(object));
    hvdl_posting posting = {0};
    if (!hvdl_py_engine(self))
        return NULL;
    if (num_args != NUM_ARGS) {
        PyErr_Format(PyExc_TypeError, "%d arguments expected, got %zd", NUM_ARGS, num_args);
        return NULL;
    }
    int filled = fill_plain(state, args, &posting);
    if (filled <= 0)
        return filled ? NULL : Py_NewRef(Py_NotImplemented);
    double seconds;
    if (hvdl_py_limit(args[TIMEOUT], &seconds))
        return NULL;
    PyObject *tensor = args[TENSOR], *result = args[RESULT], *name = NULL, *outcome = NULL;
    if (result == Py_None && tell_change(state, tensor))
        return NULL;
    if (posting.unnamed) { /* last: what was refused takes no number */
        name = PyObject_CallNoArgs(args[CALLED]);
        posting.name = name ? hvdl_py_text(name, "name") : NULL;
    }
    bool is_one = result == Py_None || result == tensor;
    PyObject *owner = is_one ? Py_NewRef(tensor) : PyTuple_Pack(2, tensor, result);
    if (posting.name && owner)
        outcome = wait_and_release(self, post(self->engine, &posting, owner, false), seconds);
    Py_XDECREF(owner);
    Py_XDECREF(name);
    return outcome;
}
