"""A queue's collectives, on the group and staged, give what those in host memory give."""

import functools

import pytest
import torch

import hvdlite as hvd
from tests.core.oracles import DTYPES, case_of, mismatch, ops_of
from tests.gpu.stand_in import allreduce, new_queue, request, result_of

pytestmark = [pytest.mark.ranks(1, 3), pytest.mark.hosts("2,1")]

routes = pytest.mark.parametrize("route", ["auto", "staged"])


@functools.cache
def queue_by(route):
    return new_queue(route)


def queue(route):
    """The queue of this route; a new one where the case before had another."""
    found = queue_by(route)
    if hvd.global_process_set.team is None or hvd.global_process_set.team.gpu_queue is not found:
        queue_by.cache_clear()
        found = queue_by(route)
    return found


def combine(route, dtype, exact):
    taken = queue(route)
    size, problems = hvd.size(), []
    for op in ops_of(dtype):
        for count in (0, 1, size + 1, 3001):
            given, expected = case_of(dtype, op, hvd.rank(), size, count)
            before = given.clone()
            got = result_of(allreduce(taken, f"{op} {count}", given, op))
            problems += [
                f"{op} {count}: {text}" for text in [mismatch(got, expected, exact)] if text
            ]
            problems += [f"{op} {count}: input"] if not torch.equal(given, before) else []
            # In place.
            what = request("allreduce", f"{op}_ {count}", given, op)
            got = result_of(taken.start(what, given, given))
            problems += (
                [f"{op}_ {count}"] if got is not given or mismatch(got, expected, exact) else []
            )
    assert not problems, problems


@routes
@pytest.mark.parametrize("dtype", DTYPES)
def test_allreduce_of_every_dtype_and_op(world, route, dtype):
    world.run(combine, route, dtype, exact=dtype not in ("float16", "bfloat16"))


def scale(route):
    taken = queue(route)
    rank, problems = hvd.rank(), []
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64):
        for op in ("Sum", "Average", "Max"):
            for pre, post in ((0.5, 1.0), (1.0, 0.3), (2.0, 0.7), (-1.5, 3.0)):
                if dtype is torch.uint8 and pre < 0:
                    continue
                name = f"{dtype} {op} {pre} {post}"
                given = (torch.arange(30) * 4 + rank).to(dtype)
                expected = hvd.allreduce(
                    given,
                    name=name,
                    op=getattr(hvd, op),
                    prescale_factor=pre,
                    postscale_factor=post,
                )
                got = result_of(allreduce(taken, name, given, op, prescale=pre, postscale=post))
                if mismatch(got, expected):
                    problems.append((name, mismatch(got, expected)))
    assert not problems, problems


@routes
def test_scale_factors_give_what_they_give_in_host_memory(world, route):
    world.run(scale, route)


