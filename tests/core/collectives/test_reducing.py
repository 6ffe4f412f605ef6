"""reduce and reducescatter as the engine has them: any cut, a tensor for each member, all ops."""

import functools
import itertools

import pytest
import torch

import hvdlite as hvd
from hvdlite import _core
from hvdlite.world import world as worlds
from tests.core import limits, oracles

LAYOUTS = ("1,1", "2,2", "3,1", "1,3,3", "2,1,1")
BITWISE = {"Band": torch.bitwise_and, "Bor": torch.bitwise_or, "Bxor": torch.bitwise_xor}
_numbers = itertools.count()


def begin():
    """Names are free again, and the same on every rank, whatever was refused before."""
    global _numbers
    hvd.init()
    _numbers = itertools.count()


def post(kind, source, result, op, splits=None, root=0, **more):
    """Starts it under a new name, which is the same on every rank."""
    tensor = source[0] if isinstance(source, tuple) else source
    dtype = getattr(_core, str(tensor.dtype).removeprefix("torch.").upper())
    name = f"reducing {next(_numbers)}"
    posting = _core.posting(
        *(kind, name, False, dtype, source, result, getattr(_core, op.upper()), root),
        splits=None if splits is None else torch.tensor(splits),
        **more,
    )
    return worlds.current().team.engine.post(posting, True)


def ended(operations):
    texts = [operation.wait() for operation in operations]
    assert texts == [None] * len(texts)


def ops_of(dtype):
    return oracles.ops_of(dtype) + (() if dtype in oracles.FLOATS else tuple(BITWISE))


def case_of(dtype, op, rank, size, count):
    """This rank's input, and the result."""
    if op not in BITWISE:
        return oracles.case_of(dtype, op, rank, size, count)
    given = [_bits(dtype, member, count) for member in range(size)]
    return given[rank], functools.reduce(BITWISE[op], given)


def _bits(dtype, rank, count):
    draw = torch.Generator().manual_seed(1000 * rank + count)
    if dtype == "bool":
        return torch.randint(0, 2, (count,), generator=draw).bool()
    return torch.randint(-(2**62), 2**62, (count,), generator=draw).to(getattr(torch, dtype))


