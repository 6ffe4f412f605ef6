/* The gradients of an optimizer, as autograd brings them: Arrivals, Gradient and GradientCount.
 *
 * `arrive` of a Gradient is the hook that autograd calls when it has accumulated that gradient. It does all
 * that most gradients need: notes the arrival, copies the gradient to its place in its bucket, makes that
 * place the parameter's `.grad`, and counts its bucket down. The rest is for Python: a bucket that is
 * complete (`on_complete`), and a gradient that needs more than a copy, or should not have come
 * (`on_gradient`). No signal's handler runs in between, so a gradient is either in its bucket or not. */
#include <stddef.h>
#include <string.h>

#include "python/python_glue.h"

#include <structmember.h>

/* Above, torch copies: it has several threads, and lets others run meanwhile. */
#define LARGE_BYTES (1 << 20)

static PyObject *new_object(PyTypeObject *type)
{
    return ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
}

static void free_object(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    ((inquiry)PyType_GetSlot(type, Py_tp_clear))(object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

/* ---- Arrivals ---- */

typedef struct {
    PyObject_HEAD PyObject *on_gradient, *on_complete;
    long long number, first_of_step;
    char is_open, in_backward, is_plain;
} ArrivalsObject;

static PyObject *arrivals_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *on_gradient, *on_complete;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "OO:Arrivals", &on_gradient, &on_complete))
        return NULL;
    ArrivalsObject *self = (ArrivalsObject *)new_object(type);
    if (!self)
        return NULL;
    self->on_gradient = Py_NewRef(on_gradient);
    self->on_complete = Py_NewRef(on_complete);
    return (PyObject *)self;
}

static int arrivals_traverse(PyObject *object, visitproc visit, void *arg)
{
    ArrivalsObject *self = (ArrivalsObject *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->on_gradient);
    Py_VISIT(self->on_complete);
    return 0;
}

static int arrivals_clear(PyObject *object)
{
    ArrivalsObject *self = (ArrivalsObject *)object;
    Py_CLEAR(self->on_gradient);
    Py_CLEAR(self->on_complete);
    return 0;
}

/* ---- GradientCount ---- */

typedef struct {
    PyObject_HEAD Py_ssize_t pending;
    char takes_copies;
} CountObject;

static PyMemberDef count_members[] = {
    {"pending", T_PYSSIZET, offsetof(CountObject, pending), 0, NULL},
    {"takes_copies", T_BOOL, offsetof(CountObject, takes_copies), 0, NULL},
    {0},
};

static PyType_Slot count_slots[] = {
    {Py_tp_members, count_members},
    {Py_tp_doc, "Counts how many gradients of a bucket are still to come."},
    {0, NULL},
};

PyType_Spec hvdl_py_count_spec = {
    .name = "hvdlite._core.GradientCount",
    .basicsize = sizeof(CountObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = count_slots,
};

/* ---- Gradient ---- */

typedef struct {
    PyObject_HEAD ArrivalsObject *arrivals;
    PyObject *param, *bucket, *view, *rows, *round_grad;
    long long last_round, unreduced_round;
    char is_sharded;
    long long version; /* of the parameter when the backward pass began */
    void *address;     /* of the parameter when its place was made */
} GradientObject;

static PyObject *gradient_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    GradientObject *self = (GradientObject *)new_object(type);
    (void)args, (void)kwargs;
    if (self)
        self->last_round = self->unreduced_round = -1;
    return (PyObject *)self;
}

static int gradient_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    GradientObject *self = (GradientObject *)object;
    hvdl_py_state *state;
    PyObject *arrivals, *param;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "OO:Gradient", &arrivals, &param))
        return -1;
    state = PyType_GetModuleState(Py_TYPE(arrivals));
    if (!state || (PyObject *)Py_TYPE(arrivals) != (PyObject *)state->arrivals_type) {
        PyErr_SetString(PyExc_TypeError, "Gradient: the first argument must be Arrivals");
        return -1;
    }
    hvdl_py_keep((PyObject **)&self->arrivals, arrivals);
    hvdl_py_keep(&self->param, param);
    return 0;
}

static int gradient_traverse(PyObject *object, visitproc visit, void *arg)
{
    GradientObject *self = (GradientObject *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->arrivals);
    Py_VISIT(self->param);
    Py_VISIT(self->bucket);
    Py_VISIT(self->view);
    Py_VISIT(self->rows);
    Py_VISIT(self->round_grad);
    return 0;
}

