"""Every collective of c10d, beside what plain torch computes from all ranks' tensors."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from hvdlite import _core
from hvdlite.errors import HorovodInternalError
from tests.distributed.default_group import in_a_group

pytestmark = [pytest.mark.ranks(2, 3)]

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
# What is moved and not reduced.
MOVED = (*FLOATS, *INTEGERS, *COMPLEX, torch.bool, torch.uint16, torch.float8_e4m3fn)
SHAPES = ((), (0,), (1,), (5,), (3, 4), (2, 3, 0), (700, 11))

# Their names in torch before 2.13, and since then.
gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

BITWISE = {
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
PAIRWISE = {
    ReduceOp.SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    **(BITWISE if hasattr(_core, "BAND") else {}),
}


def of_rank(rank, shape, dtype=torch.float32):
    """Other values on every rank and at every place, small enough to be exact in any dtype."""
    count = torch.Size(shape).numel()
    values = (torch.arange(count) * 3 + rank * 2) % 5
    if dtype is torch.bool:
        return ((values + rank) % 2 == 0).reshape(shape)
    if dtype.is_complex:
        return torch.complex(values.double(), values.double() - rank).to(dtype).reshape(shape)
    return values.to(torch.float32).to(dtype).reshape(shape)


def same(found, expected):
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert raw(found) == raw(expected), (found, expected)


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


def reduced(op, tensors):
    return functools.reduce(PAIRWISE[op], tensors)


def ended(work):
    """Waits for what an operation returned, if it was asynchronous."""
    if work is not None:
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()


@in_a_group
def all_reduces(rank, size, dtypes, ops):
    for dtype, op, shape in itertools.product(dtypes, ops, SHAPES):
        expected = reduced(op, [of_rank(r, shape, dtype) for r in range(size)])
        for async_op in (False, True, rank == 0):  # also where ranks go different ways
            tensor = of_rank(rank, shape, dtype)
            ended(dist.all_reduce(tensor, op, async_op=async_op))
            same(tensor, expected)


@pytest.mark.parametrize("dtypes", [FLOATS, INTEGERS, (torch.bool,)], ids=["float", "int", "bool"])
def test_all_reduce_combines_the_tensors_of_all_ranks(world, tmp_path, dtypes):
    ops = [op for op in PAIRWISE if op not in BITWISE or dtypes is not FLOATS]
    if dtypes == (torch.bool,):
        ops = [ReduceOp.MIN, ReduceOp.MAX]  # torch has no sum of bool
    world.run(all_reduces, tmp_path, dtypes, ops)


@in_a_group
def scaled_reduces(rank, size):
    for dtype in (torch.float32, torch.float64, *COMPLEX):
        total = sum(of_rank(r, (6,), dtype) for r in range(size))
        tensor = of_rank(rank, (6,), dtype)
        dist.all_reduce(tensor)
        same(tensor, total)
        tensor = of_rank(rank, (6,), dtype)
        dist.all_reduce(tensor, ReduceOp.AVG)
        torch.testing.assert_close(tensor, total / size)
        tensor = of_rank(rank, (6,), dtype)
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))
        same(tensor, total * 0.5)


def test_averages_and_scaled_sums(world, tmp_path):
    world.run(scaled_reduces, tmp_path)


@in_a_group
def strided(rank, size):
    expected = sum(of_rank(r, (4, 3)).t() for r in range(size))
    tensor = of_rank(rank, (4, 3)).t()
    dist.all_reduce(tensor)
    same(tensor, expected)
    whole = torch.zeros(6, 8)
    dist.broadcast(whole[1:4, ::2].copy_(of_rank(rank, (3, 4))), 1)
    same(whole[1:4, ::2], of_rank(1, (3, 4)))
    assert not whole[4:].any()
    assert not whole[:, 1::2].any()
    columns = torch.zeros(5, size)
    parts = list(columns.unbind(1))
    dist.all_gather(parts, of_rank(rank, (10,))[::2])
    for r in range(size):
        same(columns[:, r].contiguous(), of_rank(r, (10,))[::2])


def test_tensors_of_any_strides_are_read_and_written_in_place(world, tmp_path):
    world.run(strided, tmp_path)


@in_a_group
def moves(rank, size, dtypes):
    root = size - 1
    for dtype, shape, async_op in itertools.product(dtypes, SHAPES, (False, True)):
        every = [of_rank(r, shape, dtype) for r in range(size)]
        own = every[rank].clone()

        tensor = own.clone()
        ended(dist.broadcast(tensor, root, async_op=async_op))
        same(tensor, every[root])

        parts = [torch.zeros_like(own) for _ in range(size)]
        ended(dist.all_gather(parts, own, async_op=async_op))
        for part, expected in zip(parts, every, strict=True):
            same(part, expected)

        whole = torch.zeros(size, *shape).to(dtype)
        ended(gather_single(whole, own, async_op=async_op))
        for part, expected in zip(whole, every, strict=True):
            same(part, expected)

        parts = [torch.zeros_like(own) for _ in range(size)]
        gathered = parts if rank == root else None
        ended(dist.gather(own, gathered, root, async_op=async_op))
        for part, expected in zip(parts, every, strict=True):
            same(part, expected if rank == root else torch.zeros_like(own))

        tensor = torch.zeros_like(own)
        sent = [of_rank(7 + r, shape, dtype) for r in range(size)] if rank == root else None
        ended(dist.scatter(tensor, sent, root, async_op=async_op))
        same(tensor, of_rank(7 + rank, shape, dtype))

        parts = [torch.zeros_like(own) for _ in range(size)]
        sent = [of_rank(10 * rank + to, shape, dtype) for to in range(size)]
        ended(dist.all_to_all(parts, sent, async_op=async_op))
        for r, part in enumerate(parts):
            same(part, of_rank(10 * r + rank, shape, dtype))


@pytest.mark.parametrize("half", [0, 1])
def test_tensors_of_any_dtype_are_moved(world, tmp_path, half):
    world.run(moves, tmp_path, MOVED[half::2])


@in_a_group
def uneven(rank, size):
    """Rank r sends r + 1 rows."""
    for dtype, async_op in itertools.product((torch.float32, torch.complex64), (False, True)):
        every = [of_rank(r, (r + 1, 2), dtype) for r in range(size)]
        parts = [torch.zeros_like(tensor) for tensor in every]
        ended(dist.all_gather(parts, every[rank], async_op=async_op))
        for part, expected in zip(parts, every, strict=True):
            same(part, expected)

        # Rank r sends r + to rows to each rank `to`.
        sent = [of_rank(10 * rank + to, (rank + to, 2), dtype) for to in range(size)]
        expected = [of_rank(10 * r + rank, (rank + r, 2), dtype) for r in range(size)]
        parts = [torch.zeros_like(tensor) for tensor in expected]
        ended(dist.all_to_all(parts, sent, async_op=async_op))
        for part, wanted in zip(parts, expected, strict=True):
            same(part, wanted)

        rows = [rank + r for r in range(size)]
        whole = torch.zeros(sum(rows), 2).to(dtype)
        ended(dist.all_to_all_single(whole, torch.cat(sent), rows, rows, async_op=async_op))
        same(whole, torch.cat(expected))

        # Member r keeps r + 1 rows of the sum.
        inputs = [of_rank(rank, (r + 1, 2), dtype) for r in range(size)]
        output = torch.zeros(rank + 1, 2).to(dtype)
        ended(dist.reduce_scatter(output, inputs, async_op=async_op))
        same(output, sum(of_rank(r, (rank + 1, 2), dtype) for r in range(size)))


def test_parts_of_different_sizes(world, tmp_path):
    world.run(uneven, tmp_path)


@in_a_group
def reduces(rank, size):
    root = size - 1
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
    for dtype, op, shape in itertools.product(dtypes, PAIRWISE, SHAPES):
        if op in BITWISE and dtype.is_floating_point:
            continue
        for async_op in (False, True):
            tensor = of_rank(rank, shape, dtype)
            ended(dist.reduce(tensor, root, op, async_op=async_op))
            expected = reduced(op, [of_rank(r, shape, dtype) for r in range(size)])
            same(tensor, expected if rank == root else of_rank(rank, shape, dtype))

            parts = [of_rank(3 * rank + to, shape, dtype) for to in range(size)]
            expected = reduced(op, [of_rank(3 * r + rank, shape, dtype) for r in range(size)])
            output = torch.zeros_like(expected)
            ended(dist.reduce_scatter(output, parts, op, async_op=async_op))
            same(output, expected)

            output = torch.zeros_like(expected)
            whole = torch.stack(parts)
            ended(scatter_single(output, whole, op, async_op=async_op))
            same(output, expected)
            same(whole, torch.stack(parts))


def test_reduce_and_reduce_scatter(world, tmp_path):
    world.run(reduces, tmp_path)


@in_a_group
def coalesced(rank, size):
    for async_ops in (False, True):
        tensors = [of_rank(rank, (n,)) for n in (3, 0, 5)]
        with dist._coalescing_manager(async_ops=async_ops) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        if async_ops:
            manager.wait()
        for tensor in tensors:
            same(tensor, sum(of_rank(r, tensor.shape) for r in range(size)))

        outputs = [torch.zeros(size * n) for n in (2, 3)]
        with dist._coalescing_manager(async_ops=async_ops) as manager:
            for output, n in zip(outputs, (2, 3), strict=True):
                gather_single(output, of_rank(rank, (n,)))
        if async_ops:
            manager.wait()
        for output, n in zip(outputs, (2, 3), strict=True):
            same(output, torch.cat([of_rank(r, (n,)) for r in range(size)]))

        outputs = [torch.zeros(n) for n in (2, 3)]
        with dist._coalescing_manager(async_ops=async_ops) as manager:
            for output, n in zip(outputs, (2, 3), strict=True):
                scatter_single(output, of_rank(rank, (size * n,)))
        if async_ops:
            manager.wait()
        for output, n in zip(outputs, (2, 3), strict=True):
            total = sum(of_rank(r, (size * n,)) for r in range(size))
            same(output, total.view(size, n)[rank])


def test_coalesced_operations(world, tmp_path):
    world.run(coalesced, tmp_path)


@in_a_group
def sparse(rank, size):
    def of(r, dtype, sparse_dim):
        """Rank 1 has no elements."""
        count = 0 if r == 1 else 3
        indices = torch.tensor([[r, 3, 3], [0, 1, 1]])[:sparse_dim, :count]
        values = torch.tensor([[1, 2], [2, 3], [r, 4]])[:count, : 3 - sparse_dim]
        values = values.squeeze(1) if sparse_dim == 2 else values
        if dtype.is_complex:
            values = values * (1 + 2j)
        shape = size + 4, 2
        return torch.sparse_coo_tensor(indices, values.to(dtype), shape, check_invariants=True)

    for sparse_dim in (1, 2):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
            tensor = of(rank, dtype, sparse_dim)
            dist.all_reduce(tensor)
            assert tensor.is_sparse
            total = sum(of(r, dtype, sparse_dim).to_dense() for r in range(size))
            same(tensor.to_dense(), total.to(dtype))
    tensor = of(rank, torch.complex64, 1)
    dist.group.WORLD.allreduce([tensor]).wait()  # as C++ calls it
    same(tensor.to_dense(), sum(of(r, torch.complex64, 1).to_dense() for r in range(size)))
    square = torch.ones(2, 2, dtype=torch.complex64).to_sparse()
    with pytest.raises(ValueError, match=r"a view of a sparse complex tensor; pass its clone\(\)"):
        dist.all_reduce(square.t())


def test_sparse_tensors_are_added(world, tmp_path):
    world.run(sparse, tmp_path)


@in_a_group
def objects(rank, size):
    found = [None] * size
    dist.all_gather_object(found, {"rank": rank, "text": "x" * rank})
    assert found == [{"rank": r, "text": "x" * r} for r in range(size)]
    given = [("root", rank), [1, 2]]
    dist.broadcast_object_list(given, 1)
    assert given == [("root", 1), [1, 2]]
    mine = [None]
    dist.scatter_object_list(mine, [str(r) for r in range(size)] if rank == 1 else None, 1)
    assert mine == [str(rank)]
    gathered = [None] * size if rank == 1 else None
    dist.gather_object(rank * "y", gathered, 1)
    assert rank != 1 or gathered == [r * "y" for r in range(size)]


def test_objects(world, tmp_path):
    world.run(objects, tmp_path)


ONES: torch.Tensor = torch.ones(3)

# On each side a call that does not match the other's, and what the error names.
MISMATCHES = {
    "operations": (
        lambda: dist.all_reduce(torch.ones(3)),
        lambda: dist.broadcast(torch.ones(3), 0),
        ("allreduce", "broadcast"),
    ),
    "shapes": (
        lambda: dist.all_reduce(torch.ones(3)),
        lambda: dist.all_reduce(torch.ones(4)),
        (r"float32\[3\]", r"float32\[4\]"),
    ),
    "dtypes": (
        lambda: dist.all_reduce(torch.ones(3)),
        lambda: dist.all_reduce(torch.ones(3, dtype=torch.int32)),
        ("float32", "int32"),
    ),
    "ops": (
        lambda: dist.all_reduce(torch.ones(3)),
        lambda: dist.all_reduce(torch.ones(3), ReduceOp.MAX),
        ("op Sum", "op Max"),
    ),
    "sizes of one rank's part": (
        lambda: dist.all_gather([torch.zeros(2) for _ in range(dist.get_world_size())], ONES[:2]),
        lambda: dist.all_gather([*(torch.zeros(2),) * (dist.get_world_size() - 1), ONES], ONES),
        ("allgather", "splits"),
    ),
}


@in_a_group
def disagrees(rank, size, name):
    one, other, texts = MISMATCHES[name]
    with pytest.raises(RuntimeError) as found:
        (other if rank == size - 1 else one)()
    assert isinstance(found.value, dist.DistBackendError)
    assert isinstance(found.value, HorovodInternalError)
    lines = [f"test_collectives.py:{call.__code__.co_firstlineno}\\)" for call in (one, other)]
    for text in (*texts, *lines):
        assert found.match(text)
    # The group goes on.
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [size, size]


@pytest.mark.parametrize("name", MISMATCHES)
def test_ranks_that_differ_get_one_error_and_the_group_goes_on(world, tmp_path, name):
    world.run(disagrees, tmp_path, name)


@in_a_group
def splits_differ(rank, size):
    sent = [1] * size
    sent[0] += rank == 1
    with pytest.raises(dist.DistBackendError) as found:
        dist.all_to_all_single(torch.zeros(size), torch.zeros(sum(sent)), None, sent)
    assert found.match(
        r"' \(test_collectives\.py:\d+\): rank 1 on \S+ sends 2 elements to rank 0 on \S+, "
        "which expects 1"
    )


def test_splits_that_do_not_fit_are_an_error_on_every_rank(world, tmp_path):
    world.run(splits_differ, tmp_path)


# Refused at the call, before anything is sent: the other ranks need not take part.
REFUSED = {
    "the output": lambda size: gather_single(torch.zeros(5), torch.ones(7)),
    "expected": lambda size: scatter_single(torch.zeros(5), torch.ones(7)),
    "split sizes": lambda size: dist.all_to_all_single(
        torch.zeros(4), torch.zeros(4), [1] * size, [9] * size
    ),
    "float16|float32": lambda size: gather_single(
        torch.zeros(size, dtype=torch.float16), torch.ones(1)
    ),
    "complex": lambda size: dist.all_reduce(torch.ones(2, dtype=torch.complex64), ReduceOp.MAX),
    "can't be reduced": lambda size: dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fn)),
    "broadcast: there is no rank": lambda size: dist.broadcast(torch.ones(2), size),
    "reduce: there is no rank": lambda size: dist.reduce(torch.ones(2), size),
    "gather: there is no rank": lambda size: dist.gather(torch.ones(2), None, size),
    "scatter: there is no rank": lambda size: dist.scatter(torch.ones(2), None, size),
}


@in_a_group
def refuses(rank, size):
    if rank == 0:
        for text, call in REFUSED.items():
            with pytest.raises((ValueError, RuntimeError), match=text):
                call(size)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [size, size]


def test_bad_arguments_are_refused_and_take_no_number(world, tmp_path):
    world.run(refuses, tmp_path)
