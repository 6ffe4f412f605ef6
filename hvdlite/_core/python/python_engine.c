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
    bool *seen;
} geometry;

static void free_geometry(geometry *g)
{
    free(g->sizes);
    free(g->members);
    free(g->world_ranks);
    free(g->names);
    free(g->seen);
}

/* The numbers of a sequence, up to `most`; how many there are. -1: an exception, as also where there are more than
 * there is room for. */
static int to_numbers(PyObject *sequence, const char *what, int most, Py_ssize_t room, int *to)
{
    Py_ssize_t count = sequence ? PySequence_Size(sequence) : -1;
    if (count > room)
        PyErr_Format(PyExc_ValueError, "%s: %zd of them, expected at most %zd", what, count, room);
    for (Py_ssize_t i = 0; i < count && count <= room; i++) {
        PyObject *item = PySequence_GetItem(sequence, i);
        if (!item || hvdl_py_int(item, what, 0, most, &to[i]))
            count = -1;
        Py_XDECREF(item);
    }
    return count <= room ? (int)count : -1;
}

/* hosts: sequences of ranks; names: strings; world_ranks: by rank, ascending. Every rank is on exactly one host. */
static int to_geometry(PyObject *hosts, PyObject *names, PyObject *world_ranks, geometry *g,
                       hvdl_engine_config *config)
{
    Py_ssize_t num_hosts = PySequence_Size(hosts), num_ranks = PySequence_Size(world_ranks);
    int at = 0;
    bool valid = num_hosts > 0 && num_hosts == PySequence_Size(names) && config->rank >= 0 &&
                 config->rank < num_ranks && num_ranks <= INT32_MAX;
    if (!valid) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "expected at least one host, a name for each, and a "
                                              "number in world_ranks for each rank");
        return -1;
    }
    g->sizes = calloc((size_t)num_hosts, sizeof *g->sizes);
    g->names = calloc((size_t)num_hosts, sizeof *g->names);
    g->members = calloc((size_t)num_ranks, sizeof *g->members);
    g->world_ranks = calloc((size_t)num_ranks, sizeof *g->world_ranks);
    g->seen = calloc((size_t)num_ranks, sizeof *g->seen);
    if (!g->sizes || !g->names || !g->members || !g->world_ranks || !g->seen) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t h = 0; h < num_hosts; h++) {
        PyObject *ranks = PySequence_GetItem(hosts, h), *name = PySequence_GetItem(names, h);
        /* `names` is a sequence that the caller holds: the text lives as long as it. */
        g->names[h] = name ? PyUnicode_AsUTF8AndSize(name, NULL) : NULL;
        int size = to_numbers(ranks, "a rank", (int)num_ranks - 1, num_ranks - at, g->members + at);
        Py_XDECREF(ranks);
        Py_XDECREF(name);
        if (size < 0 || !g->names[h])
            return -1;
        valid = valid && size > 0;
        g->sizes[h] = size;
        at += size;
    }
    for (int i = 0; i < at; i++) {
        valid = valid && !g->seen[g->members[i]];
        g->seen[g->members[i]] = true;
    }
    if (!valid || at != num_ranks) {
        PyErr_SetString(PyExc_ValueError,
                        "every rank from 0 to size-1 must be on exactly one host");
        return -1;
    }
    config->num_hosts = (int)num_hosts;
    config->num_ranks = (int)num_ranks;
    config->host_sizes = g->sizes;
    config->members = g->members;
    config->host_names = g->names;
    config->world_ranks = g->world_ranks;
    return to_numbers(world_ranks, "a world rank", INT32_MAX, num_ranks, g->world_ranks) < 0 ? -1
                                                                                             : 0;
}

static int to_wire(PyObject *from, hvdl_wire *wire)
{
    static char *names[] = {"isend", "irecv",  "test",      "testsome",      "cancel", "comm",
                            "byte",  "tag_ub", "proc_null", "request_bytes", NULL};
    hvdl_word tag_ub, proc_null;
    memset(wire, 0, sizeof *wire);
    PyObject *nothing = PyTuple_New(0);
    int given =
        nothing &&
        PyArg_ParseTupleAndKeywords(
            nothing, from, "$O&O&O&O&O&O&O&O&O&O&:wire", names, hvdl_py_word, &wire->isend,
            hvdl_py_word, &wire->irecv, hvdl_py_word, &wire->test, hvdl_py_word, &wire->testsome,
            hvdl_py_word, &wire->cancel, hvdl_py_word, &wire->comm, hvdl_py_word, &wire->byte,
            hvdl_py_word, &tag_ub, hvdl_py_word, &proc_null, hvdl_py_word, &wire->handle_bytes);
    Py_XDECREF(nothing);
    if (!given)
        return -1;
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
    int result = to_geometry(hosts, host_names, world_ranks, &g, &config);
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

static PyObject *engine_failures(PyObject *object, PyObject *args)
{
    hvdl_engine *engine = hvdl_py_engine((EngineObject *)object);
    PyObject *given;
    int kind;
    if (!engine || !PyArg_ParseTuple(args, "iO:failures", &kind, &given))
        return NULL;
    const char *name = hvdl_py_text(given, "name");
    return name ? PyLong_FromUnsignedLongLong(hvdl_engine_failures(engine, kind, name)) : NULL;
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

/* ---- Engine: its methods ---- */

static PyMethodDef engine_methods[] = {
    HVDL_PY_METHOD("post", hvdl_py_post, METH_FASTCALL),
    HVDL_PY_METHOD("run_allreduce", hvdl_py_run_allreduce, METH_FASTCALL),
    HVDL_PY_METHOD("send", hvdl_py_send, HVDL_PY_KEYWORDS),
    HVDL_PY_METHOD("recv", hvdl_py_recv, HVDL_PY_KEYWORDS),
    HVDL_PY_METHOD("run", hvdl_py_run, HVDL_PY_KEYWORDS),
    {"give_up", hvdl_py_give_up, METH_O, NULL},
    {"failures", engine_failures, METH_VARARGS, NULL},
    {"ends", hvdl_py_ends, METH_NOARGS, NULL},
    {"await_end", hvdl_py_await_end, METH_O, NULL},
    {"wake", hvdl_py_wake, METH_NOARGS, NULL},
    {"cut_bytes", hvdl_py_cut_bytes, METH_NOARGS, NULL},
    HVDL_PY_METHOD("plan", hvdl_py_plan, HVDL_PY_DICT),
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