static int gradient_clear(PyObject *object)
{
    GradientObject *self = (GradientObject *)object;
    Py_CLEAR(self->arrivals);
    Py_CLEAR(self->param);
    Py_CLEAR(self->bucket);
    Py_CLEAR(self->view);
    Py_CLEAR(self->rows);
    Py_CLEAR(self->round_grad);
    return 0;
}

static bool is_none(PyObject *object)
{
    return !object || object == Py_None;
}

/* 1, 0; -1: an exception. */
static int is_true(PyObject *object, PyObject *attribute)
{
    PyObject *value = PyObject_GetAttr(object, attribute);
    int is = value ? PyObject_IsTrue(value) : -1;
    Py_XDECREF(value);
    return is;
}

static bool lie_alike(const dl_tensor *a, const dl_tensor *b)
{
    if (a->device.device_type != DL_CPU || b->device.device_type != DL_CPU ||
        a->dtype.code != b->dtype.code || a->dtype.bits != b->dtype.bits || a->ndim != b->ndim ||
        a->dtype.code == DL_COMPLEX || !a->strides || !b->strides)
        return false;
    for (int i = 0; i < a->ndim; i++)
        if (a->shape[i] != b->shape[i] || (a->shape[i] > 1 && a->strides[i] != b->strides[i]))
            return false;
    return true;
}

/* Copies the gradient to its place, which has no gaps. 1: it did; 0: it needs more than a copy; -1: an
 * exception. */
static int copy_to_place(const GradientObject *self, const hvdl_py_state *state, PyObject *grad)
{
    dl_tensor from, to;
    int64_t bytes;
    /* Whoever keeps the gradient of an earlier step must keep its values. */
    Py_ssize_t own = 1 + (self->round_grad == self->view);
    if ((Py_ssize_t)((size_t)Py_REFCNT(self->view) & UINT32_MAX) > own ||
        !hvdl_py_describe(state, grad, &from) || !hvdl_py_describe(state, self->view, &to) ||
        !lie_alike(&from, &to))
        return 0;
    bytes = from.dtype.bits / 8;
    for (int i = 0; i < from.ndim; i++)
        bytes *= from.shape[i];
    int has_graph = is_true(grad, state->requires_grad);
    if (has_graph)
        return has_graph < 0 ? -1 : 0;
    int holds = bytes < LARGE_BYTES ? hvdl_py_holds_values(grad, state->is_neg) : 0;
    if (holds < 0)
        return -1;
    if (holds) {
        memmove((char *)to.data + to.byte_offset, (char *)from.data + from.byte_offset,
                (size_t)bytes);
        return 1;
    }
    PyObject *view = Py_NewRef(self->view); /* other threads run meanwhile */
    PyObject *result = PyObject_CallMethodObjArgs(view, state->copy_, grad, NULL);
    Py_XDECREF(result);
    Py_DECREF(view);
    return result ? 1 : -1;
}

/* Notes that its gradient is there; whether its bucket has all of them now. */
static bool count_down(GradientObject *self)
{
    self->last_round = self->arrivals->number;
    return !--((CountObject *)self->bucket)->pending;
}

static PyObject *gradient_count_down(PyObject *object, PyObject *unused)
{
    (void)unused;
    return PyBool_FromLong(count_down((GradientObject *)object));
}

/* 1: all is done that this gradient needs, but for what a complete bucket does; 0: it needs Python; -1: an
 * exception. */
static int arrive(GradientObject *self, const hvdl_py_state *state, bool *is_complete)
{
    ArrivalsObject *arrivals = self->arrivals;
    if (!arrivals->in_backward || !arrivals->is_plain || self->last_round == arrivals->number ||
        !is_none(self->rows))
        return 0;
    PyObject *grad = PyObject_GetAttr(self->param, state->grad);
    if (!grad)
        return -1;
    bool is_reduced = self->last_round >= arrivals->first_of_step &&
                      (grad == self->round_grad || self->is_sharded);
    int done = 0;
    if (grad == Py_None || is_reduced)
        ;
    else if (!arrivals->is_open) {
        self->unreduced_round = arrivals->number;
        done = 1;
    } else if (!is_none(self->bucket) && !is_none(self->view) &&
               ((CountObject *)self->bucket)->takes_copies) {
        done = 1;
        if (grad != self->view) {
            done = copy_to_place(self, state, grad);
            if (done > 0 && PyObject_SetAttr(self->param, state->grad, self->view))
                done = -1;
        }
        if (done > 0) {
            hvdl_py_keep(&self->round_grad, self->view);
            *is_complete = count_down(self);
        }
    }
    Py_DECREF(grad);
    return done;
}

