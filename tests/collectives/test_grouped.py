"""Groups: lists of tensors that are one operation to their handle."""

import pytest
import torch

import hvdlite as hvd
from hvdlite.collectives import flat_buffers
from hvdlite.collectives.grouped_allreduce import FUSED_BYTES

LARGE = FUSED_BYTES // 4 + 3
# Empty, scalar, of several dimensions; small enough to travel with others, and larger.
SHAPES = ((), (1,), (0,), (3, 5), (0, 4), (2, 1, 7), (1009,), (FUSED_BYTES // 4,), (LARGE,))


def values(rank, size, index, shape, dtype=torch.float32):
    """x[j] = rank + size * j + 1000 * index, small enough for every sum to be exact."""
    count = torch.Size(shape).numel()
    x = torch.arange(count) % 500 * size + rank + 1000 * index
    return x.reshape(shape).to(dtype)


def group(rank, size, dtype=torch.float32, shapes=SHAPES):
    return [values(rank, size, i, shape, dtype) for i, shape in enumerate(shapes)]


def summed(size, dtype=torch.float32, shapes=SHAPES):
    everyones = [group(rank, size, dtype, shapes) for rank in range(size)]
    return [torch.stack(tensors).sum(0).to(dtype) for tensors in zip(*everyones, strict=True)]


def assert_same(results, wanted):
    assert isinstance(results, list)
    assert len(results) == len(wanted)
    for result, one in zip(results, wanted, strict=True):
        assert result.dtype == one.dtype
        assert result.shape == one.shape
        assert torch.equal(result, one)


def reduces():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    kept = list(flat_buffers._idle)
    for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16):
        shapes = SHAPES if dtype is not torch.bfloat16 else ((2,), (), (1, 1))
        wanted = summed(size, dtype, shapes) if dtype is not torch.bfloat16 else None
        for _ in range(2):  # the second one finds the buffer of the first
            tensors = group(rank, size, dtype, shapes)
            if dtype is torch.bfloat16:
                tensors = [t.remainder(4) for t in tensors]
                wanted = [
                    sum(group(r, size, dtype, shapes)[i].remainder(4) for r in range(size))
                    for i in range(len(shapes))
                ]
            before = [t.clone() for t in tensors]
            assert_same(hvd.grouped_allreduce(tensors, op=hvd.Sum), wanted)
            assert_same(hvd.grouped_allreduce(iter(tensors), op=hvd.Sum, name="n"), wanted)
            handle = hvd.grouped_allreduce_async(tuple(tensors), op=hvd.Sum)
            results = hvd.synchronize(handle)
            assert_same(results, wanted)
            assert hvd.synchronize(handle) is results
            assert hvd.poll(handle) is True
            assert_same(tensors, before)
            # No memory is shared, neither with the input nor with each other.
            for result in results:
                assert result.untyped_storage().nbytes() == result.nbytes
            in_place = [t.clone() for t in tensors]
            for result, tensor in zip(
                hvd.grouped_allreduce_(in_place, op=hvd.Sum), in_place, strict=True
            ):
                assert result is tensor
            assert_same(in_place, wanted)
            handle = hvd.grouped_allreduce_async_(tensors, op=hvd.Sum)
            for result, tensor in zip(hvd.synchronize(handle), tensors, strict=True):
                assert result is tensor
            assert_same(tensors, wanted)
    assert len(flat_buffers._idle) > len(kept) or kept


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.hosts("1,1", "2,1")
def test_a_group_is_reduced_tensor_by_tensor_in_every_form(world):
    world.run(reduces)


def reduces_mixtures():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float64, torch.bool, torch.int32)

    def mixture(r):
        return [
            (values(r, size, i, (3, 2)) % 7 < 3) if dtype is torch.bool
            else values(r, size, i, (3, 2), dtype)
            for i, dtype in enumerate(dtypes)
        ]  # fmt: skip

    everyones = list(zip(*[mixture(r) for r in range(size)], strict=True))
    for op, combine in ((hvd.Sum, torch.sum), (hvd.Max, torch.amax), (hvd.Min, torch.amin)):
        wanted = []
        for tensors in everyones:
            stacked = torch.stack(tensors)
            if stacked.dtype is torch.bool:
                wanted.append(stacked.all(0) if op is hvd.Min else stacked.any(0))
            else:
                wanted.append(combine(stacked, 0).to(stacked.dtype))
        assert_same(hvd.grouped_allreduce(mixture(rank), op=op), wanted)
        tensors = mixture(rank)
        hvd.grouped_allreduce_(tensors, op=op, name="mixture")
        assert_same(tensors, wanted)
    # Not contiguous: allowed, except in place.
    x = values(rank, size, 0, (4, 6))
    wanted = sum(values(r, size, 0, (4, 6)) for r in range(size)).t()
    for tensors in ([x.t(), x[0]], [x.t(), x[:, 0]], [x.t()]):
        results = hvd.grouped_allreduce(tensors, op=hvd.Sum)
        assert torch.equal(results[0], wanted)
        assert results[0].is_contiguous()
        with pytest.raises(ValueError, match="grouped_allreduce_: the tensor is not contiguous"):
            hvd.grouped_allreduce_(tensors)
    averaged = hvd.grouped_allreduce([x, x + 1], prescale_factor=2, postscale_factor=0.5)
    assert torch.allclose(averaged[1], wanted.t() / size + 1)
    compressed = hvd.grouped_allreduce(
        [x % 8, torch.tensor([2**30])], op=hvd.Max, compression=hvd.Compression.bf16
    )
    assert compressed[0].dtype is torch.float32
    assert compressed[1].tolist() == [2**30]
    for empty in (hvd.grouped_allreduce, hvd.grouped_allreduce_, hvd.grouped_allgather):
        assert empty([]) == []
    for begin in (hvd.grouped_allreduce_async, hvd.grouped_allgather_async):
        assert hvd.poll(begin([])) is True
        assert hvd.synchronize(begin([])) == []
    assert hvd.grouped_reducescatter([]) == []


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.hosts("1,1")
def test_a_group_may_be_of_several_dtypes_and_may_be_empty(world):
    world.run(reduces_mixtures)


