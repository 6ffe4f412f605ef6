"""Allgather and alltoall into the caller's memory, gather and scatter."""

from unittest import mock

import pytest
import torch

import hvdlite as hvd
from hvdlite import _core
from hvdlite.world import world as worlds
from hvdlite.world.teams import placement
from tests.core import limits

# Elements of a part: around what travels with the posting, and more than a block or a piece holds.
COUNTS = {"default knobs": (0, 1, 1024, 1025, 70_000), "tiny knobs": (0, 1, 16, 17, 63, 257, 1100)}
MARGIN = 5  # elements before and after each result, which nobody may write


def part_of(sender, receiver, count):
    """Values that tell the pair of ranks, and the place within the part."""
    return torch.arange(count, dtype=torch.int32) * 64 * 64 + sender * 64 + receiver


class Results:
    """Tensors that results are written to, and what is expected there."""

    def __init__(self):
        self.checks = []

    def room(self, expected, name):
        memory = torch.full((len(expected) + 2 * MARGIN,), -1, dtype=torch.int32)
        self.checks.append((name, memory, expected))
        return memory[MARGIN : MARGIN + len(expected)]

    def rooms(self, parts, in_tuple, name):
        if in_tuple:
            return tuple(self.room(part, f"{name}, part {i}") for i, part in enumerate(parts))
        return self.room(torch.cat(parts), name)

    def wrong(self):
        return [
            name
            for name, memory, expected in self.checks
            if not torch.equal(memory[MARGIN : MARGIN + len(expected)], expected)
            or memory[:MARGIN].unique().tolist() != [-1]
            or memory[MARGIN + len(expected) :].unique().tolist() != [-1]
        ]


def post(kind, name, source, result, **more):
    posting = _core.posting(kind, name, True, _core.INT32, source, result, **more)
    return worlds.current().team.engine.post(posting)


# How many elements `sender` gives to `receiver`.
SIZES = {
    "each as many": lambda sender, receiver, count: count,
    "each pair another": lambda sender, receiver, count: (3 * sender + receiver) % 5 * count,
    "none to oneself": lambda sender, receiver, count: count if sender != receiver else 0,
    "only to oneself": lambda sender, receiver, count: count if sender == receiver else 0,
    "all to the last": lambda sender, receiver, count: count * (receiver == hvd.size() - 1),
}


def gathers(results, count, in_tuple):
    size, rank = hvd.size(), hvd.rank()
    for sizes, of in SIZES.items():
        counts = [of(sender, 0, count) for sender in range(size)]
        parts = [part_of(sender, 0, counts[sender]) for sender in range(size)]
        name = f"allgather of {count}, {sizes}, in a tuple: {in_tuple}"
        into = results.rooms(parts, in_tuple, name)
        splits = None if sizes == "each as many" else tuple(counts)
        yield post(_core.ALLGATHER_INTO, name, parts[rank], into, splits=splits)
    own = results.rooms(parts, False, f"{name}, in place")
    begin = sum(counts[:rank])
    own[begin : begin + counts[rank]] = parts[rank]
    source = own[begin : begin + counts[rank]]
    yield post(_core.ALLGATHER_INTO, f"{name}, in place", source, own, splits=tuple(counts))


def exchanges(results, count, in_tuple):
    size, rank = hvd.size(), hvd.rank()
    for sizes, of in SIZES.items():
        sent = [part_of(rank, receiver, of(rank, receiver, count)) for receiver in range(size)]
        received = [part_of(sender, rank, of(sender, rank, count)) for sender in range(size)]
        name = f"alltoall of {count}, {sizes}, in a tuple: {in_tuple}"
        into = results.rooms(received, in_tuple, name)
        splits = torch.tensor([len(part) for part in sent + received])
        source = tuple(sent) if in_tuple else torch.cat(sent)
        yield post(_core.ALLTOALL_INTO, name, source, into, splits=splits)
        if sizes == "each as many":
            into = results.rooms(received, not in_tuple, f"{name}, no splits")
            yield post(_core.ALLTOALL_INTO, f"{name}, no splits", source, into)


def gathers_and_scatters(results, count, in_tuple):
    size, rank = hvd.size(), hvd.rank()
    for root in range(size):
        parts = [part_of(sender, root, count) for sender in range(size)]
        name = f"gather of {count} to {root}, in a tuple: {in_tuple}"
        into = results.rooms(parts, in_tuple, name) if rank == root else None
        yield post(_core.GATHER, name, parts[rank], into, root=root)
        parts = [part_of(root, receiver, count) for receiver in range(size)]
        name = f"scatter of {count} from {root}, in a tuple: {in_tuple}"
        source = tuple(parts) if in_tuple else torch.cat(parts)
        into = results.room(parts[rank], name)
        yield post(_core.SCATTER, name, source if rank == root else None, into, root=root)


