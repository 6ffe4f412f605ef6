"""The Python side of the collectives: all their forms, their arguments and their handles.

Sizes, dtypes and knobs in full are tested in tests/core."""

import gc
import threading
import weakref

import pytest
import torch

import hvdlite as hvd

# Where ranges of a dtype end: every sum below is exact in it.
MODULUS = {1: 16, 2: 16, 4: 4096, 8: 1 << 40}


def counts(size):
    """Counts around the number of ranks, a prime, and more than fits inline and in one block."""
    return (0, 1, max(size - 1, 0), size, size + 1, 1009, 70_001)


def values(rank, size, count, dtype, op=hvd.Sum):
    """x[j] = rank + size * j: a rank that is dropped, doubled or shifted changes the result."""
    x = torch.arange(count) * size + rank
    if dtype is torch.bool:
        return x % 3 == 0
    if op is hvd.Product:
        return (x % 2 + 1).to(dtype)
    return (x % MODULUS[dtype.itemsize]).to(dtype)


def expected(size, count, dtype, op):
    inputs = torch.stack([values(r, size, count, dtype, op) for r in range(size)])
    if dtype is torch.bool:
        return inputs.any(0) if op in (hvd.Sum, hvd.Max) else inputs.all(0)
    wide = inputs.to(torch.float64 if dtype.is_floating_point else torch.int64)
    if op is hvd.Min:
        result = wide.amin(0)
    elif op is hvd.Max:
        result = wide.amax(0)
    elif op is hvd.Product:
        result = wide.prod(0)
    else:
        result = wide.sum(0)
        if op is hvd.Average and not dtype.is_floating_point:
            # Of the sum as this dtype has it, toward zero.
            result = torch.div(result.to(dtype).long(), size, rounding_mode="trunc")
        elif op is hvd.Average:
            result = result / size
    return result.to(dtype)


def assert_same(result, wanted):
    assert result.dtype == wanted.dtype
    assert result.shape == wanted.shape
    exact = not wanted.dtype.is_floating_point
    tolerance = {"rtol": 0, "atol": 0} if exact else {}
    torch.testing.assert_close(result, wanted, **tolerance)


def bitwise_equal_on_all_ranks(tensor):
    raw = tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.reshape(-1)
    everyones = hvd.allgather(raw[None])
    return bool((everyones == everyones[0]).all())


def reduces(dtype, op):
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    for count in counts(size):
        x = values(rank, size, count, dtype, op)
        before = x.clone()
        wanted = expected(size, count, dtype, op)
        result = hvd.allreduce(x, op=op)
        assert_same(result, wanted)
        assert torch.equal(x, before)
        assert bitwise_equal_on_all_ranks(result)
        assert_same(hvd.synchronize(hvd.allreduce_async(x, op=op)), wanted)
        handle = hvd.allreduce_async_(x, op=op)
        assert hvd.synchronize(handle) is x
        assert_same(x, wanted)
        before = before.reshape(1, count, 1)
        assert hvd.allreduce_(before, op=op) is before
        assert_same(before.reshape(count), wanted)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.hosts("1,1", "2,1")
@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        (torch.float32, hvd.Average),
        (torch.bfloat16, hvd.Sum),
        (torch.int32, hvd.Average),
        (torch.bool, hvd.Sum),
        (torch.uint8, hvd.Product),
    ],
)
def test_every_form_of_allreduce_gives_the_oracles_result_on_every_rank(world, dtype, op):
    world.run(reduces, dtype, op)


def compresses(name):
    hvd.init()
    x = values(hvd.rank(), hvd.size(), 300, torch.float32) % 16
    compression = getattr(hvd.Compression, name)
    result = hvd.allreduce(x, op=hvd.Sum, compression=compression)
    wanted = sum(values(r, hvd.size(), 300, torch.float32) % 16 for r in range(hvd.size()))
    assert_same(result, wanted)
    integers = torch.tensor([2**30 + hvd.rank()])
    result = hvd.allreduce(integers, op=hvd.Max, compression=compression)
    assert result.item() == 2**30 + hvd.size() - 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["none", "fp16", "bf16"])
def test_what_is_compressed_comes_back_in_its_own_dtype(world, name):
    world.run(compresses, name)


def gathers(dtype):
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    for tail in ((), (3,), (2, 0), (300,)):
        for rows_of in (lambda r: r, lambda r: 2, lambda r: 0, lambda r: 100 * (r % 2)):
            parts = [
                torch.arange(rows_of(r) * max(1, torch.Size(tail).numel()))
                .add(r)
                .remainder(2 if dtype is torch.bool else 100)
                .to(dtype)[: rows_of(r) * torch.Size(tail).numel()]
                .reshape(rows_of(r), *tail)
                for r in range(size)
            ]
            assert_same(hvd.allgather(parts[rank]), torch.cat(parts))
            assert_same(hvd.synchronize(hvd.allgather_async(parts[rank])), torch.cat(parts))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.hosts("1,1", "2,1", "1,2")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.bfloat16])
def test_allgather_puts_rows_of_any_number_in_the_order_of_the_ranks(world, dtype):
    world.run(gathers, dtype)


