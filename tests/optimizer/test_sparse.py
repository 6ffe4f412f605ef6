"""Sparse gradients: the ranks' rows together, and dense where they would be in one process."""

import pytest
import torch
from torch import nn

import hvdlite as hvd
from hvdlite.world import world as worlds
from tests.optimizer.models import assert_bitwise_equal_on_all_ranks, assert_same_parameters

pytestmark = [pytest.mark.ranks(2), pytest.mark.mpis("mpich")]

ROWS, WIDTH = 12, 4


class Net(nn.Module):
    """A table of vectors, the same on every rank, in front of something dense."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(ROWS, WIDTH, sparse=True, dtype=dtype)
        self.head = nn.Linear(WIDTH, 1, dtype=dtype)

    def forward(self, words):
        return self.head(self.table(words).mean(1))


def words_of(step, rank):
    """Two rows of three words: some of them twice, some also on other ranks."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, ROWS, (2, 3), generator=generator)


def optimizer_of(kind, net):
    if kind == "SGD":
        return torch.optim.SGD(net.parameters(), lr=0.1)
    if kind == "Adagrad":
        return torch.optim.Adagrad(net.parameters(), lr=0.1)
    return torch.optim.SparseAdam(net.table.parameters(), lr=0.05)


def as_one_process(kind, options):
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    alone, net = Net(), Net()
    reference = optimizer_of(kind, alone)
    optimizer = hvd.DistributedOptimizer(optimizer_of(kind, net), **options)
    passes = options.get("backward_passes_per_step", 1)
    factor = size if options.get("op") is hvd.Sum else 1
    for step in range(6):
        reference.zero_grad()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        net.head.zero_grad()
        for i in range(passes):
            joined = torch.cat([words_of(step * passes + i, r) for r in range(size)])
            (alone(joined).square().mean() * factor).backward()
            net(words_of(step * passes + i, rank)).square().mean().backward()
        grad = net.table.weight.grad
        assert grad.is_sparse
        assert grad.is_coalesced()
        wanted = alone.table.weight.grad
        torch.testing.assert_close(grad.to_dense(), wanted.to_dense(), rtol=1e-9, atol=1e-12)
        # Only rows that some rank has.
        assert set(grad.indices()[0].tolist()) == set(wanted.coalesce().indices()[0].tolist())
        # torch's Adagrad leaves it open whether it wants its sparse tensors checked, and is warned.
        with torch.sparse.check_sparse_tensor_invariants(enable=True):
            reference.step()
            optimizer.step()
        if kind != "SparseAdam":
            assert_same_parameters(net, alone)
        assert_same_parameters(net.table, alone.table)
        assert_bitwise_equal_on_all_ranks(net.table)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SGD", {}),
        ("Adagrad", {}),
        ("SparseAdam", {}),
        ("SparseAdam", {"sparse_as_dense": True}),
        ("Adagrad", {"sparse_as_dense": True, "gradient_predivide_factor": 4.0}),
        ("SGD", {"sparse_as_dense": True, "backward_passes_per_step": 2}),
        ("SGD", {"op": hvd.Sum}),
        ("SGD", {"gradient_predivide_factor": 4.0}),
        ("SGD", {"backward_passes_per_step": 2}),
        ("SGD", {"groups": 1}),
    ],
)
def test_sparse_gradients_stay_sparse_and_are_those_of_one_process(world, kind, options):
    world.run(as_one_process, kind, options)


