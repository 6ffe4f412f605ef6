"""Workers of several hosts without servers: each part of the parameters has its home on one."""

import random
import threading
import time

import pytest
import torch

import hvdlite as hvd
from hvdlite.asynchronous.homes import Marks
from hvdlite.asynchronous.parts import Layout, Part
from hvdlite.asynchronous.served import Push
from hvdlite.errors import HorovodInternalError
from tests.asynchronous.job import in_a_job
from tests.asynchronous.test_without_servers import contained
from tests.harness.programs import run_program
from tests.harness.worlds import python_of


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


def embedding_and_data():
    torch.manual_seed(2)
    model = torch.nn.Sequential(
        torch.nn.EmbeddingBag(40, 3, sparse=True, mode="sum"), torch.nn.Linear(3, 1)
    )
    return model, torch.randint(0, 40, (24, 5)), torch.randn(24, 1)


def loss_of(model, inputs, targets):
    return (model(inputs) - targets).square().mean()


@in_a_job
def trains(make, steps):
    model, inputs, targets = embedding_and_data()
    if hvd.rank():
        for param in model.parameters():
            param.data.zero_()  # worker 0's values count
    optimizer = hvd.AsyncOptimizer(
        make(model),
        model.named_parameters(),
        max_staleness=2,
        partitioner=hvd.FixedShardsPartitioner(2),
    )
    before = loss_of(model, inputs, targets).item()
    hvd.barrier()
    part = slice(hvd.rank(), 24, hvd.size())
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, inputs[part], targets[part]).backward()
        optimizer.step()
    optimizer.synchronize()
    hvd.barrier()
    optimizer.pull()
    after = loss_of(model, inputs, targets).item()
    # What rank 0 saves has the state of all parameters, and loads into an ordinary optimizer.
    state = optimizer.full_state_dict()
    assert (state == {}) == (hvd.rank() != 0)
    if hvd.rank() == 0:
        ordinary = make(model)
        ordinary.load_state_dict(state)
        for param in model.parameters() if make is adagrad else ():
            assert ordinary.state[param]["sum"].shape == param.shape
            assert ordinary.state[param]["sum"].sum() > 0
    hvd.barrier()
    return before, after, [param.tolist() for param in model.parameters()]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.02)


def adagrad(model):
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


@pytest.mark.hosts("2,1", "2,2")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("make", [sgd, adagrad])
def test_rows_and_dense_gradients_train_the_same_model_on_all_hosts(world, make):
    results = world.run(trains, make, 40)
    model, inputs, targets = embedding_and_data()
    expected = loss_of(model, inputs, targets).item()
    for before, after, params in results:
        assert before == pytest.approx(expected)
        assert after < 0.5 * before
        assert params == results[0][2]


@in_a_job
def loads():
    model = torch.nn.Linear(4, 4)
    ordinary = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    model(torch.ones(1, 4)).sum().backward()
    ordinary.step()
    saved = ordinary.state_dict()
    optimizer = hvd.AsyncOptimizer(ordinary, partitioner=hvd.FixedShardsPartitioner(2))
    for _ in range(1 + hvd.rank()):
        optimizer.step()
    optimizer.synchronize()
    hvd.barrier()
    if hvd.rank() == 0:
        for param in model.parameters():
            param.data.fill_(7.0)
    optimizer.load_state_dict(saved if hvd.rank() == 0 else {})
    values = [param.tolist() for param in model.parameters()]
    momentum = [
        state["momentum_buffer"].tolist() for state in optimizer.state_dict()["state"].values()
    ]
    hvd.barrier()
    for param in model.parameters():
        param.grad.zero_()
    optimizer.step()  # takes an answer of before
    optimizer.synchronize()
    hvd.barrier()
    optimizer.pull()
    return values, momentum, model.bias.tolist()


@pytest.mark.hosts("2,1")
def test_every_host_loads_what_worker_0_has(world):
    for values, momentum, bias in world.run(loads):
        assert values == [[[7.0] * 4] * 4, [7.0] * 4]
        assert momentum == [[[1.0] * 4] * 4, [1.0] * 4]
        assert max(bias) <= 7 - 0.25  # the momentum goes on: lr * 0.5 * 1.0


