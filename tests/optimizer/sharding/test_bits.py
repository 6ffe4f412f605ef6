"""Sharded training gives the bits of unsharded training, in every step."""

import functools

import pytest
import torch

import hvdlite as hvd
from tests.harness.on_ranks import on_ranks
from tests.optimizer.sharding.alike import Pair, train_alike
from tests.optimizer.sharding.models import OPTIMIZERS, SMALL_BUCKETS, loss_of, odd, optimizer_of

# State of which each element of a parameter has one.
BY_ELEMENT = {
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg"),
    *("grad_avg", "sum", "acc_delta", "prev", "step_size", "ax"),
}


def trains_alike(name="Adam", shard=True, shared=False, dtype="float32", **arguments):
    make = functools.partial(optimizer_of, name)
    ways = {"shard": shard, "shared": shared, "steps": 5, **arguments}
    _, cut = train_alike(make, odd(getattr(torch, dtype)), **ways)
    count = sum(
        value.numel()
        for state in cut.state.values()
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and key in BY_ELEMENT
    )
    hvd.barrier()
    return count


@pytest.mark.wide_in(1, 3, 4, 7, "1,1", "1,1,1")
@pytest.mark.parametrize(
    ("shard", "shared"),
    [(True, False), ("host", False), (True, True), ("host", True), (False, True)],
)
@on_ranks(1, 2, 3, 4, 7, hosts=("1,1", "2,1", "1,1,1"), knobs=SMALL_BUCKETS)
def test_every_step_has_the_bits_of_the_unsharded_one(shard, shared):
    trains_alike("Adam", shard, shared)


@pytest.mark.mpis("mpich")
@pytest.mark.wide_in(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(2, 3)
def test_every_element_wise_optimizer_has_the_bits_of_the_unsharded_one(name):
    own, alone = trains_alike(name, True), trains_alike(name, False)
    # What all ranks keep of the state is what one keeps of all.
    assert hvd.allreduce(torch.tensor(own), op=hvd.Sum) == alone
    assert name == "SGD" or alone


@pytest.mark.mpis("mpich")
@pytest.mark.wide_in("1,1,1")
@pytest.mark.parametrize("name", ["fused", "fused momentum"])
@on_ranks(hosts=("2,1", "1,1,1"), knobs=SMALL_BUCKETS)
def test_between_hosts_fused_optimizers_have_the_bits_of_the_unsharded_ones(name):
    trains_alike(name, True)


WAYS = {
    "float64": {"name": "momentum", "dtype": "float64"},
    "bfloat16": {"name": "momentum", "dtype": "bfloat16"},
    "float16": {"name": "momentum", "dtype": "float16"},
    "compression": {"compression": hvd.Compression.bf16},
    "sum": {"op": hvd.Sum},
    "predivide": {"gradient_predivide_factor": 2.0},
    "groups": {"groups": 3},
}


@pytest.mark.wide_in(2)
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2, hosts=("2,1",))
def test_other_dtypes_and_arguments_have_the_bits_of_the_unsharded_ones(way):
    trains_alike(**WAYS[way])


@pytest.mark.mpis("mpich")
@on_ranks(3)
def test_closures_in_a_process_set_have_the_bits_of_the_unsharded_ones():
    make = functools.partial(optimizer_of, "Adam")
    pair = Pair(make, process_set=hvd.add_process_set([0, 1]))
    for step in range(3):
        for net, optimizer in pair.both:

            def closure(net=net, optimizer=optimizer, step=step):
                optimizer.zero_grad()
                loss = loss_of(net, step)
                loss.backward()
                return loss

            optimizer.step(closure)
        pair.compare(f"after step {step}")
    hvd.barrier()
