/* Tensors that have a part for each member: one tensor, or a tuple of as many tensors; and splits, which
 * say how many elements each part has. What fits together is checked here, once it is known which engine
 * they are posted to, so that the engine never reads or writes beyond a tensor. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "python/python_glue.h"

/* -1: an exception. A product of 2^63 or more has no memory, unless it is 0. */
static int64_t count_of_shape(PyObject *shape)
{
    int64_t count = 1;
    bool overflows = false, has_zero = false;
    if (!PyTuple_Check(shape)) {
        PyErr_SetString(PyExc_TypeError, "shape must be a tuple");
        return -1;
    }
    for (Py_ssize_t i = 0; i < PyTuple_Size(shape); i++) {
        long long dim = PyLong_AsLongLong(PyTuple_GetItem(shape, i));
        if (dim < 0) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_ValueError, "a dimension is negative");
            return -1;
        }
        overflows |= __builtin_mul_overflow(count, (int64_t)dim, &count);
        has_zero |= dim == 0;
    }
    if (overflows && !has_zero) {
        PyErr_SetString(PyExc_ValueError, "the tensor has 2^63 elements or more");
        return -1;
    }
    return overflows ? 0 : count;
}

static int64_t count_of(const hvdl_py_state *state, PyObject *tensor)
{
    PyObject *shape = PyObject_GetAttr(tensor, state->shape);
    int64_t count = shape ? count_of_shape(shape) : -1;
    Py_XDECREF(shape);
    return count;
}

int64_t hvdl_py_count_of_tuple(const hvdl_py_state *state, PyObject *tensors)
{
    int64_t sum = 0;
    for (Py_ssize_t i = 0; i < PyTuple_Size(tensors); i++) {
        int64_t count = count_of(state, PyTuple_GetItem(tensors, i));
        if (count < 0)
            return -1;
        if (__builtin_add_overflow(sum, count, &sum)) {
            PyErr_SetString(PyExc_ValueError, "the tensors have 2^63 elements or more");
            return -1;
        }
    }
    return sum;
}

bool hvdl_py_is_in_parts(const PostingObject *self)
{
    const hvdl_kind_facts *facts = hvdl_facts_of(&self->posting.desc);
    if (!facts->parts || self->posting.desc.place == HVDL_ORDERED)
        return false;
    return facts->result != HVDL_RESULT_SHARE || self->splits ||
           (self->source && PyTuple_Check(self->source));
}

/* ---- splits ---- */

static int raise_splits(const hvdl_posting *to, const char *what)
{
    PyErr_Format(PyExc_ValueError, "%s '%s': %s", hvdl_kind_name(to->desc.kind), to->name, what);
    return -1;
}

