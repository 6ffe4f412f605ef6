/* Plan: making one, starting it, and asking who owns which part of its buffer. */
#include <math.h>
#include <stdlib.h>

#include "python/python_glue.h"

/* form: the kind of a plan's runs. cut_as: -1, or the dtype whose cut says who owns what. */
static int to_owned_desc(const char *name, Py_ssize_t count, int dtype, int form, int cut_as,
                         hvdl_desc *desc)
{
    bool has_owners = hvdl_is_kind_of_runs(form) && hvdl_facts_of_kind(form)->owners;
    if (dtype < 0 || dtype >= HVDL_NUM_DTYPES || count < 0 || !hvdl_is_kind_of_runs(form) ||
        cut_as < -1 || cut_as >= HVDL_NUM_DTYPES) {
        PyErr_Format(PyExc_ValueError, "%s: dtype, op, count, form or cut_as out of range", name);
        return -1;
    }
    if (cut_as >= 0 && cut_as != dtype && (!has_owners || hvdl_facts_of_kind(form)->reduces)) {
        PyErr_Format(PyExc_ValueError, "%s: only what is united can be cut as another dtype", name);
        return -1;
    }
    desc->kind = (uint8_t)form;
    desc->dtype = (uint8_t)dtype;
    if (has_owners)
        desc->cut_as = (uint8_t)(cut_as < 0 ? dtype : cut_as);
    desc->root = -1;
    desc->ndim = 1;
    desc->dims[0] = desc->count = count;
    return 0;
}

/* Where the buffer of a plan lies, if it is in extents. The list is the caller's to free(). */
static int put_extents(const hvdl_engine *engine, PyObject *extents, hvdl_posting *posting)
{
    hvdl_desc *desc = &posting->desc;
    const hvdl_kind_facts *facts = hvdl_facts_of(desc);
    bool within_host = facts->owners == HVDL_OWNERS_OF_HOST ||
                       (facts->owners && hvdl_engine_num_hosts(engine) == 1);
    if (facts->reduces || !within_host || posting->input || posting->output) {
        PyErr_SetString(PyExc_ValueError, "plan: only a buffer that is united within a host can be "
                                          "in extents, and then its address is 0");
        return -1;
    }
    if (hvdl_py_to_extents(extents, (Py_ssize_t)desc->count, hvdl_dtype_bytes(desc->dtype),
                           &posting->extents))
        return -1;
    /* Ranks whose extents have other places in the buffer do not agree. */
    desc->num_tensors = (int32_t)posting->extents.count;
    desc->layout = hvdl_extents_hash(posting->extents);
    return 0;
}

PyObject *hvdl_py_plan(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"", "", "",     "",       "",        "",         "",
                            "", "", "form", "cut_as", "extents", "weighted", NULL};
    EngineObject *self = (EngineObject *)object;
    hvdl_engine *engine = hvdl_py_engine(self);
    hvdl_posting posting = {0};
    hvdl_desc *desc = &posting.desc;
    int dtype, op, form = HVDL_ALLREDUCE, cut_as = -1;
    Py_ssize_t count, weighted = 0;
    PyObject *name, *input, *output, *owner, *extents = Py_None;
    void *address;
    if (!engine ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "OiiOOnddO|iiOn:plan", names, &name, &dtype, &op,
                                     &input, &output, &count, &desc->prescale, &desc->postscale,
                                     &owner, &form, &cut_as, &extents, &weighted) ||
        hvdl_py_name(name, &posting) || to_owned_desc("plan", count, dtype, form, cut_as, desc))
        return NULL;
    if (op < 0 || op > HVDL_PRODUCT) {
        PyErr_SetString(PyExc_ValueError, "plan: dtype, op, count, form or cut_as out of range");
        return NULL;
    }
    bool can_weigh = hvdl_facts_of(desc)->reduces && hvdl_is_float(dtype) &&
                     (op == HVDL_SUM || op == HVDL_AVERAGE) && hvdl_engine_weighs(engine);
    if (weighted < 0 || weighted > count || (weighted && !can_weigh)) {
        PyErr_SetString(PyExc_ValueError, "plan: weighted is at most count; more than 0 only where "
                                          "a plan adds up floats on one host, without the "
                                          "deterministic mode");
        return NULL;
    }
    if (hvdl_py_pointer(input, &address) || hvdl_py_pointer(output, &posting.output))
        return NULL;
    posting.input = address;
    posting.num_weighted = (size_t)weighted;
    desc->prescale = hvdl_py_factor(desc->prescale);
    desc->postscale = hvdl_py_factor(desc->postscale);
    desc->op = (uint8_t)op;
    if (!hvdl_facts_of(desc)->reduces && (address != posting.output || op != HVDL_SUM ||
                                          desc->prescale != 1.0 || desc->postscale != 1.0)) {
        PyErr_SetString(PyExc_ValueError, "plan: a buffer is united in place, as a sum (SUM) with "
                                          "scale factors 1.0");
        return NULL;
    }
    if (extents != Py_None && put_extents(engine, extents, &posting))
        return NULL;
    hvdl_py_state *state = PyType_GetModuleState(Py_TYPE(object));
    PlanObject *plan = PyObject_New(PlanObject, state->plan_type);
    if (!plan) {
        free(posting.extents.list);
        return NULL;
    }
    plan->engine = NULL;
    posting.owner = hvdl_py_lend(engine, owner);
    hvdl_err err = hvdl_plan_create(engine, &posting, &plan->plan);
    free(posting.extents.list);
    if (hvdl_py_refused(err, owner, "plan", posting.name)) {
        Py_DECREF(plan);
        return NULL;
    }
    plan->engine = (EngineObject *)Py_NewRef(object);
    return (PyObject *)plan;
}