def gathers():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()

    def parts(r):
        return [
            torch.arange(r * 3).reshape(r, 3) + 100 * r,
            torch.full((2,), float(r)),
            torch.zeros(5 * r + 1, 2, 2, dtype=torch.bool),
            torch.full((1 - r % 2, 4), r, dtype=torch.uint8),
        ]

    wanted = [torch.cat(tensors) for tensors in zip(*[parts(r) for r in range(size)], strict=True)]
    assert_same(hvd.grouped_allgather(parts(rank)), wanted)
    assert_same(hvd.synchronize(hvd.grouped_allgather_async(parts(rank), name="g")), wanted)

    def rows(r):
        return [values(r, size, i, (n, 3)) for i, n in enumerate((size, 2 * size + 1, 1, 0))]

    for op, divisor in ((hvd.Sum, 1), (hvd.Average, size)):
        totals = [sum(ts) / divisor for ts in zip(*[rows(r) for r in range(size)], strict=True)]
        mine = [torch.tensor_split(total, size)[rank] for total in totals]
        results = hvd.grouped_reducescatter(rows(rank), op=op)
        for result, one in zip(results, mine, strict=True):
            torch.testing.assert_close(result, one, rtol=1e-6, atol=0)
        handle = hvd.grouped_reducescatter_async(rows(rank), op=op, prescale_factor=0.5)
        for result, one in zip(hvd.synchronize(handle), mine, strict=True):
            torch.testing.assert_close(result, one / 2, rtol=1e-6, atol=0)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.hosts("1,1", "2,1")
def test_groups_are_gathered_and_scattered_tensor_by_tensor(world):
    world.run(gathers)


def one_waits_for_all():
    hvd.init()
    begins = (
        lambda ts: hvd.grouped_allreduce_async(ts, name="g"),
        lambda ts: hvd.grouped_allgather_async(ts, name="g"),
        lambda ts: hvd.grouped_reducescatter_async(ts, name="g"),
    )
    for begin in begins:
        tensors = [torch.ones(4), torch.ones(LARGE), torch.ones(4, dtype=torch.int32)]
        if hvd.rank():
            hvd.barrier()
        handle = begin(tensors)
        if not hvd.rank():
            assert hvd.poll(handle) is False, "the others wait for the barrier first"
            with pytest.raises(ValueError, match="in flight already"):
                begin(tensors)
            hvd.barrier()
        assert len(hvd.synchronize(handle)) == 3
        assert hvd.poll(handle) is True


@pytest.mark.ranks(2)
@pytest.mark.hosts("1,1")
def test_a_group_is_one_operation_to_its_handle(world):
    world.run(one_waits_for_all)


X = torch.ones(4, 2)
# What rank 1 passes, and what the others pass.
DISPUTES = {
    "number": ([X, X], [X]),
    "shape": ([X, torch.ones(4, 3)], [X, X]),
    "dtype": ([X, X.double()], [X, X]),
    "order": ([X.double(), X], [X, X.double()]),
    "first one": ([X.int(), X], [X, X]),
    "kind of the first": ([torch.ones(LARGE, 2), X], [X, X]),
    "rows": ([X, torch.ones(LARGE, 2)], [X, X]),
}
# An allgather's first dimensions may differ.
ROWS = ("kind of the first", "rows")


