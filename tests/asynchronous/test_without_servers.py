"""Workers of one host that share their parameters."""

import logging
import random
import time

import pytest
import torch

import hvdlite as hvd
from hvdlite.errors import HorovodInternalError
from tests.asynchronous.job import in_a_job


def contained(params):
    """By worker, how many of its steps its parameter contains. Each has one of its own, so that
    none of its steps is lost."""
    return [int(param.min()) for param in params]


@in_a_job
def steps_with_delays(staleness, steps):
    # Not used any more, and freed by some workers only: as by garbage collectors.
    former = hvd.AsyncOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
    if hvd.rank() % 2:
        del former
    params = [torch.nn.Parameter(torch.zeros(9)) for _ in range(hvd.size())]
    optimizer = hvd.AsyncOptimizer(torch.optim.SGD(params, lr=1.0), max_staleness=staleness)
    assert all(map(hvd.is_shared, params))
    params[hvd.rank()].grad = -torch.ones(9)
    draw = random.Random(hvd.rank())
    history = []
    for _ in range(steps + 3 * hvd.rank()):
        history.append(contained(params))
        time.sleep(0.01 * draw.random() ** 4 * (1 + hvd.rank()))
        optimizer.step()
    made = optimizer.counters()["steps"][hvd.rank()]
    hvd.join()
    everything = contained(params)
    hvd.barrier()
    # All count again, from the same step on.
    for _ in range(steps):
        optimizer.step()
    return history, made, everything


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("staleness", [1, 4, pytest.param(None, marks=pytest.mark.wide)])
def test_no_worker_is_further_ahead_than_the_bound(world, staleness):
    steps = 30
    for rank, (history, made, everything) in enumerate(
        world.run(steps_with_delays, staleness, steps)
    ):
        assert made == steps + 3 * rank
        assert everything == [steps + 3 * r for r in range(world.size)]
        for step, contained in enumerate(history):
            assert contained[rank] == step
            if staleness is not None:
                # A worker that has joined does not count.
                bound = [min(step - staleness, steps + 3 * r) for r in range(world.size)]
                assert all(have >= need for have, need in zip(contained, bound, strict=True))


@in_a_job
def refusals():
    model = torch.nn.Linear(2, 1)
    texts = []
    for arguments in ({"max_staleness": 0}, {"sync_replicas": 1}, {"servers": 1}):
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with pytest.raises(ValueError, match="AsyncOptimizer: ") as caught:
            hvd.AsyncOptimizer(optimizer, **arguments)
        texts.append(str(caught.value))
    return texts


@pytest.mark.ranks(2)
@pytest.mark.hosts("1,1")
def test_what_needs_servers_says_how_to_start_them(world):
    for texts in world.run(refusals):
        assert all("hvdrun -np 3 --servers 1" in text for text in texts)


@in_a_job
def waits_for_a_stopped_worker(path):
    said = []

    class Handler(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.AsyncOptimizer(torch.optim.SGD([param], lr=1.0), max_staleness=1)
    hvd.barrier()
    if hvd.rank() == 1:
        deadline = time.monotonic() + 40
        while not path.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return None
    handler = Handler()
    logging.getLogger("hvdlite").addHandler(handler)
    try:
        optimizer.step()
        with pytest.raises(HorovodInternalError) as caught:
            optimizer.step()
    finally:
        logging.getLogger("hvdlite").removeHandler(handler)
        path.touch()
    return said, str(caught.value)


@pytest.mark.ranks(2)
def test_a_worker_that_waits_for_long_says_for_whom_and_gives_up(world, tmp_path):
    knobs = {
        "HVDLITE_STALL_CHECK_TIME_SECONDS": "1",
        "HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": "2",
    }
    said, failure = world.run(waits_for_a_stopped_worker, tmp_path / "go", knobs=knobs)[0]
    assert len(said) == 1
    for text in (said[0], failure):
        assert text.startswith("worker 0 (on ")
        assert " s for step 0 of worker 1 (max_staleness=1)" in text
