"""join: a rank that ran out of data keeps the others going."""

from __future__ import annotations

from hvdlite import _core
from hvdlite.collectives.handles import Handle, rows_of
from hvdlite.errors import HorovodInternalError
from hvdlite.world import world
from hvdlite.world.process_sets import as_int
from hvdlite.world.teams import Team


def join(device: int = -1) -> int:
    """This rank has no more data: it takes part in the allreduces of the others, with zeros, until
    all ranks have joined. Blocks until then.

    Zeros do not count for Min, Max and Product; Average still divides by the number of all ranks. A
    barrier takes a joined rank as present. Every other operation fails on every rank while a rank
    has joined. All this holds in each process set that this rank belongs to as well. Afterwards all
    ranks are as before, and may join again.

    It first waits for this rank's operations in flight on GPUs; every rank must have called them.

    Args:
        device: Accepted for Horovod's sake; zeros need no device.

    Returns:
        The rank that joined last, the same on every rank. It has seen all batches.

    Raises:
        ValueError: `device` is no device's number.
        HorovodInternalError: A rank has left the world. It is raised when in each process set of
            this rank, too, all members have joined, or one has left.

    Example:
        Rank 1 has one batch more than rank 0:

        >>> for batch in range(1 + hvd.rank()):
        ...     mean = hvd.allreduce(torch.ones(1), name="batch")
        >>> hvd.join()
        1
    """
    if as_int(device) is None:
        raise ValueError(f"join: device={device!r}, expected the number of a GPU, or -1")
    # The world's is the first: it refuses a second thread of this rank before anything is posted,
    # and may need this thread to drive it, while the engines of sets have threads of their own.
    teams = world.current().teams()
    for team in teams:
        if team.lane is not None:
            # What is in it may still have something to post, which must be before the join.
            team.lane.settle()
    handles = [_start(team, team is not teams[0]) for team in teams]
    # All are awaited also where one fails: a rank that went on in a set in which it still counts as
    # joined would be answered for with zeros.
    failures = [handle.operation.wait() for handle in handles]
    for team, failure in zip(teams, failures, strict=True):
        if failure is None:
            # The members have made different numbers of operations.
            team.renumber()
    for failure in failures:
        if failure is not None:
            raise HorovodInternalError(failure)
    return teams[0].ranks[rows_of(handles[0])[0]]


def _start(team: Team, wake: bool) -> Handle:
    return Handle(team.post(_core.posting(_core.JOIN, "join", False, _core.UINT8), wake))
