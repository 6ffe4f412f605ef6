"""Functional collectives, their gradients, and calls gathered by torch's managers."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as with_gradients

from tests.distributed.default_group import in_a_group

pytestmark = [pytest.mark.ranks(2)]

wait = torch.ops._c10d_functional.wait_tensor
# Their names in torch since 2.13, and before.
scatter = getattr(
    functional,
    "reduce_scatter_single_autograd",
    getattr(functional, "reduce_scatter_tensor_autograd", None),
)
gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
gather_out = torch.ops._c10d_functional.all_gather_into_tensor_out


@in_a_group
def gathers_out(rank, size):
    for backend in (dist.get_backend(), "gloo"):
        group = dist.new_group(backend=backend)
        out = torch.zeros(2 * size)
        found = gather_out(torch.tensor([rank, -1.0]), size, group.group_name, out=out)
        assert wait(found).tolist() == [x for r in range(size) for x in (r, -1.0)]
        assert found.data_ptr() == out.data_ptr()


def test_all_gather_into_a_given_tensor_works_with_any_group(world, tmp_path):
    world.run(gathers_out, tmp_path)


@in_a_group
def gradients(rank, size):
    x = torch.full((2 * size,), rank + 1.0, requires_grad=True)
    part = scatter(x, "sum", 0, dist.group.WORLD)
    (part * (rank + 1)).sum().backward()
    assert x.grad.tolist() == [r + 1.0 for r in range(size) for _ in range(2)]
    y = torch.ones(2, requires_grad=True)
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # it has a new name
        everyones = with_gradients.all_gather(y * (rank + 1))
    (sum(part.sum() for part in everyones) * (rank + 1)).backward()
    assert y.grad.tolist() == [(rank + 1.0) * sum(range(1, size + 1))] * 2


def test_gradients_flow_through_collectives(world, tmp_path):
    world.run(gradients, tmp_path)


@in_a_group
def coalesced(rank, size):
    tensors = [torch.full((count,), rank + 1.0) for count in (1, 5, 70_000)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    for tensor in tensors:
        assert tensor.eq(sum(range(1, size + 1))).all()
    outputs = [torch.zeros(size * count) for count in (1, 5)]
    with dist._coalescing_manager():
        for output in outputs:
            mine = torch.full((len(output) // size,), float(rank))
            gather_single(output, mine)
    for output in outputs:
        assert output.view(size, -1)[:, 0].tolist() == list(range(size))


def test_the_coalescing_manager_gathers_calls(world, tmp_path):
    world.run(coalesced, tmp_path)
