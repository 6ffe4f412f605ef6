"""Exchanges the positions of all ranks when a round has shown that they differ, and describes the
difference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdlite.collectives.differing_ranks import which_ranks
from hvdlite.errors import HorovodInternalError
from hvdlite.optimizer.buckets.positions import Position
from hvdlite.optimizer.checks.rows import Rows
from hvdlite.own_names import own_name
from hvdlite.world.teams.team import Team

_POSITION = 4  # numbers of a position
_MOST_BEGUN = 64  # optimizers; of more than that in one backward, the first ones are told
_ERROR_BYTES = 32  # of what has raised; the rest is cut off


def difference(positions: Sequence[Sequence[Any]], ranks: Sequence[int], joins: int) -> str | None:
    """The difference between the ranks, as the same text on every rank; None if there is none.

    positions: phase and rounds of each rank, counted from the last join, whether it has a weight,
    and what its backward has raised: in words, or only whether. ranks: by position, its rank.
    joins: the number of joins so far.
    """
    words = (
        [_backward(phase, rounds) for phase, rounds, *_ in positions],
        [_end(error) for *_, error in positions],
        ["optimizer.set_weight(n)" if weighted else "no weight" for _, _, weighted, _ in positions],
    )
    for each, text in zip(words, _TEXTS, strict=True):
        if found := which_ranks(each, ranks):
            since = " (counted since the last hvd.join())" if joins and each is words[0] else ""
            return f"DistributedOptimizer: {text.format(found + since)}"
    return None


_TEXTS = (
    (
        "the ranks are reducing gradients of different backward passes: {}. Every rank must run "
        "the same number of communicating backward passes per step: wrap a backward pass that only "
        "one rank runs in `with optimizer.no_sync():`, and call hvd.join() on a rank that has run "
        "out of batches. Gradients that do not belong together may already have been added: load a "
        "checkpoint, or give all ranks the same parameters with hvd.broadcast_parameters"
    ),
    (
        "backward() has raised an exception on some ranks when gradients were being reduced, and "
        "not on others: {}. Some gradients are missing, so that none are used, and no parameter "
        "has changed. To go on without this batch, catch this HorovodInternalError on every rank, "
        "and call the optimizer's zero_grad()"
    ),
    (
        "some ranks have given their gradients a weight, and others have not: {}. Call "
        "optimizer.set_weight(n) on every rank before backward(), with 0 on a rank that has no "
        "samples, or on none; and hvd.join() on a rank that has run out of batches. Gradients have "
        "been added, but no parameter has changed"
    ),
)


def _end(error: str | int) -> str:
    return "an exception" if error == 1 else error or "no exception"  # type: ignore[return-value]


def _backward(phase: int, rounds: int) -> str:
    inside = " inside step() number" if phase % 2 else " of step"
    return f"backward {rounds + 1}{inside} {phase // 2 + 1}"


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
        name = own_name(name, "positions", "the comparison of the steps of {}")
        self._rows = Rows(team, name, _POSITION + _ERROR_BYTES + _MOST_BEGUN)
        # (As 0 stands for nothing.)
        error = own.error.encode("ascii", "replace")[:_ERROR_BYTES].ljust(_ERROR_BYTES, b"\0")
        numbers = [number + 1 for number in begun[:_MOST_BEGUN]]
        self._rows.put([*own.numbers(), *error, *numbers])
        self.post = self._rows.post
        self.has_ended = self._rows.poll

    def exchange(self) -> tuple[list[tuple[Any, ...]], list[int], set[int]] | None:
        """The positions, with errors in words, and their ranks, without joined ranks, and the
        optimizers that any rank has begun; None if the exchange failed. Blocks."""
        try:
            rows = {rank: row.tolist() for rank, row in self._rows.exchange().items()}
        except HorovodInternalError:
            return None
        positions, begun = [], set()
        for row in rows.values():
            error = bytes(row[_POSITION:][:_ERROR_BYTES]).rstrip(b"\0").decode()
            positions.append((*row[: _POSITION - 1], error))
            begun |= {number - 1 for number in row[_POSITION + _ERROR_BYTES :] if number}
        return positions, list(rows), begun
