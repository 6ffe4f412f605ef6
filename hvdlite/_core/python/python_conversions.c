/* Between Python and C: errors of the engine as exceptions, and arguments. */
#include <stdarg.h>
#include <string.h>

#include "python/python_glue.h"

/* ---- errors ---- */

void hvdl_py_raise(hvdl_err err, const char *what, const char *name)
{
    switch (err) {
    case HVDL_ENOMEM: PyErr_NoMemory(); break;
    case HVDL_EDUP:
        if (!name) {
            PyErr_SetString(PyExc_RuntimeError, "the plan's previous run has not ended");
            break;
        }
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

int hvdl_py_refuse(const hvdl_posting *posting, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    PyObject *problem = PyUnicode_FromFormatV(format, arguments);
    va_end(arguments);
    if (problem)
        PyErr_Format(PyExc_ValueError, "%s '%s': %U", hvdl_kind_name(posting->desc.kind),
                     posting->name, problem);
    Py_XDECREF(problem);
    return -1;
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

/* ---- arguments ---- */

static int place_of(const hvdl_py_signature *signature, PyObject *keyword)
{
    Py_ssize_t length = PyUnicode_GetLength(keyword);
    for (int at = 0; at < signature->num; at++)
        if (signature->names[at].length == length &&
            !PyUnicode_CompareWithASCIIString(keyword, signature->names[at].text))
            return at;
    return -1;
}

int hvdl_py_gather(const hvdl_py_signature *signature, PyObject *const *args, Py_ssize_t num_args,
                   PyObject *keywords, PyObject **given)
{
    const char *function = signature->function;
    Py_ssize_t num_keywords = keywords ? PyTuple_Size(keywords) : 0;
    if (num_args > signature->num) {
        PyErr_Format(PyExc_TypeError, "%s: at most %d arguments expected, got %zd", function,
                     signature->num, num_args);
        return -1;
    }
    if (num_args)
        memcpy(given, args, (size_t)num_args * sizeof *given);
    memset(given + num_args, 0, (size_t)(signature->num - num_args) * sizeof *given);
    for (Py_ssize_t i = 0; i < num_keywords; i++) {
        PyObject *keyword = PyTuple_GetItem(keywords, i);
        int at = place_of(signature, keyword);
        if (at < 0 || given[at]) {
            PyErr_Format(PyExc_TypeError, "%s has no argument '%U', or has it already", function,
                         keyword);
            return -1;
        }
        given[at] = args[num_args + i];
    }
    for (Py_ssize_t i = num_args; i < signature->num_needed; i++)
        if (!given[i]) {
            PyErr_Format(PyExc_TypeError, "%s: the argument '%s' is missing", function,
                         signature->names[i].text);
            return -1;
        }
    return 0;
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

int hvdl_py_word(PyObject *object, void *to)
{
    hvdl_word word = (hvdl_word)PyLong_AsUnsignedLongLongMask(object);
    memcpy(to, &word, sizeof word);
    return !PyErr_Occurred();
}

void hvdl_py_append(PyObject **list, PyObject *item)
{
    if (!item || PyList_Append(*list, item))
        Py_CLEAR(*list);
    Py_XDECREF(item);
}

double hvdl_py_factor(double value)
{
    return value == 0.0 ? 0.0 : value;
}

PyObject *hvdl_py_decode(const char *text)
{
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
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
