/* What the C library's exit handlers are told: engine/exit.h. */
#include <stdlib.h>

#include "engine/exit.h"
#include "python/python_glue.h"

PyObject *hvdl_py_finish_on_exit(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"abort",    "ibarrier", "test",       "finalized",
                            "finalize", "comm",     "supervised", NULL};
    int supervised;
    hvdl_exit_functions functions;
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "$O&O&O&O&O&O&p:finish_on_exit", names, hvdl_py_word, &functions.abort,
            hvdl_py_word, &functions.ibarrier, hvdl_py_word, &functions.test, hvdl_py_word,
            &functions.finalized, hvdl_py_word, &functions.finalize, hvdl_py_word, &functions.comm,
            &supervised))
        return NULL;
    functions.supervised = supervised;
    if (hvdl_exit_set(&functions))
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* The (handle, number of ranks) of each communicator in a tuple. */
static bool read_comms(PyObject *tuple, hvdl_word *comms, int *sizes)
{
    for (Py_ssize_t i = 0; i < PyTuple_Size(tuple); i++)
        if (!PyArg_ParseTuple(PyTuple_GetItem(tuple, i), "O&i", hvdl_py_word, &comms[i], &sizes[i]))
            return false;
    return true;
}

PyObject *hvdl_py_receive_on_exit(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"iprobe", "get_count", "recv", "byte", "any_tag", "comms", NULL};
    PyObject *tuple;
    hvdl_exit_leftovers leftovers;
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "$O&O&O&O&iO!:receive_on_exit", names, hvdl_py_word, &leftovers.iprobe,
            hvdl_py_word, &leftovers.get_count, hvdl_py_word, &leftovers.recv, hvdl_py_word,
            &leftovers.byte, &leftovers.any_tag, &PyTuple_Type, &tuple))
        return NULL;
    leftovers.num_comms = (size_t)PyTuple_Size(tuple);
    hvdl_word *comms = malloc((leftovers.num_comms + 1) * sizeof *comms);
    int *sizes = malloc((leftovers.num_comms + 1) * sizeof *sizes);
    leftovers.comms = comms;
    leftovers.sizes = sizes;
    bool read = comms && sizes && read_comms(tuple, comms, sizes);
    hvdl_err err = read ? hvdl_exit_receive(&leftovers) : HVDL_ENOMEM;
    free(comms);
    free(sizes);
    if (err)
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    Py_RETURN_NONE;
}

PyObject *hvdl_py_close_on_exit(PyObject *module, PyObject *engines)
{
    /* Held past the end of Python: the exit handlers run after it. */
    static PyObject *kept;
    hvdl_py_state *state = PyModule_GetState(module);
    Py_ssize_t count = PyTuple_Check(engines) ? PyTuple_Size(engines) : -1;
    hvdl_engine **all = count < 0 ? NULL : calloc((size_t)count + 1, sizeof *all);
    for (Py_ssize_t i = 0; all && i < count; i++) {
        PyObject *engine = PyTuple_GetItem(engines, i);
        if (Py_TYPE(engine) != state->engine_type) {
            count = -1;
            break;
        }
        all[i] = ((EngineObject *)engine)->engine;
    }
    if (count < 0) {
        free(all);
        PyErr_SetString(PyExc_TypeError, "close_on_exit: expected a tuple of engines");
        return NULL;
    }
    hvdl_err err = all ? hvdl_exit_close(all, (size_t)count) : HVDL_ENOMEM;
    free(all);
    if (err)
        return PyErr_NoMemory();
    hvdl_py_keep(&kept, engines);
    Py_RETURN_NONE;
}
