"""The positions of all ranks, exchanged and put into words where a round has shown a difference."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdlite.collectives.host_sum import HostSum
from hvdlite.optimizer.buckets.positions import Position
from hvdlite.optimizer.checks.consistency import differing
from hvdlite.world.teams import Team


def difference(
    positions: Sequence[tuple[int, int]], ranks: Sequence[int], joins: int
) -> str | None:
    """What is not the same on all ranks, in words that are the same everywhere; None: nothing.

    positions: phases and rounds, counted anew after each join. ranks: whose they are. joins: how
    many there have been.
    """
    found = differing([_backward(*position) for position in positions], ranks)
    if not found:
        return None
    since = " (counted from the last hvd.join() on)" if joins else ""
    return (
        f"DistributedOptimizer: the ranks reduce gradients of different backwards: {found}{since}. "
        "Every rank must run as many communicating backwards per step as the others: put a "
        "backward of one rank alone into `with optimizer.no_sync():`, and call hvd.join() on a "
        "rank whose batches have ended. Until now gradients that do not belong together may have "
        "been added: load a checkpoint, or give all ranks the same parameters "
        "(hvd.broadcast_parameters)"
    )


def _backward(phase: int, rounds: int) -> str:
    step = phase // 2 + 1
    inside = f" inside step() number {step}" if phase % 2 else f" of step {step}"
    return f"backward {rounds + 1}{inside}"


def in_words(failure: str) -> str:
    """The failure of a round, with what to do against it."""
    if " has left " not in failure:
        return failure
    return (
        f"{failure}. The gradients of a backward can't be reduced without it; a rank whose batches "
        "end before those of the others calls hvd.join()"
    )


class PositionExchange:
    """Those of all ranks, exchanged where a round has shown that they differ."""

    def __init__(self, team: Team, name: str, own: Position) -> None:
        """Every member makes it, in the same round. name: the same on every member."""
        self._team = team
        self._sum = HostSum(team, f"{name}.positions", 3 * team.size)
        self._sum.numbers[3 * team.rank :][:3] = torch.tensor([1, own.phase, own.rounds])

    def exchange(self) -> tuple[list[tuple[int, int]], list[int]] | None:
        """The positions and their ranks, without those that have joined; None: it failed.
        Blocks; may be called again."""
        self._sum.post()
        if self._sum.wait() is not None:
            return None
        everyones = zip(self._team.ranks, self._sum.numbers.view(-1, 3).tolist(), strict=True)
        found = [(rank, phase, rounds) for rank, (there, phase, rounds) in everyones if there]
        return [(phase, rounds) for _, phase, rounds in found], [rank for rank, *_ in found]
