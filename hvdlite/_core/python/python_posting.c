/* Posting: an operation that a program asks for, with its tensors. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "python/python_glue.h"

#include <structmember.h>

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
        bool is_rows = (facts->rows == HVDL_ROWS_OWN || facts->rows == HVDL_ROWS_SPLITS) && i == 0;
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

/* group: None, or (number of tensors, hash of their shapes). */
static int put_group(PyObject *group, hvdl_desc *desc)
{
    unsigned long long layout;
    desc->num_tensors = 0;
    desc->layout = 0;
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

/* ---- Posting ---- */

/* The arguments of posting(), in this order; and their names. */
enum {
    POST_KIND,
    POST_NAME,
    POST_UNNAMED,
    POST_DTYPE,
    POST_SOURCE,
    POST_RESULT,
    POST_OP,
    POST_ROOT,
    POST_PRESCALE,
    POST_POSTSCALE,
    POST_SPLITS,
    POST_GROUP,
    POST_PLACE,
    POST_SITE,
    NUM_FIELDS
};
_Static_assert(NUM_FIELDS == HVDL_PY_NUM_FIELDS, "the module's state has room for all names");
static const char *const field_names[NUM_FIELDS] = {
    "kind", "name",     "unnamed",   "dtype",  "source", "result", "op",
    "root", "prescale", "postscale", "splits", "group",  "place",  "site"};
#define NUM_NEEDED (POST_DTYPE + 1)

static void keep_tensor(PyObject **at, PyObject *object)
{
    hvdl_py_keep(at, object == Py_None ? NULL : object);
}

static int set_name(PostingObject *self, PyObject *name)
{
    if (hvdl_py_name(name, &self->posting))
        return -1;
    hvdl_py_keep(&self->name, name);
    return 0;
}

static int set_site(PostingObject *self, PyObject *site)
{
    if (hvdl_py_site(site, &self->posting.site))
        return -1;
    hvdl_py_keep(&self->site, site);
    return 0;
}

/* That of all its elements, one after the other. */
static PyObject *shape_of_tuple(const hvdl_py_state *state, const PostingObject *self,
                                PyObject *tensors)
{
    if (!(hvdl_facts_of(&self->posting.desc)->parts & HVDL_PARTS_IN)) {
        PyErr_Format(PyExc_TypeError, "%s takes one tensor, and no tuple",
                     hvdl_kind_name(self->posting.desc.kind));
        return NULL;
    }
    int64_t count = hvdl_py_count_of_tuple(state, tensors);
    return count < 0 ? NULL : Py_BuildValue("(L)", (long long)count);
}

/* Of the tensor that the descriptor tells of. */
static int set_shape(hvdl_py_state *state, PostingObject *self, PyObject *tensor)
{
    if (self->shape) { /* a copy's, of the tensor that this one replaces */
        memset(self->posting.desc.dims, 0, sizeof self->posting.desc.dims);
        Py_CLEAR(self->shape);
    }
    if (tensor == Py_None) {
        self->posting.desc.ndim = 1;
        self->posting.desc.count = self->posting.rows = 0;
        return 0;
    }
    PyObject *shape = PyTuple_Check(tensor) ? shape_of_tuple(state, self, tensor)
                                            : PyObject_GetAttr(tensor, state->shape);
    if (!shape || put_shape(shape, &self->posting)) {
        Py_XDECREF(shape);
        return -1;
    }
    self->shape = shape;
    return 0;
}

/* Keeps the tensor, and reads its shape. Barrier, join: there is none. */
static int set_source(hvdl_py_state *state, PostingObject *self, PyObject *source)
{
    keep_tensor(&self->source, source);
    if (hvdl_describes_result(hvdl_facts_of(&self->posting.desc)))
        return 0;
    return set_shape(state, self, source);
}

static int set_result(hvdl_py_state *state, PostingObject *self, PyObject *result)
{
    keep_tensor(&self->result, result);
    if (!hvdl_describes_result(hvdl_facts_of(&self->posting.desc)))
        return 0;
    return set_shape(state, self, result);
}

static int set_number(uint8_t *to, int field, PyObject *value, long most)
{
    int number;
    if (hvdl_py_int(value, field_names[field], 0, most, &number))
        return -1;
    *to = (uint8_t)number;
    return 0;
}

/* And the root where none is given: a kind without one has -1 on all ranks, which compare descriptors. */
static int set_kind(hvdl_desc *desc, PyObject *value)
{
    if (set_number(&desc->kind, POST_KIND, value, HVDL_PLAN - 1))
        return -1;
    desc->root = hvdl_facts_of(desc)->has_root ? 0 : -1;
    return 0;
}

/* Inlined, so that for a field that is known when it is compiled nothing is left of the switch. */
static inline __attribute__((always_inline)) int
set_field(hvdl_py_state *state, PostingObject *self, int field, PyObject *value)
{
    hvdl_posting *posting = &self->posting;
    hvdl_desc *desc = &posting->desc;
    int truth;
    switch (field) {
    case POST_KIND: return set_kind(desc, value);
    case POST_NAME: return set_name(self, value);
    case POST_UNNAMED:
        truth = value == Py_False ? 0 : value == Py_True ? 1 : PyObject_IsTrue(value);
        posting->unnamed = truth > 0;
        return truth < 0 ? -1 : 0;
    case POST_DTYPE: return set_number(&desc->dtype, field, value, HVDL_NUM_DTYPES - 1);
    case POST_SOURCE: return set_source(state, self, value);
    case POST_RESULT: return set_result(state, self, value);
    case POST_OP: return set_number(&desc->op, field, value, HVDL_NUM_OPS - 1);
    case POST_ROOT:
        if (!hvdl_facts_of(desc)->has_root)
            return 0;
        return hvdl_py_int(value, field_names[field], 0, INT32_MAX, &desc->root);
    case POST_PRESCALE: return to_factor(value, &desc->prescale);
    case POST_POSTSCALE: return to_factor(value, &desc->postscale);
    case POST_SPLITS: keep_tensor(&self->splits, value); return 0;
    case POST_GROUP: return put_group(value, desc);
    case POST_SITE: return set_site(self, value);
    default: return set_number(&desc->place, field, value, HVDL_ORDERED);
    }
}

/* The field that a keyword names; NUM_FIELDS: none. */
static int field_of(const hvdl_py_state *state, PyObject *keyword)
{
    for (int field = 0; field < NUM_FIELDS; field++)
        if (state->field_names[field] == keyword)
            return field;
    for (int field = 0; field < NUM_FIELDS; field++)
        if (!PyUnicode_CompareWithASCIIString(keyword, field_names[field]))
            return field;
    return NUM_FIELDS;
}

static inline __attribute__((always_inline)) int set_positional(hvdl_py_state *state,
                                                                PostingObject *self,
                                                                PyObject *const *args,
                                                                Py_ssize_t num_args)
{
#define SET(field)                                                                                 \
    if (num_args <= (field))                                                                       \
        return 0;                                                                                  \
    if (set_field(state, self, field, args[field]))                                                \
    return -1
    SET(POST_KIND);
    SET(POST_NAME);
    SET(POST_UNNAMED);
    SET(POST_DTYPE);
    SET(POST_SOURCE);
    SET(POST_RESULT);
    SET(POST_OP);
    SET(POST_ROOT);
    SET(POST_PRESCALE);
    SET(POST_POSTSCALE);
    SET(POST_SPLITS);
    SET(POST_GROUP);
    SET(POST_PLACE);
    SET(POST_SITE);
#undef SET
    return 0;
}

/* Sets the positional arguments and the keywords, which follow them in `args`. */
static int set_fields(hvdl_py_state *state, PostingObject *self, PyObject *const *args,
                      Py_ssize_t num_args, PyObject *keywords)
{
    if (set_positional(state, self, args, num_args))
        return -1;
    Py_ssize_t num_keywords = keywords ? PyTuple_Size(keywords) : 0;
    for (Py_ssize_t i = 0; i < num_keywords; i++) {
        PyObject *keyword = PyTuple_GetItem(keywords, i);
        int field = field_of(state, keyword);
        /* In a copy the kind stays, by which the source's shape was read. */
        if (field < num_args || field == POST_KIND || field == NUM_FIELDS) {
            PyErr_Format(PyExc_TypeError, "a posting has no argument '%U', or has it already",
                         keyword);
            return -1;
        }
        if (set_field(state, self, field, args[num_args + i]))
            return -1;
    }
    /* What stays on its device is nothing to the engine, which must not keep it there. */
    if (self->posting.desc.place == HVDL_ORDERED) {
        hvdl_py_keep(&self->source, NULL);
        hvdl_py_keep(&self->result, NULL);
    }
    return 0;
}

static PostingObject *new_posting(hvdl_py_state *state)
{
    PostingObject *self = PyObject_New(PostingObject, state->posting_type);
    if (!self)
        return NULL;
    memset(&self->posting, 0, sizeof self->posting);
    self->name = self->site = self->source = self->result = self->splits = self->shape = NULL;
    return self;
}

PyObject *hvdl_py_posting(PyObject *module, PyObject *const *args, Py_ssize_t num_args,
                          PyObject *keywords)
{
    hvdl_py_state *state = PyModule_GetState(module);
    if (num_args < NUM_NEEDED || num_args > NUM_FIELDS) {
        PyErr_Format(PyExc_TypeError, "posting: %d to %d positional arguments expected, got %zd",
                     NUM_NEEDED, NUM_FIELDS, num_args);
        return NULL;
    }
    PostingObject *self = new_posting(state);
    if (!self)
        return NULL;
    hvdl_desc *desc = &self->posting.desc;
    desc->prescale = desc->postscale = 1.0;
    desc->ndim = 1;
    if (set_fields(state, self, args, num_args, keywords)) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

/* A copy with other values in some fields. */
static PyObject *posting_replace(PyObject *object, PyObject *const *args, Py_ssize_t num_args,
                                 PyObject *keywords)
{
    hvdl_py_state *state = PyType_GetModuleState(Py_TYPE(object));
    const PostingObject *from = (PostingObject *)object;
    if (num_args) {
        PyErr_SetString(PyExc_TypeError, "replace takes keywords only");
        return NULL;
    }
    PostingObject *self = new_posting(state);
    if (!self)
        return NULL;
    self->posting = from->posting;
    hvdl_py_keep(&self->name, from->name);
    hvdl_py_keep(&self->site, from->site);
    hvdl_py_keep(&self->source, from->source);
    hvdl_py_keep(&self->result, from->result);
    hvdl_py_keep(&self->splits, from->splits);
    hvdl_py_keep(&self->shape, from->shape);
    if (set_fields(state, self, args, 0, keywords)) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void posting_dealloc(PyObject *object)
{
    PostingObject *self = (PostingObject *)object;
    PyTypeObject *type = Py_TYPE(object);
    Py_XDECREF(self->name);
    Py_XDECREF(self->site);
    Py_XDECREF(self->source);
    Py_XDECREF(self->result);
    Py_XDECREF(self->splits);
    Py_XDECREF(self->shape);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *posting_str(PyObject *object)
{
    const PostingObject *self = (PostingObject *)object;
    return PyUnicode_FromFormat("%s '%U'", hvdl_kind_name(self->posting.desc.kind), self->name);
}

static PyMethodDef posting_methods[] = {
    {"replace", (PyCFunction)(void (*)(void))posting_replace, METH_FASTCALL | METH_KEYWORDS, NULL},
    {0},
};

#define FIELD(name, type, field) {name, type, offsetof(PostingObject, field), READONLY, NULL}

static PyMemberDef posting_members[] = {
    FIELD("kind", T_UBYTE, posting.desc.kind),
    FIELD("name", T_OBJECT, name),
    FIELD("unnamed", T_BOOL, posting.unnamed),
    FIELD("dtype", T_UBYTE, posting.desc.dtype),
    FIELD("source", T_OBJECT, source),
    FIELD("result", T_OBJECT, result),
    FIELD("op", T_UBYTE, posting.desc.op),
    FIELD("root", T_INT, posting.desc.root),
    FIELD("prescale", T_DOUBLE, posting.desc.prescale),
    FIELD("postscale", T_DOUBLE, posting.desc.postscale),
    FIELD("splits", T_OBJECT, splits),
    FIELD("place", T_UBYTE, posting.desc.place),
    FIELD("site", T_OBJECT, site),
    {0},
};

static PyType_Slot posting_slots[] = {
    {Py_tp_dealloc, posting_dealloc},
    {Py_tp_str, posting_str},
    {Py_tp_methods, posting_methods},
    {Py_tp_members, posting_members},
    {Py_tp_doc, "One operation that is to be done: what `Engine.post` takes."},
    {0, NULL},
};

PyType_Spec hvdl_py_posting_spec = {
    .name = "hvdlite._core.Posting",
    .basicsize = sizeof(PostingObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = posting_slots,
};

int hvdl_py_intern_fields(hvdl_py_state *state)
{
    state->shape = PyUnicode_InternFromString("shape");
    state->data_ptr = PyUnicode_InternFromString("data_ptr");
    for (int field = 0; field < NUM_FIELDS; field++)
        if (!(state->field_names[field] = PyUnicode_InternFromString(field_names[field])))
            return -1;
    return state->shape && state->data_ptr ? 0 : -1;
}
