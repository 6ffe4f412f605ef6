"""HVDLITE_FAULT in an optimizer's steps: what it changes, on which rank, and nothing else."""

import pytest
import torch

import hvdlite as hvd
from hvdlite.errors import NumericsError
from tests.optimizer.models import batches, loss_of, model, own

pytestmark = [pytest.mark.ranks(2), pytest.mark.mpis("mpich")]


def train(options, flaws_of, hooks=lambda *_: None):
    """Three steps; what `flaws_of` finds in each. hooks: called with the optimizer before and after
    it is wrapped."""
    hvd.init()
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    hooks(net, optimizer)
    optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters(), **options)
    hooks(net, optimizer)
    found = []
    for x, y in batches(3, 2, hvd.size()):
        optimizer.zero_grad()
        loss_of(net, *(own(each, hvd.rank(), hvd.size()) for each in (x, y))).backward()
        found.append(flaws_of(net, optimizer))
    return found


def numerics(_, optimizer):
    try:
        optimizer.step()
    except NumericsError as error:
        hvd.barrier()
        return str(error).partition(" (")[0]
    return ""


@pytest.mark.parametrize("options", [{}, {"op": hvd.Adasum}, {"shard": True}])
def test_a_gradient_becomes_nan_on_one_rank_in_one_step(world, options):
    knobs = {"HVDLITE_CHECK_NUMERICS": "1", "HVDLITE_FAULT": "nan@rank=1,name=2.bias,step=2"}
    found = world.run(train, options, numerics, knobs=knobs)
    where = "DistributedOptimizer: step 2 has NaN in the gradient of '2.bias' on rank 1"
    assert found[0] == found[1]
    assert found[0][:2] == ["", where]


class Bits:
    """Copies all bytes in a hook of the step before those of the faults, and in one after them."""

    def __init__(self):
        self.copies = []
        self.hooks = []

    def __call__(self, net, optimizer):
        def copy(*_):
            tensors = {name: param.detach() for name, param in net.named_parameters()}
            for name, param in net.named_parameters():
                for key, value in optimizer.state.get(param, {}).items():
                    tensors[f"{key} of {name}"] = value
            copied = {name: each.clone().view(-1) for name, each in tensors.items()}
            self.copies.append({name: each.view(torch.uint8) for name, each in copied.items()})

        self.hooks.append(optimizer.register_step_pre_hook(copy))

    def flipped(self, _, optimizer):
        """(tensor, byte, the bits that differ) in one step."""
        self.copies.clear()
        optimizer.step()
        before, after = self.copies
        return [
            (name, byte, int(before[name][byte] ^ after[name][byte]))
            for name in before
            for byte in (before[name] ^ after[name]).nonzero().flatten().tolist()
        ]


def flips(options):
    bits = Bits()
    found = train(options, bits.flipped, bits)
    for hook in bits.hooks:  # which would keep the optimizer for the tests that follow
        hook.remove()
    return found


@pytest.mark.parametrize("options", [{}, {"op": hvd.Adasum}, {"shard": True}])
def test_one_bit_flips_on_one_rank_in_one_step(world, options):
    found = world.run(flips, options, knobs={"HVDLITE_FAULT": "bitflip@rank=1,step=2,bit=21"})
    assert found == [[[], [], []], [[], [("0.weight", 2, 1 << 5)], []]]


def test_one_bit_of_an_optimizers_state_flips(world):
    fault = "bitflip:state@rank=0,step=2,times=2,name=2.bias; bitflip:state@rank=1,name=no.such"
    found = world.run(flips, {}, knobs={"HVDLITE_FAULT": fault})
    flip = [("exp_avg of 2.bias", 0, 1)]
    assert found == [[[], flip, flip], [[], [], []]]