def where_they_are(first_rank, as_dense):
    """In each step the gradient is on some ranks only."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    alone, net = Net(), Net()
    reference, optimizer = optimizer_of("SGD", alone), optimizer_of("SGD", net)
    optimizer = hvd.DistributedOptimizer(
        optimizer, net.named_parameters(), sparse_as_dense=as_dense
    )
    other = torch.full((2, 3, WIDTH), 0.5, dtype=torch.float64)
    who_has = [{first_rank}, set(), {size - 1}, set(range(size)), {0}, set()]
    for step, having in enumerate(who_has):
        reference.zero_grad()
        optimizer.zero_grad()
        for r in range(size):
            outputs = alone(words_of(step, r)) if r in having else alone.head(other.mean(1))
            (outputs.square().mean() / size).backward()
        outputs = net(words_of(step, rank)) if rank in having else net.head(other.mean(1))
        outputs.square().mean().backward()
        if having:
            assert net.table.weight.grad.is_sparse
        else:
            assert net.table.weight.grad is None
        reference.step()
        optimizer.step()
        assert_same_parameters(net, alone)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("as_dense", [False, True])
@pytest.mark.parametrize("first_rank", [0, 1])
def test_a_rank_without_a_sparse_gradient_takes_part_with_no_rows(world, first_rank, as_dense):
    world.run(where_they_are, first_rank, as_dense)


def nothing_at_all_on_one_rank():
    hvd.init()
    rank = hvd.rank()
    table = nn.Embedding(ROWS, WIDTH, sparse=True)
    start = table.weight.detach().clone()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0))
    for _ in range(3):
        optimizer.zero_grad()
        if rank == 0:
            table(torch.tensor([1, 1, 5])).sum().backward()
        optimizer.step()
    wanted = torch.zeros(ROWS, WIDTH)
    wanted[1], wanted[5] = 2, 1
    torch.testing.assert_close(start - table.weight, 3 * wanted / hvd.size())


@pytest.mark.ranks(2, 3)
def test_a_rank_without_any_backward_takes_part_in_step(world):
    world.run(nothing_at_all_on_one_rank)


def also_dense(dense_in, to_none, as_dense):
    """The table is also used as a matrix: by rank 0, in some steps."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    alone, net = Net(), Net()
    reference, optimizer = optimizer_of("SGD", alone), optimizer_of("SGD", net)
    optimizer = hvd.DistributedOptimizer(
        optimizer, net.named_parameters(), sparse_as_dense=as_dense
    )
    x = torch.linspace(-1, 1, WIDTH, dtype=torch.float64)

    def loss_of(module, step, r):
        loss = module(words_of(step, r)).square().mean()
        if r == 0 and step in dense_in:
            # Without the words every other time.
            dense = nn.functional.linear(x, module.table.weight).square().mean()
            loss = dense if step % 2 else loss + dense
        return loss

    forms = []
    for step in range(6):
        reference.zero_grad(set_to_none=to_none)
        optimizer.zero_grad(set_to_none=to_none)
        sum(loss_of(alone, step, r) for r in range(size)).div(size).backward()
        loss_of(net, step, rank).backward()
        forms.append(net.table.weight.grad.is_sparse)
        reference.step()
        optimizer.step()
        assert_same_parameters(net, alone)
    return forms


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("to_none", "as_dense"),
    [
        (True, False),
        (False, False),
        (True, True),
        pytest.param(False, True, marks=pytest.mark.wide),
    ],
)
@pytest.mark.parametrize("dense_in", [{0}, {1}, {2, 3}, {5}])
def test_a_parameter_is_dense_from_when_on_a_rank_had_a_dense_gradient(
    world, dense_in, to_none, as_dense
):
    first = min(dense_in)
    expected = [step < first for step in range(6)]
    assert world.run(also_dense, dense_in, to_none, as_dense) == [expected] * world.size


