"""An allreduce in a lane that is prepared once and started many times."""

from __future__ import annotations

import torch

from hvdlite import _core
from hvdlite.gpu import lane_of
from hvdlite.gpu.transfer import Transfer
from hvdlite.ops import DTYPES, ReduceOp
from hvdlite.world.teams.team import Team


class LanePlan:
    """The counterpart of `_core.Plan` for memory on a GPU. The members agree on every run, which
    gives it its turn among all transfers."""

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
        self._posting = _core.posting(
            *(_core.ALLREDUCE, name, False, DTYPES[memory.dtype], memory, memory, op),
            prescale=prescale,
            postscale=postscale,
        )

    def carry(self, position: tuple[int, int]) -> None:
        """The next run's; the members must say the same."""
        # Like the shapes of a group, which the engine compares before a run takes its turn.
        self._posting = self._posting.replace(group=position)

    @staticmethod
    def positions_differ(failure: str) -> bool:
        """Whether a run failed because the members carried different positions."""
        return " in a group of " in failure

    def start(self, owner: object, weight: None = None, is_in_input: bool = False) -> Transfer:
        """Starts a run. ValueError if the previous run has not ended. The arguments are those of
        `_core.Plan`, and ignored."""
        return lane_of(self._team).start(self._posting, self._memory, self._memory)
