"""DTensor and tensor parallel: operations and training on parts give what one process gets."""

import itertools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from tests.distributed.training import in_a_group, mean, sgd, step
from tests.optimizer.models import batches, model, own

STEPS = 6
LAYOUTS = {"replicated": Replicate(), "rows": Shard(0), "columns": Shard(1)}


def numbers(*shape):
    torch.manual_seed(5)
    return torch.randn(*shape, dtype=torch.float64)


def same(distributed, whole):
    torch.testing.assert_close(distributed.full_tensor(), whole, rtol=1e-9, atol=1e-12)


@in_a_group
def changes_layout(rank, size, shape):
    """From every layout to every other, also of tensors that do not divide evenly."""
    mesh = init_device_mesh("cpu", shape)
    whole = numbers(7, 5)
    layouts = list(itertools.product((Replicate(), Shard(0), Shard(1)), repeat=len(shape)))
    for first in layouts:
        placed = distribute_tensor(whole, mesh, first)
        same(placed, whole)
        for second in layouts:
            same(placed.redistribute(mesh, second), whole)
    # Each rank has a summand: the whole is their sum.
    summands = [number * whole for number in range(1, size + 1)]
    everywhere = [Partial()] * len(shape)
    placed = DTensor.from_local(summands[rank], mesh, everywhere, run_check=False)
    for second in layouts:
        same(placed.redistribute(mesh, second), sum(summands))


@pytest.mark.ranks(2, 3)
@pytest.mark.wide_in(3)
def test_a_tensor_changes_its_layout_on_a_line_of_ranks(world, tmp_path):
    world.run(changes_layout, tmp_path, (world.size,))


@pytest.mark.ranks(4)
def test_a_tensor_changes_its_layout_on_a_square_of_ranks(world, tmp_path):
    world.run(changes_layout, tmp_path, (2, 2))


@in_a_group
def computes(rank, size):
    """Products, sums and their gradients, in each pair of layouts."""
    mesh = init_device_mesh("cpu", (size,))
    for left, right in itertools.product(LAYOUTS.values(), repeat=2):
        a, b = numbers(6, 4).requires_grad_(), numbers(4, 5).requires_grad_()
        wanted = (a @ b).relu().softmax(1)
        wanted.square().sum().backward()
        c, d = (
            distribute_tensor(whole.detach(), mesh, [layout]).requires_grad_()
            for whole, layout in ((a, left), (b, right))
        )
        found = (c @ d).relu().softmax(1)
        found.square().sum().backward()
        same(found, wanted)
        same(c.grad, a.grad)
        same(d.grad, b.grad)
        same(found.mean(), wanted.mean())
        same(found.max(), wanted.max())


@pytest.mark.ranks(2)
def test_products_and_their_gradients_are_those_of_one_process(world, tmp_path):
    world.run(computes, tmp_path)


def parallel(net, mesh):
    """The first layer by columns, the second by rows, the last one whole."""
    return parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def assert_trained_alike(net, alone):
    for p, q in zip(net.parameters(), alone.parameters(), strict=True):
        whole = p.full_tensor() if isinstance(p, DTensor) else p
        torch.testing.assert_close(whole, q, rtol=1e-9, atol=1e-12)


@in_a_group
def trains_tensor_parallel(rank, size):
    alone, net = model(), parallel(model(), init_device_mesh("cpu", (size,)))
    assert net[0].weight.to_local().shape[0] < alone[0].weight.shape[0]
    reference, optimizer = sgd(alone), sgd(net)
    for x, y in batches(STEPS, 4, size):
        wanted = step(alone, reference, x, y)
        torch.testing.assert_close(step(net, optimizer, x, y), wanted, rtol=1e-9, atol=1e-12)
    assert_trained_alike(net, alone)


@pytest.mark.ranks(2)
def test_tensor_parallel_trains_as_one_process(world, tmp_path):
    world.run(trains_tensor_parallel, tmp_path)


