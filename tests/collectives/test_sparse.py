"""Sparse allreduce: the sum of all members' elements."""

import math

import pytest
import torch

import hvdlite as hvd


def sparse(rank, size, shape, dtype, sparse_dim=None):
    """Indices that meet on several ranks, and twice on one; rank 1 has none."""
    sparse_dim = len(shape) if sparse_dim is None else sparse_dim
    count = 0 if rank == 1 else 2 * rank + 3
    indices = torch.stack(
        [(torch.arange(count) * (rank + 1 + d)) % shape[d] for d in range(sparse_dim)]
    )
    tail = torch.Size(shape[sparse_dim:])
    values = torch.arange(count * tail.numel()).reshape(count, *tail) + 10 * rank + 1
    return torch.sparse_coo_tensor(indices, values.to(dtype), shape, check_invariants=True)


def reduces(dtype):
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    for shape, sparse_dim in (((7,), 1), ((5, 3), 2), ((5, 3), 1), ((4, 2, 2), 1), ((3, 0), 1)):
        total = sum(sparse(r, size, shape, dtype, sparse_dim).to_dense() for r in range(size))
        mine = sparse(rank, size, shape, dtype, sparse_dim)
        for tensor in (mine, mine.coalesce()):
            before = tensor.clone()
            finish = hvd.sparse_allreduce_async(tensor, "sparse", hvd.Sum)
            result = finish()
            assert finish() is result
            assert result.layout is torch.sparse_coo
            assert result.shape == torch.Size(shape)
            assert result.dtype is dtype
            assert result.sparse_dim() == sparse_dim
            assert torch.equal(result.to_dense(), total)
            assert torch.equal(tensor.to_dense(), before.to_dense())
        mean = hvd.sparse_allreduce_async(mine, None, hvd.Average)().to_dense()
        if dtype.is_floating_point:
            torch.testing.assert_close(mean, total / size)
        else:
            assert torch.equal(mean, torch.div(total, size, rounding_mode="trunc"))
    nobody = torch.sparse_coo_tensor(size=(3, 4), dtype=dtype, check_invariants=True)
    assert hvd.sparse_allreduce_async(nobody, "none", hvd.Sum)()._nnz() == 0
    # Many at once.
    handles = [
        hvd.sparse_allreduce_async(sparse(rank, size, (9,), dtype), f"{i}", hvd.Sum)
        for i in (range(10) if rank % 2 else range(9, -1, -1))
    ]
    total = sum(sparse(r, size, (9,), dtype).to_dense() for r in range(size))
    assert all(torch.equal(handle().to_dense(), total) for handle in handles)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.hosts("1,1", "2,1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_the_result_is_the_sum_of_all_elements_with_the_inputs_shape_and_dtype(world, dtype):
    world.run(reduces, dtype)


def adds_in_float32(dtype, op):
    hvd.init()
    # The last place of `large` is 2, so each of the ones would be lost by itself.
    large = 2.0 * 2 ** round(-math.log2(torch.finfo(dtype).eps))
    indices, values = [[0, 1, 0, 0]], [large, 3.0, 1.0, 1.0]
    tensor = torch.sparse_coo_tensor(
        indices, torch.tensor(values, dtype=dtype), (3,), check_invariants=True
    )
    result = hvd.sparse_allreduce_async(tensor, "narrow", op)()
    times = hvd.size() if op is hvd.Sum else 1
    assert result.dtype is dtype
    assert result.is_coalesced()
    assert result.to_dense().tolist() == [times * (large + 2), times * 3, 0]


@pytest.mark.ranks(2)
@pytest.mark.mpis("openmpi")
@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_numbers_are_added_in_float32(world, dtype, op):
    world.run(adds_in_float32, dtype, op)


def disagrees():
    hvd.init()
    odd = hvd.rank() == 1
    x = torch.eye(4)
    texts = []
    for tensor, op in (
        ((torch.eye(5) if odd else x).to_sparse(), hvd.Sum),
        ((x.double() if odd else x).to_sparse(), hvd.Sum),
        (x.to_sparse(1 if odd else 2), hvd.Sum),
        (x.to_sparse(), hvd.Average if odd else hvd.Sum),
    ):
        finish = hvd.sparse_allreduce_async(tensor, "disputed", op)
        with pytest.raises(hvd.HorovodInternalError) as caught:
            finish()
        texts.append(str(caught.value))
        good = hvd.sparse_allreduce_async(x.to_sparse(), "disputed", hvd.Sum)()
        assert torch.equal(good.to_dense(), x * hvd.size())
    return texts


@pytest.mark.ranks(2, 3)
@pytest.mark.hosts("1,1")
def test_ranks_whose_tensors_or_ops_differ_get_the_same_error(world):
    for texts in zip(*world.run(disagrees), strict=True):
        assert len(set(texts)) == 1
        assert "rank 1 " in texts[0]


def refuses():
    hvd.init()
    x = torch.eye(3)
    for tensor, op, text in (
        (x, hvd.Sum, "got torch.strided, expected a torch.sparse_coo tensor"),
        ([1.0], hvd.Sum, "got list, expected a torch.sparse_coo tensor"),
        (x.to_sparse(), hvd.Max, "op=Max, expected Average or Sum"),
        (x.to_sparse(), None, "op=None, expected Average or Sum"),
        (x.bool().to_sparse(), hvd.Average, "bool has no Average"),
        (x.to(torch.complex64).to_sparse(), hvd.Sum, "complex64 is not supported"),
    ):
        with pytest.raises(ValueError, match=f"sparse_allreduce_async: .*{text}"):
            hvd.sparse_allreduce_async(tensor, "s", op)


@pytest.mark.ranks(1)
@pytest.mark.mpis("openmpi")
def test_what_is_not_sparse_is_a_value_error(world):
    world.run(refuses)
