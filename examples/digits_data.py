"""The data and the network that the digits examples share. Nothing here knows of hvdlite.

The data are scikit-learn's handwritten digits: 1797 real scans of 8 x 8 grey values, which come
inside its wheel, so that nothing is downloaded. An example for larger images takes MNIST where its
files are at hand.
"""

import gzip
from pathlib import Path

import torch
from sklearn.datasets import load_digits as load_scans
from torch import nn
from torch.utils.data import TensorDataset


def load_digits(seed: int = 0) -> tuple[TensorDataset, TensorDataset]:
    """The training images (three quarters) and the test images, the same on every rank.

    Images are float32[n, 1, 8, 8] between 0 and 1, labels int64[n].
    """
    scans = load_scans()
    images = torch.tensor(scans.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(scans.target, dtype=torch.int64)

    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    test, train = order.tensor_split([len(order) // 4])
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def load_large_digits(mnist: Path) -> tuple[TensorDataset, TensorDataset]:
    """The training images and the test images, float32[n, 784] of 28 x 28 grey values between 0 and
    1: MNIST's, where the folder has its four files, as they are or zipped; else the scans,
    enlarged."""
    if not list(mnist.glob("train-images*")):
        train, test = load_digits()
        return enlarged(train), enlarged(test)
    return of_mnist(mnist, "train"), of_mnist(mnist, "t10k")


def enlarged(digits: TensorDataset) -> TensorDataset:
    images, labels = digits.tensors
    large = nn.functional.interpolate(images, size=(28, 28), mode="bilinear")
    return TensorDataset(large.flatten(1), labels)


def of_mnist(folder: Path, part: str) -> TensorDataset:
    images = without_header(folder, f"{part}-images*idx3-ubyte*", 16)
    labels = without_header(folder, f"{part}-labels*idx1-ubyte*", 8)
    return TensorDataset(images.reshape(-1, 784).float() / 255, labels.long())


def without_header(folder: Path, pattern: str, header: int) -> torch.Tensor:
    """The bytes of a file of MNIST's."""
    file = min(folder.glob(pattern))
    content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    return torch.frombuffer(bytearray(content[header:]), dtype=torch.uint8)


class DigitsNet(nn.Sequential):
    """Two convolutions and two linear layers: about 43,000 parameters."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 72),
            nn.ReLU(),
            nn.Linear(72, 10),
        )
