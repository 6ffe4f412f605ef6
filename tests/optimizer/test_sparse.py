"""Sparse gradients: the ranks' rows together, and dense where they would be in one process."""

import functools

import pytest
import torch
from torch import nn

import hvdlite as hvd
from hvdlite.world import world as worlds
from tests.harness.on_ranks import on_ranks
from tests.optimizer.models import SGD, Twins, assert_bitwise_equal_on_all_ranks, sgd

pytestmark = [pytest.mark.ranks(2), pytest.mark.mpis("mpich")]

ROWS, WIDTH = 12, 4


class Net(nn.Module):
    """A table of vectors, the same on every rank, in front of something dense."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(ROWS, WIDTH, sparse=True, dtype=torch.float64)
        self.head = nn.Linear(WIDTH, 1, dtype=torch.float64)

    def forward(self, words):
        return self.head(self.table(words).mean(1))


def words_of(step, rank):
    """Two rows of three words: some of them twice, some also on other ranks."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, ROWS, (2, 3), generator=generator)


def backward(twins, loss_of):
    """`loss_of` a net and a rank: in one process the mean over all ranks is the loss."""
    size = hvd.size()
    sum(loss_of(twins.alone, r) for r in range(size)).mul(twins.factor / size).backward()
    loss_of(twins.net, hvd.rank()).backward()


KINDS = {
    "SGD": SGD,
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=0.1),
    # Of the table, which is the first parameter.
    "SparseAdam": lambda params: torch.optim.SparseAdam(list(params)[:1], lr=0.05),
}


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
@on_ranks(2, 3)
def test_sparse_gradients_stay_sparse_and_are_those_of_one_process(kind, options):
    twins = Twins(KINDS[kind], nets=(Net(), Net()), **options)
    passes = options.get("backward_passes_per_step", 1)
    for step in range(6):
        twins.zero_grad(set_to_none=step % 2 == 0)
        for i in range(step * passes, (step + 1) * passes):
            backward(twins, lambda net, r, i=i: net(words_of(i, r)).square().mean())
        grad, wanted = twins.net.table.weight.grad, twins.alone.table.weight.grad
        assert grad.is_sparse
        assert grad.is_coalesced()
        torch.testing.assert_close(grad.to_dense(), wanted.to_dense(), rtol=1e-9, atol=1e-12)
        # Only rows that some rank has.
        assert set(grad.indices()[0].tolist()) == set(wanted.coalesce().indices()[0].tolist())
        # torch's Adagrad leaves it open whether it wants its sparse tensors checked, and is warned.
        with torch.sparse.check_sparse_tensor_invariants(enable=True):
            twins.step()
        assert_bitwise_equal_on_all_ranks(twins.net.table)


@pytest.mark.parametrize("as_dense", [False, True])
@pytest.mark.parametrize("first_rank", [0, 1])
@on_ranks(2, 3)
def test_a_rank_without_a_sparse_gradient_takes_part_with_no_rows(first_rank, as_dense):
    """In each step the gradient is on some ranks only."""
    size = hvd.size()
    twins = Twins(nets=(Net(), Net()), sparse_as_dense=as_dense)
    other = torch.full((2, WIDTH), 0.5, dtype=torch.float64)
    who_has = [{first_rank}, set(), {size - 1}, set(range(size)), {0}, set()]
    for step, having in enumerate(who_has):

        def loss_of(net, r, step=step, having=having):
            return (net(words_of(step, r)) if r in having else net.head(other)).square().mean()

        twins.zero_grad()
        backward(twins, loss_of)
        grad = twins.net.table.weight.grad
        assert grad.is_sparse if having else grad is None
        twins.step()


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
@on_ranks(2, 3)
def test_a_parameter_is_dense_from_when_on_a_rank_had_a_dense_gradient(dense_in, to_none, as_dense):
    """The table is also used as a matrix: by rank 0, in some steps."""
    twins = Twins(nets=(Net(), Net()), sparse_as_dense=as_dense)
    x = torch.linspace(-1, 1, WIDTH, dtype=torch.float64)
    for step in range(6):

        def loss_of(net, r, step=step):
            loss = net(words_of(step, r)).square().mean()
            if r == 0 and step in dense_in:
                # Without the words every other time.
                dense = nn.functional.linear(x, net.table.weight).square().mean()
                loss = dense if step % 2 else loss + dense
            return loss

        twins.zero_grad(set_to_none=to_none)
        backward(twins, loss_of)
        assert twins.net.table.weight.grad.is_sparse == (step < min(dense_in))
        twins.step()


@on_ranks(2, 3)
def test_what_is_reduced_dense_comes_out_with_the_rows_of_all_ranks():
    """A row that only one rank has, and one that all have and whose sum is zero."""
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


@pytest.mark.parametrize(
    ("dtype", "compression"),
    [
        (torch.bfloat16, hvd.Compression.none),
        (torch.float32, hvd.Compression.bf16),
        (torch.float32, hvd.Compression.fp16),
    ],
)
@on_ranks(3)
def test_rows_of_16_bits_are_added_in_float32(dtype, compression):
    """Ones that 16 bits can't add: 256 + 1 = 256 in bfloat16."""
    table = nn.Embedding(3, 2, sparse=True, dtype=dtype)
    optimizer = sgd(table.parameters(), op=hvd.Sum, compression=compression)
    for _ in range(2):
        optimizer.zero_grad()
        (table(torch.tensor([1])).sum() * (256 if hvd.rank() == 0 else 1)).backward()
        grad = table.weight.grad
        assert grad.dtype == dtype
        # 258 is a bfloat16: added in float32, it is reached in steps of one.
        assert grad.to_dense()[1].tolist() == [258.0] * 2


@on_ranks(1, 3)
def test_gradients_that_the_user_sets_may_be_sparse_in_any_dimensions():
    rank, size = hvd.rank(), hvd.size()
    p = nn.Parameter(torch.zeros(4, 2, dtype=torch.complex64))
    optimizer = sgd([p], op=hvd.Sum)
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


@on_ranks(2, 3)
def test_sparse_gradients_are_accumulated_by_no_sync_and_reduced_once():
    rank, size = hvd.rank(), hvd.size()
    table = nn.Embedding(size, 2, sparse=True)
    optimizer = sgd(table.parameters(), op=hvd.Sum)
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


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["SGD", "SparseAdam"])
@on_ranks(hosts=("1,1",))
def test_only_rows_travel_once_the_first_round_has_shown_it(kind):
    rows = 20_000
    table = nn.Embedding(rows, 16, sparse=True)
    optimizer = hvd.DistributedOptimizer(KINDS[kind](table.parameters()))
    engine = worlds.current().team.engine
    for step in range(3):
        before = engine.counters()["data_bytes"]
        optimizer.zero_grad()
        table(torch.tensor([step, rows - 1 - hvd.rank()])).sum().backward()
        optimizer.step()
        count = engine.counters()["data_bytes"] - before
        assert 0 < count < table.weight.nbytes / 100 or (kind == "SGD" and step == 0)
