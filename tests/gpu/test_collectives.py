"""hvdlite's collectives of tensors that say they are not in host memory."""

import contextlib
from unittest import mock

import pytest
import torch

import hvdlite as hvd
from hvdlite.collectives import devices
from tests.gpu.stand_in import new_queue, queue_for

ROUTES = ("group", "staged", "no queue")


class Elsewhere(torch.Tensor):
    """In host memory, whatever it says."""

    is_cpu = False


def elsewhere(tensor):
    return tensor.as_subclass(Elsewhere)


@contextlib.contextmanager
def a_world_of_devices(route):
    """Tensors that are Elsewhere go by a queue that takes them, or by none."""
    if route == "no queue":
        hvd.shutdown()
        hvd.init()
    else:
        new_queue(route)
    with mock.patch.object(devices, "goes_by_gpu", return_value=route != "no queue") as takes:
        yield takes


def same(got, wanted):
    torch.testing.assert_close(got.as_subclass(torch.Tensor), wanted, rtol=1e-6, atol=0)


def every_collective(route):
    with a_world_of_devices(route) as takes:
        rank, size = hvd.rank(), hvd.size()
        for shape in ((), (3, 4), (0, 2), (40_000,)):
            x = elsewhere(torch.full(shape, rank + 1.0))
            total = torch.full(shape, size * (size + 1) / 2)
            same(hvd.allreduce(x, op=hvd.Sum), total)
            same(hvd.allreduce(x, name="average", prescale_factor=2.0), 2 * total / size)
            same(hvd.synchronize(hvd.allreduce_async(x, op=hvd.Sum)), total)
            same(hvd.broadcast(x, size - 1), torch.full(shape, float(size)))
            same(x, torch.full(shape, rank + 1.0))
            y = x.clone()
            assert hvd.allreduce_(y, op=hvd.Sum) is y
            same(y, total)
            assert hvd.synchronize(hvd.broadcast_async_(x, 0, "x")) is x
            same(x, torch.ones(shape))
        x = elsewhere(torch.arange(12.0).reshape(3, 4) + 100 * rank)
        everyones = [torch.arange(12.0).reshape(3, 4) + 100 * r for r in range(size)]
        same(hvd.allreduce(x.t(), op=hvd.Sum), sum(everyones).t())
        same(hvd.allgather(x[: rank + 1]), torch.cat([t[: r + 1] for r, t in enumerate(everyones)]))
        for rows in (hvd.alltoall(x.t()[:size].contiguous()), hvd.alltoall(x.t()[:size])):
            same(rows, torch.stack([t.t()[rank] for t in everyones]))
        rows, counts = hvd.alltoall(x, [1] * (size - 1) + [0])
        assert counts.tolist() == [int(rank < size - 1)] * size
        assert not rank < size - 1 or rows.shape == (size, 4)
        same(hvd.reducescatter(x, op=hvd.Sum), torch.tensor_split(sum(everyones), size)[rank])
        large = torch.full((30_000,), float(rank))
        for form in (hvd.grouped_allreduce, hvd.grouped_allreduce_):
            group = [elsewhere(t) for t in (x + 0, x[0] + 0, large + 0, torch.tensor(rank))]
            a, b, c, d = form(group, op=hvd.Sum)
            same(a, sum(everyones))
            same(b, sum(everyones)[0])
            same(c, torch.full((30_000,), size * (size - 1) / 2))
            same(d, torch.tensor(size * (size - 1) // 2))
        first, second = hvd.grouped_allgather([x, x[:1]])
        same(first, torch.cat(everyones))
        same(second, torch.cat([t[:1] for t in everyones]))
        leaf = elsewhere(torch.ones(3)).requires_grad_()
        (hvd.allreduce(leaf, op=hvd.Sum) * (rank + 1)).sum().backward()
        same(leaf.grad, torch.full((3,), size * (size + 1) / 2))
        parameter = elsewhere(torch.ones(3)).requires_grad_()
        hvd.allreduce_(parameter, op=hvd.Sum)
        assert parameter.requires_grad
        same(parameter.detach(), torch.full((3,), float(size)))
        with torch.inference_mode():
            y = elsewhere(torch.full((5,), rank + 1.0))
            same(hvd.allreduce(y, op=hvd.Max), torch.full((5,), float(size)))
            same(hvd.allreduce_(y, op=hvd.Max), torch.full((5,), float(size)))
            same(hvd.grouped_allreduce_([y, y.clone()])[1], torch.full((5,), float(size)))
            same(hvd.allgather(y[:1]), torch.full((size,), float(size)))
        # The same name on the host of another rank is not the same operation.
        here = torch.ones(2) if rank else elsewhere(torch.ones(2))
        if size > 1:
            with pytest.raises(hvd.HorovodInternalError, match="the device the same"):
                hvd.allreduce(here, name="disputed")
        with pytest.raises(ValueError, match="not contiguous"):
            hvd.allreduce_(x.t())
        assert takes.called
    hvd.shutdown()


@pytest.mark.ranks(2, 3)
@pytest.mark.hosts("1,1")
@pytest.mark.parametrize("route", ROUTES)
def test_every_collective_takes_tensors_of_devices(world, route):
    world.run(every_collective, route)


def groups_in_place():
    """Their tensors get their turns in an order that depends on the names."""
    with a_world_of_devices("group"):
        for number in range(12):
            tensors = [elsewhere(torch.ones(2)), elsewhere(torch.ones(3, dtype=torch.int64))]
            results = hvd.grouped_allreduce_(tensors, op=hvd.Sum, name=f"group {number}")
            same(results[0], torch.full((2,), float(hvd.size())))
    hvd.shutdown()


@pytest.mark.hosts("1,1")
def test_a_tensor_of_a_group_may_have_its_turn_before_those_that_its_caller_waits_for(world):
    world.run(groups_in_place)


def in_a_set():
    with a_world_of_devices("group"):
        process_set = hvd.add_process_set(range(1, hvd.size()))
        if process_set.included():
            queue_for(process_set)
            x = elsewhere(torch.full((3,), float(hvd.rank())))
            total = torch.full((3,), float(sum(range(hvd.size()))))
            same(hvd.allreduce(x, op=hvd.Sum, process_set=process_set), total)
        hvd.remove_process_set(process_set)
    hvd.shutdown()


@pytest.mark.ranks(3)
@pytest.mark.mpis("openmpi")
def test_sets_have_gpu_queues_of_their_own(world):
    world.run(in_a_set)
