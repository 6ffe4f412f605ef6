/* Engine: making one, closing it, posting to it, and the table of its methods. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "python/python_glue.h"

/* ---- Engine: making it ---- */

/* The arrays that the configuration points to. */
typedef struct {
    int *sizes, *members, *world_ranks;
    const char **names;
} geometry;

static void free_geometry(geometry *g)
{
    free(g->sizes);
    free(g->members);
    free(g->world_ranks);
    free(g->names);
}

/* hosts: sequences of ranks; names: strings. Every rank is on exactly one host. */
static int to_geometry(PyObject *hosts, PyObject *names, geometry *g, hvdl_engine_config *config)
{
    Py_ssize_t num_hosts = PySequence_Size(hosts), num_names = PySequence_Size(names);
    int num_ranks = 0, at = 0;
    if (num_hosts < 0 || num_names < 0)
        return -1;
    if (num_hosts < 1 || num_hosts != num_names) {
        PyErr_SetString(PyExc_ValueError, "expected at least one host, and a name for each");
        return -1;
    }
    g->sizes = calloc((size_t)num_hosts, sizeof *g->sizes);
    g->names = calloc((size_t)num_hosts, sizeof *g->names);
    if (!g->sizes || !g->names) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t h = 0; h < num_hosts; h++) {
        PyObject *ranks = PySequence_GetItem(hosts, h), *name = PySequence_GetItem(names, h);
        Py_ssize_t size = ranks ? PySequence_Size(ranks) : -1;
        /* `names` is a sequence that the caller holds: the text lives as long as it. */
        g->names[h] = name ? PyUnicode_AsUTF8AndSize(name, NULL) : NULL;
        Py_XDECREF(ranks);
        Py_XDECREF(name);
        if (size < 0 || !g->names[h])
            return -1;
        g->sizes[h] = (int)size;
        num_ranks += (int)size;
    }
    g->members = calloc((size_t)num_ranks + 1, sizeof *g->members);
    char *seen = calloc((size_t)num_ranks + 1, 1);
    if (!g->members || !seen) {
        free(seen);
        PyErr_NoMemory();
        return -1;
    }
    bool valid = true;
    for (Py_ssize_t h = 0; h < num_hosts; h++) {
        PyObject *ranks = PySequence_GetItem(hosts, h);
        for (int i = 0; ranks && i < g->sizes[h]; i++) {
            PyObject *item = PySequence_GetItem(ranks, i);
            long rank = item ? PyLong_AsLong(item) : -1;
            Py_XDECREF(item);
            valid = valid && rank >= 0 && rank < num_ranks && !seen[rank];
            if (valid) {
                seen[rank] = 1;
                g->members[at++] = (int)rank;
            }
        }
        valid = valid && ranks && g->sizes[h] > 0;
        Py_XDECREF(ranks);
    }
    free(seen);
    if (!valid || config->rank < 0 || config->rank >= num_ranks) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError,
                            "every rank from 0 to size-1 must be on exactly one host");
        return -1;
    }
    config->num_hosts = (int)num_hosts;
    config->num_ranks = num_ranks;
    config->host_sizes = g->sizes;
    config->members = g->members;
    config->host_names = g->names;
    return 0;
}

/* ranks: by member, ascending. */
static int to_world_ranks(PyObject *ranks, geometry *g, hvdl_engine_config *config)
{
    g->world_ranks = calloc((size_t)config->num_ranks, sizeof *g->world_ranks);
    if (!g->world_ranks) {
        PyErr_NoMemory();
        return -1;
    }
    if (PySequence_Size(ranks) != config->num_ranks) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "world_ranks must have a number for each rank");
        return -1;
    }
    for (int i = 0; i < config->num_ranks; i++) {
        PyObject *item = PySequence_GetItem(ranks, i);
        int failed = !item || hvdl_py_int(item, "a world rank", 0, INT32_MAX, &g->world_ranks[i]);
        Py_XDECREF(item);
        if (failed)
            return -1;
    }
    config->world_ranks = g->world_ranks;
    return 0;
}

