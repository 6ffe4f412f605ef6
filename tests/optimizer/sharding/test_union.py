"""Parameters that are made whole where they lie."""

import pytest
import torch

import hvdlite as hvd
from hvdlite.optimizer.sharding import arrivals
from tests.harness.on_ranks import on_ranks
from tests.optimizer.sharding.alike import train_alike, wrapped
from tests.optimizer.sharding.late import sgd
from tests.optimizer.sharding.models import SMALL_BUCKETS, loss_of, odd

pytestmark = pytest.mark.mpis("mpich")


def of_sizes(sizes, memory_format=torch.preserve_format):
    return torch.nn.ParameterList(
        torch.randn(size).to(memory_format=memory_format) for size in sizes
    )


def adamw(net):
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def loss(net, step):
    return sum((p * p).abs().sum() * (hvd.rank() + step + 1) for p in net.parameters())


CASES = {
    "one": ([(1,)],),
    "many tiny": ([(number % 5,) for number in range(300)],),
    "odd": ([(33,), (), (1001,), (0, 3), (7, 11), (40_009,)],),
    "channels last": ([(5, 3, 3, 7), (2, 9, 4, 4)], torch.channels_last),
}


@pytest.mark.wide_in(2)
@pytest.mark.parametrize("case", CASES)
@on_ranks(2, 3)
def test_parameters_of_any_size_and_format_are_united(case):
    train_alike(adamw, of_sizes(*CASES[case]), loss, steps=2)
    hvd.barrier()


@on_ranks(3)
def test_gradients_that_travel_as_16_bits_cut_parameters_of_32():
    train_alike(adamw, of_sizes(*CASES["odd"]), loss, steps=2, compression=hvd.Compression.bf16)
    hvd.barrier()


@on_ranks(2)
def test_a_parameter_that_gets_other_memory_is_united_there():
    """`param.data = …` between two steps, on one rank only."""
    former = []

    def moves_one(net, step):
        if step == 2 and hvd.rank() == 0:
            former.append(net[2].data)
            net[2].data = former[-1].clone()
            former[-1].fill_(7)
        return loss(net, step)

    train_alike(adamw, of_sizes([(1001,), (33,), (5000,)]), moves_one)
    assert all(each.eq(7).all() for each in former), "the former memory was written"
    hvd.barrier()


@pytest.mark.wide_in("2,1")
@on_ranks(2, hosts=("2,1",), knobs=SMALL_BUCKETS)
def test_on_one_host_gradients_stay_and_autograd_sees_that_parameters_have_changed():
    """Neither gradients' memory is written, nor is a change of parameters hidden from autograd."""
    net = odd()
    optimizer = wrapped(sgd, net, shard="host")
    for step in range(2):
        optimizer.zero_grad()
        loss_of(net, step).backward()
        optimizer.synchronize()
        parts = [part for p in net.parameters() for part in optimizer.sharded_grad(p)]
        copies = [part.grad.clone() for part in parts]
        versions = [p._version for p in net.parameters()]
        x = torch.ones(1, 37, requires_grad=True)
        saved = net.end(x).sum()
        with optimizer.skip_synchronize():
            optimizer.step()
        assert all(torch.equal(p.grad, c) for p, c in zip(parts, copies, strict=True))
        moved = (p._version > v for p, v in zip(net.parameters(), versions, strict=True))
        assert all(moved)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(saved, x)
    unions = optimizer._hvdlite_update._arrivals
    assert unions
    assert all(type(union) is arrivals.UnionInPlace for union in unions)
    everyones = hvd.allgather_object([p.detach() for p in net.parameters()])
    assert all(map(torch.equal, everyones[0], everyones[-1]))
