"""Random programs, every one of them valid: a program that hangs is not its author's fault.

First wishes are drawn, which know nothing of each other; so hypothesis can take any of them away
when it shrinks. Then `granted` makes a valid program of them.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.properties.calls import (
    Allgather,
    AllgatherObject,
    Allreduce,
    Alltoall,
    Barrier,
    Broadcast,
    BroadcastObject,
    Call,
    Compressed,
    Gradient,
    Reducescatter,
    SparseAllreduce,
    Tensor,
)
from tests.properties.programs import Turn
from tests.properties.wishes import Wish, WishToAdd, WishToJoin, WishToRemove, granted

FLOATS = ("float32", "float64", "float16", "bfloat16")
INTEGERS = ("int32", "int64", "uint8", "int8", "int16")
DTYPES = (*FLOATS, *INTEGERS, "bool")
ALL_OPS = ("Sum", "Average", "Min", "Max", "Product", "Adasum")
MOST_RANKS = 4

# Around the limits of the tiny knobs. The large ones are several blocks with the default knobs too.
COUNTS = (2, 0, 3, 7, 15, 16, 17, 33, 63, 65, 129, 251, 257, 513, 1000, 1025, 2049, 4099)
LARGE_COUNTS = (70_001, 300_007)
ROWS = (1, 0, 2, 3, 17, 100, 257, 5)
# The simple ones first, to which hypothesis shrinks.
TAILS = ((), (2,), (3,), (0,), (2, 3), (4, 0), (17,), (65,), (257,), (1025,))
WITH_ROWS = (
    (1,),
    *((count,) for count in COUNTS),
    *((2, 3), (4, 1), (3, 0), (0, 2), (2, 1, 3), (1, 2, 2), (5, 257), (16, 65), (1025, 2)),
)
LARGE = tuple((count,) for count in LARGE_COUNTS)


def digits(number: int, *bases: int) -> list[int]:
    """A number's digits, the first base's the most significant.

    One draw for many choices is many times as fast as a draw for each, and shrinks as well: to 0,
    the most significant digit first.
    """
    found = []
    for base in reversed(bases):
        number, digit = divmod(number, base)
        found.append(digit)
    return found[::-1]


def choices(*bases: int) -> Any:
    """Digits, as many as there are bases."""
    most = 1
    for base in bases:
        most *= base
    return st.integers(0, most - 1).map(lambda number: digits(number, *bases))


# ---- calls ----


def groups(dtypes: Any, shapes: Any) -> Any:
    """One tensor that is no group, or a group."""
    tensor = st.builds(Tensor, st.sampled_from(dtypes), st.sampled_from(shapes))
    alone = st.tuples(st.tuples(tensor), st.just(False))
    several = st.lists(tensor, max_size=4).map(lambda them: (tuple(them), True))
    return st.one_of(alone, alone, several)


def factors(group: tuple[Tensor, ...], op: str) -> tuple[float, ...]:
    """With which every sum is exact; integers' products are truncated."""
    dtypes = {tensor.dtype for tensor in group}
    if "bool" in dtypes or (op == "Adasum" and not dtypes <= set(FLOATS)):
        return (1.0,)
    return (1.0, 1.0, 1.0, 0.5, 2.0, 0.25, 1.0 if "uint8" in dtypes else -1.0)


@st.composite
def reductions(draw: Any, kind: Any, dtypes: Any, shapes: Any, ops: tuple[str, ...]) -> Any:
    group, grouped = draw(groups(dtypes, shapes))
    if any(tensor.dtype == "bool" for tensor in group):
        ops = tuple(op for op in ops if op not in ("Average", "Adasum"))
    pre, post, number = draw(choices(7, 7, len(ops)))
    allowed = factors(group, ops[number])
    prescale, postscale = allowed[pre % len(allowed)], allowed[post % len(allowed)]
    return kind(group, ops[number], prescale, postscale, grouped)


def numbers_of_rows(count: int) -> Any:
    """For each of `count` tensors, by rank."""
    own = choices(*[len(ROWS)] * MOST_RANKS).map(lambda them: tuple(ROWS[i] for i in them))
    return st.tuples(*[own] * count)


@st.composite
def gathers(draw: Any, dtypes: Any) -> Any:
    group, grouped = draw(groups(dtypes, TAILS))
    return Allgather(group, draw(numbers_of_rows(len(group))), grouped)