/* Machine words (addresses, handles) are given as integers, signed or not. */
static int word_of(PyObject *wire, const char *key, hvdl_word *to)
{
    PyObject *item = PyDict_GetItemString(wire, key);
    if (!item) {
        PyErr_Format(PyExc_ValueError, "the wire lacks '%s'", key);
        return -1;
    }
    *to = (hvdl_word)PyLong_AsUnsignedLongLongMask(item);
    return PyErr_Occurred() ? -1 : 0;
}

static int to_wire(PyObject *from, hvdl_wire *wire)
{
    hvdl_word isend, irecv, test, testsome, cancel, tag_ub, proc_null, handle_bytes;
    memset(wire, 0, sizeof *wire);
    if (word_of(from, "isend", &isend) || word_of(from, "irecv", &irecv) ||
        word_of(from, "test", &test) || word_of(from, "testsome", &testsome) ||
        word_of(from, "cancel", &cancel) || word_of(from, "comm", &wire->comm) ||
        word_of(from, "byte", &wire->byte) || word_of(from, "tag_ub", &tag_ub) ||
        word_of(from, "proc_null", &proc_null) || word_of(from, "request_bytes", &handle_bytes))
        return -1;
    /* C has no conversion from an integer to a function that -Wpedantic would accept. */
    memcpy(&wire->isend, &isend, sizeof isend);
    memcpy(&wire->irecv, &irecv, sizeof irecv);
    memcpy(&wire->test, &test, sizeof test);
    memcpy(&wire->testsome, &testsome, sizeof testsome);
    memcpy(&wire->cancel, &cancel, sizeof cancel);
    wire->handle_bytes = handle_bytes;
    wire->proc_null = (int)proc_null;
    wire->tag_ub = tag_ub > INT32_MAX ? INT32_MAX : (int)tag_ub;
    return 0;
}

/* algorithms: pairs of the largest slice and the algorithm's number. */
static int to_rules(PyObject *algorithms, hvdl_engine_config *config)
{
    Py_ssize_t count = PyTuple_Check(algorithms) ? PyTuple_Size(algorithms) : -1;
    if (count < 0 || count > HVDL_MAX_RULES) {
        PyErr_Format(PyExc_ValueError, "algorithms must be a tuple of at most %d rules",
                     HVDL_MAX_RULES);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_ssize_t up_to;
        int algorithm;
        if (!PyArg_ParseTuple(PyTuple_GetItem(algorithms, i), "ni", &up_to, &algorithm))
            return -1;
        if (up_to < 0 || algorithm < HVDL_RING || algorithm > HVDL_DOUBLING) {
            PyErr_SetString(PyExc_ValueError,
                            "a rule is a size in bytes, and RING, DIRECT or RECURSIVE_DOUBLING");
            return -1;
        }
        config->rules[i] = (hvdl_rule){(size_t)up_to, (hvdl_algorithm)algorithm};
    }
    config->num_rules = (int)count;
    return 0;
}

/* From any thread, also while another one holds the GIL. */
void hvdl_py_say(const char *line)
{
    size_t left = strlen(line);
    while (left) {
        ssize_t wrote = write(STDERR_FILENO, line, left);
        if (wrote <= 0)
            return;
        line += wrote;
        left -= (size_t)wrote;
    }
}

#define LONGEST_S 2147483647

/* Not of NaN. In nanoseconds it fits into 64 bits. */
static bool is_time(double seconds)
{
    return seconds >= 0 && seconds <= LONGEST_S;
}

