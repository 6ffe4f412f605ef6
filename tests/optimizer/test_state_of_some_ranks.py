"""State that only some ranks have, and options that have another type on some."""

import pytest
import torch

import hvdlite as hvd
from hvdlite.errors import DifferenceError


def state_of_one_rank():
    """The texts, tensors and ranks of what check_parameters raises."""
    hvd.init()
    net = torch.nn.Linear(2, 2)
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    optimizer = torch.optim.Adam(net.parameters())
    if hvd.rank() == 1:
        net(torch.ones(1, 2)).sum().backward()
        values = [param.clone() for param in net.parameters()]
        optimizer.step()
        with torch.no_grad():
            for param, value in zip(net.parameters(), values, strict=True):
                param.copy_(value)
    with pytest.raises(DifferenceError) as raised:
        hvd.check_parameters(net, optimizer, repair=True)
    return str(raised.value), raised.value.tensor, raised.value.ranks


@pytest.mark.ranks(2, 3)
def test_state_that_some_ranks_lack_is_named(world):
    found = world.run(state_of_one_rank)
    assert found == [found[0]] * world.size
    text, tensor, ranks = found[0]
    lacking = "rank 0" if world.size == 2 else "ranks 0, 2"
    assert (
        f"state 'exp_avg of weight' float32[2, 2] is there on rank 1, but not on {lacking}" in text
    )
    assert "broadcast_optimizer_state" in text
    assert (tensor, ranks) == ("exp_avg of weight", () if world.size == 2 else (1,))


def option_of_another_type():
    hvd.init()
    net = torch.nn.Linear(2, 2)
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    (group,) = optimizer.param_groups
    group["lr"] = (1.0, 1)[hvd.rank()]
    assert hvd.check_parameters(net, optimizer) == []
    group["lr"] = (0.25, 1)[hvd.rank()]
    repaired = hvd.check_parameters(net, optimizer, repair=True)
    return repaired, group["lr"]


@pytest.mark.ranks(2)
def test_an_option_may_be_an_integer_on_one_rank(world):
    assert world.run(option_of_another_type) == [(["lr of parameter group 0"], 0.25)] * 2
