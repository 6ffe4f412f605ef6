"""ZeroRedundancyOptimizer: each rank has the optimizer's state of some parameters."""

import importlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.training import distributed_optim, in_a_group, step
from tests.optimizer.models import assert_same_parameters, batches, loss_of, model, own

STEPS = 6


@in_a_group
def trains_with_zero(rank, size, views):
    optim = distributed_optim()
    alone, net = model(), DistributedDataParallel(model())
    reference = torch.optim.Adam(alone.parameters(), lr=0.01)
    optimizer = optim.ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.Adam, parameters_as_bucket_view=views, lr=0.01
    )
    for x, y in batches(STEPS, 4, size):
        step(alone, reference, x, y)
        step(net, optimizer, own(x, rank, size), own(y, rank, size))
    assert_same_parameters(net.module, alone)
    # Each rank has the moments of its parameters alone; together they are those of one process.
    assert 0 < len(optimizer.optim.state) < len(reference.state)
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        found, wanted = optimizer.state_dict()["state"], reference.state_dict()["state"]
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_ranks_that_share_the_optimizers_state_train_as_one_process(world, tmp_path, views):
    world.run(trains_with_zero, tmp_path, views)


@in_a_group
def overlaps_zero_with_ddp(rank, size, hook, whole_buckets):
    """The optimizer makes its steps within backward. In the first two passes it learns the
    buckets, and makes none."""
    optim = distributed_optim()
    # It imports the former.
    hooks = importlib.import_module("torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook")
    alone = model()
    net = DistributedDataParallel(model(), bucket_cap_mb=0.001, gradient_as_bucket_view=True)
    optimizer = optim.ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.05
    )
    net.register_comm_hook(
        None,
        getattr(hooks, hook)(allreduce_hook, net, optimizer, shard_buckets=not whole_buckets),
    )
    reference = torch.optim.SGD(alone.parameters(), lr=0.05)
    for number, (x, y) in enumerate(batches(STEPS + 2, 4, size)):
        if number >= 2:
            step(alone, reference, x, y)
        optimizer.zero_grad()
        loss_of(net, own(x, rank, size), own(y, rank, size)).backward()
    assert_same_parameters(net.module, alone)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("whole_buckets", [True, False], ids=["whole buckets", "shared buckets"])
@pytest.mark.parametrize("hook", ["hook_with_zero_step", "hook_with_zero_step_interleaved"])
def test_the_shared_optimizer_steps_within_backward(world, tmp_path, hook, whole_buckets):
    world.run(overlaps_zero_with_ddp, tmp_path, hook, whole_buckets)


@in_a_group
def joins_with_zero(rank, size):
    """Rank r has r batches more than rank 0, which goes on to serve its part of the optimizer: in
    torch 2.13 with its last gradients, so the result is not that of one process."""
    optim = distributed_optim()
    net = DistributedDataParallel(model())
    optimizer = optim.ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.05)
    with Join([net, optimizer]):
        for x, y in list(batches(STEPS + size - 1, 4, size))[: STEPS + rank]:
            step(net, optimizer, own(x, rank, size), own(y, rank, size))
    flat = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    everyones = [torch.empty_like(flat) for _ in range(size)]
    dist.all_gather(everyones, flat)
    assert all(torch.equal(other, flat) for other in everyones)


@pytest.mark.ranks(2)
def test_on_uneven_data_ranks_with_a_shared_optimizer_stay_equal(world, tmp_path):
    world.run(joins_with_zero, tmp_path)
