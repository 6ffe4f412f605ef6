"""Works and futures of a process group."""

import itertools
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.default_group import in_a_group

pytestmark = [pytest.mark.ranks(2)]


@in_a_group
def futures(rank, size):
    work = dist.all_reduce(torch.ones(3), async_op=True)
    future = work.get_future()
    assert future.wait()[0].tolist() == [size] * 3
    assert work.get_future() is future
    assert work.result()[0].tolist() == [size] * 3
    assert work.exception() is None

    # Some ranks add their callbacks to a future that is complete; callbacks call collectives, wait
    # for them, and have callbacks of their own, while the ranks go on.
    def again(future):
        tensor = future.value()[0].clone()
        return dist.all_reduce(tensor, async_op=True).get_future().wait()

    for _ in range(20):
        work = dist.all_reduce(torch.ones(2), async_op=True)
        future = work.get_future()
        if rank == 0:
            work.wait()
            future.wait()
        chained = future.then(again).then(again)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == size
        assert chained.wait()[0].tolist() == [size**3] * 2


def test_callbacks_of_futures_call_collectives(world, tmp_path):
    world.run(futures, tmp_path)


@in_a_group
def reducer(rank, size):
    """In C++, DDP waits for futures: at a static graph's first pass earlier than later on."""
    kinds = (None, BuiltinCommHookType.ALLREDUCE, BuiltinCommHookType.FP16_COMPRESS)
    for static, kind in itertools.product((False, True), kinds):
        net = torch.nn.Linear(3, 2, bias=False)
        ddp = DistributedDataParallel(net, static_graph=static, gradient_as_bucket_view=True)
        if kind is not None:
            ddp._register_builtin_comm_hook(kind)
        for _ in range(3):
            net.zero_grad()
            ddp(torch.full((1, 3), float(2 * rank))).sum().backward()
            assert net.weight.grad.tolist() == [[size - 1.0] * 3] * 2


def test_the_reducer_of_ddp_gets_its_futures(world, tmp_path):
    world.run(reducer, tmp_path)


@in_a_group
def unawaited(rank, size):
    strided = torch.ones(3, 4).t()
    dist.all_reduce(strided, async_op=True)
    sparse = torch.eye(2).to_sparse()
    dist.all_reduce(sparse, async_op=True)
    deadline = time.monotonic() + 30
    while not (
        bool((strided == size).all()) and bool((sparse.to_dense() == size * torch.eye(2)).all())
    ):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_results_get_to_tensors_of_any_strides_where_nobody_waits(world, tmp_path):
    world.run(unawaited, tmp_path)


@in_a_group
def independent(rank, size):
    """Rank 0's first future needs what rank 1 sends after the second one."""
    if rank == 0:
        message = torch.zeros(2)
        received = dist.irecv(message, 1).get_future()
    dist.all_reduce(torch.ones(2), async_op=True).get_future().wait()
    if rank == 1:
        dist.recv(torch.zeros(1), 0)
        dist.send(torch.ones(2), 0)
    if rank == 0:
        dist.send(torch.zeros(1), 1)
        assert received.wait()[0].tolist() == [1, 1]


def test_a_future_does_not_wait_for_those_before_it(world, tmp_path):
    world.run(independent, tmp_path)


@in_a_group
def overdue(rank, size):
    group = dist.new_group(timeout=timedelta(seconds=30))
    if rank == 0:
        work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
        with pytest.raises(RuntimeError, match=r"timed out.*rank 1"):
            work.wait(timedelta(milliseconds=100))
        assert not work.is_completed()
    dist.barrier()
    if rank == 0:
        assert work.wait()
    else:
        dist.all_reduce(torch.ones(2), group=group)


def test_a_wait_with_a_timeout_leaves_the_operation_in_flight(world, tmp_path):
    world.run(overdue, tmp_path)


@in_a_group
def missing(rank, size):
    limit = timedelta(milliseconds=300)
    group = dist.group.WORLD
    group.monitored_barrier()
    if rank == 0:
        with pytest.raises(RuntimeError, match="Ranks 1 failed to pass monitoredBarrier"):
            group.monitored_barrier(limit, wait_all_ranks=True)
    dist.barrier()
    if rank:
        reached = r"Rank 1 successfully reached .* rank 0 did not "
        with pytest.raises(RuntimeError, match=reached):
            group.monitored_barrier(limit)
    dist.barrier()
    group.monitored_barrier()


def test_a_monitored_barrier_names_who_is_missing_and_the_group_goes_on(world, tmp_path):
    world.run(missing, tmp_path)


@in_a_group
def profiled(rank, size):
    with torch.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(torch.ones(3, 2))
        dist.all_reduce(torch.ones(5), async_op=True).wait()
        with dist._coalescing_manager():
            for count in (2, 4):
                dist.all_reduce(torch.ones(count))
    events = [
        event for event in profile.events() if event.name == f"{dist.get_backend()}:all_reduce"
    ]
    assert [event.input_shapes for event in events] == [[[3, 2]], [[5]], [[2], [4]]]


@in_a_group
def profiled_hooks(rank, size):
    ddp = DistributedDataParallel(torch.nn.Linear(3, 2, bias=False))
    ddp._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS)
    with torch.profiler.profile():
        ddp(torch.full((1, 3), float(2 * rank))).sum().backward()
    assert ddp.module.weight.grad.tolist() == [[size - 1.0] * 3] * 2


def test_ddp_s_hooks_get_their_futures_while_the_profiler_runs(world, tmp_path):
    world.run(profiled_hooks, tmp_path)


def test_the_profiler_sees_operations_with_their_shapes(world, tmp_path):
    world.run(profiled, tmp_path)