PyObject *hvdl_py_cut_bytes(PyObject *object, PyObject *unused)
{
    hvdl_engine *engine = hvdl_py_engine((EngineObject *)object);
    (void)unused;
    return engine ? PyLong_FromSize_t(hvdl_engine_cut_bytes(engine)) : NULL;
}

/* owned(count, dtype, form, member, cut_as=-1) */
PyObject *hvdl_py_owned(PyObject *object, PyObject *args)
{
    hvdl_engine *engine = hvdl_py_engine((EngineObject *)object);
    hvdl_desc desc = {0};
    int dtype, form, member, cut_as = -1;
    Py_ssize_t count;
    hvdl_range *ranges;
    size_t num;
    if (!engine || !PyArg_ParseTuple(args, "niii|i:owned", &count, &dtype, &form, &member, &cut_as))
        return NULL;
    if (member < 0 || member >= hvdl_engine_num_ranks(engine) || cut_as >= HVDL_NUM_DTYPES ||
        !hvdl_facts_of_kind(hvdl_is_kind_of_runs(form) ? form : HVDL_ALLREDUCE)->owners) {
        PyErr_SetString(PyExc_ValueError,
                        "owned: no such member, or a form without owners, or cut_as out of range");
        return NULL;
    }
    if (to_owned_desc("owned", count, dtype, form, -1, &desc))
        return NULL;
    if (cut_as >= 0)
        desc.cut_as = (uint8_t)cut_as;
    if (hvdl_engine_owned(engine, &desc, member, &ranges, &num))
        return PyErr_NoMemory();
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < num; i++)
        hvdl_py_append(
            &list, Py_BuildValue("(nn)", (Py_ssize_t)ranges[i].begin, (Py_ssize_t)ranges[i].end));
    free(ranges);
    return list;
}

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
    hvdl_py_lend(engine, owner);
    hvdl_err err =
        hvdl_plan_start(engine, self->plan, has_weight ? &weight : NULL, owner, &operation);
    if (hvdl_py_refused(err, owner, "plan", NULL))
        return NULL;
    return hvdl_py_operation(self->engine, object, NULL, operation);
}

static void plan_dealloc(PyObject *object)
{
    PlanObject *self = (PlanObject *)object;
    PyTypeObject *type = Py_TYPE(object);
    /* NULL: it was refused. */
    if (self->engine && self->engine->forks == hvdl_py_num_forks) {
        hvdl_plan_release(self->engine->engine, self->plan);
        hvdl_py_reap(self->engine->engine);
    }
    Py_XDECREF(self->engine);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyMethodDef plan_methods[] = {
    HVDL_PY_METHOD("start", plan_start, METH_FASTCALL),
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
