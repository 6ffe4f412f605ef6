"""A sum of integers over the members of a team, by which ranks exchange facts about themselves."""

from __future__ import annotations

import torch

from hvdlite import _core
from hvdlite.world.teams import Team


class HostSum:
    """Every member makes it, fills in `numbers`, posts it, and waits; then the sums are there. A
    rank that has joined adds zeros."""

    def __init__(self, team: Team, name: str, count: int) -> None:
        """name: the same on every member."""
        self.numbers = torch.zeros(count, dtype=torch.int64, device="cpu")
        self._team = team
        self._name = name
        self._operations: list[_core.Operation] = []

    def post(self) -> None:
        """Collective; does not block. Nothing where it is posted already."""
        if self._operations:
            return
        numbers = self.numbers
        posting = _core.posting(
            *(_core.ALLREDUCE, self._name, False, _core.INT64, numbers, numbers, _core.SUM)
        )
        # Posted and noted without a bytecode in between: no signal's exception can part them.
        self._operations.extend(map(self._team.post, (posting,)))

    def posted(self) -> bool:
        return bool(self._operations)

    def wait(self) -> str | None:
        """Returns when all members have posted it, or the text of the failure."""
        return self._operations[0].wait()

    def forget(self) -> None:
        """Forgets the operation, which has ended, so that it can be posted again."""
        self._operations.clear()
