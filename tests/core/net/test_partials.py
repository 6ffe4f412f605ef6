"""The tree of the deterministic mode, and the partials that hosts send each other: as terms."""

import ctypes
import random

import pytest

from tests.harness.compiled import compiled, linked, sources


class Partial(ctypes.Structure):
    _fields_ = [("begin", ctypes.c_int), ("end", ctypes.c_int), ("host", ctypes.c_int)]


class SumTree(ctypes.Structure):
    _fields_ = [
        ("partials", ctypes.POINTER(Partial)),
        ("num_partials", ctypes.c_int),
        ("merges", ctypes.POINTER(ctypes.c_uint8)),
        ("num_of", ctypes.POINTER(ctypes.c_int)),
        ("own_begins", ctypes.POINTER(ctypes.c_int)),
        ("combines", ctypes.c_bool),
    ]


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    objects = map(compiled, sources("base/sum_tree"))
    path = linked(tmp_path_factory.mktemp("tree") / "sum_tree.so", objects, "-shared")
    library = ctypes.CDLL(str(path))
    library.hvdl_sum_tree_doubles.restype = ctypes.c_bool
    return library


def term(begin, end):
    """The sum of ranks begin to end: a rank, or a pair of terms."""
    if end - begin == 1:
        return begin
    middle = begin + (1 << (end - begin - 1).bit_length() - 1)
    return term(begin, middle), term(middle, end)


def without(tree, absent):
    if isinstance(tree, int):
        return None if tree in absent else tree
    left, right = (without(each, absent) for each in tree)
    if left is None or right is None:
        return right if left is None else left
    return left, right


def run(merges, inputs):
    stack = []
    for merge, given in zip(merges, inputs, strict=True):
        stack.append(given)
        for _ in range(merge):
            right, left = stack.pop(), stack.pop()
            stack.append((left, right))
    (total,) = stack
    return total


def tree_of(core, host_of, own=0):
    tree = SumTree()
    hosts = (ctypes.c_int * len(host_of))(*host_of)
    number = max(host_of) + 1
    assert core.hvdl_sum_tree_make(ctypes.byref(tree), hosts, len(host_of), number, own) == 0
    return tree


def placements():
    draw = random.Random(5)
    for num_ranks in (*range(1, 18), 31, 64, 100):
        for hosts in {1, 2, 3, num_ranks // 2 or 1, num_ranks}:
            several = [rank * hosts // num_ranks for rank in range(num_ranks)]
            yield several
            yield sorted(several, key=lambda _: draw.random())


def test_partials_are_added_up_to_the_tree_of_all_ranks(core):
    for host_of in placements():
        tree = tree_of(core, host_of)
        partials = tree.partials[: tree.num_partials]
        terms = [term(each.begin, each.end) for each in partials]
        assert run(tree.merges[: len(terms)], terms) == term(0, len(host_of))
        for each in partials:
            assert set(host_of[each.begin : each.end]) == {each.host}
        own = [each.end - each.begin for each in partials if each.host == 0]
        assert tree.num_of[0] == len(own)
        assert tree.own_begins[: len(own) + 1] == [sum(own[:i]) for i in range(len(own) + 1)]
        assert tree.combines == (len(partials) < len(host_of))
        core.hvdl_sum_tree_free(ctypes.byref(tree))


@pytest.mark.parametrize(
    ("sizes", "partials", "doubles"),
    [
        ([8] * 4, 4, True),
        ([8] * 3, 3, False),
        ([1] * 8, 8, True),
        ([3, 1], 3, False),
        ([4, 2, 1, 1], 4, False),
        ([2, 2, 2, 1], 4, True),
        ([3, 3], 4, False),
    ],
)
def test_a_host_with_a_power_of_two_of_ranks_has_one_partial(core, sizes, partials, doubles):
    host_of = [host for host, size in enumerate(sizes) for _ in range(size)]
    tree = tree_of(core, host_of)
    assert tree.num_partials == partials
    assert core.hvdl_sum_tree_doubles(ctypes.byref(tree), len(sizes)) == doubles
    core.hvdl_sum_tree_free(ctypes.byref(tree))


def test_ranks_that_are_not_present_are_left_out(core):
    draw = random.Random(6)
    for num_ranks in range(1, 20):
        absent = {rank for rank in range(num_ranks) if draw.random() < 0.3}
        present = [rank not in absent for rank in range(num_ranks)]
        merges = (ctypes.c_uint8 * num_ranks)()
        count = core.hvdl_tree_merges(num_ranks, (ctypes.c_bool * num_ranks)(*present), merges)
        assert count == sum(present)
        ranks = [rank for rank in range(num_ranks) if rank not in absent]
        if ranks:
            assert run(merges[:count], ranks) == without(term(0, num_ranks), absent)
