"""The bytes of tensors of any layout."""

import pytest
import torch

import hvdlite as hvd
from hvdlite.optimizer.checks.fingerprints import bytes_of
from hvdlite.tensor_bytes import flat_bytes

LAYOUTS = {
    "one element of a column": lambda: torch.ones(1, 6)[:, 0],
    "one element, expanded": lambda: torch.ones(1).expand(4)[:1],
    "expanded": lambda: torch.tensor(1.0).expand(4),
    "no element": lambda: torch.ones(0, 6)[:, 0],
    "a number": lambda: torch.ones(3)[1],
    "a column": lambda: torch.arange(12.0).reshape(3, 4)[:, 1],
    "transposed": lambda: torch.arange(12.0).reshape(3, 4).T,
    "from the middle": lambda: torch.arange(12.0)[3:7],
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8])
def test_they_are_those_of_the_elements_in_their_order(make, dtype):
    tensor = make().to(dtype)
    wanted = list(tensor.clone(memory_format=torch.contiguous_format).flatten().tolist())
    found = flat_bytes(tensor)
    assert found.dtype == torch.uint8
    assert found.stride() == (1,)
    assert found.clone().view(dtype).tolist() == wanted


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_they_are_the_same_for_all_checks(make):
    tensor = make()
    same = torch.tensor(tensor.tolist())
    assert bytes_of(tensor).tolist() == bytes_of(same).tolist()


def trains(name):
    hvd.init()
    param = torch.nn.Parameter(LAYOUTS[name]())
    made = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=0.5))
    (param * 2).sum().backward()
    made.step()
    hvd.check_parameters([param], made)
    return param.tolist()


def test_a_parameter_of_one_element_of_a_larger_tensor_is_trained(world):
    assert world.run(trains, "one element of a column") == [[0.0]] * world.size