static int engine_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"rank",
                            "hosts",
                            "host_names",
                            "world_ranks",
                            "memory_fd",
                            "wire",
                            "progress_thread",
                            "inline_bytes",
                            "block_bytes",
                            "segment_bytes",
                            "piece_bytes",
                            "algorithms",
                            "deterministic",
                            "event_capacity",
                            "stall_warning_s",
                            "stall_shutdown_s",
                            "launcher",
                            "black_box",
                            NULL};
    EngineObject *self = (EngineObject *)object;
    hvdl_engine_config config = {.launcher = {.fd = -1}};
    hvdl_wire wire;
    unsigned long long device = 0, inode = 0, black_box = 0;
    geometry g = {0};
    PyObject *hosts, *host_names, *world_ranks, *wire_dict, *algorithms;
    int progress_thread, deterministic;
    double stall_warning_s, stall_shutdown_s;
    Py_ssize_t inline_bytes, block_bytes, segment_bytes, piece_bytes, event_capacity;
    if (self->engine) {
        PyErr_SetString(PyExc_RuntimeError, "the engine is already made");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "$iOOOiOpnnnnOpndd(iKK)(KI):Engine", names, &config.rank, &hosts,
            &host_names, &world_ranks, &config.memory_fd, &wire_dict, &progress_thread,
            &inline_bytes, &block_bytes, &segment_bytes, &piece_bytes, &algorithms, &deterministic,
            &event_capacity, &stall_warning_s, &stall_shutdown_s, &config.launcher.fd, &device,
            &inode, &black_box, &config.team))
        return -1;
    if (inline_bytes < 0 || block_bytes < 64 || segment_bytes < 1 || piece_bytes < 64 ||
        event_capacity < 0 || !is_time(stall_warning_s) || !is_time(stall_shutdown_s) ||
        segment_bytes > HVDL_MAX_MESSAGE_BYTES) {
        PyErr_SetString(PyExc_ValueError, "inline_bytes and event_capacity must be at least 0, the "
                                          "stall check's times 0 to 2^31-1, block_bytes and "
                                          "piece_bytes at least 64, segment_bytes 1 to 2^30");
        return -1;
    }
    config.black_box = (hvdl_box_memory *)(uintptr_t)black_box;
    config.launcher.device = device;
    config.launcher.inode = inode;
    config.progress_thread = progress_thread;
    config.deterministic = deterministic;
    config.inline_bytes = (size_t)inline_bytes;
    config.block_bytes = (size_t)block_bytes;
    config.segment_bytes = (size_t)segment_bytes;
    config.piece_bytes = (size_t)piece_bytes;
    config.event_capacity = (size_t)event_capacity;
    config.stall_warning_ns = (uint64_t)(stall_warning_s * 1e9);
    config.stall_shutdown_ns = (uint64_t)(stall_shutdown_s * 1e9);
    config.say = hvdl_py_say;
    if (wire_dict != Py_None) {
        if (to_wire(wire_dict, &wire))
            return -1;
        config.wire = &wire;
    }
    if (to_rules(algorithms, &config))
        return -1;
    int result = to_geometry(hosts, host_names, &g, &config);
    if (!result)
        result = to_world_ranks(world_ranks, &g, &config);
    if (!result && config.num_hosts > 1 && !config.wire) {
        PyErr_SetString(PyExc_ValueError, "several hosts need a wire");
        result = -1;
    }
    if (!result) {
        hvdl_err err = hvdl_engine_create(&self->engine, &config);
        self->forks = hvdl_py_num_forks;
        if (err) {
            hvdl_py_raise(err, "Engine", "");
            result = -1;
        }
    }
    free_geometry(&g);
    return result;
}

static PyObject *engine_close(PyObject *object, PyObject *args)
{
    EngineObject *self = (EngineObject *)object;
    int linger = 0;
    if (!PyArg_ParseTuple(args, "|p:close", &linger))
        return NULL;
    if (self->engine && !self->closed && self->forks == hvdl_py_num_forks) {
        self->closed = true;
        Py_BEGIN_ALLOW_THREADS hvdl_engine_close(self->engine, linger);
        Py_END_ALLOW_THREADS hvdl_py_reap(self->engine);
    }
    Py_RETURN_NONE;
}

