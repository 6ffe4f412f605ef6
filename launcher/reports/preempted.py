"""What the user reads about a job that its batch system has told to end. Pure."""

from __future__ import annotations

import signal


def left_preempted(code: int) -> str:
    """All ranks have ended in order."""
    return (
        "hvdrun: the job was preempted: hvd.preempted() has told the ranks, and all have ended in"
        f" order; exit code {code}, as the work may not be done"
    )


def not_requeued(rank: int | None = None, host: str = "", how: str = "") -> str:
    """`rank`: the one that failed after it was told, and `how`, as its keeper reports it; None: the
    job has failed."""
    if rank is None:
        return "hvdrun: the job is not requeued, as it has failed"
    kind, number = [word for word in how.split() if word not in ("late", "asked")][:2]
    ended = (
        f"ended with exit code {number}"
        if kind == "code"
        else f"was ended by {signal.Signals(int(number)).name}"
    )
    return (
        f"hvdrun: the job is not requeued: rank {rank} on {host} {ended} after hvd.preempted() had"
        " told it to leave, and might do so again"
    )
