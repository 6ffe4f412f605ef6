"""Checkpoints of sharded optimizers: training goes on with the bits of one process."""

import copy
import functools
import io

import pytest
import torch

import hvdlite as hvd
from hvdlite.optimizer.sharding.state_dicts import MARK, ShardStateDict
from tests.harness.on_ranks import on_ranks
from tests.optimizer.sharding.alike import same_full, wrapped
from tests.optimizer.sharding.cuts import assert_same_state
from tests.optimizer.sharding.models import (
    SMALL_BUCKETS,
    differences,
    odd,
    optimizer_of,
    portions_of,
)


def sharded(name, net, shard=True, **arguments):
    make = functools.partial(optimizer_of, name)
    return wrapped(make, net, shard=shard, op=hvd.Sum, **arguments)


def train(net, optimizer, steps, counts=True):
    """The sum over the ranks is the gradient of the one whose gradient counts: that of a training
    in one process, whatever the number of ranks."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, 3, 6, 6, generator=generator)
        optimizer.zero_grad()
        (net(x).square().mean() * float(counts)).backward()
        optimizer.step()


def through_a_file(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


SMALL, WHOLE = 128, 1 << 20  # elements of float32


@pytest.mark.parametrize(
    ("name", "shard", "shared", "portions"),
    [
        pytest.param("Adam", True, False, "whole", marks=pytest.mark.wide_in(2, "2,1")),
        pytest.param("Adam", True, False, "saved small", marks=pytest.mark.wide_in(3, "2,1")),
        pytest.param("Adam", True, False, "loaded small", marks=pytest.mark.wide_in(3, "2,1")),
        pytest.param("Adam", "host", False, "whole", marks=pytest.mark.wide_in(2, 3)),
        pytest.param("Adam", "host", True, "whole", marks=pytest.mark.wide_in(2, 3)),
        pytest.param("Adam", False, True, "whole", marks=pytest.mark.wide_in(2)),
        *(
            pytest.param(name, True, False, "whole", marks=pytest.mark.wide)
            for name in ("SGD", "momentum", "NAdam", "Adagrad", "ASGD", "Rprop")
        ),
    ],
)
@on_ranks(2, 3, hosts=("2,1",), knobs=SMALL_BUCKETS)
def test_checkpoints_continue_the_training_of_one_process(name, shard, shared, portions):
    rank, size = hvd.rank(), hvd.size()

    def new_model():
        net = odd()
        net.load_state_dict(model)
        if shared:
            hvd.share_parameters(net)
        return net

    def goes_on(net, optimizer):
        with portions_of(SMALL if portions == "loaded small" else WHOLE):
            train(net, optimizer, range(3, 6), rank == 0)
        assert differences(net, alone) == []
        same_full(optimizer.full_state_dict(), plain)
        if portions != "whole":
            largest = max(key.numel() for key in optimizer.state)
            assert (largest > 2 * SMALL) == (portions == "saved small")

    alone = odd()
    plain = optimizer_of(name, alone)
    model = alone.state_dict()
    net = new_model()
    optimizer = sharded(name, net, shard)
    train(alone, plain, range(3))
    with portions_of(SMALL if portions == "saved small" else WHOLE):
        train(net, optimizer, range(3), rank == 0)
    assert differences(net, alone) == []
    same_full(optimizer.full_state_dict(), plain)
    model, full = copy.deepcopy(alone.state_dict()), through_a_file(plain.state_dict())
    own = through_a_file(optimizer.state_dict())
    assert type(own) is ShardStateDict
    if portions == "loaded small":
        # As it was saved before there were portions.
        assert own[MARK].pop("portions") == own[MARK]["cut"][rank]
    shards = hvd.allgather_object(own)
    saved = optimizer_of(name, odd())
    saved.load_state_dict(copy.deepcopy(full))
    train(alone, plain, range(3, 6))

    # Before the first step of a new job: its own shard, those of all, and the full state.
    for given in (own, shards, full) if shard is True else (own, full):
        net = new_model()
        optimizer = sharded(name, net, shard)
        optimizer.load_state_dict(copy.deepcopy(given))
        same_full(optimizer.full_state_dict(), saved)
        goes_on(net, optimizer)

    # The full state, in the middle of another training.
    optimizer.load_state_dict(full)
    net.load_state_dict(model)
    goes_on(net, optimizer)

    # In one process, not sharded, before the optimizer is wrapped; then all of it sharded.
    net = new_model()
    inner = optimizer_of(name, net)
    inner.load_state_dict(copy.deepcopy(full))
    optimizer = hvd.DistributedOptimizer(inner, net.named_parameters(), shard=shard, op=hvd.Sum)
    same_full(optimizer.full_state_dict(), saved)
    goes_on(net, optimizer)

    # With another number of ranks.
    fewer = hvd.add_process_set(range(size - 1))
    if rank < size - 1 and not shared:
        net = new_model()
        optimizer = sharded(name, net, shard, process_set=fewer)
        optimizer.load_state_dict(shards)
        goes_on(net, optimizer)
    hvd.barrier()
    owners = [each[MARK]["owners"] for each in shards]
    assert owners == [size] * size if shard is True else sum(owners) >= size


@on_ranks(3, knobs=SMALL_BUCKETS)
def test_state_follows_when_parameters_freeze_thaw_and_come():
    """The division changes in the middle."""
    rank = hvd.rank()
    alone, net = odd(), odd()
    new = [torch.nn.Parameter(torch.ones(130)) for _ in range(2)]
    plain, optimizer = optimizer_of("Adam", alone), sharded("Adam", net)
    for first, requires in ((0, True), (2, False), (4, True)):
        for each in (alone, net):
            each.mix.weight.requires_grad_(requires)
            each.conv.requires_grad_(requires)
        train(alone, plain, (first, first + 1))
        train(net, optimizer, (first, first + 1), rank == 0)
        assert differences(net, alone) == [], first
        same_full(optimizer.full_state_dict(), plain)
        optimizer.load_state_dict(optimizer.state_dict())
    for each, param in ((plain, new[0]), (optimizer, new[1])):
        each.add_param_group({"params": [param], "lr": 0.5})
        for _ in range(2):
            each.zero_grad()
            (param.sin().sum() * float(each is plain or rank == 0)).backward()
            each.step()
    assert torch.equal(*new)
    same_full(optimizer.full_state_dict(), plain)


@on_ranks(2, knobs=SMALL_BUCKETS)
def test_what_does_not_fit_is_refused_and_changes_nothing():
    net = odd()
    optimizer = sharded("Adam", net)
    optimizer.load_state_dict(through_a_file(optimizer.state_dict()))  # of no step
    train(net, optimizer, range(1))
    own = optimizer.state_dict()
    before = copy.deepcopy(own)
    other = hvd.allgather_object(own)[1 - hvd.rank()]
    for into, given, text in (
        (optimizer, other, r"is that of owner \d of 2, and this rank is owner"),
        (optimizer, [other], "give load_state_dict the shards of all owners"),
        (optimizer, {}, r"full_state_dict\(\) gives \{\} on all ranks but"),
        (sharded("Adam", odd(), False), own, "loads only into an optimizer that is sharded"),
        (sharded("SGD", odd()), own, "is of the optimizer Adam, and this one is SGD"),
    ):
        with pytest.raises(ValueError, match=text):
            into.load_state_dict(given)
    with pytest.raises(ValueError, match=r"optimizer.load_state_dict\(hvd.broadcast_object"):
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert_same_state(optimizer.state_dict()["state"], before["state"])
    assert [len(group["params"]) for group in optimizer.param_groups] == [5, 5]


@on_ranks(2)
def test_states_that_do_not_belong_together_are_an_error_on_every_rank():
    net = odd()
    optimizer = sharded("Adam", net)
    with portions_of(64):
        train(net, optimizer, range(2))
    mine = list(optimizer.state.values())
    if hvd.rank() == 1:
        # As if an exception had ended a step among the portions of a parameter.
        for state in mine[1::2]:
            state["step"] += 1
    with pytest.raises(ValueError, match=r"'step' of '.*' is \d.0 for .* but \d.0 for"):
        optimizer.full_state_dict()
    if hvd.rank() == 1:
        for state in mine:
            state.clear()
    with pytest.raises(ValueError, match=r"has \['exp_avg', .* but \[\] for"):
        optimizer.full_state_dict()