@in_a_group
def trains_data_and_tensor_parallel(rank, size):
    """FSDP2 over rows of the mesh, tensor parallel over its columns."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    alone, net = model(), parallel(model(), mesh["model"])
    fully_shard(net, mesh=mesh["data"])
    reference, optimizer = sgd(alone), sgd(net)
    place = mesh["data"].get_local_rank()
    for x, y in batches(STEPS, 4, 2):
        wanted = step(alone, reference, x, y)
        loss = step(net, optimizer, own(x, place, 2), own(y, place, 2))
        torch.testing.assert_close(mean(loss), wanted, rtol=1e-9, atol=1e-12)
    assert_trained_alike(net, alone)


@pytest.mark.ranks(4)
def test_data_and_tensor_parallel_trains_as_one_process(world, tmp_path):
    world.run(trains_data_and_tensor_parallel, tmp_path)


class Block(nn.Module):
    """A norm, and two layers of which the ranks have parts."""

    def __init__(self, width):
        super().__init__()
        torch.manual_seed(6)
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 3 * width)
        self.outer = nn.Linear(3 * width, width)
        self.double()

    def forward(self, x):
        return x + self.outer(self.inner(self.norm(x)).relu())


@in_a_group
def trains_sequence_parallel(rank, size):
    """The norm on a part of each sequence, the layers on parts of their columns and rows."""
    width = 2 * size
    alone, net = Block(width), Block(width)
    mesh = init_device_mesh("cpu", (size,))
    net = parallelize_module(
        net,
        mesh,
        {
            "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "inner": ColwiseParallel(input_layouts=Shard(1)),
            "outer": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        },
    )
    reference, optimizer = sgd(alone), sgd(net)
    for number in range(STEPS):
        x = numbers(2, 4 * size, width) + number
        wanted = alone(x).square().mean()
        reference.zero_grad()
        wanted.backward()
        reference.step()
        output = net(x)
        assert output.placements == (Shard(1),)
        loss = output.square().mean().full_tensor()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(loss, wanted, rtol=1e-9, atol=1e-12)
    assert_trained_alike(net, alone)


@pytest.mark.ranks(2)
def test_sequence_parallel_trains_as_one_process(world, tmp_path):
    world.run(trains_sequence_parallel, tmp_path)


@in_a_group
def trains_with_a_parallel_loss(rank, size):
    """The classes of the last layer are spread over the ranks, and no rank has all logits."""

    def network():
        torch.manual_seed(7)
        return nn.Linear(6, 5 * size).double()

    alone, net = network(), network()
    layout = ColwiseParallel(use_local_output=False)
    net = parallelize_module(net, init_device_mesh("cpu", (size,)), layout)
    reference, optimizer = sgd(alone), sgd(net)
    for number in range(STEPS):
        x, labels = numbers(8, 6), (torch.arange(8) + number) % (5 * size)
        wanted = nn.functional.cross_entropy(alone(x), labels)
        reference.zero_grad()
        wanted.backward()
        reference.step()
        optimizer.zero_grad()
        with loss_parallel():
            loss = nn.functional.cross_entropy(net(x), labels)
            loss.backward()
        optimizer.step()
        torch.testing.assert_close(loss.full_tensor(), wanted, rtol=1e-9, atol=1e-12)
    assert_trained_alike(net, alone)


@pytest.mark.ranks(2)
def test_a_loss_of_logits_in_parts_is_that_of_one_process(world, tmp_path):
    world.run(trains_with_a_parallel_loss, tmp_path)


@in_a_group
def trains_with_batch_layout(rank, size):
    """Data parallel as a layout: the parameters are everywhere, the batch is in parts."""
    mesh = init_device_mesh("cpu", (size,))
    alone, net = model(), distribute_module(model(), mesh)
    reference, optimizer = sgd(alone), sgd(net)
    for x, y in batches(STEPS, 4, size):
        wanted = step(alone, reference, x, y)
        x, y = (distribute_tensor(part, mesh, [Shard(0)]) for part in (x, y))
        optimizer.zero_grad()
        # Not mse_loss: in torch 2.13 its gradient divides by the size of the rank's part.
        loss = (net(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(loss.full_tensor(), wanted, rtol=1e-9, atol=1e-12)
    assert_trained_alike(net, alone)


@pytest.mark.ranks(2)
def test_a_batch_in_parts_trains_as_one_process(world, tmp_path):
    world.run(trains_with_batch_layout, tmp_path)
