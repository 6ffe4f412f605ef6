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
from tests.harness.on_ranks import on_ranks
from tests.optimizer.sharding.alike import Pair, same_full, wrapped
from tests.optimizer.sharding.models import SMALL_BUCKETS, differences, loss_of, odd


@pytest.mark.wide_in("2,1")
@pytest.mark.parametrize(
    ("shard", "shared", "passes", "fused"),
    [
        (True, False, 1, True),
        (True, False, 2, False),
        ("host", True, 2, False),
        pytest.param(True, False, 1, False, marks=pytest.mark.wide),
        pytest.param("host", False, 1, False, marks=pytest.mark.wide),
    ],
)
@on_ranks(3, hosts=("2,1",), knobs=SMALL_BUCKETS)
def test_scheduler_scaler_clipping_no_sync_and_several_backwards_go_together(
    shard, shared, passes, fused
):
    """In two steps one rank overflows, and all skip them. Each second step accumulates in no_sync,
    unscales and clips."""
    schedulers = []

    def make(net):
        inner = torch.optim.AdamW(net.parameters(), lr=0.01, fused=fused)
        schedulers.append(torch.optim.lr_scheduler.OneCycleLR(inner, 0.05, total_steps=20))
        return inner

    pair = Pair(make, shard=shard, shared=shared, backward_passes_per_step=passes)
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2) for _ in range(2)]
    for step in range(6):
        overflows = step in (1, 4)
        more = passes if step % 2 else 0
        for (net, optimizer), scaler, scheduler in zip(pair.both, scalers, schedulers, strict=True):
            before = [param.detach().clone() for param in net.parameters()]
            optimizer.zero_grad()
            for number in range(more + passes):
                loss = loss_of(net, 4 * step + number)
                if overflows and number == 0 and hvd.rank() == step % 2:
                    loss = loss * torch.inf
                with optimizer.no_sync() if number < more else contextlib.nullcontext():
                    scaler.scale(loss).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                if shard != "host":  # which adds in another order between the hosts
                    optimizer.clip_grad_norm_(1e6)
            scaler.step(optimizer)
            scaler.update()
            assert all(map(torch.equal, before, net.parameters())) == overflows
            if not overflows:
                scheduler.step()
        pair.compare(f"after step {step}")
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert scalers[1].get_scale() == 256.0 / 2 * 2 / 2
    assert pair.plain.param_groups[0]["lr"] == pair.cut.param_groups[0]["lr"]
    same_full(pair.cut.full_state_dict(), pair.plain)


@pytest.mark.mpis("mpich")
@pytest.mark.parametrize("shared", [False, True])
@on_ranks(2)
def test_several_sharded_optimizers_train_parts_of_one_model(shared):
    """One backward reaches the parameters of all, another those of some."""
    alone, net = odd(), odd()
    if shared:
        hvd.share_parameters(net)
    made = [], []
    for each, optimizers in zip((alone, net), made, strict=True):
        params = list(each.named_parameters())
        for first, kind in enumerate((torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop)):
            own = params[first::3]
            inner = kind([param for _, param in own], lr=0.01)
            shard = each is net and ("host" if first == 2 else True)
            optimizers.append(hvd.DistributedOptimizer(inner, own, shard=shard))
    for step in range(6):
        for each, optimizers in zip((alone, net), made, strict=True):
            # In some steps only the first two; in the last ones one stands still.
            used = optimizers[: 2 if step == 5 else 3]
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(each, step).backward()
            for optimizer in reversed(used) if step % 2 else used:
                optimizer.step()
        assert differences(net, alone) == [], step
    for plain, cut in zip(*made, strict=True):
        same_full(cut.full_state_dict(), plain)


@pytest.mark.mpis("mpich")
@on_ranks(2)
def test_hooks_of_the_wrapped_optimizer_are_called_once():
    seen = []
    net = odd()
    inner = torch.optim.Adam(net.parameters())

    def shapes(optimizer):
        return [tuple(param.shape) for group in optimizer.param_groups for param in group["params"]]

    def note(name):
        return lambda optimizer, *_: seen.append((name, shapes(optimizer) == wanted))

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
        loss_of(net, 0).backward()
        optimizer.step()
    finally:
        for handle in everyones:
            handle.remove()
    saved = optimizer.state_dict()
    assert saved["more"] == "of the user's"
    optimizer.load_state_dict(saved)
    assert optimizer.full_state_dict().get("more") == ("of the user's" if hvd.rank() == 0 else None)
    assert [name for name, _ in seen] == [
        *("each pre", "pre", "post", "each post", "saving", "loading", "loaded", "saving")
    ]
    assert [whole for name, whole in seen if "p" in name] == [True] * 4


def mapped_kib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


# By how much it may grow: something may come late, but once; buckets are made anew three times and
# more.
LIMITS = {"objects": 200, "file descriptors": 3, "views": 1, "KiB of memory": 4096}


@pytest.mark.mpis("mpich")
@pytest.mark.parametrize(("shard", "shared"), [(True, False), ("host", True)])
@on_ranks(2)
def test_steps_leave_nothing_behind(shard, shared):
    net = nn.Sequential(nn.Linear(7, 300), nn.Tanh(), nn.Linear(300, 9))
    if shared:
        hvd.share_parameters(net)
    optimizer = wrapped(lambda net: torch.optim.Adam(net.parameters()), net, shard=shard)
    engine = worlds.current().team.engine
    x = torch.ones(2, 7)

    def steps(count):
        """How many operations they have started."""
        before = engine.counters()["operations"]
        for _ in range(count):
            optimizer.zero_grad()
            net(x).sum().backward()
            optimizer.step()
        return engine.counters()["operations"] - before

    def counted_after_many():
        """Frozen and thawed in between: buckets and divisions are made anew."""
        for frozen in (False, True, False):
            net[0].requires_grad_(not frozen)
            steps(50)
        gc.collect()
        hvd.barrier()
        views = len(optimizer._hvdlite_states._views)
        found = (len(gc.get_objects()), len(os.listdir("/proc/self/fd")), views, mapped_kib())
        return dict(zip(LIMITS, found, strict=True))

    before, after = counted_after_many(), counted_after_many()
    grown = [name for name, limit in LIMITS.items() if after[name] - before[name] >= limit]
    assert grown == [], (before, after)
    assert steps(5) == 5 * steps(1)