class Failing(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        if self.param_groups[0]["lr"] < 0.5 and threading.current_thread().name.startswith("hvd"):
            raise ZeroDivisionError("the learning rate is too small")


@in_a_job
def steps_until_it_fails():
    params = counters_of(hvd.size())
    optimizer = hvd.AsyncOptimizer(
        Failing(params, lr=1.0), max_staleness=2, partitioner=hvd.FixedShardsPartitioner(2)
    )
    for param in params:
        param.grad = torch.ones_like(param)
    for step in range(1000):
        if step == 3 and hvd.rank() == hvd.size() - 1:
            optimizer.param_groups[0]["lr"] = 0.1
        try:
            optimizer.step()
        except HorovodInternalError as error:
            return str(error)
    return None


@pytest.mark.hosts("2,1")
def test_a_host_that_can_not_serve_fails_every_worker(world):
    for text in world.run(steps_until_it_fails):
        assert "worker 0 (on " in text
        assert "and serves there) failed: ZeroDivisionError: the learning rate is too" in text


@in_a_job
def one_leaves_early(which):
    params = counters_of(hvd.size())
    optimizers = [optimizer_for(params, staleness) for staleness in (1, None)]
    for param in params:
        param.grad = -torch.ones_like(param)
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.step()
    if hvd.rank() == which:
        return None
    for _ in range(30):
        for optimizer in optimizers:
            optimizer.step()
    del optimizers[0]
    optimizer = None
    for _ in range(3):
        optimizers[0].step()
    optimizers[0].synchronize()
    return optimizers[0].counters()["steps"]


@pytest.mark.hosts("2,2")
@pytest.mark.parametrize("which", [0, 3])
def test_a_worker_that_leaves_holds_up_nobody_and_goes_on_serving(world, which):
    for rank, found in enumerate(world.run(one_leaves_early, which)):
        if rank != which:
            assert found[rank] == 36


class Slow(torch.optim.SGD):
    """Leaves time for another thread between the gradient and its use."""

    def step(self, closure=None):
        before = [param.grad for group in self.param_groups for param in group["params"]]
        time.sleep(0.002)
        after = [param.grad for group in self.param_groups for param in group["params"]]
        assert all(one is other for one, other in zip(before, after, strict=True))
        super().step()


@in_a_job
def steps_at_the_same_time():
    params = counters_of(hvd.size())
    own = params[hvd.rank()]
    optimizer = hvd.AsyncOptimizer(Slow(params, lr=1.0), partitioner=hvd.FixedShardsPartitioner(2))
    own.grad = -torch.ones_like(own)
    for _ in range(20):
        optimizer.step()
    optimizer.synchronize()
    hvd.barrier()
    optimizer.pull()
    return contained(params)


@pytest.mark.hosts("2,1")
def test_the_leader_applies_its_own_gradients_and_those_of_others_at_once(world):
    assert world.run(steps_at_the_same_time) == [[20] * 3] * 3


def test_what_is_marked_while_others_are_taken_is_taken_later():
    rows = 1 << 18
    part = Part(0, "weight", 0, 0, rows, (rows, 1), torch.float32)
    layout = Layout((part,), (0,), part.size_bytes)
    marks = Marks(torch.zeros(Marks.size_bytes(layout), dtype=torch.uint8), layout)

    def mark():
        for begin in range(32):
            chosen = torch.arange(begin, rows, 32)
            marks.mark(Push(0, 0, 0, rows={0: (chosen, chosen)}))

    thread = threading.Thread(target=mark)
    thread.start()
    taken = torch.zeros(rows, dtype=torch.int64)
    while True:
        is_last = not thread.is_alive()
        _, found = marks.take()
        for chosen in found.values():
            taken[chosen] += 1
        if is_last:
            break
    assert taken.tolist() == [1] * rows


PROGRAM = """
import torch
import hvdlite as hvd

hvd.init()
params = [torch.nn.Parameter(torch.zeros(4, 2)) for _ in range(2)]
optimizer = hvd.AsyncOptimizer(torch.optim.SGD(params, lr=1.0), max_staleness=4)
for param in params:
    param.grad = torch.ones_like(param)
for step in range(100_000):
    optimizer.step()
    if hvd.rank() == {rank} and step == 5:
        raise ZeroDivisionError("in the middle")
"""


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.wide)])
def test_a_worker_that_fails_ends_the_job(rank, tmp_path, monkeypatch):
    monkeypatch.setenv("HVDLITE_HOST_RANKS", "2,1")
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.format(rank=rank))
    python = python_of("openmpi")
    finished = run_program([python.with_name("hvdrun"), "-np", "3", python, script], 60)
    assert finished.code == 1
    assert "ZeroDivisionError: in the middle" in finished.stderr