def differs(kind):
    hvd.init()
    odd = hvd.rank() == 1
    run = getattr(hvd, f"grouped_{kind}")
    texts = []
    for name in (None, "disputed"):
        for dispute, (ones, others) in DISPUTES.items():
            if kind == "allgather" and dispute in ROWS:
                continue
            with pytest.raises(hvd.HorovodInternalError) as caught:
                run(ones if odd else others, name=name)
            texts.append(str(caught.value))
            # The engine goes on, also under the same name and with the arguments of either side.
            for good in (ones, others):
                results = run([t + hvd.rank() for t in good], name=name)
                assert results[-1].flatten()[-1] == (hvd.size() if kind == "allgather" else
                                                     1 + (hvd.size() - 1) / 2)  # fmt: skip
    return texts


@pytest.mark.ranks(2, 3)
@pytest.mark.hosts("1,1", "2,1")
@pytest.mark.parametrize("kind", ["allreduce", "allgather", "reducescatter"])
def test_groups_that_differ_are_an_error_on_every_rank_and_no_hang(world, kind):
    everyones = world.run(differs, kind)
    for texts in zip(*everyones, strict=True):
        assert len(set(texts)) == 1, texts
        assert "rank 1 " in texts[0]
        assert "in a group of" in texts[0]


def a_group_meets_one_tensor(is_waited_for):
    hvd.init()
    pair = [X, torch.ones(LARGE)]
    for name in (None, "g"):
        for ranks_with_a_group in ({0}, set(range(1, hvd.size()))):
            if hvd.rank() in ranks_with_a_group:
                handle = hvd.grouped_allreduce_async(pair, name=name)
            else:
                handle = hvd.allreduce_async(X, name=name)
            if is_waited_for:
                with pytest.raises(hvd.HorovodInternalError, match="in a group of 2 tensors"):
                    hvd.synchronize(handle)
            while not hvd.poll(handle):
                pass
            del handle
            assert_same(hvd.grouped_allreduce(pair, name=name), pair)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == hvd.size()


@pytest.mark.ranks(2, 3)
@pytest.mark.hosts("1,1", "2,1")
@pytest.mark.parametrize("is_waited_for", [True, False])
def test_a_group_against_one_tensor_is_an_error_and_the_next_one_works(world, is_waited_for):
    world.run(a_group_meets_one_tensor, is_waited_for)


def fails_while_one_has_joined():
    hvd.init()
    for _ in range(2):
        if hvd.rank():
            with pytest.raises(hvd.HorovodInternalError, match="has joined"):
                hvd.grouped_allgather([X, X], name="g")
        hvd.join()
        assert len(hvd.grouped_allgather([X, X], name="g")) == 2


@pytest.mark.ranks(2, 3)
@pytest.mark.hosts("1,1", "2,1")
def test_a_group_that_failed_while_a_rank_had_joined_works_after_all_have(world):
    world.run(fails_while_one_has_joined)


