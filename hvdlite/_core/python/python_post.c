/* Hands a Posting to the engine, with the addresses that its tensors have now. */
#include <stdlib.h>

#include "python/python_glue.h"

/* The op and the factors against the dtype. */
static int check_arithmetic(const hvdl_posting *posting)
{
    const hvdl_desc *desc = &posting->desc;
    const char *problem = NULL;
    if (desc->dtype == HVDL_BOOL && (desc->prescale != 1.0 || desc->postscale != 1.0))
        problem = "bool takes no scale factors";
    else if (hvdl_is_bitwise(desc->op) && hvdl_is_float(desc->dtype))
        problem = "bitwise ops take integers and bool, not floats";
    if (!problem)
        return 0;
    PyErr_Format(PyExc_ValueError, "%s '%s': %s", hvdl_kind_name(desc->kind), posting->name,
                 problem);
    return -1;
}

static int check_posting(const hvdl_posting *posting, const hvdl_engine *engine)
{
    const hvdl_desc *desc = &posting->desc;
    const hvdl_kind_facts *facts = hvdl_facts_of(desc);
    bool needs_output = facts->result == HVDL_RESULT_WHOLE; /* a share may have no rows */
    if (facts->has_root)
        needs_output &= !hvdl_root_gets(facts) || desc->root == hvdl_engine_rank(engine);
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
    return check_arithmetic(posting);
}

/* With the addresses of the tensors as they are now. */
static int fill_posting(const hvdl_py_state *state, hvdl_engine *engine, const PostingObject *self,
                        hvdl_posting *to)
{
    void *input, *splits;
    *to = self->posting;
    const hvdl_kind_facts *facts = hvdl_facts_of(&to->desc);
    if (!self->shape && hvdl_moves_data(facts)) {
        PyErr_Format(PyExc_ValueError, "%s '%s': the source is missing", facts->name, to->name);
        return -1;
    }
    if (hvdl_py_address_of(state, self->source, &input) ||
        hvdl_py_address_of(state, self->splits, &splits))
        return -1;
    to->input = input;
    to->output = input;
    to->splits = splits;
    if (self->result != self->source && hvdl_py_address_of(state, self->result, &to->output))
        return -1;
    return check_posting(to, engine);
}

static hvdl_operation *post_parts(hvdl_py_state *state, hvdl_engine *engine, PostingObject *self,
                                  bool wake)
{
    hvdl_posting posting = self->posting;
    hvdl_py_parts parts = {0};
    bool failed =
        hvdl_py_put_parts(state, engine, self, &posting, &parts) || check_arithmetic(&posting);
    hvdl_operation *operation =
        failed ? NULL : hvdl_py_post(engine, &posting, (PyObject *)self, wake);
    free(parts.memory);
    return operation;
}

hvdl_operation *hvdl_py_post_object(hvdl_py_state *state, hvdl_engine *engine, PyObject *object,
                                    bool wake)
{
    hvdl_posting posting;
    if (Py_TYPE(object) != state->posting_type) {
        PyErr_SetString(PyExc_TypeError, "post: expected a Posting");
        return NULL;
    }
    if (hvdl_facts_of(&((PostingObject *)object)->posting.desc)->parts &&
        hvdl_py_is_in_parts((PostingObject *)object))
        return post_parts(state, engine, (PostingObject *)object, wake);
    if (fill_posting(state, engine, (PostingObject *)object, &posting))
        return NULL;
    return hvdl_py_post(engine, &posting, object, wake);
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
