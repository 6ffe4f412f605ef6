"""What a sharded optimizer refuses, on every rank that sees it."""

import pytest
import torch
from torch import nn

import hvdlite as hvd
from tests.harness.on_ranks import on_ranks
from tests.optimizer.models import sgd


def backward(net):
    net(torch.ones(1, 40, dtype=net.weight.dtype)).sum().backward()


@on_ranks(1)
def test_arguments_that_do_not_go_together_are_refused():
    net = nn.Linear(40, 3)
    inner = torch.optim.SGD(net.parameters())
    differentiable = torch.optim.Adam(net.parameters(), differentiable=True)
    for optimizer, options, text in (
        (inner, {"shard": "hosts"}, "expected True, False or"),
        (inner, {"shard": True, "op": hvd.Adasum}, "op=Adasum"),
        (torch.optim.LBFGS(net.parameters()), {"shard": True}, "LBFGS can't be sharded"),
        (differentiable, {"shard": True}, "Adam with differentiable=True can't be sharded"),
        (
            inner,
            {"overlap_forward": net},
            'overlap_forward=Linear needs shard=True or shard="host"',
        ),
        (inner, {"overlap_forward": nn.ReLU(), "shard": True}, "none of the optimizer's 2 param"),
        (inner, {"overlap_forward": net.weight, "shard": True}, "expected the model, a torch.nn"),
    ):
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(optimizer, **options)


@on_ranks(2)
def test_ranks_that_shard_differently_get_the_same_error():
    net = nn.Linear(40, 3)
    optimizer = sgd(net.parameters(), shard=hvd.rank() == 0)
    with pytest.raises(hvd.HorovodInternalError, match="shard=True on rank 0, shard=False on rank"):
        backward(net)
    del optimizer


@on_ranks(2)
def test_parameters_that_are_shared_too_late_are_an_error_at_the_step():
    net = nn.Linear(40, 3)
    optimizer = sgd(net.parameters())
    hvd.share_parameters(net)
    backward(net)
    with pytest.raises(RuntimeError, match=r"before hvd\.DistributedOptimizer"):
        optimizer.step()


@on_ranks(2)
def test_parameters_that_are_shared_no_longer_are_an_error_at_the_step():
    net = nn.Linear(40, 3)
    hvd.share_parameters(net)
    optimizer = sgd(net.parameters(), names=net.named_parameters())
    backward(net)
    optimizer.step()
    net.to(torch.float64)
    backward(net)
    with pytest.raises(RuntimeError, match="'weight' was placed into shared memory"):
        optimizer.step()


@on_ranks(2)
def test_a_rank_that_has_joined_owns_parameters_that_nobody_updates():
    net = nn.Linear(40, 3)
    optimizer = sgd(net.parameters(), shard=True)
    for _ in range(2):
        optimizer.zero_grad()
        backward(net)
        optimizer.step()
    if hvd.rank() == 0:
        optimizer.zero_grad()
        with pytest.raises(hvd.HorovodInternalError, match=r"a rank has called hvd\.join"):
            backward(net)
    hvd.join()


@on_ranks(2)
def test_a_gradient_is_reduced_once_per_step_and_each_element_has_one_owner():
    net = nn.Linear(40, 3)
    optimizer = sgd(net.parameters(), shard=True)
    for _ in range(2):
        backward(net)
        with pytest.raises(RuntimeError, match="already reduced in this step"):
            backward(net)
        parts = optimizer.sharded_grad(net.weight)
        assert all(len(part.grad) == part.end - part.begin for part in parts)
        owned = hvd.allreduce(torch.tensor(sum(len(p.grad) for p in parts)), op=hvd.Sum)
        assert owned == net.weight.numel()
        optimizer.step()
        assert optimizer.sharded_grad(net.weight) == ()


def interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("where", ["pre", "post"])
@on_ranks(2)
def test_a_step_that_one_rank_alone_repeats_is_an_error_and_hangs_nobody(shared, where):
    net = nn.Linear(40, 3)
    if shared:
        hvd.share_parameters(net)
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(net.parameters()), shard=True)
    for step in range(3):
        optimizer.zero_grad()
        backward(net)
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
        backward(net)
    optimizer.zero_grad()
    backward(net)
    optimizer.step()
