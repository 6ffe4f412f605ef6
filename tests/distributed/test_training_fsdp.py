"""fully_shard (FSDP2): n ranks that share the parameters train as one process does."""

import copy

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tests.distributed.training import in_a_group, mean, sgd, step
from tests.optimizer.models import batches, loss_of, model, own

STEPS = 6
FULL = StateDictOptions(full_state_dict=True)


def sharded(net, **options):
    """Each layer by itself, as users do; no number of rows of it is a multiple of 3."""
    for layer in net:
        if list(layer.parameters()):
            fully_shard(layer, **options)
    return fully_shard(net, **options)


def assert_trained_alike(net, alone, rtol=1e-9, atol=1e-12):
    """Also that the state dict names and gives the parameters of the whole model."""
    whole = get_model_state_dict(net, options=FULL)
    torch.testing.assert_close(dict(whole), dict(alone.state_dict()), rtol=rtol, atol=atol)
    for p, q in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q, rtol=rtol, atol=atol)


@in_a_group
def trains_as_one_process(rank, size, options, clip):
    alone, net = model(), sharded(model(), mesh=init_device_mesh("cpu", (size,)), **options)
    assert all(isinstance(p, DTensor) for p in net.parameters())
    reference, optimizer = sgd(alone), sgd(net)
    for x, y in batches(STEPS, 4, size):
        reference.zero_grad()
        wanted = loss_of(alone, x, y)
        wanted.backward()
        optimizer.zero_grad()
        loss = loss_of(net, own(x, rank, size), own(y, rank, size))
        loss.backward()
        torch.testing.assert_close(mean(loss.detach()), wanted.detach(), rtol=1e-9, atol=1e-12)
        if clip:
            wanted = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            torch.testing.assert_close(norm.full_tensor(), wanted, rtol=1e-9, atol=1e-12)
            assert wanted > 0.5
        reference.step()
        optimizer.step()
    assert_trained_alike(net, alone)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("reshard", [False, True], ids=["whole until backward", "sharded at once"])
def test_fsdp_trains_as_one_process(world, tmp_path, reshard, clip):
    world.run(trains_as_one_process, tmp_path, {"reshard_after_forward": reshard}, clip)


@in_a_group
def accumulates(rank, size):
    alone, net = model(), sharded(model())
    reference, optimizer = sgd(alone), sgd(net)
    for number, (x, y) in enumerate(batches(2 * STEPS, 4, size)):
        last = number % 2 == 1
        loss_of(alone, x, y).backward()
        net.set_requires_gradient_sync(last)
        loss_of(net, own(x, rank, size), own(y, rank, size)).backward()
        if last:
            for trained in (reference, optimizer):
                trained.step()
                trained.zero_grad()
    assert_trained_alike(net, alone)


@pytest.mark.ranks(2)
def test_fsdp_accumulates_gradients_without_reducing_them(world, tmp_path):
    world.run(accumulates, tmp_path)


@in_a_group
def trains_in_mixed_precision(rank, size, reduced):
    """The forward pass of one process on the rows of each rank with rounded parameters, whose
    gradients are added up in `reduced`."""
    alone, low = model(torch.float32), model(torch.bfloat16)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
    net = sharded(model(torch.float32), mp_policy=policy)
    reference, optimizer = sgd(alone), sgd(net)
    for x, y in batches(STEPS, 4, size, torch.float32):
        x, y = x.bfloat16(), y.bfloat16()
        with torch.no_grad():
            for p, q in zip(low.parameters(), alone.parameters(), strict=True):
                p.copy_(q)
        sums = [torch.zeros_like(p, dtype=reduced) for p in low.parameters()]
        for other in range(size):
            low.zero_grad()
            loss_of(low, own(x, other, size), own(y, other, size)).backward()
            for total, p in zip(sums, low.parameters(), strict=True):
                total += p.grad.to(reduced)
        for p, total in zip(alone.parameters(), sums, strict=True):
            p.grad = (total / size).float()
        reference.step()
        step(net, optimizer, own(x, rank, size), own(y, rank, size))
    assert all(p.dtype == torch.float32 for p in net.parameters())
    # Sums of two numbers, and halves, are rounded once: all ranks and orders give the same bits.
    assert_trained_alike(net, alone, rtol=1e-6, atol=1e-7)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reduced", [torch.float32, torch.bfloat16], ids=str)
def test_fsdp_computes_and_reduces_in_lower_precision(world, tmp_path, reduced):
    world.run(trains_in_mixed_precision, tmp_path, reduced)


@in_a_group
def trains_hybrid(rank, size):
    """Two copies of the model, each of which two ranks share."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    alone, net = model(), sharded(model(), mesh=mesh)
    assert net[0].weight.placements[0].is_replicate()
    assert net[0].weight.to_local().shape[0] == alone[0].weight.shape[0] // 2
    reference, optimizer = sgd(alone), sgd(net)
    for x, y in batches(STEPS, 4, size):
        step(alone, reference, x, y)
        step(net, optimizer, own(x, rank, size), own(y, rank, size))
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0).full_tensor()
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0))
    assert_trained_alike(net, alone)


@pytest.mark.ranks(4)
def test_hybrid_sharding_trains_as_one_process(world, tmp_path):
    world.run(trains_hybrid, tmp_path)


@in_a_group
def goes_on_from_state_dicts(rank, size):
    """A second model that is loaded half way trains on as the first does."""

    def adam(net):
        return torch.optim.Adam(net.parameters(), lr=0.01)

    data = list(batches(2 * STEPS, 4, size))
    net = sharded(model())
    optimizer = adam(net)
    for x, y in data[:STEPS]:
        step(net, optimizer, own(x, rank, size), own(y, rank, size))
    weights = get_model_state_dict(net, options=FULL)
    # A copy, as the numbers of steps in it are the optimizer's own tensors.
    moments = copy.deepcopy(get_optimizer_state_dict(net, optimizer, options=FULL))
    if rank > 0:
        weights, moments = {}, {}

    other = sharded(model())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    others_optimizer = adam(other)
    from_rank_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, weights, options=from_rank_0)
    set_optimizer_state_dict(other, others_optimizer, moments, options=from_rank_0)
    for x, y in data[STEPS:]:
        for trained in ((net, optimizer), (other, others_optimizer)):
            step(*trained, own(x, rank, size), own(y, rank, size))
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.to_local(), q.to_local())


@pytest.mark.ranks(2)
def test_a_model_goes_on_from_the_state_dicts_of_another(world, tmp_path):
    world.run(goes_on_from_state_dicts, tmp_path)
