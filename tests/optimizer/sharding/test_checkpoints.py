"""Checkpoints of sharded optimizers: training goes on with the bits of one process."""

import copy
import io

import pytest
import torch

import hvdlite as hvd
from hvdlite.optimizer.sharding.state_dicts import MARK
from tests.optimizer.sharding.alike import same_full
from tests.optimizer.sharding.cuts import assert_same_state
from tests.optimizer.sharding.models import (
    SMALL_BUCKETS,
    differences,
    groups_of,
    odd,
    optimizer_of,
    portions_of,
)


def sharded(name, net, shard=True, **arguments):
    return hvd.DistributedOptimizer(
        optimizer_of(name, net), net.named_parameters(), shard=shard, op=hvd.Sum, **arguments
    )


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


def checkpoints(name, shard, shared=False):
    hvd.init()
    rank, size = hvd.rank(), hvd.size()

    def again():
        """The model in a new job."""
        net = odd()
        net.load_state_dict(model)
        if shared:
            hvd.share_parameters(net)
        return net

    def goes_on(net, optimizer):
        train(net, optimizer, range(3, 6), rank == 0)
        assert differences(net, alone) == []
        return optimizer

    alone, net = odd(), odd()
    if shared:
        hvd.share_parameters(net)
    plain = optimizer_of(name, alone)
    optimizer = sharded(name, net, shard)
    train(alone, plain, range(3))
    train(net, optimizer, range(3), rank == 0)
    assert differences(net, alone) == []
    same_full(optimizer.full_state_dict(), plain)
    model, full = copy.deepcopy(alone.state_dict()), through_a_file(plain.state_dict())
    own = through_a_file(optimizer.state_dict())
    shards = hvd.allgather_object(own)
    train(alone, plain, range(3, 6))

    # Before the first step of a new job: its own shard, those of all, and the full state.
    for given in (own, shards, full):
        if given is not shards or shard is True:
            net = again()
            optimizer = sharded(name, net, shard)
            optimizer.load_state_dict(copy.deepcopy(given))
            same_full(optimizer.full_state_dict(), plain_of(name, model, full))
            same_full(goes_on(net, optimizer).full_state_dict(), plain)

    # The full state, in the middle of another training.
    optimizer.load_state_dict(full)
    net.load_state_dict(model)
    goes_on(net, optimizer)

    # In one process, not sharded, before the optimizer is wrapped; then all of it sharded.
    net = again()
    inner = plain_of(name, model, full, net)
    optimizer = hvd.DistributedOptimizer(inner, net.named_parameters(), shard=shard, op=hvd.Sum)
    same_full(optimizer.full_state_dict(), plain_of(name, model, full))
    goes_on(net, optimizer)

    # With another number of ranks.
    fewer = hvd.ProcessSet(range(size - 1))
    hvd.add_process_set(fewer)
    if rank in fewer.ranks and not shared:
        net = again()
        optimizer = sharded(name, net, shard, process_set=fewer)
        optimizer.load_state_dict(shards)
        goes_on(net, optimizer)
    hvd.barrier()
    hvd.remove_process_set(fewer)
    same = [each[MARK]["owners"] for each in shards]
    assert same == [size] * size if shard is True else sum(same) >= size


def plain_of(name, model, full, net=None):
    """The optimizer of one process after it has loaded."""
    if net is None:
        net = odd()
        net.load_state_dict(model)
    plain = optimizer_of(name, net)
    plain.load_state_dict(copy.deepcopy(full))
    return plain


@pytest.mark.ranks(2, 3)
@pytest.mark.hosts("2,1")
@pytest.mark.parametrize(
    ("name", "shard", "shared"),
    [
        pytest.param("Adam", True, False, marks=pytest.mark.wide_in(2, "2,1")),
        pytest.param("Adam", "host", False, marks=pytest.mark.wide_in(2, 3)),
        pytest.param("Adam", "host", True, marks=pytest.mark.wide_in(2, 3)),
        pytest.param("Adam", False, True, marks=pytest.mark.wide_in(2)),
        *(
            pytest.param(name, True, False, marks=pytest.mark.wide)
            for name in ("SGD", "momentum", "NAdam", "Adagrad", "ASGD", "Rprop")
        ),
    ],
)
def test_checkpoints_continue_the_training_of_one_process(world, name, shard, shared):
    world.run(checkpoints, name, shard, shared, knobs=SMALL_BUCKETS)


def freezes_and_adds():
    """The division changes in the middle: the state follows."""
    hvd.init()
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


@pytest.mark.ranks(3)
def test_state_follows_when_parameters_freeze_thaw_and_come(world):
    world.run(freezes_and_adds, knobs=SMALL_BUCKETS)


def refuses():
    hvd.init()
    net = odd()
    optimizer = sharded("Adam", net)
    empty = through_a_file(optimizer.state_dict())
    optimizer.load_state_dict(empty)
    train(net, optimizer, range(1))
    shards = hvd.allgather_object(optimizer.state_dict())
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"is that of owner \d of 2, and this rank is owner"):
        optimizer.load_state_dict(shards[1 - hvd.rank()])
    with pytest.raises(ValueError, match="give load_state_dict the shards of all owners"):
        optimizer.load_state_dict([shards[1 - hvd.rank()]])
    with pytest.raises(ValueError, match=r"full_state_dict\(\) gives \{\} on all ranks but"):
        optimizer.load_state_dict({})
    with pytest.raises(ValueError, match="loads only into an optimizer that is sharded"):
        optimizer_of("Adam", net).load_state_dict(shards[0])
    with pytest.raises(ValueError, match="loads only into an optimizer that is sharded"):
        hvd.DistributedOptimizer(optimizer_of("Adam", odd())).load_state_dict(shards[0])
    assert_same_state(optimizer.state_dict()["state"], before["state"])
    assert [len(group["params"]) for group in optimizer.param_groups] == [
        len(group["params"]) for group in groups_of(net, lr=0.1)
    ]
    other = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters()), shard=True)
    with pytest.raises(ValueError, match="is of the optimizer Adam, and this one is SGD"):
        other.load_state_dict(shards[hvd.rank()])


@pytest.mark.ranks(2)
def test_what_does_not_fit_is_refused_and_changes_nothing(world):
    world.run(refuses, knobs=SMALL_BUCKETS)


def disagrees():
    hvd.init()
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


@pytest.mark.ranks(2)
def test_states_that_do_not_belong_together_are_an_error_on_every_rank(world):
    world.run(disagrees)
