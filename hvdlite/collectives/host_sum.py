"""hvdlite's own operations in host memory, safely in code that a signal may interrupt; and sums of
integers over the members of a team: ranks exchange facts about themselves this way."""

from __future__ import annotations

import torch

from hvdlite import _core
from hvdlite.world.teams.team import Team


class HostOperation:
    """Every member makes it, posts it, and waits. After an interruption each method may be called
    again."""

    def __init__(self, team: Team, posting: _core.Posting) -> None:
        self._team = team
        self._posting = posting
        # Empty until there is one.
        self._operations: list[_core.Operation] = []

    def post(self) -> None:
        """Collective; does not block. Does nothing if it is posted already."""
        if not self._operations:
            # No bytecode between post and store, so no signal handler can raise there.
            self._operations.extend(map(self._team.post, (self._posting,)))

    def wait(self) -> str | None:
        """Returns when all members have posted it, or the text of the failure."""
        return self._operations[0].wait()


class HostSum(HostOperation):
    """Fill in `numbers` before it is posted; after a wait they are the sums. A rank that has
    joined adds zeros."""

    def __init__(self, team: Team, name: str, count: int) -> None:
        """name: the same on every member."""
        self.numbers = sums = torch.zeros(count, dtype=torch.int64, device="cpu")
        kind = _core.ALLREDUCE, name, False, _core.INT64
        super().__init__(team, _core.posting(*kind, sums, sums, _core.SUM))

    def posted(self) -> bool:
        return bool(self._operations)

    def poll(self) -> bool:
        """Whether `wait` would return at once."""
        return self._operations[0].poll()

    def ends_within(self, limit_s: float) -> bool:
        """Whether `wait` would return at once by then. Blocks for so long at most."""
        return self._operations[0].drive(limit_s) if limit_s else self.poll()

    def forget(self) -> None:
        """Forgets the operation, which has ended, so that it can be posted again."""
        self._operations.clear()
