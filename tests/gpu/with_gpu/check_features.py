"""What else hvdlite has works on GPUs: process sets, joining, objects, SyncBatchNorm."""

import torch
from torch import nn

import hvdlite as hvd
from tests.gpu.with_gpu.checking import DEVICE, ON_GPU, check, error_of, needs, run_checks, start
from tests.gpu.with_gpu.training import (
    STEPS,
    assert_same,
    batch,
    loss_of,
    net,
    sgd,
    train,
    wrap,
)


@check
def sync_batch_norm_normalizes_over_the_joined_batch():
    def network(norm):
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 8, 3), norm(8), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 36, 4)]
        return nn.Sequential(*layers).to(DEVICE, torch.float64)

    def images(rank):
        generator = torch.Generator().manual_seed(rank)
        values = torch.randn(4, 3, 8, 8, generator=generator, dtype=torch.float64)
        return values.to(DEVICE), torch.zeros((), device=DEVICE)

    model, alone = network(hvd.SyncBatchNorm), network(nn.BatchNorm2d)
    train(model, wrap(model), [images(hvd.rank())])
    joined = torch.cat([images(rank)[0] for rank in range(hvd.size())])
    train(alone, sgd(alone.parameters()), [(joined, torch.zeros((), device=DEVICE))])
    assert_same(model, alone, 1e-9)
    for name in ("running_mean", "running_var"):
        ours, theirs = getattr(model[1], name), getattr(alone[1], name)
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-9), (name, ours, theirs)


@check
def only_the_members_of_a_process_set_reduce():
    needs(hvd.size() > 1, "several ranks")
    members = list(range(1, hvd.size()))
    some = hvd.add_process_set(members)
    if hvd.rank() in members:
        given = torch.full((5,), float(hvd.rank() + 1), device=DEVICE)
        got = hvd.allreduce(given, op=hvd.Sum, process_set=some)
        assert got.tolist() == [float(sum(rank + 1 for rank in members))] * 5, got
    everyone = hvd.allreduce(torch.ones(2, device=DEVICE), op=hvd.Sum)
    assert everyone.tolist() == [hvd.size()] * 2, everyone


@check
def a_joined_rank_counts_as_zero():
    model, alone = net(), net()
    optimizer, other = wrap(model), sgd(alone.parameters())
    for _ in range(3 + hvd.rank()):
        optimizer.zero_grad()
        loss_of(model, batch(hvd.rank())).backward()
        optimizer.step()
    assert hvd.join() == hvd.size() - 1
    for step in range(2 + hvd.size()):
        other.zero_grad()
        for rank in range(hvd.size()):
            if step < 3 + rank:
                (loss_of(alone, batch(rank)) / hvd.size()).backward()
        other.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.size() - 1)
    assert_same(model, alone)


@check
def ranks_gather_different_numbers_of_rows():
    given = torch.full((hvd.rank() + 1, 2), float(hvd.rank()), device=DEVICE)
    got = hvd.allgather(given)
    expected = [[float(rank)] * 2 for rank in range(hvd.size()) for _ in range(rank + 1)]
    assert got.tolist() == expected, got
    assert got.device.type == DEVICE


@check
def objects_with_tensors_on_the_device_are_sent():
    given = {"rank": hvd.rank(), "a": torch.full((2,), float(hvd.rank()), device=DEVICE)}
    root = hvd.size() - 1
    sent = hvd.broadcast_object(given, root_rank=root)
    assert sent["rank"] == root
    assert sent["a"].tolist() == [float(root)] * 2
    assert sent["a"].device.type == DEVICE
    every = hvd.allgather_object(given)
    assert [one["a"].tolist() for one in every] == [[float(r)] * 2 for r in range(hvd.size())]


@check
def parameters_on_a_gpu_are_not_shared_within_a_host():
    needs(ON_GPU, "a GPU")
    text = error_of(lambda: hvd.share_parameters(net()), ValueError)
    assert "cuda" in text, text


@check
def a_model_that_was_trained_differently_is_made_the_same():
    model, alone = net(), net()
    train(model, sgd(model.parameters()), [batch(hvd.rank())], STEPS)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    train(alone, sgd(alone.parameters()), [batch(0)], STEPS)
    assert_same(model, alone, 0.0)


start()
run_checks()
