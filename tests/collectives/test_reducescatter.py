"""reducescatter: the sum's rows, dealt out over the members."""

import pytest
import torch

import hvdlite as hvd


def values(rank, size, shape, dtype):
    """x[j] = rank + size * j, with few enough j for every sum to be exact."""
    period = {torch.bfloat16: 5, torch.float16: 29, torch.uint8: 9}.get(dtype, 1001)
    x = torch.arange(torch.Size(shape).numel()) % period * size + rank
    return x.reshape(shape).to(dtype)


def wanted(rank, size, shape, dtype, op):
    total = sum(values(r, size, shape, dtype).long() for r in range(size))
    if op is hvd.Average:
        total = total.double() / size if dtype.is_floating_point else total // size
    return torch.tensor_split(total.to(dtype), size)[rank]


def scatters(dtype, op):
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    for num_rows in (0, 1, size - 1, size, size + 1, 2 * size + 1, 997, 40_009):
        for tail in ((), (3,), (0,), (2, 1)):
            x = values(rank, size, (num_rows, *tail), dtype)
            before = x.clone()
            mine = wanted(rank, size, x.shape, dtype, op)
            for got in (
                hvd.reducescatter(x, op=op),
                hvd.synchronize(hvd.reducescatter_async(x, "named", op)),
            ):
                assert got.dtype is dtype
                assert got.shape == mine.shape
                tolerance = 0 if op is hvd.Sum else 1e-2 if dtype.itemsize == 2 else 1e-6
                torch.testing.assert_close(got, mine, rtol=tolerance, atol=0)
            assert torch.equal(x, before)
    x = values(rank, size, (5, 4), dtype)
    mine = wanted(rank, size, (4, 5), dtype, hvd.Sum)
    assert hvd.reducescatter(x.t(), op=hvd.Sum).shape == mine.shape
    total = sum(values(r, size, (5, 4), dtype).long() for r in range(size)).t().to(dtype)
    assert torch.equal(hvd.reducescatter(x.t(), op=hvd.Sum), torch.tensor_split(total, size)[rank])


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.hosts("1,1", "2,1", "2,2")
@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        (torch.float32, hvd.Average),
        (torch.float64, hvd.Sum),
        (torch.bfloat16, hvd.Sum),
        (torch.int32, hvd.Average),
        (torch.uint8, hvd.Sum),
    ],
)
def test_every_member_gets_its_rows_of_the_result(world, dtype, op):
    world.run(scatters, dtype, op)


def scales():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    x = values(rank, size, (size + 1, 2), torch.float32)
    mine = wanted(rank, size, x.shape, torch.float32, hvd.Sum)
    in_order = (None, hvd.Compression.none, hvd.Sum, hvd.global_process_set, 2, 0.25)
    assert torch.equal(hvd.reducescatter(x, *in_order), mine / 2)
    got = hvd.reducescatter(x % 8, op=hvd.Sum, compression=hvd.Compression.bf16)
    total = sum(values(r, size, x.shape, torch.float32) % 8 for r in range(size))
    assert got.dtype is torch.float32
    assert torch.equal(got, torch.tensor_split(total, size)[rank])
    anyone = torch.zeros(size, dtype=torch.bool)
    anyone[rank] = rank % 2 == 0
    assert hvd.reducescatter(anyone, op=hvd.Sum).tolist() == [rank % 2 == 0]
    for call, text in (
        (lambda: hvd.reducescatter(torch.tensor(1.0)), "reducescatter: a scalar has no first"),
        (lambda: hvd.reducescatter(x, op=hvd.Min), "op=Min, expected Average or Sum"),
        (lambda: hvd.reducescatter(x, op=None), "op=None, expected Average or Sum"),
        (lambda: hvd.reducescatter(x, op=1), "op=1, expected"),
        (lambda: hvd.reducescatter(x > 0), "bool has no Average"),
        (lambda: hvd.reducescatter(x > 0, op=hvd.Sum, prescale_factor=2), "bool takes no scale"),
        (lambda: hvd.reducescatter(x, prescale_factor=None), "prescale_factor=None"),
        (lambda: hvd.reducescatter(x, compression="bf16"), "compression='bf16', expected"),
        (lambda: hvd.reducescatter([x]), "expected a torch.Tensor, got list"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == size


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.hosts("1,1")
def test_factors_compression_and_bad_arguments(world):
    world.run(scales)


def disagrees():
    hvd.init()
    odd = hvd.rank() == 1
    x = torch.ones(4, 2)
    texts = []
    for options in (
        {"tensor": torch.ones(5, 2) if odd else x},
        {"tensor": x.double() if odd else x},
        {"tensor": x, "op": hvd.Sum if odd else hvd.Average},
        {"tensor": x, "postscale_factor": 0.5 if odd else 1.0},
    ):
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.reducescatter(name="disputed", **options)
        texts.append(str(caught.value))
        assert hvd.reducescatter(x, "disputed").eq(1).all()
    return texts


@pytest.mark.ranks(2, 3)
@pytest.mark.hosts("1,1", "2,1")
def test_ranks_that_disagree_get_the_same_error(world):
    for texts in zip(*world.run(disagrees), strict=True):
        assert len(set(texts)) == 1
        assert "reducescatter 'disputed'" in texts[0]
        assert "rank 1 " in texts[0]


def gradients():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    shape = (size + 1, 2)
    for op, factor in ((hvd.Sum, size), (hvd.Average, 1)):
        x = torch.ones(shape, requires_grad=True)
        rows = hvd.reducescatter(x, op=op, prescale_factor=3.0, postscale_factor=0.5)
        weights = torch.arange(rows.numel()).reshape(rows.shape) + 10.0 * rank
        (rows * weights).sum().backward()
        everyones = []
        for r, part in enumerate(torch.tensor_split(torch.empty(shape), size)):
            everyones.append(torch.arange(part.numel()).reshape(part.shape) + 10.0 * r)
        assert torch.equal(x.grad, torch.cat(everyones) * factor * 1.5)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.hosts("1,1")
def test_the_gradient_is_gathered_with_the_size_and_the_factors(world):
    world.run(gradients)
