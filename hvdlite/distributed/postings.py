"""Posts sends and receives of a process group to the engine."""

from __future__ import annotations

from typing import Any

import torch

from hvdlite.sites import site
from hvdlite.world.teams.team import Team

Tensor = torch.Tensor


def send(team: Team, flat: Tensor, to: int, tag: int, wake: bool = True) -> Any:
    """wake: False where the caller waits for it next."""
    return team.engine.send(flat, to, tag, site(3), wake)


def recv(team: Team, flat: Tensor, source: int, tag: int, wake: bool = True) -> Any:
    """source: -1: any."""
    return team.engine.recv(flat, source, tag, site(3), wake)