def broadcasts(dtype):
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    for root in range(size):
        for count in counts(size):
            x = values(rank, size, count, dtype)
            before = x.clone()
            wanted = values(root, size, count, dtype)
            assert_same(hvd.broadcast(x, root), wanted)
            assert_same(hvd.synchronize(hvd.broadcast_async(x, root)), wanted)
            assert torch.equal(x, before)
            assert hvd.broadcast_(x, root) is x
            assert_same(x, wanted)
            assert hvd.synchronize(hvd.broadcast_async_(before, root)) is before
            assert_same(before, wanted)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.hosts("1,1", "2,1")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bool])
def test_every_form_of_broadcast_gives_every_rank_the_roots_values(world, dtype):
    world.run(broadcasts, dtype)


def not_contiguous():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    x = values(rank, size, 12, torch.float32).reshape(3, 4).t()
    wanted = sum(values(r, size, 12, torch.float32) for r in range(size)).reshape(3, 4).t()
    assert_same(hvd.allreduce(x, op=hvd.Sum), wanted)
    assert_same(hvd.broadcast(x, 0), values(0, size, 12, torch.float32).reshape(3, 4).t())
    assert hvd.allgather(x).shape == (4 * size, 3)
    for in_place in (hvd.allreduce_, lambda t: hvd.broadcast_(t, 0)):
        with pytest.raises(ValueError, match="not contiguous"):
            in_place(x)


@pytest.mark.ranks(2)
def test_a_tensor_that_is_not_contiguous_is_copied_and_refused_in_place(world):
    world.run(not_contiguous)


def many_threads():
    hvd.init()
    results = {}
    begins = [threading.Event() for _ in range(4)]

    def work(number):
        # Threads are counted by their first unnamed operation: the same order on every rank.
        begins[number].wait()
        results[number] = [hvd.allreduce(torch.tensor([float(number)]), op=hvd.Sum).item()]
        if number + 1 < len(begins):
            begins[number + 1].set()
        results[number] += [
            hvd.allreduce(torch.tensor([float(number + i)]), op=hvd.Sum).item() for i in range(20)
        ]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    begins[0].set()
    for thread in threads:
        thread.join()
    size = hvd.size()
    for number, found in results.items():
        assert found == [number * size] + [(number + i) * size for i in range(20)]


@pytest.mark.ranks(2, 3)
def test_unnamed_operations_of_a_thread_match_those_of_the_same_thread_elsewhere(world):
    world.run(many_threads)


def polls():
    hvd.init()
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(2), name="polled")
        assert hvd.poll(handle) is False, "rank 1 waits for the barrier first"
        hvd.barrier()
    else:
        hvd.barrier()
        handle = hvd.allreduce_async(torch.ones(2), name="polled")
    first = hvd.synchronize(handle)
    assert hvd.poll(handle) is True
    assert hvd.synchronize(handle) is first


@pytest.mark.ranks(2)
def test_poll_tells_whether_an_operation_has_ended(world):
    world.run(polls)


def drops_handles():
    hvd.init()
    tensors = []
    for _ in range(50):
        x = torch.ones(1000)
        tensors.append(weakref.ref(x))
        hvd.allreduce_async_(x)
        hvd.allgather_async(x)
        del x
    # They end in no particular order, and the next call drops those that have ended.
    left = len(tensors)
    for _ in range(10_000):
        gc.collect(0)
        left = sum(ref() is not None for ref in tensors)
        if not hvd.allreduce(torch.tensor(left), op=hvd.Max):
            break
    return left


@pytest.mark.ranks(1, 2)
def test_a_handle_that_nobody_waits_for_keeps_no_tensor(world):
    assert world.run(drops_handles) == [0] * world.size


def average_argument():
    hvd.init()
    x = torch.full((2,), float(hvd.rank()))
    with pytest.warns(DeprecationWarning, match="use op="):
        total = hvd.allreduce(x, average=False)
    with pytest.warns(DeprecationWarning, match="use op=") as caught:
        mean = hvd.allreduce(x, average=True)
    assert caught[0].filename == __file__
    assert total[0] == sum(range(hvd.size()))
    assert mean[0] == sum(range(hvd.size())) / hvd.size()


@pytest.mark.ranks(2)
def test_average_is_deprecated_and_works(world):
    world.run(average_argument)


def gradients():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    x = torch.ones(3, requires_grad=True)
    (hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0) * (rank + 1)).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3,), 2.0 * size * (size + 1) / 2))
    x = torch.ones(rank + 1, 2, requires_grad=True)
    gathered = hvd.allgather(x, name="gathered")
    (gathered * torch.arange(len(gathered))[:, None] * (rank + 1)).sum().backward()
    begin = sum(r + 1 for r in range(rank))
    rows = torch.arange(begin, begin + rank + 1.0)[:, None].expand(-1, 2)
    torch.testing.assert_close(x.grad, rows * (size + 1) / 2)
    x = torch.ones(3, requires_grad=True)
    (hvd.broadcast(x, size - 1) * (rank + 1)).sum().backward()
    wanted = (size + 1) / 2 if rank == size - 1 else 0.0
    torch.testing.assert_close(x.grad, torch.full((3,), wanted))
    assert not hvd.allreduce(torch.ones(2)).requires_grad


@pytest.mark.ranks(1, 2, 3)
def test_gradients_are_horovods(world):
    world.run(gradients)


def in_place_changes_are_seen():
    hvd.init()
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    z = (y * y).sum()
    hvd.allreduce_(y.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


@pytest.mark.ranks(1)
@pytest.mark.mpis("openmpi")
def test_autograd_knows_of_a_change_in_place(world):
    world.run(in_place_changes_are_seen)
