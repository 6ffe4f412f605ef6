"""op=Adasum, against the formula in NumPy."""

import numpy as np
import pytest
import torch

import hvdlite as hvd


def adasum(a, b):
    aa, bb, ab = a @ a, b @ b, a @ b
    if aa == 0 or bb == 0:
        return a + b
    return (1 - ab / (2 * aa)) * a + (1 - ab / (2 * bb)) * b


def combined(vectors):
    """In the contract's order: the ranks beyond a power of two first, then at distance 1, 2, 4."""
    vectors = [np.asarray(v, dtype=np.float64) for v in vectors]
    power = 1 << (len(vectors).bit_length() - 1)
    for rank in range(power, len(vectors)):
        vectors[rank - power] = adasum(vectors[rank - power], vectors[rank])
    vectors = vectors[:power]
    while len(vectors) > 1:
        vectors = [adasum(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


def vector(rank, count, kind):
    generator = np.random.default_rng(1000 * rank + count)
    if kind == "random":
        return generator.standard_normal(count)
    if kind == "orthogonal":
        return np.where(np.arange(count) % 7 == rank, generator.standard_normal(count), 0)
    if kind == "parallel":
        return np.random.default_rng(count).standard_normal(count) * (rank + 1)
    return np.zeros(count) if rank % 2 else generator.standard_normal(count)


def reduces(dtype, tolerance):
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    for kind in ("random", "orthogonal", "parallel", "zero"):
        for count in (1, 2, 1009, 70_001):
            inputs = [torch.tensor(vector(r, count, kind)).to(dtype) for r in range(size)]
            wanted = combined([x.double().numpy() for x in inputs])
            for got in (
                hvd.allreduce(inputs[rank], op=hvd.Adasum),
                hvd.synchronize(hvd.allreduce_async_(inputs[rank].clone(), op=hvd.Adasum)),
            ):
                assert got.dtype is dtype
                error = np.abs(got.double().numpy() - wanted).max()
                assert error <= tolerance * max(1.0, np.abs(wanted).max()), (kind, count, error)
                everyones = hvd.allgather(got[None].view(torch.uint8))
                assert (everyones == everyones[0]).all()
    assert hvd.allreduce(torch.zeros(0), op=hvd.Adasum).shape == (0,)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.hosts("1,1", "2,1", "3,2")
@pytest.mark.wide_in("3,2")
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
def test_adasum_is_its_formula_in_the_contracts_order(world, dtype, tolerance):
    world.run(reduces, dtype, tolerance)


def by_tensor():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()

    def inputs(r):
        return [torch.tensor(vector(r, n, "random")) * (10.0 ** (n % 3)) for n in (3, 4, 5, 1000)]

    wanted = [
        combined([x.numpy() for x in xs]) for xs in zip(*map(inputs, range(size)), strict=True)
    ]
    for results in (
        hvd.grouped_allreduce(inputs(rank), op=hvd.Adasum),
        hvd.grouped_allreduce_(inputs(rank), op=hvd.Adasum, name="group"),
    ):
        for result, one in zip(results, wanted, strict=True):
            np.testing.assert_allclose(result.numpy(), one, rtol=1e-10)
    scaled = hvd.allreduce(inputs(rank)[0], op=hvd.Adasum, prescale_factor=2, postscale_factor=3)
    np.testing.assert_allclose(scaled.numpy(), 6 * wanted[0], rtol=1e-10)
    x = inputs(rank)[0].requires_grad_()
    hvd.allreduce(x, op=hvd.Adasum).backward(inputs(rank)[0])
    np.testing.assert_allclose(x.grad.numpy(), wanted[0], rtol=1e-10)
    with pytest.raises(ValueError, match="bool has no Adasum"):
        hvd.allreduce(torch.ones(2, dtype=torch.bool), op=hvd.Adasum)


@pytest.mark.ranks(2, 3)
@pytest.mark.hosts("1,1")
def test_adasum_looks_at_every_tensor_of_a_group_by_itself(world):
    world.run(by_tensor)
