"""HVDLITE_FAULT in an optimizer's steps: what it changes, on which rank, and nothing else."""

import pytest

import hvdlite as hvd
from hvdlite.errors import NumericsError
from hvdlite.tensor_bytes import flat_bytes
from tests.harness.on_ranks import on_ranks
from tests.optimizer.models import OPTIMIZERS, batches, loss_of, mine, model

pytestmark = [pytest.mark.ranks(2), pytest.mark.mpis("mpich")]

OPTIONS = pytest.mark.parametrize("options", [{}, {"op": hvd.Adasum}, {"shard": True}])


def steps(options, hooks=lambda *_: None):
    """An optimizer before each of three steps. hooks: called with it before and after it is
    wrapped."""
    net = model()
    optimizer = OPTIMIZERS["Adam"](net.parameters())
    hooks(net, optimizer)
    optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters(), **options)
    hooks(net, optimizer)
    for x, y in batches(3, 2, hvd.size()):
        optimizer.zero_grad()
        loss_of(net, *mine(x, y)).backward()
        yield optimizer


@OPTIONS
@on_ranks(knobs={"HVDLITE_CHECK_NUMERICS": "1", "HVDLITE_FAULT": "nan@rank=1,name=2.bias,step=2"})
def test_a_gradient_becomes_nan_on_one_rank_in_one_step(options):
    for number, optimizer in enumerate(steps(options)):
        if number == 1:
            with pytest.raises(NumericsError, match=r"step 2 has NaN .* of '2.bias' on rank 1"):
                optimizer.step()
            hvd.barrier()
            return
        optimizer.step()


def flipped(options):
    """By step (tensor, byte, bits) that differ between a hook of the step before those of the
    faults, and one after them."""
    copies, hooks, found = [], [], []

    def look(net, optimizer):
        def copy(*_):
            tensors = {name: param.detach() for name, param in net.named_parameters()}
            for name, param in net.named_parameters():
                state = optimizer.state.get(param, {}).items()
                tensors |= {f"{key} of {name}": value for key, value in state}
            copies.append({name: flat_bytes(each).clone() for name, each in tensors.items()})

        hooks.append(optimizer.register_step_pre_hook(copy))

    for optimizer in steps(options, look):
        copies.clear()
        optimizer.step()
        before, after = copies
        found.append(
            [
                (name, byte, int(before[name][byte] ^ after[name][byte]))
                for name in before
                for byte in (before[name] ^ after[name]).nonzero().flatten().tolist()
            ]
        )
    for hook in hooks:  # which would keep the optimizer for the tests that follow
        hook.remove()
    return hvd.allgather_object(found)


@OPTIONS
@on_ranks(knobs={"HVDLITE_FAULT": "bitflip@rank=1,step=2,bit=21"})
def test_one_bit_flips_on_one_rank_in_one_step(options):
    assert flipped(options) == [[[], [], []], [[], [("0.weight", 2, 1 << 5)], []]]


STATE = "bitflip:state@rank=0,step=2,times=2,name=2.bias; bitflip:state@rank=1,name=no.such"


@on_ranks(knobs={"HVDLITE_FAULT": STATE})
def test_one_bit_of_an_optimizers_state_flips():
    flip = [("exp_avg of 2.bias", 0, 1)]
    assert flipped({}) == [[[], flip, flip], [[], [], []]]
