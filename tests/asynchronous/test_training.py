"""Training on servers: what it computes, whatever the timing."""

import random
import time

import pytest
import torch

import hvdlite as hvd
from tests.asynchronous.job import in_a_job, of_workers, servers
from tests.asynchronous.steps import Steps


def model_and_data():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    return model, torch.randn(24, 6), torch.randn(24, 2)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model):
    groups = [{"params": [p], "lr": 0.1 / (1 + i)} for i, p in enumerate(model.parameters())]
    return torch.optim.Adam(groups)


class OwnOptimizer(torch.optim.SGD):
    """A user's class, which may look at whole tensors: its parameters stay whole."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                param.data.div_(1 + param.data.norm() / 100)


def own(model):
    return OwnOptimizer(model.parameters(), lr=0.1)


def adagrad(model):  # its state is there before the first step
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


def train(model, optimizer, inputs, targets, steps):
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
        schedule.step()


@in_a_job
def trains_in_step(make, steps, partitioner):
    model, inputs, targets = model_and_data()
    if hvd.rank():
        for param in model.parameters():
            param.data.zero_()  # worker 0's values count
    optimizer = hvd.AsyncOptimizer(
        make(model), model.named_parameters(), max_staleness=0, partitioner=partitioner
    )
    part = slice(hvd.rank(), 24, hvd.size())
    train(model, optimizer, inputs[part], targets[part], steps)
    return [param.tolist() for param in model.parameters()]


def close(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(one), other.data)


@pytest.mark.ranks(4)
@pytest.mark.hosts("2,1")
@pytest.mark.parametrize(
    ("make", "partitioner"),
    [
        (sgd, None),
        (adam, hvd.FixedShardsPartitioner(2)),
        (own, hvd.FixedShardsPartitioner(2)),
        pytest.param(adagrad, hvd.MaxSizePartitioner(24), marks=pytest.mark.wide),
    ],
)
def test_without_staleness_it_trains_as_one_process_on_all_batches(world, make, partitioner):
    knobs = servers(2 if world.size == 4 else 1)
    results = world.run(trains_in_step, make, 4, partitioner, knobs=knobs)
    model, inputs, targets = model_and_data()
    train(model, make(model), inputs, targets, 4)
    for params in of_workers(results):
        close(params, model.parameters())


@in_a_job
def steps_with_random_delays(staleness, steps):
    model = Steps(3)
    optimizer = hvd.AsyncOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        model.named_parameters(),
        max_staleness=staleness,
        partitioner=hvd.FixedShardsPartitioner(2),
    )
    draw = random.Random(hvd.rank())
    history = []
    for _ in range(steps):
        history.append(model.contained())
        time.sleep(0.02 * draw.random() ** 4 * (1 + hvd.rank()))
        model.backward(hvd.rank())
        optimizer.step()
    optimizer.synchronize()
    hvd.barrier()
    optimizer.pull()
    assert model.contained() == [steps] * hvd.size()
    return history


@pytest.mark.ranks(4)
@pytest.mark.hosts("2,2")
@pytest.mark.parametrize("staleness", [1, 3, pytest.param(None, marks=pytest.mark.wide)])
def test_parameters_are_never_older_than_the_bound(world, staleness):
    steps = 40
    results = world.run(steps_with_random_delays, staleness, steps, knobs=servers(1))
    for history in of_workers(results):
        for step, contained in enumerate(history):
            assert len(contained) == 3
            assert max(contained) <= steps
            if staleness is not None:
                assert min(contained) >= step - staleness, (step, contained)


@in_a_job
def backups(replicas, steps):
    model = Steps(2)  # one on each server
    optimizer = hvd.AsyncOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        model.named_parameters(),
        sync_replicas=replicas,
    )
    draw = random.Random(hvd.rank())
    pushed = 0
    while model.counts[0].sum().item() / 3 < steps:
        time.sleep(0.01 * draw.random() * (1 + 3 * (hvd.rank() == 0)))
        model.backward(hvd.rank())
        optimizer.step()
        pushed += 1
    hvd.join()
    optimizer.synchronize()
    optimizer.pull()
    first, second = model.counts
    assert first.equal(second), "the servers took gradients of different workers"
    everything = hvd.allreduce(torch.tensor([float(pushed)]), op=hvd.Sum)
    dropped = optimizer.counters()["dropped"]
    rounds = first.sum().item() / 3
    return everything.item(), dropped, rounds


@pytest.mark.ranks(4)
@pytest.mark.hosts("3,2")
def test_a_step_has_the_gradients_of_the_fastest_workers_on_all_servers(world):
    results = of_workers(world.run(backups, 1, 15, knobs=servers(2)))
    for pushed, dropped, rounds in results:
        # With one replica each step has one gradient, and all others are dropped.
        assert rounds >= 15
        assert pushed == dropped + rounds


@in_a_job
def second_server_hears_late():
    model = Steps(2)  # one on each server
    optimizer = hvd.AsyncOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), sync_replicas=1)
    first, second = optimizer._hvdlite_worker.links
    model.backward(hvd.rank())
    if hvd.rank() == 1:
        optimizer.step()
        hvd.barrier()
        hvd.barrier()
        optimizer.step()
        return None
    hvd.barrier()
    push = second.push

    def push_after_the_next_round(*arguments):
        while not first.look()["dropped"]:
            pass
        hvd.barrier()
        while first.look()["made"][1] < 2:
            pass
        # What the first server has told the second one comes before this worker's next questions.
        for _ in range(20):
            second.look()
        push(*arguments)

    second.push = push_after_the_next_round
    optimizer.step()
    return model.contained()[1], [count.sum().item() for count in model.counts]


@pytest.mark.ranks(4)
def test_a_late_worker_gets_the_parameters_of_one_round_from_all_servers(world):
    late = of_workers(world.run(second_server_hears_late, knobs=servers(2)))[0]
    assert late == (1, [3, 3])


@in_a_job
def loads_late():
    param = torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.AsyncOptimizer(torch.optim.SGD([param], lr=1.0), sync_replicas=1)
    param.grad = -torch.ones(3)
    if hvd.rank() == 1:
        hvd.barrier()
        while optimizer.counters()["steps"][1] < 3:
            optimizer.step()
        hvd.barrier()
        return None
    link = optimizer._hvdlite_worker.links[0]
    load = link.load

    def load_when_the_next_rounds_are_over(places):
        hvd.barrier()
        hvd.barrier()
        load(places)

    link.load = load_when_the_next_rounds_are_over
    optimizer.step()
    return param.tolist()


@pytest.mark.ranks(3)
def test_a_round_that_not_all_wait_for_is_read_as_it_was(world):
    assert of_workers(world.run(loads_late, knobs=servers(1)))[0] == [1, 1, 1]


def embedding_and_data():
    torch.manual_seed(2)
    model = torch.nn.Sequential(
        torch.nn.EmbeddingBag(50, 4, sparse=True, mode="sum"), torch.nn.Linear(4, 1)
    )
    return model, torch.randint(0, 50, (12, 6)), torch.randn(12, 1)


def sparse_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def sparse_adagrad(model):
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


def sparse_adam(model):
    return torch.optim.SparseAdam([model[0].weight], lr=0.1)


@in_a_job
def trains_sparse(make, staleness):
    model, inputs, targets = embedding_and_data()
    optimizer = hvd.AsyncOptimizer(
        make(model), max_staleness=staleness, partitioner=hvd.FixedShardsPartitioner(2)
    )
    part = slice(hvd.rank(), 12, hvd.size())
    train(model, optimizer, inputs[part], targets[part], 4)
    assert model[0].weight.grad.is_sparse
    optimizer.synchronize()
    hvd.barrier()
    optimizer.pull()
    return [param.tolist() for param in model.parameters()]


@pytest.mark.ranks(4)
@pytest.mark.hosts("2,1")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("make", [sparse_sgd, sparse_adagrad, sparse_adam])
def test_rows_train_as_in_one_process(world, make):
    knobs = servers(2 if world.size == 4 else 1)
    results = of_workers(world.run(trains_sparse, make, 0, knobs=knobs))
    model, inputs, targets = embedding_and_data()
    train(model, make(model), inputs, targets, 4)
    for params in results:
        close(params, model.parameters())


@in_a_job
def saves_and_loads(path):
    model, inputs, targets = model_and_data()
    optimizer = hvd.AsyncOptimizer(
        adam(model), max_staleness=0, partitioner=hvd.FixedShardsPartitioner(2)
    )
    train(model, optimizer, inputs, targets, 3)
    state = optimizer.full_state_dict()
    if hvd.rank() == 0:
        torch.save({"model": model.state_dict(), "optimizer": state}, path)
    else:
        assert state == {}
    hvd.barrier()
    train(model, optimizer, inputs, targets, 2)
    expected = [param.tolist() for param in model.parameters()]
    # Back, with what rank 0 loads.
    saved = torch.load(path)
    if hvd.rank() == 0:
        model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    train(model, optimizer, inputs, targets, 2)
    assert [param.tolist() for param in model.parameters()] == expected
    # A new one, of an optimizer that has state.
    model.load_state_dict(saved["model"])
    ordinary = adam(model)
    ordinary.load_state_dict(saved["optimizer"])
    again = hvd.AsyncOptimizer(ordinary, max_staleness=0)
    train(model, again, inputs, targets, 2)
    close([param.tolist() for param in model.parameters()], map(torch.tensor, expected))
    return expected


@pytest.mark.ranks(4)
def test_a_checkpoint_loads_into_an_ordinary_optimizer_and_back(world, tmp_path):
    path = str(tmp_path / "checkpoint")
    results = of_workers(world.run(saves_and_loads, path, knobs=servers(1)))
    model, inputs, targets = model_and_data()
    optimizer = adam(model)
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    train(model, optimizer, inputs, targets, 2)
    for params in results:
        close(params, model.parameters())


@in_a_job
def uneven_data(staleness):
    # Not used any more, and freed by some workers only: as by garbage collectors.
    former = hvd.AsyncOptimizer(torch.optim.SGD(Steps(1).parameters(), lr=1.0))
    if hvd.rank() % 2:
        del former
    model = Steps(1)
    optimizer = hvd.AsyncOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), max_staleness=staleness
    )
    for _ in range(2):
        for _ in range(3 + 10 * hvd.rank()):
            model.backward(hvd.rank())
            optimizer.step()
        assert hvd.join() in range(hvd.size())
    optimizer.synchronize()
    hvd.barrier()
    optimizer.pull()
    return model.contained()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_worker_that_has_joined_holds_up_nobody(world, staleness):
    results = of_workers(world.run(uneven_data, staleness, knobs=servers(1)))
    # In step, the mean is over those that still have data: 3 steps of three workers, 10 of two,
    # 10 of one.
    expected = [6, 26, 46] if staleness else [2, 12, 32]
    for contained in results:
        assert contained == pytest.approx(expected)


@in_a_job
def scaled():
    model, inputs, targets = model_and_data()
    optimizer = hvd.AsyncOptimizer(sgd(model), max_staleness=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        scaler.scale(loss * float("inf") if step == 1 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
    optimizer.synchronize()
    return optimizer.counters()["steps"]


@pytest.mark.ranks(2)
def test_a_step_that_grad_scaler_skips_is_none(world):
    assert of_workers(world.run(scaled, knobs=servers(1))) == [[2]]


@in_a_job
def loads_what_only_worker_0_has():
    model = torch.nn.Linear(2, 2)
    optimizer = hvd.AsyncOptimizer(torch.optim.Adam(model.parameters(), lr=0.5), max_staleness=1)
    saved = optimizer.full_state_dict()
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.load_state_dict(saved)
    model.double()
    with pytest.raises(RuntimeError, match=r"parameter 'parameter 0' is now .*float64"):
        optimizer.pull()
    return optimizer.param_groups[0]["lr"], len(saved)


@pytest.mark.ranks(3)
def test_every_worker_loads_what_worker_0_has(world):
    results = of_workers(world.run(loads_what_only_worker_0_has, knobs=servers(1)))
    assert results == [(0.5, 2), (0.5, 0)]


class Held(torch.optim.SGD):
    """Its steps on a server wait for a file."""

    def __init__(self, params, path):
        super().__init__(params, lr=1.0)
        self.path = path

    def step(self, closure=None):
        deadline = time.monotonic() + 40
        while not self.path.exists():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        super().step()


@in_a_job
def meets_with_pushes_under_way(path, staleness):
    model = Steps(1)
    optimizer = hvd.AsyncOptimizer(Held(model.parameters(), path), max_staleness=staleness)
    hvd.barrier()  # no worker's push comes before all have the parameters
    model.backward(hvd.rank())
    optimizer.step()
    hvd.barrier()
    hvd.join()
    assert not path.exists()
    hvd.barrier()  # nobody is between
    path.touch()
    optimizer.step()  # all count again
    optimizer.synchronize()
    hvd.barrier()
    optimizer.pull()
    return model.contained(), optimizer.counters()["steps"]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("staleness", [1, None])
def test_neither_barrier_nor_join_waits_for_pushes(world, staleness, tmp_path):
    path = tmp_path / "go"
    results = world.run(meets_with_pushes_under_way, path, staleness, knobs=servers(1))
    assert of_workers(results) == [([2, 2], [2, 2])] * 2