def rows_of_zeros():
    """A row that only one rank has, and one that all have and whose sum is zero."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    table = nn.Embedding(6, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SparseAdam(table.parameters()), sparse_as_dense=True
    )
    sign = (-1) ** rank if size % 2 == 0 else 0
    for _ in range(3):
        optimizer.zero_grad()
        loss = table(torch.tensor([rank + 1])).sum() * 2 + table(torch.tensor([0])).sum() * sign
        loss.backward()
        grad = table.weight.grad
        assert grad.is_coalesced()
        assert grad.indices()[0].tolist() == list(range(size + 1))
        assert grad.values()[0].tolist() == [0.0, 0.0]
        torch.testing.assert_close(grad.values()[1:], torch.full((size, 2), 2 / size))
        optimizer.step()


@pytest.mark.ranks(2, 3)
def test_what_is_reduced_dense_comes_out_with_the_rows_of_all_ranks(world):
    world.run(rows_of_zeros)


def in_16_bits(dtype, compression):
    """Ones that 16 bits can't add: 256 + 1 = 256 in bfloat16."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    table = nn.Embedding(3, 2, sparse=True, dtype=dtype)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=1.0), op=hvd.Sum, compression=compression
    )
    for _ in range(2):
        optimizer.zero_grad()
        (table(torch.tensor([1])).sum() * (256 if rank == 0 else 1)).backward()
        grad = table.weight.grad
        assert grad.dtype == dtype
        # 258 is a bfloat16: added in float32, it is reached in steps of one.
        assert grad.to_dense()[1].tolist() == [256.0 + size - 1] * 2


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("dtype", "compression"),
    [
        (torch.bfloat16, hvd.Compression.none),
        (torch.float32, hvd.Compression.bf16),
        (torch.float32, hvd.Compression.fp16),
    ],
)
def test_rows_of_16_bits_are_added_in_float32(world, dtype, compression):
    world.run(in_16_bits, dtype, compression)


def table_of_complex_numbers():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    p = nn.Parameter(torch.zeros(4, 2, dtype=torch.complex64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), op=hvd.Sum)
    for _ in range(2):
        # Two sparse dimensions, which become one.
        value = torch.tensor([rank + 1j], dtype=torch.complex64)
        place = torch.tensor([[rank], [1]])
        p.grad = torch.sparse_coo_tensor(place, value, p.shape, check_invariants=False)
        optimizer.synchronize()
        wanted = torch.zeros(4, 2, dtype=torch.complex64)
        wanted[:size, 1] = torch.arange(size) + 1j
        torch.testing.assert_close(p.grad.to_dense(), wanted)
        optimizer.zero_grad()


@pytest.mark.ranks(1, 3)
def test_gradients_that_the_user_sets_may_be_sparse_in_any_dimensions(world):
    world.run(table_of_complex_numbers)


def accumulates_on_this_rank():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    table = nn.Embedding(size, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), op=hvd.Sum)
    for _ in range(3):
        optimizer.zero_grad()
        with optimizer.no_sync():
            table(torch.tensor([rank])).sum().backward()
        assert table.weight.grad.to_dense().sum().item() == 2
        table(torch.tensor([0])).sum().backward()
        wanted = torch.ones(size, 2)
        wanted[0] += size
        assert torch.equal(table.weight.grad.to_dense(), wanted)
        with pytest.raises(RuntimeError, match="already reduced in this step"):
            table(torch.tensor([0])).sum().backward()


@pytest.mark.ranks(2, 3)
def test_sparse_gradients_are_accumulated_by_no_sync_and_reduced_once(world):
    world.run(accumulates_on_this_rank)


def bytes_between_hosts(kind):
    hvd.init()
    rows = 20_000
    torch.manual_seed(1)
    table = nn.Embedding(rows, 16, sparse=True)
    make = torch.optim.SparseAdam if kind == "SparseAdam" else torch.optim.SGD
    optimizer = hvd.DistributedOptimizer(make(list(table.parameters()), lr=1.0))
    engine = worlds.current().team.engine
    counts = []
    for step in range(3):
        before = engine.counters()["data_bytes"]
        optimizer.zero_grad()
        table(torch.tensor([step, rows - 1 - hvd.rank()])).sum().backward()
        optimizer.step()
        counts.append(engine.counters()["data_bytes"] - before)
    return counts, table.weight.numel() * table.weight.element_size()


@pytest.mark.ranks
@pytest.mark.hosts("1,1")
@pytest.mark.parametrize("kind", ["SGD", "SparseAdam"])
def test_only_rows_travel_once_the_first_round_has_shown_it(world, kind):
    for counts, table_bytes in world.run(bytes_between_hosts, kind):
        known = counts if kind == "SparseAdam" else counts[1:]
        assert all(0 < count < table_bytes / 100 for count in known)
