"""Train one network on a mesh of processes, laid out in four ways, with one result.

    hvdrun -np 8 python examples/mesh.py
    torchrun --nproc-per-node 8 examples/mesh.py

The network is an MLP of 784-700-500-10 neurons. A *mesh* arranges the ranks in a line or in a
rectangle, and names its dimensions. A *layout* says for each tensor and each dimension of the mesh
whether all ranks along it have the whole tensor, or each has a part. Four layouts are trained on
the same batches:

    data parallel    each rank has some images of the batch, and all parameters
    model parallel   each rank has all images, and some neurons of the hidden layers
    both             a mesh of two dimensions, one of each kind: 4 x 2 and 2 x 4 ranks

DTensor works out from the layouts what the ranks have to send. The losses are those of one process,
but for rounding. At the end the parameters are put together and saved as those of an ordinary
model; `python examples/mesh.py --load mesh.pt` tests it in one process.
"""

import argparse
import itertools
import logging
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from digits_data import load_large_digits
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn.functional import cross_entropy

# The sums of float32 numbers depend on their order, and where a neuron's input is about 0, rounding
# decides whether it passes a gradient on.
TOLERANCE = 1e-3

# How the parameters lie along the mesh's dimension "model"; all ranks along "batch" have the same.
# The first layer has its neurons in parts, the second its inputs, which are these neurons.
MODEL_PARALLEL = {"0.weight": Shard(0), "0.bias": Shard(0), "2.weight": Shard(1)}

Batch = tuple[torch.Tensor, torch.Tensor]


class Network(nn.Sequential):
    """About 900,000 parameters, the same on every rank."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(
            *(nn.Linear(784, 700), nn.ReLU()),
            *(nn.Linear(700, 500), nn.ReLU()),
            nn.Linear(500, 10),
        )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=128, help="images per step")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate of SGD")
    parser.add_argument("--backend", default="hvdlite", help="the backend of torch.distributed")
    parser.add_argument(
        "--mnist",
        type=Path,
        default=Path("data/MNIST/raw"),
        metavar="FOLDER",
        help="has MNIST's files (train-images-idx3-ubyte …); scikit-learn's digits otherwise",
    )
    parser.add_argument("--export", type=Path, default=Path("mesh.pt"), metavar="FILE")
    parser.add_argument("--load", type=Path, metavar="FILE", help="test it in one process")
    return parser.parse_args()


def batches(args: argparse.Namespace) -> list[Batch]:
    """The same on every rank."""
    images, labels = load_large_digits(args.mnist)[0].tensors
    order = torch.Generator().manual_seed(0)
    chosen = [
        torch.randint(len(images), (args.batch_size,), generator=order) for _ in range(args.steps)
    ]
    return [(images[rows], labels[rows]) for rows in chosen]


def accuracy(model: nn.Module, args: argparse.Namespace) -> float:
    """Per cent of the test images that are recognised."""
    images, labels = load_large_digits(args.mnist)[1].tensors
    with torch.no_grad():
        hits = (model(images).argmax(dim=1) == labels).sum()
    return 100 * float(hits) / len(labels)


def placements(mesh: DeviceMesh, **along: Placement) -> list[Placement]:
    """Of a tensor: whole on all ranks, but for the dimensions of the mesh that are named."""
    return [along.get(name, Replicate()) for name in mesh.mesh_dim_names or ()]


def lay_out(model: nn.Sequential, mesh: DeviceMesh) -> None:
    """Turns the parameters into DTensors: of each, a rank keeps its part."""
    for name, parameter in list(model.named_parameters()):
        place = placements(mesh, model=MODEL_PARALLEL.get(name, Replicate()))
        layer, _, kind = name.partition(".")
        whole = distribute_tensor(parameter.detach(), mesh, place)
        setattr(model[int(layer)], kind, nn.Parameter(whole))


def train(model: nn.Module, data: list[Batch], lr: float, mesh: DeviceMesh | None) -> list[float]:
    """The loss of each step. Apart from where the batch lies, it is the loop of one process."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for images, labels in data:
        if mesh is not None:
            place = placements(mesh, batch=Shard(0))
            images = distribute_tensor(images, mesh, place)
            labels = distribute_tensor(labels, mesh, place)
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(whole(loss.detach()).item())
    return losses


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as one process has it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def layout(tensor: torch.Tensor) -> str:
    """Such as "700x784 as 175x784: batch whole, model dimension 0 in parts"."""
    assert isinstance(tensor, DTensor)
    names = tensor.device_mesh.mesh_dim_names or ()
    where = [
        f"{name} " + (f"dimension {place.dim} in parts" if isinstance(place, Shard) else "whole")
        for name, place in zip(names, tensor.placements, strict=True)
    ]
    return f"{shape(tensor)} as {shape(tensor.to_local())}: {', '.join(where)}"


