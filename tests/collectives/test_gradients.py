"""The differentiable collectives: Horovod's gradients, in the world and in process sets."""

import pytest
import torch

import hvdlite as hvd
from tests.world.test_process_sets import begin, member_lists


def weights(rank, like):
    """This rank's factors for a result; they differ between the ranks and the elements."""
    return (torch.arange(like.numel(), dtype=like.dtype) + 100 * (rank + 1)).reshape(like.shape)


def gradient(run, x):
    """x.grad, after a backward through `run`."""
    leaf = x.clone().requires_grad_()
    result = run(leaf)
    assert result.requires_grad
    (result * weights(hvd.rank(), result)).sum().backward()
    return leaf.grad


def assert_gradients(process_set, ranks):
    own, size = hvd.rank(), len(ranks)
    at = ranks.index(own)
    kind = {"process_set": process_set}
    x = torch.full((4, 3), own + 1.0, dtype=torch.float64)

    def everyones(like):
        return [weights(rank, like) for rank in ranks]

    total = sum(everyones(x))
    for op, wanted in ((hvd.Sum, total), (hvd.Average, total / size), (hvd.Max, None)):
        got = gradient(lambda t, op=op: hvd.allreduce(t, op=op, **kind), x)
        expected = torch.stack(everyones(x)).amax(0) if wanted is None else wanted
        torch.testing.assert_close(got, expected)
    got = gradient(
        lambda t: hvd.allreduce(t, op=hvd.Sum, prescale_factor=2, postscale_factor=3, **kind), x
    )
    torch.testing.assert_close(got, 6 * total)
    got = gradient(lambda t: hvd.allreduce(t, compression=hvd.Compression.fp16, **kind), x)
    torch.testing.assert_close(got, total / size, rtol=1e-3, atol=0)

    rows = [r + 1 for r in ranks]
    mine = torch.ones(rows[at], 2, dtype=torch.float64)
    gathered = torch.empty(sum(rows), 2, dtype=torch.float64)
    got = gradient(lambda t: hvd.allgather(t, **kind), mine)
    torch.testing.assert_close(got, (sum(everyones(gathered)) / size).split(rows)[at])

    for root in ranks:
        got = gradient(lambda t, root=root: hvd.broadcast(t, root, **kind), x)
        torch.testing.assert_close(got, total / size if own == root else torch.zeros_like(x))

    # To the member at place i go i + 1 rows; one row is left.
    splits = [i + 1 for i in range(size)]
    rows = torch.ones(sum(splits) + 1, dtype=torch.float64)
    received = [weights(rank, torch.empty(size * (i + 1))) for i, rank in enumerate(ranks)]
    back = torch.cat([received[i].view(size, i + 1)[at] for i in range(size)])
    got = gradient(lambda t: hvd.alltoall(t, splits, **kind)[0], rows)
    torch.testing.assert_close(got, torch.cat((back, torch.zeros(1))).double())

    long = torch.ones(size + 1, 2, dtype=torch.float64)
    parts = zip(ranks, torch.tensor_split(long, size), strict=True)
    pieces = [weights(rank, part) for rank, part in parts]
    got = gradient(lambda t: hvd.reducescatter(t, op=hvd.Sum, prescale_factor=0.5, **kind), long)
    torch.testing.assert_close(got, torch.cat(pieces) * size / 2)


def in_sets():
    begin()
    size = hvd.size()
    assert_gradients(hvd.global_process_set, list(range(size)))
    for ranks in member_lists(size):
        process_set = hvd.add_process_set(ranks)
        if process_set.included():
            assert_gradients(process_set, ranks)
            # Again, under a name, whose backward is named after it.
            x = torch.ones(2, requires_grad=True)
            hvd.allreduce(x, name="loss", op=hvd.Sum, process_set=process_set).sum().backward()
            assert x.grad.tolist() == [len(ranks)] * 2


@pytest.mark.ranks(1, 3)
@pytest.mark.hosts("2,1")
def test_gradients_are_horovods_in_every_set(world):
    world.run(in_sets)


def refused_calls():
    """Differentiable operations with a bad argument each."""
    x = torch.ones(2, requires_grad=True)
    scalar = torch.tensor(1.0, requires_grad=True)
    return (
        lambda: hvd.allreduce(x, op="sum"),
        lambda: hvd.allreduce(x, prescale_factor=None),
        lambda: hvd.grouped_allreduce([x, x.to(torch.complex64)]),
        lambda: hvd.allgather(scalar),
        lambda: hvd.grouped_allgather([x, scalar]),
        lambda: hvd.broadcast(x, hvd.size()),
        lambda: hvd.alltoall(x, [7] * hvd.size()),
        lambda: hvd.reducescatter(x, op=hvd.Max),
        lambda: hvd.grouped_reducescatter([x], op=hvd.Max),
    )


def takes_no_number(calls):
    hvd.init()
    if hvd.rank() == 0:
        for call in calls():
            with pytest.raises(ValueError, match=r"expected|not |scalar|only 2"):
                call()
    x = torch.ones(2, requires_grad=True)
    result = hvd.allreduce(x, op=hvd.Sum)
    assert result.tolist() == [hvd.size()] * 2
    result.sum().backward()
    assert x.grad.tolist() == [hvd.size()] * 2


@pytest.mark.ranks(2)
@pytest.mark.mpis("openmpi")
def test_a_differentiable_operation_that_is_refused_on_one_rank_leaves_no_trace(world):
    world.run(takes_no_number, refused_calls)


def backwards_in_any_order():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    a, b = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    first, second = hvd.allreduce(a, op=hvd.Sum), hvd.allreduce(b, op=hvd.Sum)
    # The backward has the forward's name; asynchronous on no rank, so both go the same way round.
    for result in (second, first) if size % 2 else (first, second):
        result.sum().backward()
    # It takes no number, also where another rank runs none.
    if rank == 0 and size == 1:
        hvd.allreduce(a, op=hvd.Sum).sum().backward()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == size
    assert a.grad[0] >= size
    assert b.grad[0] == size
    # A gradient of the gradient: that of sum over the ranks of (sum of all x)².
    x = torch.full((2,), rank + 1.0, requires_grad=True)
    squares = hvd.allreduce(x, name="x", op=hvd.Sum).square().sum()
    (grad,) = torch.autograd.grad(squares, x, create_graph=True)
    assert grad.tolist() == [size * size * (size + 1.0)] * 2
    (grad * (rank + 1)).sum().backward()
    assert x.grad.tolist() == [size * size * (size + 1.0)] * 2


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.mpis("openmpi")
def test_the_backward_of_an_operation_is_named_after_it_and_differentiable(world):
    world.run(backwards_in_any_order)
