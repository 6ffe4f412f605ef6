"""Gathers rows of all members of a team in host memory, safely in code that a signal may
interrupt."""

from __future__ import annotations

import operator

import torch

from hvdlite import _core
from hvdlite.collectives.host_sum import HostOperation
from hvdlite.ops import DTYPES
from hvdlite.world.teams.team import Team

# Both are C code, so `list.extend(map(…))` gets and stores a result with no bytecode in between
# where a signal handler could raise.
_capsule = operator.methodcaller("capsule")
_from_dlpack = torch._C._from_dlpack


class HostGather(HostOperation):
    """After a wait without failure it has the rows of all members."""

    def __init__(self, team: Team, name: str, tensor: torch.Tensor) -> None:
        """name: the same on every member. tensor: in host memory, contiguous; shaped as for
        `allgather`."""
        self._dtype = tensor.dtype
        kind = _core.ALLGATHER, name, False, DTYPES[tensor.dtype]
        super().__init__(team, _core.posting(*kind, tensor))
        # Each empty until there is one.
        self._capsules: list[object] = []
        self._results: list[torch.Tensor] = []

    def rows(self) -> tuple[int, ...]:
        """After a wait without failure: the rows of each member."""
        return self._operations[0].rows()

    def result(self) -> torch.Tensor:
        """After a wait without failure: the rows of all, in the members' order."""
        if not self._capsules:
            self._capsules.extend(map(_capsule, self._operations))
        made = self._capsules[0]
        if isinstance(made, tuple):
            # No elements.
            return torch.empty(made, dtype=self._dtype, device="cpu")
        if not self._results:
            self._results.extend(map(_from_dlpack, self._capsules))
        result = self._results[0]
        return result if result.dtype is self._dtype else result.view(self._dtype)
