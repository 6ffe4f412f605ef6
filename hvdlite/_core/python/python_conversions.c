/* Between Python and C: errors of the engine as exceptions, and arguments. */
#include <string.h>

#include "python/python_glue.h"

/* ---- errors ---- */

void hvdl_py_raise(hvdl_err err, const char *what, const char *name)
{
    switch (err) {
    case HVDL_ENOMEM: PyErr_NoMemory(); break;
    case HVDL_EDUP:
        PyErr_Format(PyExc_ValueError,
                     "%s '%s': an operation of this kind and name is in flight already; "
                     "wait for it first, or give this one another name",
                     what, name);
        break;
    case HVDL_ECLOSED: PyErr_SetString(PyExc_RuntimeError, "the engine is closed"); break;
    case HVDL_EMPI: PyErr_Format(PyExc_RuntimeError, "%s: MPI reported an error", what); break;
    default: PyErr_Format(PyExc_ValueError, "%s: invalid arguments", what); break;
    }
}

hvdl_engine *hvdl_py_engine(EngineObject *self)
{
    if (!self->engine || self->closed) {
        PyErr_SetString(PyExc_RuntimeError, "the engine is closed");
        return NULL;
    }
    if (self->forks != hvdl_py_num_forks) {
        PyErr_SetString(PyExc_RuntimeError,
                        "this is a forked child of a rank: only the rank itself takes part in "
                        "operations");
        return NULL;
    }
    return self->engine;
}

void hvdl_py_reap(hvdl_engine *engine)
{
    PyObject *owner;
    while ((owner = hvdl_engine_reap(engine)))
        Py_DECREF(owner);
}

/* ---- conversions ---- */

int hvdl_py_int(PyObject *object, const char *name, long least, long most, int *to)
{
    long value = PyLong_AsLong(object);
    if (value == -1 && PyErr_Occurred())
        return -1;
    if (value < least || value > most) {
        PyErr_Format(PyExc_ValueError, "%s is %ld, not within %ld .. %ld", name, value, least,
                     most);
        return -1;
    }
    *to = (int)value;
    return 0;
}

int hvdl_py_pointer(PyObject *object, void **to)
{
    size_t value = PyLong_AsSize_t(object);
    if (value == (size_t)-1 && PyErr_Occurred())
        return -1;
    *to = (void *)value;
    return 0;
}

double hvdl_py_factor(double value)
{
    return value == 0.0 ? 0.0 : value;
}

const char *hvdl_py_text(PyObject *object, const char *what)
{
    Py_ssize_t bytes;
    const char *text = PyUnicode_AsUTF8AndSize(object, &bytes);
    if (text && strlen(text) != (size_t)bytes) {
        PyErr_Format(PyExc_ValueError, "a %s may not contain a NUL character", what);
        return NULL;
    }
    return text;
}

int hvdl_py_name(PyObject *object, hvdl_posting *to)
{
    to->words = NULL;
    to->name = hvdl_py_text(object, "name");
    if (!to->name || PyUnicode_CheckExact(object))
        return to->name ? 0 : -1;
    PyObject *words = PyObject_GetAttrString(object, "words");
    if (!words) { /* another kind of str */
        PyErr_Clear();
        return 0;
    }
    to->words = hvdl_py_text(words, "name");
    Py_DECREF(words); /* the name has it */
    return to->words ? 0 : -1;
}

int hvdl_py_site(PyObject *object, const char **to)
{
    const char *text = hvdl_py_text(object, "site");
    *to = text && *text ? text : NULL;
    return text ? 0 : -1;
}

int hvdl_py_address_of(const hvdl_py_state *state, PyObject *tensor, void **to)
{
    *to = NULL;
    if (!tensor)
        return 0;
    PyObject *address = PyObject_CallMethodObjArgs(tensor, state->data_ptr, NULL);
    int failed = !address || hvdl_py_pointer(address, to);
    Py_XDECREF(address);
    return failed ? -1 : 0;
}
