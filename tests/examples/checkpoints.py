"""What the checkpoints of an example have in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def last_step(folder: Path) -> int:
    """The number of the latest checkpoint."""
    return int(max(folder.glob("*.pt")).stem.rpartition("-")[2])


def load(folder: Path) -> dict[str, Any]:
    """The latest checkpoint."""
    states: dict[str, Any] = torch.load(max(folder.glob("*.pt")), weights_only=True)
    return states


def trained(folder: Path) -> dict[str, Any]:
    """The bytes of every tensor of the model and the optimizer in the latest checkpoint."""
    states = load(folder)
    return {
        **{name: tensor.numpy().tobytes() for name, tensor in states["model"].items()},
        **{
            f"{index}.{name}": value.numpy().tobytes()
            for index, state in states["optimizer"]["state"].items()
            for name, value in state.items()
            if isinstance(value, torch.Tensor)
        },
    }