static void engine_dealloc(PyObject *object)
{
    EngineObject *self = (EngineObject *)object;
    PyTypeObject *type = Py_TYPE(object);
    /* In a forked child nothing is freed: the locks may have been held by another thread. */
    if (self->engine && self->forks == hvdl_py_num_forks) {
        Py_BEGIN_ALLOW_THREADS hvdl_engine_close(self->engine, false);
        Py_END_ALLOW_THREADS hvdl_py_reap(self->engine);
        hvdl_engine_free(self->engine);
    }
    PyObject_Free(self);
    Py_DECREF(type);
}

/* ---- Engine: posting ---- */

/* post(posting, wake=True) */
static PyObject *engine_post(PyObject *object, PyObject *const *args, Py_ssize_t num_args)
{
    EngineObject *self = (EngineObject *)object;
    hvdl_engine *engine = hvdl_py_engine(self);
    if (!engine)
        return NULL;
    if (num_args < 1 || num_args > 2) {
        PyErr_Format(PyExc_TypeError, "post: 1 or 2 arguments expected, got %zd", num_args);
        return NULL;
    }
    int wake = num_args > 1 ? PyObject_IsTrue(args[1]) : 1;
    if (wake < 0)
        return NULL;
    hvdl_py_state *state = PyType_GetModuleState(Py_TYPE(object));
    hvdl_operation *operation = hvdl_py_post_object(state, engine, args[0], wake);
    if (!operation)
        return NULL;
    return hvdl_py_operation(self, NULL, ((PostingObject *)args[0])->shape, operation);
}

static PyMethodDef engine_methods[] = {
    {"post", (PyCFunction)(void (*)(void))engine_post, METH_FASTCALL, NULL},
    {"allreduce_in_place", (PyCFunction)(void (*)(void))hvdl_py_allreduce_in_place, METH_FASTCALL,
     NULL},
    {"run_allreduce", (PyCFunction)(void (*)(void))hvdl_py_run_allreduce, METH_FASTCALL, NULL},
    {"send", (PyCFunction)(void (*)(void))hvdl_py_send, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"recv", (PyCFunction)(void (*)(void))hvdl_py_recv, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"run", (PyCFunction)(void (*)(void))hvdl_py_run, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"give_up", hvdl_py_give_up, METH_O, NULL},
    {"ends", hvdl_py_ends, METH_NOARGS, NULL},
    {"await_end", hvdl_py_await_end, METH_O, NULL},
    {"wake", hvdl_py_wake, METH_NOARGS, NULL},
    {"cut_bytes", hvdl_py_cut_bytes, METH_NOARGS, NULL},
    {"plan", (PyCFunction)(void (*)(void))hvdl_py_plan, METH_VARARGS | METH_KEYWORDS, NULL},
    {"owned", hvdl_py_owned, METH_VARARGS, NULL},
    {"record", hvdl_py_record, METH_VARARGS, NULL},
    {"events", hvdl_py_events, METH_NOARGS, NULL},
    {"drain_events", hvdl_py_drain_events, METH_NOARGS, NULL},
    {"counters", hvdl_py_counters, METH_NOARGS, NULL},
    {"sent_bytes", hvdl_py_sent_bytes, METH_NOARGS, NULL},
    {"close", engine_close, METH_VARARGS, NULL},
    {0},
};

static PyType_Slot engine_slots[] = {
    {Py_tp_init, engine_init},
    {Py_tp_dealloc, engine_dealloc},
    {Py_tp_methods, engine_methods},
    {Py_tp_doc,
     "The engine of one process: a queue of operations and the thread that drives them."},
    {0, NULL},
};

PyType_Spec hvdl_py_engine_spec = {
    .name = "hvdlite._core.Engine",
    .basicsize = sizeof(EngineObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = engine_slots,
};