def shape(tensor: torch.Tensor) -> str:
    return "x".join(map(str, tensor.shape))


def say(text: str = "") -> None:
    """Prints it once, not on every rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def show_layout(model: nn.Module, mesh: DeviceMesh, images: torch.Tensor) -> None:
    """What rank 0 has of each tensor."""
    say(f"  images    {layout(distribute_tensor(images, mesh, placements(mesh, batch=Shard(0))))}")
    for name, parameter in model.named_parameters():
        say(f"  {name:<9} {layout(parameter)}")


def show_relayout(weight: object) -> None:
    """The same tensor in other layouts; the ranks send each other what they lack."""
    assert isinstance(weight, DTensor)
    mesh = weight.device_mesh
    say("\nThe first layer's weight in other layouts:")
    before = weight.full_tensor()
    for place in (Shard(0), Shard(1), Replicate()):
        other = weight.redistribute(mesh, placements(mesh, model=place))
        assert torch.equal(other.full_tensor(), before)
        say(f"  {layout(other)}")


def main() -> int:
    args = parse_args()
    if args.load:
        model = Network()
        model.load_state_dict(torch.load(args.load, weights_only=True))
        print(f"Test accuracy of {args.load}: {accuracy(model, args):.2f} %")
        return 0

    # DTensor tells every rank which of its ways to send could be shorter.
    for module in ("_redistribute", "_collective_utils"):
        logging.getLogger(f"torch.distributed.tensor.{module}").setLevel(logging.ERROR)
    dist.init_process_group(args.backend)
    ranks = dist.get_world_size()
    data = batches(args)
    say(f"{ranks} ranks, {args.steps} steps of {args.batch_size} images")
    alone = train(Network(), data, args.lr, None)

    meshes = {
        "data parallel": init_device_mesh("cpu", (ranks,), mesh_dim_names=("batch",)),
        "model parallel": init_device_mesh("cpu", (ranks,), mesh_dim_names=("model",)),
    }
    for columns in sorted({2, ranks // 2}):
        if columns > 1 and ranks % columns == 0 and ranks // columns > 1:
            shape = (ranks // columns, columns)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("batch", "model"))
            meshes[f"both, {shape[0]} x {shape[1]}"] = mesh

    curves = {"one process": alone}
    for name, mesh in meshes.items():
        model = Network()
        lay_out(model, mesh)
        say(f"\nLayout: {name}")
        show_layout(model, mesh, data[0][0])
        curves[name] = train(model, data, args.lr, mesh)
    show_relayout(model[0].weight)

    say("\nLoss, step by step:")
    shown = sorted({*range(0, args.steps, max(1, args.steps // 6)), args.steps - 1})
    say(f"  {'step':<16}" + "".join(f"{step + 1:>9}" for step in shown))
    for name, curve in curves.items():
        say(f"  {name:<16}" + "".join(f"{curve[step]:9.5f}" for step in shown))
    apart = max(
        abs(a - b) for one, other in itertools.combinations(curves.values(), 2)
        for a, b in zip(one, other, strict=True)
    )  # fmt: skip
    say(f"The curves differ by {apart:.1e} at most; allowed are {TOLERANCE:g}.")

    # What one process needs: ordinary tensors under the names of an ordinary model. All ranks
    # take part in putting them together.
    state = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    if dist.get_rank() == 0:
        torch.save(state, args.export)
        exported = Network()
        exported.load_state_dict(torch.load(args.export, weights_only=True))
        print(f"\nSaved {args.export}. Test accuracy: {accuracy(exported, args):.2f} %")
        print(f"In one process: python examples/mesh.py --load {args.export}")
    dist.barrier()
    dist.destroy_process_group()
    return int(apart > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