/* From a tuple of integers, or from a tensor of int64 in host memory. */
static int read_splits(const hvdl_py_state *state, PyObject *from, const hvdl_posting *to,
                       int64_t *splits, size_t count)
{
    bool is_tuple = PyTuple_Check(from);
    int64_t given = is_tuple ? PyTuple_Size(from) : count_of(state, from);
    void *address = NULL;
    if (given < 0)
        return -1;
    if ((size_t)given != count) {
        PyErr_Format(PyExc_ValueError, "%s '%s': %lld splits, expected %zu",
                     hvdl_kind_name(to->desc.kind), to->name, (long long)given, count);
        return -1;
    }
    if (!is_tuple) {
        if (hvdl_py_address_of(state, from, &address))
            return -1;
        if (!hvdl_py_is_memory(address))
            return raise_splits(to, "the splits have no memory");
        memcpy(splits, address, count * sizeof *splits);
    }
    for (size_t i = 0; i < count; i++) {
        if (is_tuple)
            splits[i] = PyLong_AsLongLong(PyTuple_GetItem(from, (Py_ssize_t)i));
        if (splits[i] < 0)
            return PyErr_Occurred() ? -1 : raise_splits(to, "a split is negative");
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
        return raise_splits(to, "the splits add up to 2^63 or more");
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

/* What the members' parts are expected to have. */
typedef struct {
    const int64_t *splits; /* NULL: all the same */
    int64_t same;
    size_t ranks;
} part_sizes;

static int64_t part_size(const part_sizes *sizes, size_t rank)
{
    return sizes->splits ? sizes->splits[rank] : sizes->same;
}

/* -1: 2^63 or more, as no tensor has. */
static int64_t all_sizes(const part_sizes *sizes)
{
    int64_t all;
    if (sizes->splits)
        return sum_of(sizes->splits, sizes->ranks);
    return __builtin_mul_overflow(sizes->same, (int64_t)sizes->ranks, &all) ? -1 : all;
}

/* Which tensor a text is about. */
typedef struct {
    const hvdl_posting *posting;
    const char *which;
    Py_ssize_t index; /* in the tuple; -1: there is none */
} tensor_name;

static int raise_size(const tensor_name *name, int64_t found, int64_t expected)
{
    const char *kind = hvdl_kind_name(name->posting->desc.kind);
    if (name->index < 0)
        PyErr_Format(PyExc_ValueError, "%s '%s': the %s has %lld elements, expected %lld", kind,
                     name->posting->name, name->which, (long long)found, (long long)expected);
    else
        PyErr_Format(PyExc_ValueError,
                     "%s '%s': tensor %zd of the %s has %lld elements, expected %lld", kind,
                     name->posting->name, name->index, name->which, (long long)found,
                     (long long)expected);
    return -1;
}

static int put_tensor(const hvdl_py_state *state, PyObject *tensor, const tensor_name *name,
                      int64_t expected, void **to)
{
    int64_t count = count_of(state, tensor);
    if (count < 0 || hvdl_py_address_of(state, tensor, to))
        return -1;
    if (count != expected)
        return raise_size(name, count, expected);
    if (count && !hvdl_py_is_memory(*to)) {
        PyErr_Format(PyExc_ValueError, "%s '%s': the tensor has no memory",
                     hvdl_kind_name(name->posting->desc.kind), name->posting->name);
        return -1;
    }
    return 0;
}

/* A tensor of one part. */
static int put_one(const hvdl_py_state *state, PyObject *tensor, tensor_name name, int64_t expected,
                   void **to)
{
    if (tensor)
        return put_tensor(state, tensor, &name, expected, to);
    PyErr_Format(PyExc_ValueError, "%s '%s': the %s is missing",
                 hvdl_kind_name(name.posting->desc.kind), name.posting->name, name.which);
    return -1;
}

/* One of all parts, or a tuple of tensors, whose addresses go to `all`. */
static int put_all(const hvdl_py_state *state, PyObject *tensors, tensor_name name,
                   const part_sizes *sizes, void **one, void **all, bool *in_tuple)
{
    *in_tuple = tensors && PyTuple_Check(tensors);
    if (!*in_tuple)
        return put_one(state, tensors, name, all_sizes(sizes), one);
    if ((size_t)PyTuple_Size(tensors) != sizes->ranks) {
        PyErr_Format(PyExc_ValueError,
                     "%s '%s': the %s has %zd tensors, expected one for each of "
                     "the %zu members",
                     hvdl_kind_name(name.posting->desc.kind), name.posting->name, name.which,
                     PyTuple_Size(tensors), sizes->ranks);
        return -1;
    }
    for (size_t rank = 0; rank < sizes->ranks; rank++) {
        name.index = (Py_ssize_t)rank;
        if (put_tensor(state, PyTuple_GetItem(tensors, name.index), &name, part_size(sizes, rank),
                       &all[rank]))
            return -1;
    }
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
    if (count % (int64_t)ranks) {
        PyErr_Format(
            PyExc_ValueError,
            "%s '%s': the source has %lld elements, which can't be cut into %zu equal parts; "
            "give splits",
            facts->name, to->name, (long long)count, ranks);
        return -1;
    }
    *same = count / (int64_t)ranks;
    return 0;
}

static int fill(const hvdl_py_state *state, hvdl_engine *engine, const PostingObject *self,
                hvdl_posting *to, hvdl_py_parts *parts)
{
    const hvdl_kind_facts *facts = hvdl_facts_of(&to->desc);
    size_t ranks = (size_t)hvdl_engine_num_ranks(engine), own = (size_t)hvdl_engine_rank(engine);
    part_sizes in = {.ranks = ranks}, out = {.ranks = ranks};
    if (self->splits) {
        size_t count = hvdl_num_splits(facts, (int)ranks);
        if (read_splits(state, self->splits, to, parts->splits, count) ||
            describe_splits(to, parts->splits, ranks))
            return -1;
        in.splits = out.splits = parts->splits;
        if (facts->rows == HVDL_ROWS_BOTH)
            out.splits += ranks;
    } else if (same_part(to, ranks, &in.same)) {
        return -1;
    }
    out.same = in.same;
    tensor_name source = {to, "source", -1}, result = {to, "result", -1};
    bool is_heard = !facts->has_root || (size_t)to->desc.root == own, in_tuple = false;
    void *input = NULL, *output = NULL;
    if (!(facts->parts & HVDL_PARTS_IN)) {
        if (put_one(state, self->source, source, part_size(&in, own), &input))
            return -1;
    } else if (is_heard) {
        if (put_all(state, self->source, source, &in, &input, parts->addresses, &in_tuple))
            return -1;
        to->inputs = in_tuple ? (const void *const *)parts->addresses : NULL;
    }
    if (!(facts->parts & HVDL_PARTS_OUT)) {
        if (put_one(state, self->result, result, part_size(&out, own), &output))
            return -1;
    } else if (is_heard) {
        if (put_all(state, self->result, result, &out, &output, parts->addresses + ranks,
                    &in_tuple))
            return -1;
        to->outputs = in_tuple ? parts->addresses + ranks : NULL;
    }
    to->input = input;
    to->output = output;
    return 0;
}

int hvdl_py_put_parts(const hvdl_py_state *state, hvdl_engine *engine, const PostingObject *self,
                      hvdl_posting *to, hvdl_py_parts *parts)
{
    const hvdl_kind_facts *facts = hvdl_facts_of(&to->desc);
    size_t ranks = (size_t)hvdl_engine_num_ranks(engine);
    if (!self->shape) {
        PyErr_Format(PyExc_ValueError, "%s '%s': the %s is missing", facts->name, to->name,
                     hvdl_describes_result(facts) ? "result" : "source");
        return -1;
    }
    if (facts->rows != HVDL_ROWS_CUT && facts->rows != HVDL_ROWS_BOTH && self->splits)
        return raise_splits(to, "takes no splits");
    parts->memory = malloc(ranks * (2 * sizeof *parts->splits + 2 * sizeof *parts->addresses));
    if (!parts->memory) {
        PyErr_NoMemory();
        return -1;
    }
    parts->splits = parts->memory;
    parts->addresses = (void **)(parts->splits + 2 * ranks);
    return fill(state, engine, self, to, parts);
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