def move_parts(kinds, knobs):
    hvd.init()
    results, operations = Results(), []
    for count in COUNTS[knobs]:
        for in_tuple in (False, True):
            operations += kinds(results, count, in_tuple)
    assert [text for text in (operation.wait() for operation in operations) if text] == []
    assert results.wrong() == []


@pytest.mark.ranks(*limits.SIZES)
@pytest.mark.hosts(*limits.LAYOUTS)
@pytest.mark.parametrize("knobs", limits.KNOBS)
@pytest.mark.parametrize("kinds", [gathers, exchanges, gathers_and_scatters])
def test_every_part_arrives_where_it_belongs_and_nothing_else_is_written(world, kinds, knobs):
    world.run(move_parts, kinds, knobs, knobs=limits.KNOBS[knobs])


def move_parts_of_dealt_ranks(kinds):
    hvd.shutdown()
    leaders = [rank % 2 for rank in range(4)]
    with mock.patch.object(placement, "pretended_leaders", return_value=leaders):
        hvd.init()
    assert worlds.current().placement.hosts == ((0, 2), (1, 3))
    try:
        move_parts(kinds, "tiny knobs")
    finally:
        hvd.shutdown()


@pytest.mark.hosts("2,2")
@pytest.mark.parametrize("kinds", [gathers, exchanges, gathers_and_scatters])
def test_parts_arrive_where_the_ranks_of_a_host_do_not_follow_each_other(world, kinds):
    world.run(move_parts_of_dealt_ranks, kinds, knobs=limits.TINY)


# ---- sizes that do not fit ----


def give_what_does_not_fit():
    hvd.init()
    x, size = torch.zeros(2, dtype=torch.int32), hvd.size()
    both, parts = x.repeat(size), (x,) * size
    gather, exchange = _core.ALLGATHER_INTO, _core.ALLTOALL_INTO
    twos = (2,) * size
    refused = {
        "the result has 2 elements, expected 4": (gather, x, x, {}),
        "the result has 2 tensors, expected one for each of the 2 members": None,
        "tensor 1 of the result has 4 elements, expected 2": (gather, x, (x, both), {}),
        "the source has 2 elements, expected 3": (gather, x, both, {"splits": (3, 3)}),
        "3 splits, expected 2": (gather, x, both, {"splits": (2, 2, 0)}),
        "2 splits, expected 4": (exchange, both, both, {"splits": twos}),
        "a split is negative": (exchange, both, both, {"splits": (-1, 5, 2, 2)}),
        "the splits add up to 2^63 or more": (gather, x, both, {"splits": (2**62, 2**62)}),
        "the source has 4 elements, expected 3": (exchange, both, both, {"splits": (1, 2, 2, 2)}),
        "the source has 3 elements, which can't be cut into 2 equal parts": (
            *(exchange, both[:3], both[:3]),
            {},
        ),
        "the result is missing": (exchange, both, None, {}),
        "the source is missing": (exchange, None, both, {}),
        "takes no splits": (_core.GATHER, x, both, {"splits": twos}),
    }
    for text, call in refused.items():
        if call is None:
            continue
        kind, source, result, more = call
        with pytest.raises(ValueError, match=f"'x': {text}".replace("^", r"\^")):
            post(kind, "x", source, result, **more)
    if hvd.rank() == 0:
        with pytest.raises(ValueError, match="expected one for each of the 2 members"):
            post(_core.SCATTER, "x", (x,), x)
        with pytest.raises(ValueError, match="the source is missing"):
            post(_core.SCATTER, "x", None, x)
    with pytest.raises(ValueError, match="the result is missing"):
        post(_core.SCATTER, "x", parts, None)
    with pytest.raises(TypeError, match="one tensor, and no tuple"):
        post(_core.ALLREDUCE, "x", parts, x)
    gone = torch.zeros(4, dtype=torch.int32)
    gone.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="no memory"):
        post(gather, "x", x, gone)
    assert post(gather, "x", x, both).wait() is None


@pytest.mark.ranks(2)
@pytest.mark.hosts("1,1")
def test_tensors_of_another_size_than_the_parts_are_refused_before_anything_is_posted(world):
    world.run(give_what_does_not_fit)


# ---- ranks that disagree ----


