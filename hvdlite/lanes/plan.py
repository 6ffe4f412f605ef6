"""An allreduce in a lane that is prepared once and started many times."""

from __future__ import annotations

import torch

from hvdlite import _core
from hvdlite.lanes import lane_of
from hvdlite.lanes.transfer import Request, Transfer
from hvdlite.ops import DTYPES, ReduceOp
from hvdlite.teams import Team


class LanePlan:
    """For memory on a GPU what `_core.Plan` is for host memory. The members agree on every run, as
    its turn among all transfers has to be found."""

    def __init__(
        self,
        team: Team,
        name: str,
        memory: torch.Tensor,
        op: ReduceOp,
        prescale: float,
        postscale: float,
    ) -> None:
        """memory: contiguous; reduced in place."""
        self._team = team
        self._memory = memory
        self._request = Request(
            _core.ALLREDUCE,
            name,
            False,
            DTYPES[memory.dtype],
            op,
            prescale=prescale,
            postscale=postscale,
        )

    def start(self, owner: object) -> Transfer:
        """Starts it. Before the run before has ended: ValueError. owner: not needed."""
        return lane_of(self._team).start(self._request, self._memory, self._memory)
