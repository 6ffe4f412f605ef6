/* What the C library's exit handlers are told: engine/exit.h. */
#include <stdlib.h>
#include <string.h>

#include "engine/exit.h"
#include "python/python_glue.h"

PyObject *hvdl_py_finish_on_exit(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"abort",    "ibarrier", "test",       "finalized",
                            "finalize", "comm",     "supervised", NULL};
    unsigned long long abort_, ibarrier, test, finalized, finalize, comm;
    int supervised;
    hvdl_exit_functions functions;
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$KKKKKKp:finish_on_exit", names, &abort_,
                                     &ibarrier, &test, &finalized, &finalize, &comm, &supervised))
        return NULL;
    hvdl_word words[] = {(hvdl_word)abort_, (hvdl_word)ibarrier, (hvdl_word)test,
                         (hvdl_word)finalized, (hvdl_word)finalize};
    memcpy(&functions.abort, &words[0], sizeof words[0]);
    memcpy(&functions.ibarrier, &words[1], sizeof words[1]);
    memcpy(&functions.test, &words[2], sizeof words[2]);
    memcpy(&functions.finalized, &words[3], sizeof words[3]);
    memcpy(&functions.finalize, &words[4], sizeof words[4]);
    functions.comm = (hvdl_word)comm;
    functions.supervised = supervised;
    if (hvdl_exit_set(&functions))
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* The (handle, number of ranks) of each communicator in a tuple. */
static bool read_comms(PyObject *tuple, hvdl_word *comms, int *sizes)
{
    for (Py_ssize_t i = 0; i < PyTuple_Size(tuple); i++) {
        unsigned long long comm;
        if (!PyArg_ParseTuple(PyTuple_GetItem(tuple, i), "Ki", &comm, &sizes[i]))
            return false;
        comms[i] = (hvdl_word)comm;
    }
    return true;
}

PyObject *hvdl_py_receive_on_exit(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"iprobe", "get_count", "recv", "byte", "any_tag", "comms", NULL};
    unsigned long long iprobe, get_count, recv, byte;
    PyObject *tuple;
    hvdl_exit_leftovers leftovers;
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$KKKKiO!:receive_on_exit", names, &iprobe,
                                     &get_count, &recv, &byte, &leftovers.any_tag, &PyTuple_Type,
                                     &tuple))
        return NULL;
    hvdl_word words[] = {(hvdl_word)iprobe, (hvdl_word)get_count, (hvdl_word)recv};
    memcpy(&leftovers.iprobe, &words[0], sizeof words[0]);
    memcpy(&leftovers.get_count, &words[1], sizeof words[1]);
    memcpy(&leftovers.recv, &words[2], sizeof words[2]);
    leftovers.byte = (hvdl_word)byte;
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
    PyObject *former = kept;
    Py_INCREF(engines);
    kept = engines;
    Py_XDECREF(former);
    Py_RETURN_NONE;
}
