"""A barrier that names the ranks that have not called it, and leaves the group usable.

Every rank sends the number of its barrier to rank 0 and waits for the answer; rank 0 answers when
all have, or says who is missing. Messages of earlier barriers, which failed, are passed over.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from hvdlite.distributed.errors import CollectiveError, OperationTimeoutError
from hvdlite.sites import site
from hvdlite.world.teams.team import Team

# The highest tag, so that it is not the user's.
TAG = 2**31 - 1
# To find a message that had come when the time was over, as others were missing.
LOOK_S = 0.01
# How long rank 0 waits until its answers are taken.
ANSWER_S = 1.0
# After it was matched, a message of some bytes needs no time but that of its ranks to run again.
MATCHED_S = 60.0


def run(team: Team, number: int, timeout_s: float, wait_all_ranks: bool) -> None:
    """number: counts the group's monitored barriers, from 1.

    Raises:
        OperationTimeoutError: Ranks did not call it in time; rank 0 names them. The first one only,
            unless wait_all_ranks.
    """
    deadline = time.monotonic() + timeout_s
    limit = f"{timeout_s * 1000:.0f} ms"
    if team.rank:
        _report(team, number, deadline, limit)
        return
    if timeout_s <= 0:
        raise OperationTimeoutError(
            f"[Rank {team.ranks[0]}]: Rank {team.ranks[0]} timed out in monitoredBarrier after "
            f"{limit}: that leaves no time to wait for other ranks; pass a longer timeout"
        )
    missing: list[int] = []
    for member in range(1, team.size):
        if not _hears(team, torch.zeros(1, dtype=torch.int64), member, number, deadline):
            missing.append(member)
            if not wait_all_ranks:
                break
    answer = torch.tensor([number, missing[0] if missing else 0])
    sent = [
        team.engine.send(answer, member, TAG, site(3))
        for member in range(1, team.size)
        if member not in missing
    ]
    # An answer that has not been taken is lost if this rank leaves now. Those that are not taken in
    # this time stay for ranks that come later.
    until = time.monotonic() + ANSWER_S
    for operation in sent:
        operation.drive(max(0.0, until - time.monotonic()))
    if missing:
        ranks = ", ".join(str(team.ranks[member]) for member in missing)
        which = "Ranks" if wait_all_ranks else "Rank"
        raise OperationTimeoutError(
            f"[Rank {team.ranks[0]}]: {which} {ranks} failed to pass monitoredBarrier in {limit}"
        )


def _report(team: Team, number: int, deadline: float, limit: str) -> None:
    """Tells rank 0, and waits for its answer."""
    own, first = team.ranks[team.rank], team.ranks[0]
    sent = team.engine.send(torch.tensor([number]), 0, TAG, site(4))
    answer = torch.zeros(2, dtype=torch.int64)
    if not _ended(sent, deadline):
        problem = f"rank {first} did not receive from it in {limit}"
    elif not _hears(team, answer, 0, number, deadline):
        problem = f"rank {first} did not pass monitoredBarrier in {limit}: Timed out"
    elif int(answer[1]):
        missing = team.ranks[int(answer[1])]
        problem = f"rank {missing} failed to pass monitoredBarrier in {limit}"
    else:
        return
    raise OperationTimeoutError(
        f"[Rank {own}]: Rank {own} successfully reached monitoredBarrier, but received errors "
        f"while waiting for send/recv from rank {first}: {problem}"
    )


def _hears(team: Team, message: torch.Tensor, source: int, number: int, deadline: float) -> bool:
    """Whether its message of this barrier, or of a later one, comes in time."""
    while int(message[0]) < number:
        if not _ended(team.engine.recv(message, source, TAG, site(4)), deadline):
            return False
    return True


def _ended(operation: Any, deadline: float) -> bool:
    """False: it has not been matched in time, and never will be."""
    try:
        failure = operation.wait(max(LOOK_S, deadline - time.monotonic()))
    except TimeoutError:
        if operation.withdraw():
            return False
        failure = operation.wait(MATCHED_S)
    if failure is not None:
        raise CollectiveError(failure)
    return True