def cuts(count, size):
    """Ways to deal out so many elements."""
    even = [len(part) for part in torch.arange(count).tensor_split(size)]
    first, last = [0] * size, [0] * size
    first[0] = last[-1] = count
    rising = [count * (i + 1) // size - count * i // size for i in range(size)]
    lopsided = [count * (i + 1) ** 2 // size**2 - count * i**2 // size**2 for i in range(size)]
    return [even, first, last, rising, lopsided, lopsided[::-1]]


def as_sum(op):
    """Averages are divided by what may not be exact."""
    return op != "Average"


def scatters(dtype, knobs):
    begin()
    rank, size = hvd.rank(), hvd.size()
    wrong, operations, checks = [], [], []
    for op in ops_of(dtype):
        for count in limits.counts(knobs, dtype, size):
            given, whole = case_of(dtype, op, rank, size, count)
            for splits in cuts(count, size):
                expected = whole.split(splits)[rank]
                result = torch.empty_like(expected)
                parts = given.split(splits)
                source = tuple(part.clone() for part in parts) if splits[0] % 2 else given
                operations.append(post(_core.REDUCESCATTER, source, result, op, splits))
                checks.append((f"{op} of {count} cut {splits}", result, expected, as_sum(op)))
    ended(operations)
    for what, result, expected, exact in checks:
        if problem := oracles.mismatch(result, expected, exact):
            wrong.append(f"{what}: {problem}")
    assert not wrong, "\n".join(wrong[:20])


@pytest.mark.ranks(*limits.SIZES)
@pytest.mark.hosts(*LAYOUTS)
@pytest.mark.parametrize("knobs", limits.KNOBS)
@pytest.mark.parametrize(
    "dtype", oracles.mostly_on_few_ranks([*oracles.WIDTHS, "bool"], ("int32", "float32", "bool"))
)
def test_every_member_gets_its_share_of_any_cut(world, dtype, knobs):
    world.run(scatters, dtype, knobs, knobs=limits.KNOBS[knobs])


def reduces(dtype, knobs):
    begin()
    rank, size = hvd.rank(), hvd.size()
    wrong, operations, checks = [], [], []
    for op in ops_of(dtype):
        for count in limits.counts(knobs, dtype, size):
            for root in range(size):
                given, expected = case_of(dtype, op, rank, size, count)
                kept = given.clone()
                result = torch.empty_like(given) if count % 2 else given
                is_root = rank == root
                operations.append(
                    post(_core.REDUCE, given, result if is_root else None, op, root=root)
                )
                checks.append(
                    (
                        f"{op} of {count} to {root}",
                        result if is_root else given,
                        expected if is_root else kept,
                        as_sum(op) or not is_root,
                    )
                )
                if is_root and result is not given:
                    checks.append((f"input of {op} of {count}", given, kept, True))
    ended(operations)
    for what, result, expected, exact in checks:
        if problem := oracles.mismatch(result, expected, exact):
            wrong.append(f"{what}: {problem}")
    assert not wrong, "\n".join(wrong[:20])


@pytest.mark.ranks(*limits.SIZES)
@pytest.mark.hosts(*LAYOUTS)
@pytest.mark.parametrize("knobs", limits.KNOBS)
@pytest.mark.parametrize(
    "dtype", oracles.mostly_on_few_ranks([*oracles.WIDTHS, "bool"], ("float32", "bool"))
)
def test_the_root_gets_the_sum_and_the_others_keep_what_they_gave(world, dtype, knobs):
    world.run(reduces, dtype, knobs, knobs=limits.KNOBS[knobs])


def bits_of_an_allreduce(dtype):
    """In deterministic mode; and what this rank gets of a bitwise op of an allreduce."""
    begin()
    rank, size = hvd.rank(), hvd.size()
    draw = torch.Generator().manual_seed(rank)
    for count in (size, 1003, 100_003):
        values = torch.randn(count, generator=draw, dtype=torch.float64)
        given = (values * 10.0 ** (values * 2).round()).to(getattr(torch, dtype))
        whole = hvd.allreduce(given, op=hvd.Sum)
        for splits in cuts(count, size):
            share = torch.empty(splits[rank], dtype=given.dtype)
            reduced = torch.empty_like(given)
            ended(
                [
                    post(_core.REDUCESCATTER, given, share, "Sum", splits),
                    post(_core.REDUCE, given, reduced if rank == 0 else None, "Sum"),
                ]
            )
            assert torch.equal(share, whole.split(splits)[rank]), (count, splits)
            assert rank or torch.equal(reduced, whole), count


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.hosts("1,1", "2,1", "1,1,1", "3,1")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_deterministic_mode_the_bits_are_those_of_an_allreduce(world, dtype):
    world.run(bits_of_an_allreduce, dtype, knobs={"HVDLITE_DETERMINISTIC": "1"})


def sent_bytes(count, kind):
    """What this rank sends to other hosts."""
    begin()
    rank, size = hvd.rank(), hvd.size()
    engine = worlds.current().team.engine
    given = torch.ones(count)
    result = torch.empty(count // size if kind == "reducescatter" else count)
    hvd.barrier()
    before = engine.counters()["data_bytes"]
    if kind == "reducescatter":
        ended([post(_core.REDUCESCATTER, given, result, "Sum")])
    elif kind == "reduce":
        ended([post(_core.REDUCE, given, result if rank == 0 else None, "Sum")])
    else:
        ended([post(_core.ALLREDUCE, given, result, "Sum")])
    return engine.counters()["data_bytes"] - before


@pytest.mark.hosts("1,1", "2,2", "1,1,1", "1,1,1,1")
@pytest.mark.parametrize("algorithm", ["auto", "ring", "direct"])
def test_only_shares_are_sent_between_hosts(world, algorithm):
    knobs = {"HVDLITE_ALGORITHM": algorithm}
    count = 12 * (1 << 16)
    hosts = len(world.hosts.split(","))
    each = 4 * count * (hosts - 1)  # of all ranks together
    for kind, expected in (("allreduce", 2 * each), ("reducescatter", each), ("reduce", each)):
        assert sum(world.run(sent_bytes, count, kind, knobs=knobs)) == expected, kind


def refused():
    begin()
    tensor = torch.ones(4)
    root = 0 if hvd.size() == 1 else hvd.size() - 1
    with pytest.raises(ValueError, match="bitwise ops take integers and bool, not floats"):
        post(_core.REDUCE, tensor, tensor, "Band")
    with pytest.raises(ValueError, match="bitwise ops take integers and bool, not floats"):
        post(_core.ALLREDUCE, tensor, tensor, "Bxor")
    if hvd.rank() == root:
        with pytest.raises(ValueError, match="the tensor has no memory"):
            post(_core.REDUCE, tensor, None, "Sum", root=root)
    uneven = [4] + [0] * (hvd.size() - 1)
    with pytest.raises(ValueError, match="the source has 4 elements, expected 5"):
        post(_core.REDUCESCATTER, tensor, tensor, "Sum", [5] + [0] * (hvd.size() - 1))
    with pytest.raises(ValueError, match="the result has 9 elements"):
        post(_core.REDUCESCATTER, tensor, torch.ones(9), "Sum", uneven)


@pytest.mark.ranks(1, 2)
def test_what_does_not_fit_is_refused_where_it_is_posted(world):
    world.run(refused)


def disagrees():
    begin()
    rank, size = hvd.rank(), hvd.size()
    splits = [0] * size
    splits[rank] = 4
    differ = post(_core.REDUCESCATTER, torch.ones(4), torch.empty(4), "Sum", splits)
    roots = post(_core.REDUCE, torch.ones(4), torch.empty(4), "Sum", root=rank)
    return differ.wait(), roots.wait()


@pytest.mark.ranks(2)
@pytest.mark.hosts("1,1")
def test_other_shares_or_another_root_fail_on_every_rank(world):
    said = world.run(disagrees)
    assert len(set(said)) == 1
    assert all("reducescatter 'reducing" in shares for shares, _ in said)
    assert all("root_rank 0" in roots and "root_rank 1" in roots for _, roots in said)