def move(route, dtype):
    taken = queue(route)
    rank, size, problems = hvd.rank(), hvd.size(), []

    def check(what, got, expected):
        if mismatch(got, expected):
            problems.append((what, mismatch(got, expected)))

    def rows_of(member, count, width=3):
        values = torch.arange(count * width) * 7 + member * 11
        return (values % 2 if dtype is torch.bool else values % 120).to(dtype).view(count, width)

    for root in range(size):
        given = rows_of(rank, 5)
        got = result_of(
            taken.start(
                request("broadcast", f"b{root}", given, root=root), given, torch.zeros_like(given)
            )
        )
        check("broadcast", got, rows_of(root, 5))
        check("the broadcast's input", given, rows_of(rank, 5))
    for counts in ([4] * size, [2 * m for m in range(size)], [0] * size, [0] * (size - 1) + [7]):
        given = rows_of(rank, counts[rank])
        transfer = taken.start(request("allgather", f"g{counts}", given), given, None)
        expected = torch.cat([rows_of(member, count) for member, count in enumerate(counts)])
        check(f"allgather {counts}", result_of(transfer), expected)
        if transfer.rows() != tuple(counts):
            problems.append(("allgather's rows", transfer.rows()))
    for sent in (lambda a, b: 2, lambda a, b: a * b, lambda a, b: 0, lambda a, b: (a + 2 * b) % 3):
        splits = torch.tensor([sent(rank, member) for member in range(size)])
        given = rows_of(rank, int(splits.sum()) + 2)  # rows that go to nobody
        what = request("alltoall", f"a{sent(1, 2)}.{sent(1, 1)}", given, splits=splits)
        transfer = taken.start(what, given, None)
        parts = []
        for member in range(size):
            begin = sum(sent(member, other) for other in range(rank))
            theirs = rows_of(member, sum(sent(member, other) for other in range(size)) + 2)
            parts.append(theirs[begin : begin + sent(member, rank)])
        check("alltoall", result_of(transfer), torch.cat(parts))
        if transfer.rows() != tuple(sent(member, rank) for member in range(size)):
            problems.append(("alltoall's rows", transfer.rows()))
    # Rows without elements.
    given = torch.ones((rank, 0), dtype=dtype)
    got = result_of(taken.start(request("allgather", "empty", given), given, None))
    check("rows without elements", got, torch.ones((sum(range(size)), 0), dtype=dtype))
    assert not problems, problems


@routes
@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int16, torch.bool, torch.bfloat16, torch.float64]
)
def test_broadcast_allgather_and_alltoall_move_every_width(world, route, dtype):
    world.run(move, route, dtype)


def scatter(route, dtype):
    taken = queue(route)
    rank, size, problems = hvd.rank(), hvd.size(), []
    for op in ("Sum", "Average"):
        if dtype is torch.bool and op == "Average":
            continue
        for rows in (0, 1, size, size + 1, 4 * size - 1, 101):
            for pre, post in ((1.0, 1.0), (2.0, 0.5)):
                if dtype is torch.bool and pre != 1.0:
                    continue
                name = f"{op} {rows} {pre}"
                given = ((torch.arange(rows * 2) + rank) * size % 100).to(dtype).view(rows, 2)
                before = given.clone()
                expected = hvd.reducescatter(
                    given,
                    name=name,
                    op=getattr(hvd, op),
                    prescale_factor=pre,
                    postscale_factor=post,
                )
                what = request("reducescatter", name, given, op, prescale=pre, postscale=post)
                got = result_of(taken.start(what, given, torch.empty_like(expected)))
                if mismatch(got, expected):
                    problems.append((name, mismatch(got, expected)))
                if not torch.equal(given, before):
                    problems.append((name, "the input has changed"))
    assert not problems, problems


@routes
@pytest.mark.parametrize("dtype", [torch.int16, torch.bool, torch.int64, torch.float32])
def test_reducescatter_gives_each_rank_its_rows(world, route, dtype):
    world.run(scatter, route, dtype)


def combine_by_adasum(route):
    taken = queue(route)
    given = torch.arange(40.0) + 100 * hvd.rank() ** 2
    expected = hvd.allreduce(given, op=hvd.Adasum, name="adasum")
    got = result_of(allreduce(taken, "adasum", given, "Adasum"))
    assert torch.equal(got, expected)
    assert result_of(allreduce(taken, "sum", torch.ones(2))).tolist() == [hvd.size()] * 2


@routes
def test_adasum_goes_through_host_memory_and_takes_its_turn(world, route):
    world.run(combine_by_adasum, route)


def disagree_about_a_group():
    taken = queue("auto")
    tensor = torch.ones(6)
    layout = (2, 111 if hvd.rank() else 222)
    return allreduce(taken, "group", tensor, group=layout).wait()


def test_tensors_that_are_reduced_as_one_are_compared_as_a_group(world):
    texts = set(world.run(disagree_about_a_group))
    assert len(texts) == 1
    assert world.size == 1 or "in a group of 2 tensors" in texts.pop()
