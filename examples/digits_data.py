"""The data and the network that the digits examples share. Nothing here knows of hvdlite.

The data are scikit-learn's handwritten digits: 1797 real scans of 8 x 8 grey values, which come
inside its wheel, so that nothing is downloaded.
"""

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
