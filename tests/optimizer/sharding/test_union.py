"""Parameters that are made whole where they lie."""

import pytest
import torch

import hvdlite as hvd
from hvdlite.optimizer.sharding import arrivals
from tests.optimizer.sharding.alike import train_alike
from tests.optimizer.sharding.models import SMALL_BUCKETS, batch, odd


def of_sizes(sizes, dtype=torch.float32, memory_format=torch.preserve_format):
    torch.manual_seed(1)
    made = [torch.randn(size, dtype=dtype).to(memory_format=memory_format) for size in sizes]
    return torch.nn.ParameterList(made)


def adamw(net):
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def loss(net, step):
    return sum((p * p).abs().sum() * (hvd.rank() + step + 1) for p in net.parameters())


CASES = {
    "one": ([(1,)],),
    "many tiny": ([(number % 5,) for number in range(300)],),
    "odd": ([(33,), (), (1001,), (0, 3), (7, 11), (40_009,)],),
    "half": ([(33,), (1001,), (3,)], torch.bfloat16),
    "double": ([(33,), (1001,), (3,)], torch.float64),
    "complex": ([(33,), (1001,), (3,)], torch.complex64),
    "channels last": ([(5, 3, 3, 7), (2, 9, 4, 4)], torch.float32, torch.channels_last),
}


def unites(case, compression=hvd.Compression.none):
    hvd.init()
    train_alike(of_sizes(*CASES[case]), adamw, loss, steps=2, compression=compression)
    hvd.barrier()


@pytest.mark.ranks(2, 3)
@pytest.mark.mpis("mpich")
@pytest.mark.wide_in(2)
@pytest.mark.parametrize("case", CASES)
def test_parameters_of_any_size_and_kind_are_united(world, case):
    world.run(unites, case)


@pytest.mark.ranks(3)
@pytest.mark.mpis("mpich")
def test_gradients_that_travel_as_16_bits_cut_parameters_of_32(world):
    world.run(unites, "odd", hvd.Compression.bf16)


def gets_other_memory():
    """`param.data = …` between two steps, on one rank only."""
    hvd.init()
    former = []

    def moves_one(net, step):
        if step == 2 and hvd.rank() == 0:
            former.append(net[2].data)
            net[2].data = former[-1].clone()
            former[-1].fill_(7)
        return loss(net, step)

    train_alike(of_sizes([(1001,), (33,), (5000,)]), adamw, moves_one)
    assert all(each.eq(7).all() for each in former), "the former memory was written"
    hvd.barrier()


@pytest.mark.ranks(2)
@pytest.mark.mpis("mpich")
def test_a_parameter_that_gets_other_memory_is_united_there(world):
    world.run(gets_other_memory)


def leaves_gradients(shard):
    """Neither gradients' memory is written, nor is a change of parameters hidden from autograd."""
    hvd.init()
    net = odd()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), shard=shard)
    for step in range(2):
        optimizer.zero_grad()
        net(batch(step)).square().mean().backward()
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


@pytest.mark.ranks(2)
@pytest.mark.hosts("2,1")
@pytest.mark.mpis("mpich")
@pytest.mark.wide_in("2,1")
def test_on_one_host_gradients_stay_and_autograd_sees_that_parameters_have_changed(world):
    world.run(leaves_gradients, "host", knobs=SMALL_BUCKETS)
