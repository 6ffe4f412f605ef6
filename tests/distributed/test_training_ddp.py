"""DistributedDataParallel: n ranks train as one process does on the joined batch."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.training import in_a_group, mean, sgd, step
from tests.optimizer.models import FEATURES, assert_same_parameters, batches, loss_of, model, own

STEPS = 6

OPTIONS = {
    "as it is": {},
    "bucket views": {"gradient_as_bucket_view": True},
    "many buckets": {"bucket_cap_mb": 0.001},
    "many bucket views": {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "unused are looked for": {"find_unused_parameters": True},
}


@in_a_group
def trains_as_one_process(rank, size, options):
    alone, net = model(), DistributedDataParallel(model(), **options)
    reference, optimizer = sgd(alone), sgd(net)
    losses = []
    for x, y in batches(STEPS, 4, size):
        wanted = step(alone, reference, x, y)
        loss = mean(step(net, optimizer, own(x, rank, size), own(y, rank, size)))
        torch.testing.assert_close(loss, wanted, rtol=1e-9, atol=1e-12)
        losses.append(loss.item())
    assert_same_parameters(net.module, alone)
    assert losses[-1] < losses[0]


@pytest.mark.ranks(2, 3)
@pytest.mark.wide_in(3)
@pytest.mark.parametrize("options", OPTIONS)
def test_ddp_trains_as_one_process(world, tmp_path, options):
    world.run(trains_as_one_process, tmp_path, OPTIONS[options])


@in_a_group
def starts_from_rank_0(rank, size):
    net = model()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(rank)
    wrapped = DistributedDataParallel(net)
    assert_same_parameters(wrapped.module, model())


@pytest.mark.ranks(2)
def test_ddp_starts_from_the_parameters_of_rank_0(world, tmp_path):
    world.run(starts_from_rank_0, tmp_path)


class Table(nn.Module):
    """Each batch uses some rows of the table, whose gradient is sparse."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.rows = nn.Embedding(8, 3, sparse=True)
        self.last = nn.Linear(3, 1)
        self.double()

    def forward(self, numbers):
        return self.last(self.rows(numbers))


@in_a_group
def trains_a_table(rank, size):
    alone, net = Table(), DistributedDataParallel(Table())
    reference, optimizer = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (alone, net))
    for turn in range(STEPS):
        # One row of each rank's own, and one that all of them use.
        numbers = torch.tensor([[(turn + r) % 7, 7] for r in range(size)])
        for one, its, used in ((alone, reference, numbers), (net, optimizer, numbers[[rank]])):
            its.zero_grad()
            one(used).square().mean().backward()
            its.step()
        assert net.module.rows.weight.grad.is_sparse
    assert_same_parameters(net.module, alone)


@pytest.mark.ranks(2, 3)
@pytest.mark.wide_in(3)
def test_ddp_adds_sparse_gradients(world, tmp_path):
    world.run(trains_a_table, tmp_path)


