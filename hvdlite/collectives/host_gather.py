"""Gathers rows of all members of a team in host memory, safely in code that a signal may
interrupt."""

from __future__ import annotations

from typing import Any

import torch

from hvdlite import _core
from hvdlite.collectives.host_sum import HostOperation
from hvdlite.ops import DTYPES
from hvdlite.result_tensors import gathered_result
from hvdlite.world.teams.team import Team


class HostGather(HostOperation):
    """After a wait without failure it has the rows of all members."""

    def __init__(self, team: Team, name: str, tensor: torch.Tensor) -> None:
        """name: the same on every member. tensor: in host memory, contiguous; shaped as for
        `allgather`."""
        self._dtype = tensor.dtype
        kind = _core.ALLGATHER, name, False, DTYPES[tensor.dtype]
        super().__init__(team, _core.posting(*kind, tensor))
        self._made: list[Any] = []

    def rows(self) -> tuple[int, ...]:
        """After a wait without failure: the rows of each member."""
        return self._operations[0].rows()

    def result(self) -> torch.Tensor:
        """After a wait without failure: the rows of all, in the members' order."""
        return gathered_result(self._operations[0], self._dtype, self._made)