def disagree(case):
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    odd = rank == 1
    x = torch.zeros(4 + odd, dtype=torch.int32)

    def many(count):
        return torch.zeros(size * count, dtype=torch.int32)

    ones = [1] * size
    sent, received = list(ones), list(ones)
    if odd:
        received[size - 1] = 3
    cut = [2] * size if odd else [1, 3, *[2] * (size - 2)]
    calls = {
        "gathered sizes": lambda: post(_core.ALLGATHER_INTO, "d", x, many(len(x))),
        "cuts": lambda: post(
            *(_core.ALLGATHER_INTO, "d", many(1)[: cut[rank]], many(2)),
            splits=tuple(cut),
        ),
        "exchanged sizes": lambda: post(_core.ALLTOALL_INTO, "d", many(2 + odd), many(2 + odd)),
        "splits": lambda: post(
            *(_core.ALLTOALL_INTO, "d", many(1), torch.zeros(sum(received), dtype=torch.int32)),
            splits=(*sent, *received),
        ),
        "roots": lambda: post(_core.GATHER, "d", x[:4], many(4), root=int(odd)),
        "scattered sizes": lambda: post(_core.SCATTER, "d", many(len(x)), x, root=0),
        "kinds": lambda: post(
            _core.GATHER if odd else _core.ALLGATHER_INTO, "d", x[:4], many(4), root=0
        ),
    }
    texts = []
    for _ in range(2):
        texts.append(calls[case]().wait())
        into = many(1)
        assert post(_core.ALLGATHER_INTO, "d", x[:1], into).wait() is None
        assert into.tolist() == [0] * size
    return texts


FOUND = {
    "gathered sizes": ["allgather 'd': ", "int32[5]", "int32[4]", "make the shape"],
    "cuts": ["allgather 'd': ", "cut by splits (hash ", "make the shape"],
    "exchanged sizes": ["alltoall 'd': ", "make the shape"],
    "splits": [" sends 1 elements to rank 1 on ", ", which expects 3; make the splits"],
    "roots": ["gather 'd': ", "root_rank 1", "root_rank 0"],
    "scattered sizes": ["scatter 'd': ", "int32[5]", "int32[4]"],
    "kinds": ["operation 'd': ", "called ", "allgather", "gather"],
}


@pytest.mark.ranks(2, 4)
@pytest.mark.hosts("1,1", "2,2", "3,1")
@pytest.mark.parametrize("case", FOUND)
def test_ranks_whose_parts_do_not_fit_get_one_text_that_names_both_sides(world, case):
    (text,) = {text for texts in world.run(disagree, case) for text in texts}
    assert text is not None
    for words in (*FOUND[case], "rank 1 on "):
        assert words in text


# ---- a rank that has joined ----


def call_with_one_joined(kind):
    hvd.init()
    size = hvd.size()
    x, many = torch.zeros(2, dtype=torch.int32), torch.zeros(2 * size, dtype=torch.int32)
    calls = {
        "allgather": lambda: post(_core.ALLGATHER_INTO, "j", x, many),
        "alltoall": lambda: post(
            _core.ALLTOALL_INTO, "j", many, many.clone(), splits=(2,) * (2 * size)
        ),
        "gather": lambda: post(_core.GATHER, "j", x, many, root=0),
        "scatter": lambda: post(_core.SCATTER, "j", many, x, root=0),
    }
    text = None
    if hvd.rank() == size - 1:
        hvd.join()
    else:
        text = calls[kind]().wait()
        hvd.join()
    return text


@pytest.mark.ranks(2, 4)
@pytest.mark.hosts("1,1", "2,2")
@pytest.mark.parametrize("kind", ["allgather", "alltoall", "gather", "scatter"])
def test_while_a_rank_has_joined_they_fail_and_say_so(world, kind):
    *texts, last = world.run(call_with_one_joined, kind)
    assert last is None
    for text in texts:
        assert f"{kind} 'j': rank {world.size - 1} on " in text
        assert "has joined" in text


# ---- more than 2 GiB ----


def move_more_than_2_gib():
    hvd.init()
    elems = (1 << 31) + 3
    source = torch.full((elems,), hvd.rank() + 1, dtype=torch.uint8)
    into = torch.zeros(elems * hvd.size(), dtype=torch.uint8)
    posting = _core.posting(_core.ALLGATHER_INTO, "x", True, _core.UINT8, source, into)
    assert worlds.current().team.engine.post(posting).wait() is None
    for rank in range(hvd.size()):
        part = into[rank * elems : (rank + 1) * elems]
        assert part.min() == part.max() == rank + 1
    source.random_(0, 255)
    back = torch.zeros(elems, dtype=torch.uint8)
    splits = (elems, 0, elems, 0) if hvd.rank() == 0 else (0, elems, 0, elems)
    posting = _core.posting(
        _core.ALLTOALL_INTO, "x", True, _core.UINT8, source, back, splits=splits
    )
    assert worlds.current().team.engine.post(posting).wait() is None
    assert torch.equal(source, back)


@pytest.mark.timeout(240)
@pytest.mark.ranks(2)
@pytest.mark.hosts("1,1")
@pytest.mark.wide
@pytest.mark.above_mpi  # a message is a segment at most
def test_parts_of_more_than_2_to_the_31_bytes_arrive(world):
    world.run(move_more_than_2_gib, limit_s=200)
