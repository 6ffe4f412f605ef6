"""Exchanges the positions of all ranks when a round has shown that they differ, and describes the
difference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdlite.collectives.differing_ranks import which_ranks
from hvdlite.collectives.host_sum import HostSum
from hvdlite.optimizer.buckets.positions import Position
from hvdlite.own_names import own_name
from hvdlite.world.teams.team import Team

_POSITION = 4  # numbers of a position
_MOST_BEGUN = 64  # optimizers; of more than that in one backward, the first ones are told
_ERROR_BYTES = 32  # of what has raised; the rest is cut off
# Numbers of a rank: 1 if it is there, those of its position, the bytes of its error, and the
# optimizers that it has begun.
_EACH = 1 + _POSITION + _ERROR_BYTES + _MOST_BEGUN


def difference(positions: Sequence[Sequence[Any]], ranks: Sequence[int], joins: int) -> str | None:
    """The difference between the ranks, as the same text on every rank; None if there is none.

    positions: phase and rounds of each rank, counted from the last join, whether it has a weight,
    and what its backward has raised: in words, or only whether. ranks: by position, its rank.
    joins: the number of joins so far.
    """
    found = which_ranks([_backward(phase, rounds) for phase, rounds, *_ in positions], ranks)
    if not found:
        if found := which_ranks([_end(error) for *_, error in positions], ranks):
            return _gradients_missing(found)
        found = which_ranks([_weight(weighted) for _, _, weighted, _ in positions], ranks)
        return _weights_missing(found) if found else None
    since = " (counted since the last hvd.join())" if joins else ""
    return (
        "DistributedOptimizer: the ranks are reducing gradients of different backward passes: "
        f"{found}{since}. Every rank must run the same number of communicating backward passes per "
        "step: wrap a backward pass that only one rank runs in `with optimizer.no_sync():`, and "
        "call hvd.join() on a rank that has run out of batches. Gradients that do not belong "
        "together may already have been added: load a checkpoint, or give all ranks the same "
        "parameters with hvd.broadcast_parameters"
    )


def _gradients_missing(found: str) -> str:
    return (
        "DistributedOptimizer: backward() has raised an exception on some ranks when gradients "
        f"were being reduced, and not on others: {found}. Some gradients are missing, so that none "
        "are used, and no parameter has changed. To go on without this batch, catch this "
        "HorovodInternalError on every rank, and call the optimizer's zero_grad()"
    )


def _end(error: object) -> str:
    return (
        error if error and isinstance(error, str) else "an exception" if error else "no exception"
    )


def _weights_missing(found: str) -> str:
    return (
        "DistributedOptimizer: some ranks have given their gradients a weight, and others have "
        f"not: {found}. Call optimizer.set_weight(n) on every rank before backward(), with 0 on a "
        "rank that has no samples, or on none; and hvd.join() on a rank that has run out of "
        "batches. "
        "Gradients have been added, but no parameter has changed"
    )


def _weight(weighted: int) -> str:
    return "optimizer.set_weight(n)" if weighted else "no weight"


def _backward(phase: int, rounds: int) -> str:
    step = phase // 2 + 1
    inside = f" inside step() number {step}" if phase % 2 else f" of step {step}"
    return f"backward {rounds + 1}{inside}"


def with_advice(failure: str) -> str:
    """The failure of a round, with advice if a rank has left."""
    if " has left " not in failure:
        return failure
    return (
        f"{failure}. Gradients can't be reduced without it; a rank that runs out of batches before "
        "the others must call hvd.join()"
    )


class PositionExchange:
    """Exchanges the positions of all ranks, and which optimizers each has begun a round of in the
    same backward. In one operation, so that a rank can wait for several exchanges at once."""

    def __init__(self, team: Team, name: str, own: Position, begun: Sequence[int]) -> None:
        """Every member makes it, in the same round, and posts it. name: the same on every member.
        begun: the optimizers by their numbers in the team."""
        self._team = team
        self._sum = HostSum(
            team,
            own_name(name, "positions", "the comparison of the steps of {}"),
            _EACH * team.size,
        )
        # (As 0 stands for nothing.)
        error = own.error.encode("ascii", "replace")[:_ERROR_BYTES].ljust(_ERROR_BYTES, b"\0")
        numbers = [1, *own.numbers(), *error, *(number + 1 for number in begun[:_MOST_BEGUN])]
        self._sum.numbers[_EACH * team.rank :][: len(numbers)] = torch.tensor(numbers)

    def post(self) -> None:
        """Does not block. Once in a round, however often it is called."""
        self._sum.post()

    def has_ended(self) -> bool:
        """Whether `exchange` would not block. After `post`."""
        return self._sum.poll()

    def exchange(self) -> tuple[list[tuple[Any, ...]], list[int], set[int]] | None:
        """The positions, with errors in words, and their ranks, without joined ranks, and the
        optimizers that any rank has begun; None if the exchange failed. Blocks."""
        self._sum.post()
        if self._sum.wait() is not None:
            return None
        positions, ranks, begun = [], [], set()
        by_rank = self._sum.numbers.view(-1, _EACH).tolist()
        for rank, (is_there, *numbers) in zip(self._team.ranks, by_rank, strict=True):
            if is_there:
                error = bytes(numbers[_POSITION:][:_ERROR_BYTES]).rstrip(b"\0").decode()
                positions.append((*numbers[: _POSITION - 1], error))
                ranks.append(rank)
                begun |= {number - 1 for number in numbers[_POSITION + _ERROR_BYTES :] if number}
        return positions, ranks, begun
