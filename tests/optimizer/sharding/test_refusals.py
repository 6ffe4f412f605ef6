"""What a sharded optimizer refuses, on every rank that sees it."""

import pytest
import torch
from torch import nn

import hvdlite as hvd


def line():
    torch.manual_seed(1)
    return nn.Linear(40, 3)


def refuses_arguments():
    hvd.init()
    net = line()
    with pytest.raises(ValueError, match="expected True, False or"):
        hvd.DistributedOptimizer(torch.optim.SGD(net.parameters()), shard="hosts")
    with pytest.raises(ValueError, match="op=Adasum"):
        hvd.DistributedOptimizer(torch.optim.SGD(net.parameters()), op=hvd.Adasum, shard=True)
    with pytest.raises(ValueError, match="LBFGS can't be sharded"):
        hvd.DistributedOptimizer(torch.optim.LBFGS(net.parameters()), shard=True)
    optimizer = torch.optim.Adam(net.parameters(), differentiable=True)
    with pytest.raises(ValueError, match="Adam with differentiable=True can't be sharded"):
        hvd.DistributedOptimizer(optimizer, shard=True)


@pytest.mark.ranks(1)
def test_arguments_that_do_not_go_together_are_refused(world):
    world.run(refuses_arguments)


def differ():
    hvd.init()
    net = line()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters()), shard=hvd.rank() == 0)
    with pytest.raises(hvd.HorovodInternalError, match="shard=True on rank 0, shard=False on rank"):
        net(torch.ones(1, 40)).sum().backward()
    del optimizer


@pytest.mark.ranks(2)
def test_ranks_that_shard_differently_get_the_same_error(world):
    world.run(differ)


def shares_too_late():
    hvd.init()
    net = line()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters()))
    hvd.share_parameters(net)
    net(torch.ones(1, 40)).sum().backward()
    with pytest.raises(RuntimeError, match=r"before hvd\.DistributedOptimizer"):
        optimizer.step()


def unshares():
    hvd.init()
    net = line()
    hvd.share_parameters(net)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters()), net.named_parameters())
    net(torch.ones(1, 40)).sum().backward()
    optimizer.step()
    net.to(torch.float64)
    net(torch.ones(1, 40, dtype=torch.float64)).sum().backward()
    with pytest.raises(RuntimeError, match="'weight' was placed into shared memory"):
        optimizer.step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", [shares_too_late, unshares])
def test_parameters_that_are_shared_too_late_or_no_longer_are_an_error_at_the_step(world, case):
    world.run(case)


def joins():
    hvd.init()
    net = line()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters()), shard=True)
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.ones(1, 40)).sum().backward()
        optimizer.step()
    if hvd.rank() == 1:
        hvd.join()
        return
    optimizer.zero_grad()
    with pytest.raises(hvd.HorovodInternalError, match=r"a rank has called hvd\.join"):
        net(torch.ones(1, 40)).sum().backward()
    hvd.join()


@pytest.mark.ranks(2)
def test_a_rank_that_has_joined_owns_parameters_that_nobody_updates(world):
    world.run(joins)


def again():
    hvd.init()
    net = line()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), shard=True)
    for _ in range(2):
        net(torch.ones(1, 40)).sum().backward()
        with pytest.raises(RuntimeError, match="already reduced in this step"):
            net(torch.ones(1, 40)).sum().backward()
        parts = optimizer.sharded_grad(net.weight)
        assert all(len(part.grad) == part.end - part.begin for part in parts)
        owned = hvd.allreduce(torch.tensor(sum(len(p.grad) for p in parts)), op=hvd.Sum)
        assert owned == net.weight.numel()
        optimizer.step()
        assert optimizer.sharded_grad(net.weight) == ()


@pytest.mark.ranks(2)
def test_a_gradient_is_reduced_once_per_step_and_each_element_has_one_owner(world):
    world.run(again)


def repeats(shared, where):
    hvd.init()
    net = line()
    if shared:
        hvd.share_parameters(net)
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(net.parameters()), shard=True)
    for step in range(3):
        optimizer.zero_grad()
        net(torch.ones(1, 40)).sum().backward()
        if step == 2 and hvd.rank() == 1:
            hook = getattr(optimizer, f"register_step_{where}_hook")(interrupt)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
            hook.remove()
            for _ in range(2):
                with pytest.raises(RuntimeError, match="can't repeat it alone"):
                    optimizer.step()
        else:
            optimizer.step()
    sums = hvd.allgather(net.weight.detach().sum()[None])
    assert sums[0] == sums[1]
    optimizer.zero_grad()
    with pytest.raises(hvd.HorovodInternalError, match="different backward passes"):
        net(torch.ones(1, 40)).sum().backward()
    optimizer.zero_grad()
    net(torch.ones(1, 40)).sum().backward()
    optimizer.step()


def interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("where", ["pre", "post"])
def test_a_step_that_one_rank_alone_repeats_is_an_error_and_hangs_nobody(world, shared, where):
    world.run(repeats, shared, where)
