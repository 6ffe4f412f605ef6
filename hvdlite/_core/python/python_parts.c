/* Tensors that have a part for each member: one tensor, or a tuple of as many tensors; and splits, which
 * say how many elements each part has. What fits together is checked here, once it is known which engine
 * they are posted to, so that the engine never reads or writes beyond a tensor. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "python/python_glue.h"

bool hvdl_py_is_in_parts(const PostingObject *self)
{
    const hvdl_kind_facts *facts = hvdl_facts_of(&self->posting.desc);
    if (!facts->parts || self->posting.desc.place == HVDL_ORDERED)
        return false;
    return facts->result != HVDL_RESULT_SHARE || self->splits ||
           (self->source && PyTuple_Check(self->source));
}

/* ---- splits ---- */

/* From a tuple of integers, or from a tensor of int64 in host memory. */
static int read_splits(const hvdl_py_state *state, PyObject *from, const hvdl_posting *to,
                       int64_t *splits, size_t count)
{
    bool is_tuple = PyTuple_Check(from);
    int64_t given = is_tuple ? PyTuple_Size(from) : hvdl_py_count_of(state, from);
    void *address = NULL;
    if (given < 0)
        return -1;
    if ((size_t)given != count)
        return hvdl_py_refuse(to, "%lld splits, expected %zu", (long long)given, count);
    if (!is_tuple) {
        if (hvdl_py_address_of(state, from, &address))
            return -1;
        if (!hvdl_py_is_memory(address))
            return hvdl_py_refuse(to, "the splits have no memory");
        memcpy(splits, address, count * sizeof *splits);
    }
    for (size_t i = 0; i < count; i++) {
        if (is_tuple)
            splits[i] = PyLong_AsLongLong(PyTuple_GetItem(from, (Py_ssize_t)i));
        if (splits[i] < 0)
            return PyErr_Occurred() ? -1 : hvdl_py_refuse(to, "a split is negative");
    }
    return 0;
}

/* -1: 2^63 or more. */
static int64_t sum_of(const int64_t *numbers, size_t count)
{
    int64_t sum = 0;
    for (size_t i = 0; i < count; i++)
        if (__builtin_add_overflow(sum, numbers[i], &sum))
            return -1;
    return sum;
}

/* Never 0, which says that there are none. */
static uint64_t hash_of(const int64_t *splits, size_t count)
{
    uint64_t hash = 0xcbf29ce484222325ull;
    for (size_t i = 0; i < count; i++) {
        hash = (hash ^ (uint64_t)splits[i]) * 0x9e3779b97f4a7c15ull;
        hash ^= hash >> 29;
    }
    return hash | 1;
}

/* What the ranks agree on where there are splits: not on the shapes. */
static int describe_splits(hvdl_posting *to, const int64_t *splits, size_t ranks)
{
    hvdl_desc *desc = &to->desc;
    bool both = hvdl_facts_of(desc)->rows == HVDL_ROWS_BOTH;
    int64_t sum = sum_of(splits, ranks);
    if (sum < 0 || (both && sum_of(splits + ranks, ranks) < 0))
        return hvdl_py_refuse(to, "the splits add up to 2^63 or more");
    memset(desc->dims, 0, sizeof desc->dims);
    desc->ndim = 1;
    desc->dims[0] = both ? -1 : sum;
    desc->count = both ? 1 : sum;
    desc->layout = both ? 0 : hash_of(splits, ranks);
    to->splits = splits;
    to->rows = both ? sum : 0;
    return 0;
}

/* ---- tensors ---- */

/* The source or the result. */
typedef struct {
    const hvdl_posting *posting;
    const char *which;
    PyObject *tensors; /* of one part, or of all: a tensor, or a tuple of tensors; or NULL */
    bool has_all;      /* else this rank's part alone */
    const int64_t
        *splits; /* the elements of each member's part; NULL: all have as many as `same` */
    int64_t same;
    void *at;    /* found: where the tensor lies, */
    void **list; /* or those of a tuple, for which there is room; else NULL */
} side;

static int64_t part_size(const side *parts, int rank)
{
    return parts->splits ? parts->splits[rank] : parts->same;
}

/* -1: 2^63 or more, as no tensor has. */
static int64_t all_sizes(const side *parts, size_t ranks)
{
    int64_t all;
    if (parts->splits)
        return sum_of(parts->splits, ranks);
    return __builtin_mul_overflow(parts->same, (int64_t)ranks, &all) ? -1 : all;
}

/* index: in the tuple; -1: there is none. */
static int put_tensor(const hvdl_py_state *state, const side *parts, PyObject *tensor, int index,
                      int64_t expected, void **to)
{
    if (!tensor)
        return hvdl_py_refuse(parts->posting, "the %s is missing", parts->which);
    int64_t count = hvdl_py_count_of(state, tensor);
    if (count < 0 || hvdl_py_address_of(state, tensor, to))
        return -1;
    if (count != expected && index >= 0)
        return hvdl_py_refuse(parts->posting,
                              "tensor %d of the %s has %lld elements, expected %lld", index,
                              parts->which, (long long)count, (long long)expected);
    if (count != expected)
        return hvdl_py_refuse(parts->posting, "the %s has %lld elements, expected %lld",
                              parts->which, (long long)count, (long long)expected);
    if (count && !hvdl_py_is_memory(*to))
        return hvdl_py_refuse(parts->posting, "the tensor has no memory");
    return 0;
}