class Branches(nn.Module):
    """Takes one of two layers, as the caller says."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(FEATURES, 1) for _ in range(2))
        self.double()

    def forward(self, x, branch):
        return self.layers[branch](x)


def branch_of(rank, number):
    """In every third step all ranks take the first."""
    return 0 if number % 3 == 2 else (rank + number) % 2


@in_a_group
def trains_with_unused_parameters(rank, size):
    alone = Branches()
    net = DistributedDataParallel(Branches(), find_unused_parameters=True)
    reference, optimizer = sgd(alone), sgd(net)
    for number, (x, y) in enumerate(batches(STEPS, 4, size)):
        reference.zero_grad()
        for other in range(size):
            output = alone(own(x, other, size), branch_of(other, number))
            (nn.functional.mse_loss(output, own(y, other, size)) / size).backward()
        reference.step()
        optimizer.zero_grad()
        output = net(own(x, rank, size), branch_of(rank, number))
        nn.functional.mse_loss(output, own(y, rank, size)).backward()
        assert (net.module.layers[1].weight.grad is None) == (number % 3 == 2)
        optimizer.step()
    assert_same_parameters(net.module, alone)


@pytest.mark.ranks(2)
def test_ddp_finds_parameters_that_a_rank_or_all_ranks_leave_out(world, tmp_path):
    world.run(trains_with_unused_parameters, tmp_path)


@in_a_group
def accumulates(rank, size):
    alone, net = model(), DistributedDataParallel(model(), gradient_as_bucket_view=True)
    reference, optimizer = sgd(alone), sgd(net)
    for number, (x, y) in enumerate(batches(2 * STEPS, 4, size)):
        last = number % 2 == 1
        loss_of(alone, x, y).backward()
        with contextlib.nullcontext() if last else net.no_sync():
            loss_of(net, own(x, rank, size), own(y, rank, size)).backward()
        if last:
            for trained in (reference, optimizer):
                trained.step()
                trained.zero_grad()
    assert_same_parameters(net.module, alone)


@pytest.mark.ranks(2)
def test_no_sync_accumulates_gradients(world, tmp_path):
    world.run(accumulates, tmp_path)


@in_a_group
def trains_on_uneven_data(rank, size, views):
    """Rank r has r batches more than rank 0."""
    alone = model()
    net = DistributedDataParallel(model(), gradient_as_bucket_view=views)
    reference, optimizer = (torch.optim.SGD(n.parameters(), lr=0.05) for n in (alone, net))
    data = list(batches(STEPS + size - 1, 4, size))
    for number, (x, y) in enumerate(data):
        reference.zero_grad()
        for other in range(size):
            if number < STEPS + other:
                (loss_of(alone, own(x, other, size), own(y, other, size)) / size).backward()
        reference.step()
    with Join([net]):
        for x, y in data[: STEPS + rank]:
            step(net, optimizer, own(x, rank, size), own(y, rank, size))
    assert_same_parameters(net.module, alone)


@pytest.mark.ranks(2, 3)
@pytest.mark.wide_in(3)
@pytest.mark.parametrize("views", [False, True])
def test_a_rank_that_has_joined_takes_part_with_zeros(world, tmp_path, views):
    world.run(trains_on_uneven_data, tmp_path, views)


@in_a_group
def raises_on_uneven_data(rank, size):
    net = DistributedDataParallel(model())
    optimizer = sgd(net)

    def train():
        with Join([net], throw_on_early_termination=True):
            for x, y in batches(STEPS + rank, 4, size):
                step(net, optimizer, own(x, rank, size), own(y, rank, size))

    with pytest.raises(RuntimeError, match="exhausted"):
        train()
    dist.barrier()


@pytest.mark.ranks(2)
def test_join_raises_on_all_ranks_where_it_is_told_to(world, tmp_path):
    world.run(raises_on_uneven_data, tmp_path)


class OwnBuffer(nn.Linear):
    """Counts its calls in a buffer, from a number of the rank's own."""

    def __init__(self, start):
        super().__init__(FEATURES, 1, dtype=torch.float64)
        self.register_buffer("count", torch.tensor(float(start)))

    def forward(self, x):
        self.count += 1
        return super().forward(x)


@in_a_group
def sends_buffers(rank, size):
    net = DistributedDataParallel(OwnBuffer(10 * rank))
    for number, (x, y) in enumerate(batches(3, 4, size)):
        net.module.count.fill_(10 * (rank + number))
        loss_of(net, own(x, rank, size), own(y, rank, size)).backward()
        assert net.module.count.item() == 10 * number + 1


@pytest.mark.ranks(2)
def test_ddp_sends_the_buffers_of_rank_0_in_every_step(world, tmp_path):
    world.run(sends_buffers, tmp_path)


@in_a_group
def trains_in_a_part_of_the_ranks(rank, size):
    """Ranks 0 and 2 train one model, rank 1 another one by itself."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1])]
    mine, members = (pairs[0], [0, 2]) if rank in (0, 2) else (pairs[1], [1])
    alone = model()
    net = DistributedDataParallel(model(), process_group=mine)
    reference, optimizer = sgd(alone), sgd(net)
    for x, y in batches(STEPS, 4, len(members)):
        step(alone, reference, x, y)
        place = members.index(rank)
        step(net, optimizer, own(x, place, len(members)), own(y, place, len(members)))
    assert_same_parameters(net.module, alone)


@pytest.mark.ranks(3)
@pytest.mark.mpis("mpich")
def test_ddp_trains_in_a_group_of_some_ranks(world, tmp_path):
    world.run(trains_in_a_part_of_the_ranks, tmp_path)
