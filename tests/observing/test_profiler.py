"""hvdlite's operations in the traces of torch.profiler."""

import re

import pytest
import torch

import hvdlite as hvd
from hvdlite import recipes
from hvdlite.observe import waits


def operations():
    hvd.allreduce(torch.ones(3), name="mean")
    hvd.allreduce_(torch.ones(3), name="in place")
    hvd.allgather(torch.ones(2))
    hvd.synchronize(hvd.broadcast_async(torch.ones(2), 0, name="from 0"))
    hvd.grouped_allreduce([torch.ones(2), torch.ones(3)], name="group")
    hvd.barrier()


def profiled():
    hvd.init()
    model = torch.nn.Linear(4, 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    assert not waits.observed()
    operations()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        operations()
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    assert not waits.observed()
    operations()
    return {e.key: e.count for e in profile.key_averages() if e.key.startswith("hvdlite::")}


@pytest.mark.ranks(1, 2)
def test_the_profiler_shows_the_waits_for_operations_by_name(world):
    for shown in world.run(profiled):
        for name in (
            "hvdlite::allreduce mean",
            "hvdlite::allreduce in place",
            "hvdlite::allgather",
            "hvdlite::broadcast from 0",
            "hvdlite::barrier",
        ):
            assert shown[name] == 1, name
        assert shown["hvdlite::allreduce group"] >= 1
        if world.size > 1:
            [bucket] = [name for name in shown if name.endswith(".bucket.0")]
            assert bucket.startswith("hvdlite::allreduce DistributedOptimizer.")
            assert shown[bucket] == 2
            [wait] = [name for name in shown if name.endswith("waits for its gradients")]
            assert shown[wait] == 2


def call(function):
    """A function that makes operations of its own."""
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.Adam(net.parameters())
    if function == "broadcast_parameters":
        hvd.broadcast_parameters(list(net.parameters()), 0)
    elif function == "broadcast_optimizer_state":
        net(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, 0)
    elif function == "broadcast_object":
        hvd.broadcast_object(1)
    elif function == "allgather_object":
        hvd.allgather_object(1)
    elif function == "SyncBatchNorm":
        hvd.SyncBatchNorm(1)(torch.ones(2, 1, requires_grad=True)).sum().backward()
    elif function == "average_metrics":
        recipes.average_metrics({"loss": 1.0})
    elif function == "rank_first(0)":
        with recipes.rank_first():
            pass
    else:
        recipes.only_rank(0, broadcast=True)(answer)()


def answer():
    return 42


def in_its_own_name(function):
    hvd.init()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call(function)
    return {e.key for e in profile.key_averages() if e.key.startswith("hvdlite::")}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "function",
    [
        "broadcast_parameters",
        "broadcast_optimizer_state",
        "broadcast_object",
        "allgather_object",
        "SyncBatchNorm",
        "average_metrics",
        "rank_first(0)",
        "answer (only_rank(0))",
    ],
)
def test_what_a_function_sends_has_its_name_and_matches_nothing_else(world, function):
    for shown in world.run(in_its_own_name, function):
        assert shown
        for name in shown:
            assert re.fullmatch(rf"hvdlite::\w+ {re.escape(function)}(\.\S+)?", name), shown


def deltas_profiled():
    hvd.init()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    names = model.named_parameters()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=names, op=hvd.Adasum)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    return {e.key: e.count for e in profile.key_averages() if e.key.startswith("hvdlite::")}


@pytest.mark.ranks(2)
def test_the_first_wait_of_an_adasum_step_is_shown_too(world):
    for shown in world.run(deltas_profiled):
        [changed] = [name for name in shown if name.endswith(".changed")]
        assert changed.startswith("hvdlite::allreduce DistributedOptimizer.")
        assert shown[changed] == 1


def test_a_wait_inside_another_one_counts_once(monkeypatch):
    monkeypatch.setattr(waits, "_counted", None)
    monkeypatch.setattr(waits, "observed", waits.observed)
    now = [0.0]
    monkeypatch.setattr(waits.time, "perf_counter", lambda: now[0])
    counted = waits.count_time()
    assert waits.observed()
    with waits.waiting("hvdlite::outer"):
        now[0] += 1
        with waits.waiting("hvdlite::inner"):
            now[0] += 2
    now[0] += 4
    assert counted.read() == 3
