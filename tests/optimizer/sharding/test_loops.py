"""Training loops that combine features, with sharded optimizers."""

import contextlib
import gc
import os

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import hvdlite as hvd
from hvdlite.world import world as worlds
from tests.optimizer.sharding.alike import same_full
from tests.optimizer.sharding.models import batch, differences, odd

pytestmark = pytest.mark.mpis("mpich")


def two_nets(shared=False):
    alone, net = odd(), odd()
    if shared:
        hvd.share_parameters(net)
    return alone, net


def everything_at_once(shared):
    """A scheduler, a GradScaler, no_sync, backward_passes_per_step, clipping by value, and steps
    that are skipped."""
    hvd.init()
    nets = two_nets(shared)
    shards = (False, "host" if shared else True)
    optimizers, schedulers, scalers = [], [], []
    for net, shard in zip(nets, shards, strict=True):
        inner = torch.optim.AdamW(net.parameters(), lr=0.01)
        schedulers.append(torch.optim.lr_scheduler.OneCycleLR(inner, 0.05, total_steps=20))
        optimizers.append(
            hvd.DistributedOptimizer(
                inner, net.named_parameters(), shard=shard, backward_passes_per_step=2
            )
        )
        scalers.append(torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3))
    skipped = 0
    for step in range(7):
        for net, optimizer, scaler, scheduler in zip(
            nets, optimizers, scalers, schedulers, strict=True
        ):
            optimizer.zero_grad()
            for number in range(4):
                inside = optimizer.no_sync() if number < 2 else contextlib.nullcontext()
                loss = net(batch(4 * step + number)).square().mean()
                if step in (1, 4) and number == 1 and hvd.rank() == step % 2:
                    loss = loss * torch.inf
                with inside:
                    scaler.scale(loss / 4).backward()
            scaler.unscale_(optimizer)
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() >= before:
                scheduler.step()
            else:
                skipped += 1
        assert differences(nets[1], nets[0]) == [], step
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert skipped == 4
    assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"]
    same_full(optimizers[1].full_state_dict(), optimizers[0])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shared", [False, True])
def test_scheduler_scaler_no_sync_and_several_backwards_go_together(world, shared):
    world.run(everything_at_once, shared)


def several_optimizers(shared):
    """Of disjoint parameters of one model; one backward reaches those of all, another some."""
    hvd.init()
    made = []
    for net, shard in zip(two_nets(shared), (False, True), strict=True):
        params = dict(net.named_parameters())
        names = [list(params)[first::3] for first in range(3)]
        kinds = (torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop)
        optimizers = [
            hvd.DistributedOptimizer(
                kind([params[name] for name in own], lr=0.01),
                [(name, params[name]) for name in own],
                shard=shard if kind is not torch.optim.RMSprop or not shard else "host",
            )
            for kind, own in zip(kinds, names, strict=True)
        ]
        made.append((net, optimizers))
    for step in range(6):
        for net, optimizers in made:
            # In some steps only the first two; in the last ones one stands still.
            used = optimizers[: 2 if step == 5 else 3]
            for optimizer in optimizers:
                optimizer.zero_grad()
            net(batch(step)).square().mean().backward()
            for optimizer in reversed(used) if step % 2 else used:
                optimizer.step()
        assert differences(made[1][0], made[0][0]) == [], step
    for plain, cut in zip(made[0][1], made[1][1], strict=True):
        same_full(cut.full_state_dict(), plain)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shared", [False, True])
def test_several_sharded_optimizers_train_parts_of_one_model(world, shared):
    world.run(several_optimizers, shared)


def calls_hooks():
    hvd.init()
    seen = []
    net = odd()
    inner = torch.optim.Adam(net.parameters())

    def shapes(optimizer):
        return [tuple(param.shape) for group in optimizer.param_groups for param in group["params"]]

    def note(name, result=None):
        def hook(optimizer, *_):
            seen.append((name, shapes(optimizer) == wanted))
            return result

        return hook

    wanted = shapes(inner)
    inner.register_step_pre_hook(note("pre"))
    inner.register_step_post_hook(note("post"))
    inner.register_state_dict_pre_hook(note("saving"))
    inner.register_state_dict_post_hook(lambda optimizer, state: {**state, "more": "of the user's"})
    inner.register_load_state_dict_pre_hook(note("loading"))
    inner.register_load_state_dict_post_hook(note("loaded"))
    everyones = [
        register_optimizer_step_pre_hook(note("each pre")),
        register_optimizer_step_post_hook(note("each post")),
    ]
    try:
        optimizer = hvd.DistributedOptimizer(inner, net.named_parameters(), shard=True)
        net(batch(0)).sum().backward()
        optimizer.step()
    finally:
        for handle in everyones:
            handle.remove()
    saved = optimizer.state_dict()
    assert saved["more"] == "of the user's"
    optimizer.load_state_dict(saved)
    assert optimizer.full_state_dict().get("more") == ("of the user's" if hvd.rank() == 0 else None)
    return seen


@pytest.mark.ranks(2)
def test_hooks_of_the_wrapped_optimizer_are_called_once(world):
    for seen in world.run(calls_hooks):
        assert [name for name, _ in seen] == [
            *("each pre", "pre", "post", "each post", "saving", "loading", "loaded", "saving")
        ]
        assert [whole for name, whole in seen if "p" in name] == [True] * 4


def file_descriptors():
    return len(os.listdir("/proc/self/fd"))


def mapped_kib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def steps_many(shard, shared, steps):
    hvd.init()
    net = nn.Sequential(nn.Linear(7, 300), nn.Tanh(), nn.Linear(300, 9))
    if shared:
        hvd.share_parameters(net)
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(net.parameters()), net.named_parameters(), shard=shard
    )
    engine = worlds.current().team.engine
    x = torch.ones(2, 7)

    def step():
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()

    def round_of_steps(count):
        """Frozen and thawed in between: buckets and divisions are made anew."""
        for number in range(count):
            if number % 50 == 0:
                net[0].requires_grad_(number % 100 == 0)
            step()

    def counted():
        gc.collect()
        hvd.barrier()
        views = len(optimizer._hvdlite_states._views)
        return len(gc.get_objects()), file_descriptors(), views, mapped_kib()

    round_of_steps(150)
    before = counted()
    round_of_steps(steps)
    after = counted()
    first = engine.counters()["operations"]
    step()
    one = engine.counters()["operations"]
    for _ in range(5):
        step()
    operations = engine.counters()["operations"] - one
    return before, after, one - first, operations


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("shard", "shared"), [(True, False), ("host", True)])
def test_steps_leave_nothing_behind(world, shard, shared):
    for before, after, operations, of_five in world.run(steps_many, shard, shared, 150):
        assert of_five == 5 * operations
        assert after[0] - before[0] < 200, "objects"
        # Something may be opened late, but once: buckets are made anew three times and more.
        assert after[1] - before[1] < 3, "file descriptors"
        assert after[2] == before[2], "views"
        assert after[3] - before[3] < 4096, "KiB of memory"
