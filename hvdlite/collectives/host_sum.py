"""Sums integers over the members of a team: ranks exchange facts about themselves this way."""

from __future__ import annotations

import torch

from hvdlite import _core
from hvdlite.world.teams.team import Team


class HostSum:
    """Every member makes it, fills in `numbers`, posts it, and waits; then `numbers` are the sums.
    A rank that has joined adds zeros."""

    def __init__(self, team: Team, name: str, count: int) -> None:
        """name: the same on every member."""
        self.numbers = torch.zeros(count, dtype=torch.int64, device="cpu")
        self._team = team
        self._name = name
        self._operations: list[_core.Operation] = []

    def post(self) -> None:
        """Collective; does not block. Does nothing if it is posted already."""
        if self._operations:
            return
        numbers = self.numbers
        posting = _core.posting(
            *(_core.ALLREDUCE, self._name, False, _core.INT64, numbers, numbers, _core.SUM)
        )
        # No bytecode between post and store, so no signal handler can raise there.
        self._operations.extend(map(self._team.post, (posting,)))

    def posted(self) -> bool:
        return bool(self._operations)

    def poll(self) -> bool:
        """Whether `wait` would return at once."""
        return self._operations[0].poll()

    def ends_within(self, limit_s: float) -> bool:
        """Whether `wait` would return at once by then. Blocks for so long at most."""
        return self._operations[0].drive(limit_s) if limit_s else self.poll()

    def wait(self) -> str | None:
        """Returns when all members have posted it, or the text of the failure."""
        return self._operations[0].wait()

    def forget(self) -> None:
        """Forgets the operation, which has ended, so that it can be posted again."""
        self._operations.clear()
