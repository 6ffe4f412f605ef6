"""The networks that are trained, with their optimizers and batches. Nothing here knows of
hvdlite."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

CLASSES = 10


@dataclass(frozen=True)
class Task:
    title: str
    build: Callable[[], nn.Module]
    sample_shape: tuple[int, ...]
    optimizer: Callable[..., torch.optim.Optimizer]
    batch_size: int  # of all ranks together

    def network(self) -> nn.Module:
        """The same parameters at every call."""
        torch.manual_seed(0)
        return self.build()

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return self.optimizer(parameters)


def linear_layers(*widths: int) -> nn.Sequential:
    """Linear layers with ReLU between them; the width of the input first."""
    layers: list[nn.Module] = []
    for width_in, width_out in pairwise(widths):
        linear = nn.Linear(width_in, width_out)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Residual(nn.Module):
    """y = relu(x + F(x)), F being two 3×3 convolutions with batch norm (He et al., 2016).

    Where the shape changes, x is subsampled and filled up with channels of zeros, so that the short
    cut has no parameters.
    """

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.more_channels = channels - channels_in
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        short = x[:, :, :: self.stride, :: self.stride]
        short = nn.functional.pad(short, (0, 0, 0, 0, 0, self.more_channels))
        return nn.functional.relu(short + self.body(x))


def resnet20() -> nn.Sequential:
    """The ResNet of 20 layers for images of 32×32: 270 thousand parameters in 59 tensors."""
    blocks: list[nn.Module] = []
    channels_in = 16
    for channels in (16, 32, 64):
        for block in range(3):
            stride = 2 if block == 0 and channels > 16 else 1
            blocks.append(Residual(channels_in, channels, stride))
            channels_in = channels
    stem = (nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))
    return nn.Sequential(*stem, *blocks, *head)


class ManyParameters(nn.Module):
    """A linear layer and many tiny parameters: what each of these costs is what counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, CLASSES)
        self.tiny = nn.ParameterList(nn.Parameter(torch.zeros(CLASSES)) for _ in range(158))

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.layer(x) + torch.stack(list(self.tiny)).sum(0)
        return added


SGD, ADAM = torch.optim.SGD, torch.optim.Adam
TASKS = {
    "mlp": Task(
        "MLP 784-700-500-10, Adam, batch 128",
        partial(linear_layers, 784, 700, 500, CLASSES),
        (784,),
        partial(ADAM, lr=1e-3),
        128,
    ),
    "deep": Task(
        "12 layers 1024×1024, SGD, batch 64",
        partial(linear_layers, *(1024,) * 13),
        (1024,),
        partial(SGD, lr=3e-4),
        64,
    ),
    "deep, Adam": Task(
        "12 layers 1024×1024, Adam, batch 64",
        partial(linear_layers, *(1024,) * 13),
        (1024,),
        partial(ADAM, lr=1e-4),
        64,
    ),
    "resnet": Task(
        "ResNet-20, 32×32 images, SGD, batch 64",
        resnet20,
        (3, 32, 32),
        partial(SGD, lr=1e-3, momentum=0.9),
        64,
    ),
    "tiny": Task(
        "160 tiny parameters, SGD, batch 16",
        ManyParameters,
        (16,),
        partial(SGD, lr=1e-3),
        16,
    ),
}


def batch(task: Task, round_: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """This rank's share of a round's batch."""
    generator = torch.Generator().manual_seed(round_)
    samples = torch.randn(task.batch_size, *task.sample_shape, generator=generator)
    labels = torch.randint(CLASSES, (task.batch_size,), generator=generator)
    return samples[rank::size], labels[rank::size]
