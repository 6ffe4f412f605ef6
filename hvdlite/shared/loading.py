"""load_state_dict of a model with shared parameters: it writes once per host."""

from __future__ import annotations

import torch


def add_hooks(model: torch.nn.Module) -> None:
    """Makes `load_state_dict` of the model, and of each of its modules, write once per host."""
