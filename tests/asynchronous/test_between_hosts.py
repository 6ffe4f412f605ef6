"""Workers of several hosts without servers: each part of the parameters has its home on one."""

import random
import time

import pytest
import torch

import hvdlite as hvd
from tests.asynchronous.job import in_a_job
from tests.asynchronous.test_without_servers import contained


def counters_of(size):
    """A parameter for each worker, in which it alone counts its steps: none of them is lost. Cut in
    two, so that each has rows on two hosts."""
    return [torch.nn.Parameter(torch.zeros(2, 5 + worker)) for worker in range(size)]


def optimizer_for(params, staleness):
    return hvd.AsyncOptimizer(
        torch.optim.SGD(params, lr=1.0),
        max_staleness=staleness,
        partitioner=hvd.FixedShardsPartitioner(2),
    )


@in_a_job
def steps_with_delays(staleness, steps):
    params = counters_of(hvd.size())
    own = params[hvd.rank()]
    optimizer = optimizer_for(params, staleness)
    assert all(map(hvd.is_shared, params))
    own.grad = -torch.ones_like(own)
    draw = random.Random(hvd.rank())
    history = []
    for _ in range(steps + 3 * hvd.rank()):
        history.append(contained(params))
        time.sleep(0.01 * draw.random() ** 4 * (1 + hvd.rank()))
        optimizer.step()
    made = optimizer.counters()["steps"][hvd.rank()]
    optimizer.synchronize()
    hvd.join()
    optimizer.pull()
    everything = contained(params)
    hvd.barrier()
    # All count again, from the same step on.
    again = []
    for _ in range(steps):
        again.append(contained(params))
        optimizer.step()
    return history, made, everything, again


@pytest.mark.hosts("2,1", "1,1,1", "2,2")
@pytest.mark.parametrize("staleness", [1, 3, pytest.param(None, marks=pytest.mark.wide)])
def test_parameters_are_never_older_than_the_bound(world, staleness):
    steps = 20
    for rank, (history, made, everything, again) in enumerate(
        world.run(steps_with_delays, staleness, steps)
    ):
        assert made == steps + 3 * rank
        totals = [steps + 3 * r for r in range(world.size)]
        assert everything == totals
        if staleness is None:
            continue
        for step, found in enumerate(history):
            # A worker that has joined does not count.
            bound = [min(step - staleness, total) for total in totals]
            assert all(have >= need for have, need in zip(found, bound, strict=True)), (step, found)
        for step, found in enumerate(again):
            bound = [total + step - staleness for total in totals]
            assert all(have >= need for have, need in zip(found, bound, strict=True)), (step, found)
