"""How ranks tell each other what they have: each has a row of numbers, and one sum exchanges them.

A rank that has joined adds zeros, and so has no row: the others go on without it.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch

from hvdlite.collectives.host_sum import HostSum
from hvdlite.errors import HorovodInternalError
from hvdlite.own_names import renamed
from hvdlite.world.teams.team import Team


class Rows(HostSum):
    """Every member makes it, puts its own row, and posts it."""

    def __init__(self, team: Team, name: str, width: int) -> None:
        """name, width: the same on every member."""
        super().__init__(team, name, team.size * (1 + width))

    def put(self, row: Sequence[int]) -> None:
        """This rank's, before `post`; zeros follow if it is shorter than the others'."""
        own = self.numbers.view(self._team.size, -1)[self._team.rank]
        own[: 1 + len(row)] = torch.tensor([1, *row], dtype=torch.int64, device="cpu")

    def exchange(self) -> dict[int, torch.Tensor]:
        """`by_rank`. Collective; blocks; may be called again.

        Raises:
            HorovodInternalError: It failed; on every rank.
        """
        self.post()
        failure = self.wait()
        if failure is not None:
            raise HorovodInternalError(failure)
        return self.by_rank()

    def by_rank(self) -> dict[int, torch.Tensor]:
        """After `wait`: the rows of the ranks that have not joined."""
        rows = self.numbers.view(self._team.size, -1)
        return {rank: row[1:] for rank, row in zip(self._team.ranks, rows, strict=True) if row[0]}


class Exchange:
    """What each rank has, as Python's objects. Every member makes it."""

    def __init__(self, team: Team, name: str, own: Any) -> None:
        self._team, self._name = team, name
        self._pickled = pickle.dumps(own)
        self._lengths = Rows(team, renamed(name, f"{name}.length"), 1)
        self._lengths.put([len(self._pickled)])
        self._words: Rows | None = None

    def exchange(self) -> dict[int, Any]:
        """By rank that has not joined, its object. Collective; blocks; may be called again.

        Raises:
            HorovodInternalError: It failed; on every rank.
        """
        longest = max(int(length) for length in self._lengths.exchange().values())
        if self._words is None:
            padded = bytearray(self._pickled.ljust(-(-longest // 8) * 8, b"\0"))
            words = torch.frombuffer(padded, dtype=torch.int64).tolist()
            rows = Rows(self._team, self._name, len(words))
            rows.put(words)
            self._words = rows
        return {
            rank: pickle.loads(row.numpy().tobytes())
            for rank, row in self._words.exchange().items()
        }