static int put_side(const hvdl_py_state *state, const hvdl_engine *engine, side *parts)
{
    const hvdl_desc *desc = &parts->posting->desc;
    int own = hvdl_engine_rank(engine), ranks = hvdl_engine_num_ranks(engine);
    bool is_heard = !hvdl_facts_of(desc)->has_root || desc->root == own;
    void **list = parts->list;
    parts->list = NULL;
    if (!parts->has_all)
        return put_tensor(state, parts, parts->tensors, -1, part_size(parts, own), &parts->at);
    if (!is_heard)
        return 0;
    if (!parts->tensors || !PyTuple_Check(parts->tensors))
        return put_tensor(state, parts, parts->tensors, -1, all_sizes(parts, (size_t)ranks),
                          &parts->at);
    if (PyTuple_Size(parts->tensors) != ranks)
        return hvdl_py_refuse(parts->posting,
                              "the %s has %zd tensors, expected one for each of the %d members",
                              parts->which, PyTuple_Size(parts->tensors), ranks);
    for (int rank = 0; rank < ranks; rank++)
        if (put_tensor(state, parts, PyTuple_GetItem(parts->tensors, rank), rank,
                       part_size(parts, rank), &list[rank]))
            return -1;
    parts->list = list;
    return 0;
}

/* Elements of a part where all are the same. Those of the whole are in the descriptor if the source holds
 * all parts and is described. */
static int same_part(const hvdl_posting *to, size_t ranks, int64_t *same)
{
    const hvdl_kind_facts *facts = hvdl_facts_of(&to->desc);
    int64_t count = to->desc.count;
    *same = count;
    if (!(facts->parts & HVDL_PARTS_IN) || hvdl_describes_result(facts))
        return 0;
    if (count % (int64_t)ranks)
        return hvdl_py_refuse(
            to,
            "the source has %lld elements, which can't be cut into %zu equal parts; give splits",
            (long long)count, ranks);
    *same = count / (int64_t)ranks;
    return 0;
}

int hvdl_py_put_parts(const hvdl_py_state *state, hvdl_engine *engine, const PostingObject *self,
                      hvdl_posting *to, void **memory)
{
    const hvdl_kind_facts *facts = hvdl_facts_of(&to->desc);
    size_t ranks = (size_t)hvdl_engine_num_ranks(engine);
    if (!self->shape)
        return hvdl_py_refuse(to, "the %s is missing",
                              hvdl_describes_result(facts) ? "result" : "source");
    if (facts->rows != HVDL_ROWS_CUT && facts->rows != HVDL_ROWS_BOTH && self->splits)
        return hvdl_py_refuse(to, "takes no splits");
    *memory = malloc(ranks * (2 * sizeof(int64_t) + 2 * sizeof(void *)));
    if (!*memory) {
        PyErr_NoMemory();
        return -1;
    }
    int64_t *splits = *memory;
    void **addresses = (void **)(splits + 2 * ranks);
    side in = {to, "source", self->source, facts->parts & HVDL_PARTS_IN, .list = addresses};
    if (self->splits) {
        size_t count = hvdl_num_splits(facts, (int)ranks);
        if (read_splits(state, self->splits, to, splits, count) ||
            describe_splits(to, splits, ranks))
            return -1;
        in.splits = splits;
    } else if (same_part(to, ranks, &in.same)) {
        return -1;
    }
    side out = {to,        "result", self->result, facts->parts & HVDL_PARTS_OUT,
                in.splits, in.same,  NULL,         addresses + ranks};
    if (in.splits && facts->rows == HVDL_ROWS_BOTH)
        out.splits += ranks;
    if (put_side(state, engine, &in) || put_side(state, engine, &out))
        return -1;
    to->input = in.at;
    to->inputs = (const void *const *)in.list;
    to->output = out.at;
    to->outputs = out.list;
    return 0;
}

/* ---- extents ---- */

/* least: the first element that it may have. */
static int to_extent(PyObject *item, Py_ssize_t least, Py_ssize_t count, size_t elem_bytes,
                     hvdl_extent *to)
{
    Py_ssize_t begin, end;
    PyObject *address;
    void *at;
    if (!PyArg_ParseTuple(item, "nnO:extent", &begin, &end, &address) ||
        hvdl_py_pointer(address, &at))
        return -1;
    if (begin < least || end <= begin || end > count || !hvdl_py_is_memory(at)) {
        PyErr_Format(PyExc_ValueError,
                     "plan: the extent (%zd, %zd, %R) is empty, has no memory, is not within the "
                     "buffer's %zd elements, or begins before the end of the one before it",
                     begin, end, address, count);
        return -1;
    }
    *to = (hvdl_extent){{(size_t)begin * elem_bytes, (size_t)end * elem_bytes}, at};
    return 0;
}

int hvdl_py_to_extents(PyObject *object, Py_ssize_t count, size_t elem_bytes, hvdl_extents *to)
{
    PyObject *items = PySequence_Tuple(object);
    if (!items)
        return -1;
    size_t number = (size_t)PyTuple_Size(items);
    hvdl_extents extents = {calloc(number ? number : 1, sizeof *extents.list), number};
    int result = extents.list ? 0 : -1;
    if (!extents.list)
        PyErr_NoMemory();
    for (size_t i = 0; !result && i < number; i++) {
        size_t end = i ? extents.list[i - 1].bytes.end / elem_bytes : 0;
        PyObject *item = PyTuple_GetItem(items, (Py_ssize_t)i);
        if (!PyTuple_Check(item)) {
            PyErr_SetString(PyExc_TypeError, "plan: an extent is a tuple (begin, end, address)");
            result = -1;
        } else {
            result = to_extent(item, (Py_ssize_t)end, count, elem_bytes, &extents.list[i]);
        }
    }
    Py_DECREF(items);
    if (result)
        free(extents.list);
    else
        *to = extents;
    return result;
}
