"""Sharded training gives the bits of unsharded training, in every step."""

import functools

import pytest
import torch

import hvdlite as hvd
from tests.optimizer.sharding.alike import train_alike
from tests.optimizer.sharding.models import (
    OPTIMIZERS,
    SMALL_BUCKETS,
    batch,
    differences,
    odd,
    optimizer_of,
)

# State of which each element of a parameter has one.
BY_ELEMENT = {
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg"),
    *("grad_avg", "sum", "acc_delta", "prev", "step_size", "ax"),
}


def trains_alike(name, shard, shared=False, dtype_name="float32", **arguments):
    hvd.init()
    dtype = getattr(torch, dtype_name)

    def loss(net, step):
        return net(batch(step, dtype)).square().mean()

    make = functools.partial(optimizer_of, name)
    ways = {"shard": shard, "shared": shared, "steps": 5, **arguments}
    _, cut = train_alike(odd(dtype), make, loss, **ways)
    count = sum(
        value.numel()
        for state in cut.state.values()
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and key in BY_ELEMENT
    )
    hvd.barrier()
    return count


@pytest.mark.ranks(1, 2, 3, 4, 7)
@pytest.mark.hosts("1,1", "2,1", "1,1,1")
@pytest.mark.wide_in(1, 3, 4, 7, "1,1", "1,1,1")
@pytest.mark.parametrize(
    ("shard", "shared"),
    [(True, False), ("host", False), (True, True), ("host", True), (False, True)],
)
def test_every_step_has_the_bits_of_the_unsharded_one(world, shard, shared):
    world.run(trains_alike, "Adam", shard, shared, knobs=SMALL_BUCKETS)


@pytest.mark.ranks(2, 3)
@pytest.mark.mpis("mpich")
@pytest.mark.wide_in(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_element_wise_optimizer_has_the_bits_of_the_unsharded_one(world, name):
    sizes = world.run(trains_alike, name, True)
    alone = world.run(trains_alike, name, False)
    # What all ranks keep of the state is what one keeps of all.
    assert sum(sizes) == alone[0]
    assert name == "SGD" or alone[0]


@pytest.mark.hosts("2,1", "1,1,1")
@pytest.mark.mpis("mpich")
@pytest.mark.wide_in("1,1,1")
@pytest.mark.parametrize("name", ["fused", "fused momentum"])
def test_between_hosts_fused_optimizers_have_the_bits_of_the_unsharded_ones(world, name):
    world.run(trains_alike, name, True, knobs=SMALL_BUCKETS)


@pytest.mark.ranks(2)
@pytest.mark.hosts("2,1")
@pytest.mark.wide_in(2)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_other_dtypes_have_the_bits_of_the_unsharded_ones(world, dtype):
    world.run(trains_alike, "momentum", True, False, dtype)


ARGUMENTS = {
    "compression": {"compression": hvd.Compression.bf16},
    "sum": {"op": hvd.Sum},
    "predivide": {"gradient_predivide_factor": 2.0},
    "groups": {"groups": 3},
}


@pytest.mark.ranks(2)
@pytest.mark.hosts("2,1")
@pytest.mark.wide_in(2)
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_with_other_arguments_it_has_the_bits_of_the_unsharded_one(world, arguments):
    world.run(trains_alike, "Adam", True, **ARGUMENTS[arguments])


def only_some():
    """An optimizer of a process set, and closures."""
    hvd.init()
    some = hvd.add_process_set([0, 1])
    alone, net = odd(), odd()
    plain = hvd.DistributedOptimizer(torch.optim.Adam(alone.parameters()), process_set=some)
    cut = hvd.DistributedOptimizer(torch.optim.Adam(net.parameters()), process_set=some, shard=True)
    for step in range(3):
        for each, optimizer in ((alone, plain), (net, cut)):

            def closure(each=each, optimizer=optimizer, step=step):
                optimizer.zero_grad()
                loss = each(batch(step)).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
        assert differences(net, alone) == []
    hvd.barrier()


@pytest.mark.ranks(3)
@pytest.mark.mpis("mpich")
def test_closures_in_a_process_set_have_the_bits_of_the_unsharded_ones(world):
    world.run(only_some)
