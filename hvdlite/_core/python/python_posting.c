/* Posting: an operation that a program asks for, with its tensors. */
#include <stddef.h>
#include <string.h>

#include "python/python_glue.h"

#include <structmember.h>

/* ---- its fields ---- */

/* The arguments of posting(), in this order. A field is set after those before it, which it may depend on. */
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
static const hvdl_py_keyword field_names[NUM_FIELDS] = {
    NAME("kind"),   NAME("name"),  NAME("unnamed"), NAME("dtype"),    NAME("source"),
    NAME("result"), NAME("op"),    NAME("root"),    NAME("prescale"), NAME("postscale"),
    NAME("splits"), NAME("group"), NAME("place"),   NAME("site")};

static int set_number(uint8_t *to, int field, PyObject *value, long most)
{
    int number;
    if (hvdl_py_int(value, field_names[field].text, 0, most, &number))
        return -1;
    *to = (uint8_t)number;
    return 0;
}

static int set_factor(double *to, PyObject *value)
{
    *to = hvdl_py_factor(PyFloat_AsDouble(value));
    return *to == -1.0 && PyErr_Occurred() ? -1 : 0;
}

/* And the root where none is given: a kind without one has -1 on all ranks, which compare descriptors. */
static int set_kind(hvdl_desc *desc, PyObject *value)
{
    if (set_number(&desc->kind, POST_KIND, value, HVDL_PLAN - 1))
        return -1;
    desc->root = hvdl_facts_of(desc)->has_root ? 0 : -1;
    return 0;
}

/* group: None, or (number of tensors, hash of their shapes). */
static int set_group(hvdl_desc *desc, PyObject *group)
{
    unsigned long long layout = 0;
    desc->num_tensors = 0;
    if (group != Py_None && !PyTuple_Check(group)) {
        PyErr_SetString(PyExc_TypeError, "group must be a tuple or None");
        return -1;
    }
    if (group != Py_None && !PyArg_ParseTuple(group, "iK:group", &desc->num_tensors, &layout))
        return -1;
    desc->layout = layout;
    return 0;
}

/* That of all elements of a tuple's tensors, one after the other. */
static PyObject *shape_of_tuple(const hvdl_py_state *state, const PostingObject *self,
                                PyObject *tensors)
{
    int64_t sum = 0;
    if (!(hvdl_facts_of(&self->posting.desc)->parts & HVDL_PARTS_IN)) {
        PyErr_Format(PyExc_TypeError, "%s takes one tensor, and no tuple",
                     hvdl_kind_name(self->posting.desc.kind));
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyTuple_Size(tensors); i++) {
        int64_t count = hvdl_py_count_of(state, PyTuple_GetItem(tensors, i));
        if (count < 0)
            return NULL;
        if (__builtin_add_overflow(sum, count, &sum)) {
            PyErr_SetString(PyExc_ValueError, "the tensors have 2^63 elements or more");
            return NULL;
        }
    }
    return Py_BuildValue("(L)", (long long)sum);
}

/* Of the tensor that the descriptor tells of, which takes the place of a copy's. None: barrier, join. */
static int set_shape(hvdl_py_state *state, PostingObject *self, PyObject *tensor)
{
    hvdl_desc *desc = &self->posting.desc;
    const hvdl_kind_facts *facts = hvdl_facts_of(desc);
    bool has_rows = facts->rows == HVDL_ROWS_OWN || facts->rows == HVDL_ROWS_SPLITS;
    Py_CLEAR(self->shape);
    memset(desc->dims, 0, sizeof desc->dims);
    desc->ndim = 1;
    desc->count = self->posting.rows = 0;
    if (tensor == Py_None)
        return 0;
    self->shape = PyTuple_Check(tensor) ? shape_of_tuple(state, self, tensor)
                                        : PyObject_GetAttr(tensor, state->shape);
    if (!self->shape || hvdl_py_put_shape(self->shape, has_rows, desc, &self->posting.rows))
        return -1;
    if (hvdl_works_on_rows(facts) && !desc->ndim) {
        PyErr_Format(PyExc_ValueError, "%s takes no scalars: give it a first dimension",
                     facts->name);
        return -1;
    }
    return 0;
}

/* Keeps the tensor, and reads its shape if the descriptor tells of it. */
static inline int set_tensor(hvdl_py_state *state, PostingObject *self, PyObject **at,
                             PyObject *tensor, bool is_described)
{
    hvdl_py_keep(at, tensor == Py_None ? NULL : tensor);
    return is_described ? set_shape(state, self, tensor) : 0;
}

static int set_texts(PostingObject *self, PyObject *name, PyObject *site)
{
    if ((name && hvdl_py_name(name, &self->posting)) ||
        (site && hvdl_py_site(site, &self->posting.site)))
        return -1;
    if (name)
        hvdl_py_keep(&self->name, name);
    if (site)
        hvdl_py_keep(&self->site, site);
    return 0;
}