static PyObject *gradient_arrive(PyObject *object, PyObject *param)
{
    GradientObject *self = (GradientObject *)object;
    ArrivalsObject *arrivals = self->arrivals;
    bool is_complete = false;
    if (!arrivals || !arrivals->on_gradient)
        Py_RETURN_NONE; /* the collector has taken the optimizer apart */
    const hvdl_py_state *state = PyType_GetModuleState(Py_TYPE(arrivals));
    int done = arrive(self, state, &is_complete);
    if (done < 0)
        return NULL;
    if (!done)
        return PyObject_CallFunctionObjArgs(arrivals->on_gradient, object, param, NULL);
    if (is_complete)
        return PyObject_CallNoArgs(arrivals->on_complete);
    Py_RETURN_NONE;
}

static int set_bucket(PyObject *object, PyObject *value, void *unused)
{
    GradientObject *self = (GradientObject *)object;
    const hvdl_py_state *state =
        self->arrivals ? PyType_GetModuleState(Py_TYPE(self->arrivals)) : NULL;
    (void)unused;
    if (!state || !value || (value != Py_None && !PyObject_TypeCheck(value, state->count_type))) {
        PyErr_SetString(PyExc_TypeError, "bucket must be a GradientCount or None");
        return -1;
    }
    hvdl_py_keep(&self->bucket, value);
    return 0;
}

static PyObject *get_bucket(PyObject *object, void *unused)
{
    GradientObject *self = (GradientObject *)object;
    (void)unused;
    return Py_NewRef(self->bucket ? self->bucket : Py_None);
}

static PyMethodDef gradient_methods[] = {
    {"arrive", gradient_arrive, METH_O, NULL},
    {"count_down", gradient_count_down, METH_NOARGS, NULL},
    {0},
};

static PyMemberDef gradient_members[] = {
    {"arrivals", T_OBJECT, offsetof(GradientObject, arrivals), READONLY, NULL},
    {"param", T_OBJECT, offsetof(GradientObject, param), READONLY, NULL},
    {"view", T_OBJECT, offsetof(GradientObject, view), 0, NULL},
    {"rows", T_OBJECT, offsetof(GradientObject, rows), 0, NULL},
    {"round_grad", T_OBJECT, offsetof(GradientObject, round_grad), 0, NULL},
    {"last_round", T_LONGLONG, offsetof(GradientObject, last_round), 0, NULL},
    {"unreduced_round", T_LONGLONG, offsetof(GradientObject, unreduced_round), 0, NULL},
    {"is_sharded", T_BOOL, offsetof(GradientObject, is_sharded), 0, NULL},
    {0},
};

static PyGetSetDef gradient_getset[] = {
    {"bucket", get_bucket, set_bucket, NULL, NULL},
    {0},
};

static PyType_Slot gradient_slots[] = {
    {Py_tp_new, gradient_new},
    {Py_tp_init, gradient_init},
    {Py_tp_dealloc, free_object},
    {Py_tp_traverse, gradient_traverse},
    {Py_tp_clear, gradient_clear},
    {Py_tp_methods, gradient_methods},
    {Py_tp_members, gradient_members},
    {Py_tp_getset, gradient_getset},
    {Py_tp_doc, "One parameter's gradient, and the hook that autograd calls with it."},
    {0, NULL},
};