@st.composite
def exchanges(draw: Any, dtypes: Any) -> Any:
    tensor = Tensor(draw(st.sampled_from(dtypes)), draw(st.sampled_from(TAILS)))
    rest, even = draw(choices(3, 2 * len(ROWS)))
    if even < len(ROWS):
        return Alltoall(tensor, even=ROWS[even])
    return Alltoall(tensor, draw(numbers_of_rows(MOST_RANKS)), rest=rest)


@st.composite
def sparse(draw: Any) -> Any:
    dtype, op, rows, columns = draw(choices(len(FLOATS + INTEGERS), 2, 20, 5))
    elements = draw(numbers_of_rows(1))[0]
    return SparseAllreduce(
        (*FLOATS, *INTEGERS)[dtype], (rows + 1, columns + 1), elements, ALL_OPS[op]
    )


def calls(large: bool) -> Any:
    """large: now and then a tensor of some megabytes, too."""
    with_rows = WITH_ROWS + LARGE * large
    shapes = ((1,), (), *with_rows[1:])

    def allreduces(dtypes: Any, ops: tuple[str, ...]) -> Any:
        return reductions(Allreduce, dtypes, shapes, ops)

    def reducescatters(dtypes: Any) -> Any:
        return reductions(Reducescatter, dtypes, with_rows, ("Sum", "Average"))

    def broadcasts(dtypes: Any) -> Any:
        tensor = st.builds(Tensor, st.sampled_from(dtypes), st.sampled_from(shapes))
        return st.builds(Broadcast, tensor, st.integers(0, MOST_RANKS - 1))

    differentiable = st.one_of(
        allreduces(FLOATS, ("Sum", "Average")),
        reducescatters(FLOATS),
        gathers(FLOATS),
        exchanges(FLOATS),
        broadcasts(FLOATS),
    ).map(lambda call: Gradient(call) if getattr(call, "tensors", True) else call)
    compressible = st.one_of(
        allreduces(FLOATS + INTEGERS, ("Sum", "Average", "Min", "Max")),
        reducescatters(FLOATS + INTEGERS),
    )
    return st.one_of(
        allreduces(DTYPES, ALL_OPS),
        allreduces(DTYPES, ALL_OPS),
        broadcasts(DTYPES),
        gathers(DTYPES),
        exchanges(DTYPES),
        reducescatters(DTYPES),
        st.just(Barrier()),
        sparse(),
        differentiable,
        st.builds(Compressed, compressible, st.sampled_from(("fp16", "bf16"))),
        st.sampled_from((AllgatherObject(), BroadcastObject(0), BroadcastObject(1))),
    )


# ---- wishes ----


def _turn_of(chosen: list[int]) -> Turn:
    refused, polls, strided, in_place, late, early, form = chosen
    return Turn(
        ("sync", "async", "async", "dropped")[form],
        early,
        late,
        bool(in_place),
        strided == 1,
        polls == 1,
        refused == 1,
    )


turns = choices(12, 5, 5, 2, 5, 4, 4).map(_turn_of)


def _wish_of(call: Call, turns: tuple[Turn, ...], chosen: list[int]) -> Wish:
    odd, odd_rank, odd_call, lost, thread, on, name = chosen
    return Wish(
        call,
        (None, "a", "b")[name],
        on,
        (0, 0, 0, 0, 1, 2)[thread],
        turns,
        (odd_rank, odd_call) if odd == 1 else None,
        max(0, lost - 30),
    )


def wishes(size: int, large: bool) -> Any:
    all_turns = st.one_of(st.just((Turn(),) * size), st.tuples(*[turns] * size))
    ranks = 1 << size
    step = st.builds(_wish_of, calls(large), all_turns, choices(8, size, 31, 30 + ranks, 6, 3, 3))
    add = st.builds(WishToAdd, st.integers(1, ranks - 1))
    remove = st.builds(WishToRemove, st.integers(0, 3))
    join = st.builds(WishToJoin, choices(*[5] * size).map(tuple))
    # Not one_of, which takes what is given several times for one.
    return st.integers(0, 15).flatmap(
        lambda number: step if number < 12 else (remove, add, add, join)[number - 12]
    )


def programs(size: int, large: bool = False) -> Any:
    """Valid programs for so many ranks. large: also with tensors of some megabytes."""
    few, many = (st.lists(wishes(size, large), min_size=n, max_size=20) for n in (1, 8))
    return st.one_of(few, many).map(lambda them: granted(size, them))
