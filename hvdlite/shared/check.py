"""HVDLITE_CHECK_SHARED=1: finds changes of shared parameters that hvdlite has not made."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def begin(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """share_parameters has placed these."""
