"""Scale factors and averages on every path have the bits of torch's own `factor * tensor`."""

import itertools

import pytest
import torch

import hvdlite as hvd
from tests.core import limits, oracles
from tests.core.scaling import differ, reduced, times, widened

DTYPES = ("uint8", "int64", *oracles.FLOATS)
# Through the shared log; of one block; of several; of several pieces.
COUNTS = (0, 1, 7, 50, 131, 1031)
# Products that round, are denormal, overflow, are none; whole ones for integers too.
FACTORS = ((0.3, 1.0), (1.0, -1 / 3), (1e-30, 1.7), (-1e30, 1e-30), (0.0, 2.0), (1.7, 0.77))


def given_by(rank, dtype, count):
    """This rank's numbers, of all magnitudes."""
    draw = torch.Generator().manual_seed(1000 * rank + count)
    dtype = getattr(torch, dtype)
    if not dtype.is_floating_point:
        return torch.randint(0, 40, (count,), generator=draw).to(dtype)
    most = 4 if dtype is torch.float16 else 12
    exponents = torch.randint(-most, most // 2, (count,), generator=draw).double()
    return (torch.randn(count, generator=draw).double() * 10.0**exponents).to(dtype)


def factors_of(dtype):
    if dtype in oracles.FLOATS:
        return ((1.0, 1.0), *FACTORS)
    return ((1.0, 1.0), (0.3, 1.0), (1.0, 0.7), (1.7, 0.4))  # what fits; uint8 has no sign


def own_rows(result, rank, size):
    rows, more = divmod(len(result), size)
    begin = rank * rows + min(rank, more)
    return result[begin : begin + rows + (rank < more)]


def scale_on_every_path(layout):
    """layout: how many ranks each host has."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    ends = list(itertools.accumulate(layout, initial=0))
    problems = []

    def check(what, got, wanted):
        problems.extend(f"{what}: {problem}" for problem in [differ(got, wanted)] if problem)

    cases = [(d, factors) for d in DTYPES for factors in factors_of(d)]
    for count, (dtype, (pre, post)) in itertools.product(COUNTS, cases):
        everyones = [given_by(r, dtype, count) for r in range(size)]
        hosts = [everyones[a:b] for a, b in itertools.pairwise(ends)]
        own = everyones[rank]
        kind = {"prescale_factor": pre, "postscale_factor": post}
        for op in ("Sum", "Average", "Max", "Product"):
            what = f"{op} of {dtype}[{count}], {pre=} {post=}"
            kind["op"] = getattr(hvd, op)
            wanted = reduced(hosts, op, pre, post, size)
            check(f"allreduce, {what}", hvd.allreduce(own, **kind), wanted)
            check(f"allreduce_, {what}", hvd.allreduce_(own.clone(), **kind), wanted)
            if op in ("Max", "Product"):
                continue
            several = [own, own[: count // 2], own.clone()]
            for got in hvd.grouped_allreduce(several, **kind):
                check(f"grouped_allreduce, {what}", got, wanted[: len(got)])
            rows = own_rows(wanted, rank, size)
            check(f"reducescatter, {what}", hvd.reducescatter(own, **kind), rows)
            for got in hvd.grouped_reducescatter([own, own.clone()], **kind):
                check(f"grouped_reducescatter, {what}", got, rows)
    assert not problems, problems[:5]


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.hosts("1,1", "2,1")
def test_every_path_gives_the_bits_of_factor_times_tensor(world):
    layout = [int(ranks) for ranks in (world.hosts or str(world.size)).split(",")]
    world.run(scale_on_every_path, layout, knobs=limits.TINY)


def scale_gradients_and_compressed():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    pre, post = 0.3, -0.77
    kind = {"prescale_factor": pre, "postscale_factor": post}
    problems = []
    for dtype, op in itertools.product(oracles.FLOATS, ("Sum", "Average")):
        grads = [given_by(r, dtype, 100) for r in range(size)]
        kind["op"] = getattr(hvd, op)
        wanted = reduced([grads], op, pre, post, size)
        for reduce in (hvd.allreduce, lambda x, **kind: hvd.grouped_allreduce([x, x], **kind)[0]):
            x = torch.ones_like(grads[0], requires_grad=True)
            reduce(x, **kind).backward(grads[rank])
            problems.append(differ(x.grad, wanted))
        x = torch.ones_like(grads[0], requires_grad=True)
        hvd.reducescatter(x, **kind).backward(own_rows(grads[rank], rank, size))
        factor = (size if op == "Sum" else 1) * pre * post
        rows = [own_rows(grad, r, size) for r, grad in enumerate(grads)]
        scaled = [times(factor, widened(part)).to(part.dtype) for part in rows]
        problems.append(differ(x.grad, torch.cat(scaled)))
        if dtype in ("float32", "float64"):
            for compression, narrow in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
                kind["compression"] = getattr(hvd.Compression, compression)
                wanted = reduced([[grad.to(narrow) for grad in grads]], op, pre, post, size)
                got = hvd.allreduce(grads[rank], **kind)
                problems.append(differ(got, wanted.to(grads[0].dtype)))
            del kind["compression"]
    assert not any(problems), problems


@pytest.mark.ranks(1, 3)
def test_gradients_and_compressed_tensors_are_scaled_so_too(world):
    world.run(scale_gradients_and_compressed)


def scale_adasum():
    """Of orthogonal tensors it is their sum."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    problems = []
    for dtype, (pre, post) in itertools.product(oracles.FLOATS, [(0.3, 1.0), (-1.7, 0.77)]):
        everyones = given_by(7, dtype, 601)
        own = everyones * (torch.arange(601) % size == rank)
        kind = {"op": hvd.Adasum, "prescale_factor": pre, "postscale_factor": post}
        wanted = times(post, times(pre, widened(everyones))).to(everyones.dtype)
        problems.append(differ(hvd.allreduce(own, **kind) + 0.0, wanted + 0.0))
    assert not any(problems), problems


@pytest.mark.ranks(1, 3)
def test_adasum_scales_so_too(world):
    world.run(scale_adasum)


def average_sparse():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    problems = []
    for dtype in oracles.FLOATS:
        everyones = [given_by(r, dtype, 40) for r in range(size)]
        indices = torch.arange(40).reshape(1, 40)
        own = torch.sparse_coo_tensor(indices, everyones[rank], (40,), check_invariants=False)
        got = hvd.sparse_allreduce_async(own, f"sparse {dtype}", hvd.Average)()
        if everyones[0].dtype.itemsize == 2:
            wanted = reduced([everyones], "Average", 1.0, 1.0, size)
        else:  # it hands the elements on one by one
            wanted = torch.stack([times(1 / size, x) for x in everyones]).sum(0)
        problems.append(differ(got.to_dense(), wanted))
    assert not any(problems), problems


@pytest.mark.ranks(3)
def test_a_sparse_average_multiplies_by_one_over_n_so_too(world):
    world.run(average_sparse)


def leave_out_who_has_joined(layout):
    """Rank 0 has joined: no value is neutral under every factor."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    ends = list(itertools.accumulate(layout, initial=0))
    problems = []
    hvd.allreduce(torch.ones(1), name="together")
    if rank:
        for count, pre in itertools.product((7, 131, 1031), (-0.3, 0.0)):
            everyones = [given_by(r, "float32", count) for r in range(size)]
            hosts = [[everyones[r] for r in range(a, b) if r] for a, b in itertools.pairwise(ends)]
            for op in ("Sum", "Average", "Min", "Max", "Product"):
                kind = {"op": getattr(hvd, op), "prescale_factor": pre, "postscale_factor": 1.7}
                got = hvd.allreduce(everyones[rank], name=f"{op} {count} {pre}", **kind)
                wanted = reduced(hosts, op, pre, 1.7, size)
                # A host without ranks adds zeros to a sum.
                problems.append(differ(got + 0.0, wanted + 0.0))
    hvd.join()
    assert not any(problems), problems


@pytest.mark.ranks(3)
@pytest.mark.hosts("1,2", "2,1")
def test_a_rank_that_has_joined_is_left_out_whatever_the_factors(world):
    layout = [int(ranks) for ranks in (world.hosts or str(world.size)).split(",")]
    world.run(leave_out_who_has_joined, layout, knobs=limits.TINY)