/* Those that are given. */
static int set_fields(hvdl_py_state *state, PostingObject *self, PyObject *const *given)
{
    hvdl_posting *posting = &self->posting;
    hvdl_desc *desc = &posting->desc;
    int unnamed = given[POST_UNNAMED] ? hvdl_py_truth(given[POST_UNNAMED]) : posting->unnamed;
    posting->unnamed = unnamed > 0;
    if (unnamed < 0 || (given[POST_KIND] && set_kind(desc, given[POST_KIND])) ||
        set_texts(self, given[POST_NAME], given[POST_SITE]))
        return -1;
    bool of_result = hvdl_describes_result(hvdl_facts_of(desc));
#define SET(field, set) (given[field] && (set))
    if (SET(POST_DTYPE,
            set_number(&desc->dtype, POST_DTYPE, given[POST_DTYPE], HVDL_NUM_DTYPES - 1)) ||
        SET(POST_SOURCE, set_tensor(state, self, &self->source, given[POST_SOURCE], !of_result)) ||
        SET(POST_RESULT, set_tensor(state, self, &self->result, given[POST_RESULT], of_result)) ||
        SET(POST_OP, set_number(&desc->op, POST_OP, given[POST_OP], HVDL_NUM_OPS - 1)) ||
        SET(POST_ROOT, hvdl_facts_of(desc)->has_root &&
                           hvdl_py_int(given[POST_ROOT], "root", 0, INT32_MAX, &desc->root)) ||
        SET(POST_PRESCALE, set_factor(&desc->prescale, given[POST_PRESCALE])) ||
        SET(POST_POSTSCALE, set_factor(&desc->postscale, given[POST_POSTSCALE])) ||
        SET(POST_GROUP, set_group(desc, given[POST_GROUP])) ||
        SET(POST_PLACE, set_number(&desc->place, POST_PLACE, given[POST_PLACE], HVDL_ORDERED)))
        return -1;
#undef SET
    if (given[POST_SPLITS])
        hvdl_py_keep(&self->splits, given[POST_SPLITS] == Py_None ? NULL : given[POST_SPLITS]);
    /* What stays on its device is nothing to the engine, which must not keep it there. */
    if (desc->place == HVDL_ORDERED) {
        hvdl_py_keep(&self->source, NULL);
        hvdl_py_keep(&self->result, NULL);
    }
    return 0;
}

/* ---- the object ---- */

#define NUM_OBJECTS ((int)(sizeof((PostingObject *)0)->objects / sizeof(PyObject *)))

/* With what another one has; from: NULL: with nothing. */
static PostingObject *new_posting(hvdl_py_state *state, const PostingObject *from)
{
    PostingObject *self = PyObject_New(PostingObject, state->posting_type);
    if (!self)
        return NULL;
    memset(&self->posting, 0, sizeof self->posting);
    if (from)
        self->posting = from->posting;
    for (int i = 0; i < NUM_OBJECTS; i++)
        self->objects[i] = from ? Py_XNewRef(from->objects[i]) : NULL;
    return self;
}

/* self: taken over. */
static PyObject *with_fields(hvdl_py_state *state, PostingObject *self, PyObject *const *given)
{
    if (self && set_fields(state, self, given))
        Py_CLEAR(self);
    return (PyObject *)self;
}

PyObject *hvdl_py_posting(PyObject *module, PyObject *const *args, Py_ssize_t num_args,
                          PyObject *keywords)
{
    static const hvdl_py_signature signature = {"posting", POST_DTYPE + 1, NUM_FIELDS, field_names};
    hvdl_py_state *state = PyModule_GetState(module);
    PyObject *given[NUM_FIELDS];
    if (hvdl_py_gather(&signature, args, num_args, keywords, given))
        return NULL;
    PostingObject *self = new_posting(state, NULL);
    if (self) {
        self->posting.desc.prescale = self->posting.desc.postscale = 1.0;
        self->posting.desc.ndim = 1;
    }
    return with_fields(state, self, given);
}

/* A copy with other values in some fields, but for the kind, by which the shape was read. */
static PyObject *posting_replace(PyObject *object, PyObject *const *args, Py_ssize_t num_args,
                                 PyObject *keywords)
{
    static const hvdl_py_signature signature = {"replace", 0, NUM_FIELDS, field_names};
    hvdl_py_state *state = PyType_GetModuleState(Py_TYPE(object));
    PyObject *given[NUM_FIELDS];
    if (hvdl_py_gather(&signature, args, num_args, keywords, given))
        return NULL;
    if (num_args || given[POST_KIND]) {
        PyErr_SetString(PyExc_TypeError, num_args
                                             ? "replace takes keywords only"
                                             : "replace has no argument 'kind', or has it already");
        return NULL;
    }
    return with_fields(state, new_posting(state, (PostingObject *)object), given);
}

static void posting_dealloc(PyObject *object)
{
    PostingObject *self = (PostingObject *)object;
    PyTypeObject *type = Py_TYPE(object);
    for (int i = 0; i < NUM_OBJECTS; i++)
        Py_XDECREF(self->objects[i]);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *posting_str(PyObject *object)
{
    const PostingObject *self = (PostingObject *)object;
    return PyUnicode_FromFormat("%s '%U'", hvdl_kind_name(self->posting.desc.kind), self->name);
}

static PyMethodDef posting_methods[] = {
    HVDL_PY_METHOD("replace", posting_replace, HVDL_PY_KEYWORDS),
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
