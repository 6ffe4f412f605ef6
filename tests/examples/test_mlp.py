"""examples/mlp.py: ranks that divide a batch take the step of one process with the whole batch."""

import re
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from examples.networks import MLP

EPOCHS = 3


def losses_of_one_process(monkeypatch):
    """The same training in plain PyTorch: the mean training loss of each epoch."""
    monkeypatch.syspath_prepend("examples")
    from digits_data import load_large_digits

    torch.manual_seed(0)
    images, labels = load_large_digits(Path("missing"))[0].tensors
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    order = torch.Generator().manual_seed(0)
    means = []
    for _ in range(EPOCHS):
        losses = []
        for batch in torch.randperm(len(images), generator=order).split(128):
            optimizer.zero_grad()
            loss = cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            losses += [loss.item()] * len(batch)
        means.append(sum(losses) / len(losses))
    return means


@pytest.mark.wide_in("mpich")
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.wide)])
def test_the_losses_are_those_of_one_process(hvdrun, monkeypatch, ranks):
    run = hvdrun(ranks, "mlp.py", "--epochs", str(EPOCHS), "--mnist", "missing")
    assert run.code == 0, run
    losses = re.findall(r"^Epoch \d/3: training loss (\S+)$", run.stdout, re.MULTILINE)
    expected = losses_of_one_process(monkeypatch)
    assert [float(loss) for loss in losses] == pytest.approx(expected, abs=2e-4)


@pytest.mark.wide
def test_two_ranks_recognise_at_least_95_percent(hvdrun):
    run = hvdrun(2, "mlp.py", "--epochs", "8", "--mnist", "missing", "--expect-accuracy", "95")
    assert run.code == 0, run
