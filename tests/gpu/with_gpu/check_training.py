"""Training with DistributedOptimizer on a GPU gives what it gives on the CPU."""

import torch

import hvdlite as hvd
from tests.gpu.with_gpu.checking import DEVICE, check, equal_on_all_ranks, run_checks, start

STEPS = 10


def train(device, **options):
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)
    )
    model.double().to(device)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), **options)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(1000 * step + hvd.rank())
        samples = torch.randn(16, 6, generator=generator, dtype=torch.float64).to(device)
        loss = (model(samples) - samples.sum(1, keepdim=True)).square().mean()
        loss.backward()
        losses.append(hvd.allreduce(loss.detach(), name="loss").item())
        optimizer.step()
        optimizer.zero_grad()
    assert equal_on_all_ranks(model.parameters())
    return torch.tensor(losses), torch.cat(
        [p.detach().cpu().reshape(-1) for p in model.parameters()]
    )


def compare(**options):
    (losses, params), (expected, others) = train(DEVICE, **options), train("cpu", **options)
    assert torch.allclose(losses, expected), (losses, expected)
    assert torch.allclose(params, others), (params - others).abs().max()


@check
def averages_train_as_on_the_cpu():
    compare()


@check
def predivided_gradients_in_groups_train_as_on_the_cpu():
    compare(gradient_predivide_factor=2.0, num_groups=2)


@check
def adasum_trains_as_on_the_cpu():
    compare(op=hvd.Adasum)


start()
run_checks()
