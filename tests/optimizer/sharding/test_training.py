"""What a training loop does with a sharded optimizer."""

import copy

import pytest
import torch
from torch import nn

import hvdlite as hvd
from tests.optimizer.sharding.models import batch, differences, odd


def pair(shard, shared=False, kind=torch.optim.Adam, **options):
    """A plain optimizer and one that is sharded, each with a model of its own."""
    hvd.init()
    options = {"lr": 0.01, **options}
    alone, net = odd(), odd()
    if shared:
        hvd.share_parameters(net)
    plain = hvd.DistributedOptimizer(kind(alone.parameters(), **options))
    cut = hvd.DistributedOptimizer(
        kind(net.parameters(), **options), net.named_parameters(), shard=shard
    )
    return (alone, plain), (net, cut)


def loss_of(net, step):
    return net(batch(step)).square().mean()


def run(each, step):
    net, optimizer = each
    optimizer.zero_grad()
    loss_of(net, step).backward()
    optimizer.step()


def clips(shard):
    (alone, plain), (net, cut) = pair(shard, shard is False)
    for step in range(3):
        for model, optimizer in ((alone, plain), (net, cut)):
            optimizer.zero_grad()
            loss_of(model, step).backward()
        wanted = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        got = cut.clip_grad_norm_(0.1)
        torch.testing.assert_close(got, wanted)
        assert (hvd.allgather(got[None]) == got).all()
        plain.step()
        cut.step()
        for p, q in zip(net.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p, q)
    if shard:
        with pytest.raises(RuntimeError, match=r"clip_grad_norm_"):
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    hvd.barrier()


@pytest.mark.ranks(2)
@pytest.mark.hosts("2,1")
@pytest.mark.wide_in(2)
@pytest.mark.parametrize("shard", [True, "host", False])
def test_the_norm_is_that_of_all_gradients(world, shard):
    world.run(clips, shard)


def scales(shard, bad_rank, explicit, fused):
    (alone, plain), (net, cut) = pair(shard, fused=fused)
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2) for _ in range(2)]
    for step in range(5):
        for scaler, (model, optimizer) in zip(scalers, ((alone, plain), (net, cut)), strict=True):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            if step in (0, 2) and hvd.rank() == bad_rank:
                loss = loss + model.end.bias[0] * torch.inf
            scaler.scale(loss).backward()
            if explicit:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert differences(net, alone) == [], step
    assert scalers[1].get_scale() < 4.0


@pytest.mark.ranks(2, 3)
@pytest.mark.mpis("mpich")
@pytest.mark.wide_in(3)
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_every_rank_skips_the_steps_that_one_process_skips(world, explicit, fused):
    world.run(scales, True, 1, explicit, fused)


def saves_and_loads(shard, shared):
    (alone, plain), (net, cut) = pair(shard, shared)
    for step in range(3):
        run((alone, plain), step)
        run((net, cut), step)
    own, full = cut.state_dict(), cut.full_state_dict()
    assert own["hvdlite_shard"]
    with pytest.raises(ValueError, match="full_state_dict"):
        torch.optim.Adam(alone.parameters()).load_state_dict(own)
    if hvd.rank() == 0:
        wanted = plain.state_dict()
        assert full["param_groups"] == wanted["param_groups"]
        assert full["state"].keys() == wanted["state"].keys()
        for index, state in wanted["state"].items():
            for key, value in state.items():
                assert torch.equal(full["state"][index][key], value), (index, key)
    else:
        assert full == {}
    full = hvd.broadcast_object(full)
    cut_as_here = own["hvdlite_shard"]["cut"]
    shards = [
        shard for shard in hvd.allgather_object(own) if shard["hvdlite_shard"]["cut"] == cut_as_here
    ]
    for given in (own, full, shards):
        again = odd()
        again.load_state_dict(net.state_dict())
        if shared:
            hvd.share_parameters(again)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(again.parameters(), lr=1.0), again.named_parameters(), shard=shard
        )
        optimizer.load_state_dict(copy.deepcopy(given))
        other = odd()
        other.load_state_dict(alone.state_dict())
        reference = hvd.DistributedOptimizer(torch.optim.Adam(other.parameters()))
        reference.load_state_dict(copy.deepcopy(plain.state_dict()))
        for step in range(3, 6):
            run((other, reference), step)
            run((again, optimizer), step)
            assert differences(again, other) == [], step
    hvd.barrier()


@pytest.mark.ranks(1, 2)
@pytest.mark.hosts("2,1")
@pytest.mark.wide_in(1, 2)
@pytest.mark.parametrize(("shard", "shared"), [(True, False), ("host", True), (False, True)])
def test_what_is_saved_loads_and_goes_on_with_the_same_bits(world, shard, shared):
    world.run(saves_and_loads, shard, shared)


def changes_parameters():
    (alone, plain), (net, cut) = pair(True)
    for step in range(10):
        for model, optimizer in ((alone, plain), (net, cut)):
            if step == 2:
                model.mix.requires_grad_(False)
            if step == 4:
                model.mix.requires_grad_(True)
            if step == 6:
                torch.manual_seed(3)
                model.more = nn.Linear(5, 5)
                optimizer.add_param_group({"params": list(model.more.parameters()), "lr": 0.02})
            optimizer.zero_grad()
            out = model(batch(step))
            if step >= 6:
                out = model.more(out)
            out.square().mean().backward()
            optimizer.step()
        assert differences(net, alone) == [], step


@pytest.mark.ranks(2, 3)
@pytest.mark.wide_in(3)
def test_frozen_thawed_and_added_parameters_keep_their_state(world):
    world.run(changes_parameters)


class Scaled(torch.optim.SGD):
    """Looks at whole parameters."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["seen"] = state.get("seen", 0) + 1
                    param.sub_(group["lr"] * param.grad / (param.grad.norm() + 1))


def deals(shard, shared):
    (alone, plain), (net, cut) = pair(shard, shared, Scaled)
    for step in range(4):
        run((alone, plain), step)
        run((net, cut), step)
        assert differences(net, alone) == [], step
    owned = sum(len(state) > 0 for state in cut.state.values())
    if shard is True:
        total = hvd.allreduce(torch.tensor(owned), op=hvd.Sum)
        assert total == sum(len(state) > 0 for state in plain.state.values())
    hvd.barrier()


@pytest.mark.ranks(2)
@pytest.mark.hosts("2,1", "1,1")
@pytest.mark.wide_in(2, "1,1")
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("shard", [True, "host", False])
def test_an_optimizer_that_looks_at_whole_tensors_gets_whole_parameters(world, shard, shared):
    world.run(deals, shard, shared)