def refuses():
    hvd.init()
    x = torch.ones(2, 2)
    for call, text in (
        (lambda: hvd.grouped_allreduce(x), "expected a list of tensors, got Tensor"),
        (lambda: hvd.grouped_allreduce(3), "expected a list of tensors, got int"),
        (lambda: hvd.grouped_allreduce_([x, 3]), "grouped_allreduce_: expected a torch.Tensor"),
        (lambda: hvd.grouped_allreduce([3, x]), "grouped_allreduce: expected a torch.Tensor"),
        (lambda: hvd.grouped_allreduce([x, x.to_sparse()]), "sparse_coo"),
        (lambda: hvd.grouped_allreduce([x, x > 0]), "bool has no Average"),
        (lambda: hvd.grouped_allreduce([x, x > 0], op=hvd.Sum, prescale_factor=2), "bool takes no"),
        (lambda: hvd.grouped_allreduce([x, x], op=7), "op=7"),
        (lambda: hvd.grouped_allreduce([x, x], True, op=hvd.Sum), "average and op"),
        (lambda: hvd.grouped_allreduce([x, x], compression="fp16"), "expected hvdlite.Compression"),
        (lambda: hvd.grouped_allreduce([x, 3], compression=hvd.Compression.fp16), "torch.Tensor"),
        (lambda: hvd.grouped_allreduce([x, x.to("meta")]), "meta"),
        (lambda: hvd.grouped_allreduce([x.to(torch.complex64)] * 2), "complex64 is not supported"),
        (lambda: hvd.grouped_allgather([x, torch.tensor(1.0)]), "grouped_allgather: a scalar"),
        (lambda: hvd.grouped_reducescatter([x, torch.tensor(1.0)]), "a scalar"),
        (lambda: hvd.grouped_reducescatter([x], op=hvd.Max), "expected Average or Sum"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    # Nothing of these groups was sent, and no number was taken.
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == hvd.size()


@pytest.mark.ranks(2)
@pytest.mark.mpis("openmpi")
def test_a_bad_member_is_a_value_error_before_anything_is_sent(world):
    world.run(refuses)


def gradients():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    weight = rank + 1.0
    total = size * (size + 1) / 2

    def leaves(*shapes):
        return [torch.ones(shape, requires_grad=True) for shape in shapes]

    def backward(results):
        sum((weight * (i + 1) * r * torch.arange(r.numel()).reshape(r.shape)).sum()
            for i, r in enumerate(results)).backward()  # fmt: skip

    a, b, c = leaves((3,), (2, 2), (LARGE,))
    frozen = torch.ones(2)
    results = hvd.grouped_allreduce([a, frozen, b, c], op=hvd.Sum, prescale_factor=2.0)
    backward(results)
    for i, leaf in ((1, a), (3, b), (4, c)):
        index = torch.arange(leaf.numel()).reshape(leaf.shape)
        torch.testing.assert_close(leaf.grad, 2.0 * total * i * index)
    assert frozen.grad is None
    a, b = leaves((rank + 1, 2), (2,))
    backward(hvd.grouped_allgather([a, b], name="gathered"))
    begin = 2 * sum(r + 1 for r in range(rank))
    wanted = torch.arange(begin, begin + a.numel()).reshape(a.shape) * total / size
    torch.testing.assert_close(a.grad, wanted)
    wanted = 2 * torch.arange(2 * rank, 2 * rank + 2) * total / size
    torch.testing.assert_close(b.grad, wanted)
    a, b = leaves((size + 1, 2), (1,))
    backward(hvd.grouped_reducescatter([a, b], op=hvd.Sum, postscale_factor=0.5))
    wanted = torch.cat([
        (r + 1) * torch.arange(part.numel()).reshape(part.shape)
        for r, part in enumerate(torch.tensor_split(a.detach(), size))
    ])  # fmt: skip
    torch.testing.assert_close(a.grad, 0.5 * size * wanted.float())
    torch.testing.assert_close(b.grad, torch.zeros(1))
    a, b = leaves((2,), (2,))
    averaged = hvd.grouped_reducescatter([a.repeat(size), b.repeat(size)], op=hvd.Average)
    backward(averaged)
    torch.testing.assert_close(a.grad, total * torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(b.grad, 2 * total * torch.tensor([0.0, 1.0]))
    with torch.no_grad():
        assert not any(t.requires_grad for t in hvd.grouped_allreduce([a, b]))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.hosts("1,1")
def test_groups_are_differentiable_with_horovods_gradients(world):
    world.run(gradients)


def gradients_of_mixtures():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    total = size * (size + 1) / 2
    scattered = [(r + 1.0) * size for r in range(size)]
    for other in (torch.ones(size, dtype=torch.bool), torch.ones(size, dtype=torch.int32)):
        for call, wanted in (
            (lambda pair: hvd.grouped_allreduce(pair, op=hvd.Sum), [total] * size),
            (hvd.grouped_allgather, [total / size] * size),
            (lambda pair: hvd.grouped_reducescatter(pair, op=hvd.Sum), scattered),
        ):
            x = torch.ones(size, requires_grad=True)
            integers, result = call([other, x])
            assert not integers.requires_grad
            (result * (rank + 1)).sum().backward()
            assert x.grad.tolist() == wanted


@pytest.mark.ranks(1, 2)
@pytest.mark.mpis("openmpi")
def test_what_has_no_gradient_may_be_in_a_group_with_what_has_one(world):
    world.run(gradients_of_mixtures)


def changes_are_seen():
    hvd.init()
    x = torch.ones(3, requires_grad=True)
    y, z = x * 2, x * 3
    loss = (y * y * z).sum()
    hvd.grouped_allreduce_([y.detach(), z.detach()])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    # And results have versions of their own.
    a, b = hvd.grouped_allreduce([torch.ones(3), torch.ones(3)])
    w = torch.ones(3, requires_grad=True)
    loss = (w * a).sum()
    b.add_(1)
    loss.backward()
    parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(1, 2))]
    hvd.grouped_allreduce_(parameters, op=hvd.Sum)
    assert all(p.eq(hvd.size()).all() and p.requires_grad for p in parameters)
    with torch.inference_mode():
        assert (
            hvd.grouped_allreduce_([torch.ones(2), torch.ones(3)], op=hvd.Sum)[1][0] == hvd.size()
        )


@pytest.mark.ranks(1, 2)
@pytest.mark.mpis("openmpi")
def test_autograd_knows_which_tensors_of_a_group_have_changed(world):
    world.run(changes_are_seen)
