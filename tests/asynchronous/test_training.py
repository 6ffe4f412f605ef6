"""Training on servers."""

import pytest
import torch

import hvdlite as hvd
from tests.asynchronous.job import in_a_job, servers


def model_and_data():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    return model, torch.randn(24, 6), torch.randn(24, 2)


@in_a_job
def trains_in_step(make, steps):
    model, inputs, targets = model_and_data()
    if hvd.rank():
        for param in model.parameters():
            param.data.zero_()  # worker 0's values count
    optimizer = hvd.AsyncOptimizer(make(model), model.named_parameters(), max_staleness=0)
    size = 24 // hvd.size()
    own = slice(size * hvd.rank(), size * (hvd.rank() + 1))
    for _ in range(steps):
        optimizer.zero_grad()
        (model(inputs[own]) - targets[own]).square().mean().backward()
        optimizer.step()
    return [param.tolist() for param in model.parameters()]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.1)


@pytest.mark.ranks(3)
@pytest.mark.hosts("2,1")
@pytest.mark.parametrize("make", [sgd, adam])
def test_without_staleness_it_trains_as_one_process_on_all_batches(world, make):
    results = world.run(trains_in_step, make, 4, knobs=servers(1 if world.size == 3 else 2))
    workers = [result for result in results if result != "served"]
    model, inputs, targets = model_and_data()
    optimizer = make(model)
    for _ in range(4):
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
    for params in workers:
        for found, expected in zip(params, model.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(found), expected.data)
