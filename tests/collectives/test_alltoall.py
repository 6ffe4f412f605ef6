"""alltoall: rows for each member, and where they come from."""

import numpy as np
import pytest
import torch

import hvdlite as hvd


def rows_from_to(sender, receiver, size):
    """How many: none from some, many from the last one to the first, few from the others."""
    many = 4000 if (sender, receiver) == (size - 1, 0) else 0
    return (3 * sender + receiver) % (size + 2) + many


def rows(sender, receiver, count, tail, dtype):
    """Each element encodes its sender, its receiver and its position."""
    elems = count * torch.Size(tail).numel()
    x = 100 * sender + 10 * receiver + torch.arange(elems) % 7
    return (x % 2 == 0 if dtype is torch.bool else x.to(dtype)).reshape(count, *tail)


def sends(dtype):
    hvd.init()
    own, size = hvd.rank(), hvd.size()
    for tail in ((), (3,), (2, 0), (2, 2)):
        for spare in (0, 2):  # rows behind those that are sent
            counts = [rows_from_to(own, other, size) for other in range(size)]
            parts = [rows(own, other, n, tail, dtype) for other, n in enumerate(counts)]
            tensor = torch.cat([*parts, torch.ones(spare, *tail, dtype=dtype)])
            from_each = [rows_from_to(other, own, size) for other in range(size)]
            wanted = torch.cat(
                [rows(other, own, n, tail, dtype) for other, n in enumerate(from_each)]
            )
            before = tensor.clone()
            for splits in (
                torch.tensor(counts, dtype=torch.int32),
                torch.tensor(counts),
                counts,
                tuple(counts),
                np.array(counts),
            ):
                given = splits if isinstance(splits, torch.Tensor) else None
                for got, received in (
                    hvd.alltoall(tensor, splits),
                    hvd.synchronize(hvd.alltoall_async(tensor, splits, "named")),
                ):
                    assert got.dtype is dtype
                    assert torch.equal(got, wanted)
                    assert received.tolist() == from_each
                    assert received.dtype is (torch.int32 if given is None else given.dtype)
            assert torch.equal(tensor, before)
        even = torch.cat([rows(own, other, 5, tail, dtype) for other in range(size)])
        wanted = torch.cat([rows(other, own, 5, tail, dtype) for other in range(size)])
        assert torch.equal(hvd.alltoall(even), wanted)
        got, received = hvd.synchronize(hvd.alltoall_async(even))
        assert torch.equal(got, wanted)
        assert received.tolist() == [5] * size
        # Not contiguous: columns of a wider tensor.
        wide = torch.stack((even, even), dim=-1)
        assert torch.equal(hvd.alltoall(wide[..., 1]), wanted)
        # Nothing at all from anybody.
        assert hvd.alltoall(even[:0]).shape == (0, *tail)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.hosts("1,1", "2,1", "2,2")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.bfloat16])
def test_rows_arrive_in_the_order_of_the_members_with_their_numbers(world, dtype):
    world.run(sends, dtype)


def many_in_flight():
    hvd.init()
    own, size = hvd.rank(), hvd.size()
    numbers = list(range(20))
    handles = {}
    for number in numbers if own % 2 else numbers[::-1]:
        x = torch.arange(size * (number + 1)) + 1000 * own + number
        handles[number] = hvd.alltoall_async(x, name=f"number {number}")
    for number in numbers:
        got, _ = hvd.synchronize(handles[number])
        share = number + 1
        wanted = torch.cat(
            [torch.arange(share) + own * share + 1000 * r + number for r in range(size)]
        )
        assert torch.equal(got, wanted)


@pytest.mark.ranks(2, 3)
@pytest.mark.hosts("1,1", "2,1")
def test_many_are_in_flight_in_any_order(world):
    world.run(many_in_flight)


def refuses():
    hvd.init()
    size = hvd.size()
    x = torch.ones(size + 1, 2)
    for splits, text in (
        (None, f"first dimension is {size + 1}, not a multiple of the {size} members"),
        ([1] * (size + 1), f"expected {size} row counts"),
        ([2] * size, f"add up to {2 * size} rows, but the tensor has only {size + 1}"),
        ([-1] + [1] * (size - 1), "none negative"),
        ([0.5] * size, f"expected {size} row counts"),
        ([True] * size, f"expected {size} row counts"),
        (3, "expected a tensor or a list"),
        (torch.ones(size), f"float32\\[{size}\\], expected int32\\[{size}\\]"),
        (torch.ones(1, size, dtype=torch.int32), f"int32\\[1, {size}\\], expected"),
        (torch.ones(size, dtype=torch.int16), "int16"),
    ):
        with pytest.raises(ValueError, match=f"alltoall: .*{text}"):
            hvd.alltoall(x, splits)
        with pytest.raises(ValueError, match=f"alltoall: .*{text}"):
            hvd.alltoall_async(x, splits)
    with pytest.raises(ValueError, match="alltoall: a scalar has no first dimension"):
        hvd.alltoall(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"expected a torch\.Tensor, got list"):
        hvd.alltoall([1.0])
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == size


@pytest.mark.ranks(2, 3)
@pytest.mark.mpis("openmpi")
def test_splits_that_do_not_fit_are_value_errors(world):
    world.run(refuses)


def disagrees():
    hvd.init()
    odd = hvd.rank() == 1
    size = hvd.size()
    texts = []
    for tensor in (
        torch.ones(size, 3 if odd else 2),
        torch.ones(size, dtype=torch.int8 if odd else torch.uint8),
        torch.ones((size, 1) if odd else (size,)),
    ):
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.alltoall(tensor, name="disputed")
        texts.append(str(caught.value))
        assert hvd.alltoall(torch.ones(size), name="disputed").tolist() == [1.0] * size
    return texts


@pytest.mark.ranks(2, 3)
@pytest.mark.hosts("1,1", "2,1")
def test_rows_of_different_kinds_are_an_error_on_every_rank(world):
    for texts in zip(*world.run(disagrees), strict=True):
        assert len(set(texts)) == 1
        assert "alltoall 'disputed'" in texts[0]
        assert "rank 1 " in texts[0]


def gradients():
    hvd.init()
    own, size = hvd.rank(), hvd.size()
    splits = [own + 1] * size
    x = torch.ones(size * (own + 1) + 2, 2, requires_grad=True)
    received, counts = hvd.alltoall(x, splits)
    assert not counts.requires_grad
    # This rank weights the rows that it received with its number.
    (received * (own + 1)).sum().backward()
    wanted = torch.cat([torch.full((own + 1, 2), r + 1.0) for r in range(size)])
    assert torch.equal(x.grad, torch.cat((wanted, torch.zeros(2, 2))))
    x = torch.ones(2 * size, requires_grad=True)
    (hvd.alltoall(x, name="even") * torch.arange(2 * size) * (own + 1)).sum().backward()
    wanted = [(r + 1.0) * (2 * own + j) for r in range(size) for j in range(2)]
    assert x.grad.tolist() == wanted


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.hosts("1,1")
def test_the_gradient_goes_back_to_where_the_rows_came_from(world):
    world.run(gradients)