PyType_Spec hvdl_py_gradient_spec = {
    .name = "hvdlite._core.Gradient",
    .basicsize = sizeof(GradientObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = gradient_slots,
};

/* ---- questions about all gradients of a backward pass ---- */

/* The i-th of a list of Gradients; NULL: an exception. */
static GradientObject *gradient_at(const hvdl_py_state *state, PyObject *list, Py_ssize_t i)
{
    PyObject *object = PyList_GetItem(list, i);
    if (object &&
        (!PyObject_TypeCheck(object, state->gradient_type) || !((GradientObject *)object)->param)) {
        PyErr_SetString(PyExc_TypeError, "a list of Gradients is expected");
        return NULL;
    }
    return (GradientObject *)object;
}

/* Notes where the parameters of these gradients are. */
static PyObject *arrivals_note_addresses(PyObject *object, PyObject *list)
{
    const hvdl_py_state *state = PyType_GetModuleState(Py_TYPE(object));
    for (Py_ssize_t i = 0; i < PyList_Size(list); i++) {
        GradientObject *gradient = gradient_at(state, list, i);
        if (!gradient || hvdl_py_address_of(state, gradient->param, &gradient->address))
            return NULL;
    }
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/* Whether all parameters of the first list still require gradients, and are where they were noted, and none
 * of the second list requires any. */
static PyObject *arrivals_are_unchanged(PyObject *object, PyObject *args)
{
    const hvdl_py_state *state = PyType_GetModuleState(Py_TYPE(object));
    PyObject *lists[2];
    if (!PyArg_ParseTuple(args, "OO:are_unchanged", &lists[0], &lists[1]))
        return NULL;
    for (int frozen = 0; frozen < 2; frozen++)
        for (Py_ssize_t i = 0; i < PyList_Size(lists[frozen]); i++) {
            GradientObject *gradient = gradient_at(state, lists[frozen], i);
            void *address;
            int requires = gradient ? is_true(gradient->param, state->requires_grad) : -1;
            if (requires < 0 || (!frozen && hvdl_py_address_of(state, gradient->param, &address)))
                return NULL;
            if (requires == frozen || (!frozen && address != gradient->address))
                Py_RETURN_FALSE;
        }
    return PyErr_Occurred() ? NULL : PyBool_FromLong(true);
}

static int version_of(const hvdl_py_state *state, const GradientObject *gradient, long long *to)
{
    PyObject *version = PyObject_GetAttr(gradient->param, state->version);
    *to = version ? PyLong_AsLongLong(version) : -1;
    Py_XDECREF(version);
    return PyErr_Occurred() ? -1 : 0;
}

/* Notes how often each parameter has been changed in place. */
static PyObject *arrivals_note_versions(PyObject *object, PyObject *list)
{
    const hvdl_py_state *state = PyType_GetModuleState(Py_TYPE(object));
    for (Py_ssize_t i = 0; i < PyList_Size(list); i++) {
        GradientObject *gradient = gradient_at(state, list, i);
        if (!gradient || version_of(state, gradient, &gradient->version))
            return NULL;
    }
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/* The first of them that has come in the open round and is gone, or whose parameter has another version
 * than was noted; None: there is none. */
static PyObject *arrivals_changed(PyObject *object, PyObject *list)
{
    const ArrivalsObject *self = (ArrivalsObject *)object;
    const hvdl_py_state *state = PyType_GetModuleState(Py_TYPE(object));
    for (Py_ssize_t i = 0; i < PyList_Size(list); i++) {
        GradientObject *gradient = gradient_at(state, list, i);
        long long version;
        if (!gradient || version_of(state, gradient, &version))
            return NULL;
        bool changed = version != gradient->version;
        if (!changed && self->is_open && gradient->last_round == self->number) {
            PyObject *grad = PyObject_GetAttr(gradient->param, state->grad);
            if (!grad)
                return NULL;
            changed = grad == Py_None;
            Py_DECREF(grad);
        }
        if (changed)
            return Py_NewRef((PyObject *)gradient);
    }
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static PyMethodDef arrivals_methods[] = {
    {"note_addresses", arrivals_note_addresses, METH_O, NULL},
    {"are_unchanged", arrivals_are_unchanged, METH_VARARGS, NULL},
    {"note_versions", arrivals_note_versions, METH_O, NULL},
    {"changed", arrivals_changed, METH_O, NULL},
    {0},
};

static PyMemberDef arrivals_members[] = {
    {"number", T_LONGLONG, offsetof(ArrivalsObject, number), 0, NULL},
    {"first_of_step", T_LONGLONG, offsetof(ArrivalsObject, first_of_step), 0, NULL},
    {"is_open", T_BOOL, offsetof(ArrivalsObject, is_open), 0, NULL},
    {"in_backward", T_BOOL, offsetof(ArrivalsObject, in_backward), 0, NULL},
    {"is_plain", T_BOOL, offsetof(ArrivalsObject, is_plain), 0, NULL},
    {0},
};

static PyType_Slot arrivals_slots[] = {
    {Py_tp_new, arrivals_new},
    {Py_tp_dealloc, free_object},
    {Py_tp_traverse, arrivals_traverse},
    {Py_tp_clear, arrivals_clear},
    {Py_tp_methods, arrivals_methods},
    {Py_tp_members, arrivals_members},
    {Py_tp_doc, "What the hooks of an optimizer's gradients know of the round."},
    {0, NULL},
};

PyType_Spec hvdl_py_arrivals_spec = {
    .name = "hvdlite._core.Arrivals",
    .basicsize = sizeof(ArrivalsObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = arrivals_slots,
};
