"""join: a rank that has run out of data takes part in the others' allreduces with zeros."""

from __future__ import annotations

from hvdlite import _core
from hvdlite.errors import HorovodInternalError
from hvdlite.world import world
from hvdlite.world.teams.process_sets import as_int


def join(device: int = -1) -> int:
    """Declares that this rank has no more data: it takes part in the others' allreduces, with
    zeros, until all ranks have joined. Blocks until then.

    Zeros do not count for Min, Max and Product; Average still divides by the number of all ranks. A
    barrier counts a joined rank as present. Every other operation fails on every rank while a rank
    has joined. This also holds in each process set of this rank. Afterwards all ranks are as
    before, and may join again.

    It first waits for this rank's collectives on a GPU, which every rank must have called.

    Args:
        device: Accepted for compatibility with Horovod; zeros need no device.

    Returns:
        The rank that joined last, the same on every rank. It has seen all batches.

    Raises:
        ValueError: `device` is not an integer; or HVDLITE_DETERMINISTIC=virtual:V, where every step
            has all of its micro-batches.
        HorovodInternalError: A rank has left the world. It is raised once, in each process set of
            this rank too, all members have joined or one has left.

    Example:
        Rank 1 has one batch more than rank 0:

        >>> for batch in range(1 + hvd.rank()):
        ...     mean = hvd.allreduce(torch.ones(1), name="batch")
        >>> hvd.join()
        1
    """
    if as_int(device) is None:
        raise ValueError(f"join: device={device!r}, expected the number of a GPU, or -1")
    # The world's team is first: it refuses a second thread of this rank before anything is posted,
    # and may need this thread to drive it, while the engines of sets have their own threads.
    active = world.current()
    if active.config.virtual_ranks:
        raise ValueError(
            f"join: HVDLITE_DETERMINISTIC={active.config.deterministic} trains alike on every "
            "number of ranks only if every step has all of its micro-batches; give every virtual "
            "rank the same number of batches, and leave join() out"
        )
    for tell in active.before_joining:
        tell()
    teams = active.teams()
    for team in teams:
        if team.gpu_queue is not None:
            # Its transfers may still post operations, which must come before the join.
            team.gpu_queue.settle()
    operations = [
        team.post(_core.posting(_core.JOIN, "join", False, _core.UINT8), team is not teams[0])
        for team in teams
    ]
    # Waits for all even if one fails: in a set where this rank still counts as joined, zeros would
    # stand in for its tensors.
    failures = [operation.wait() for operation in operations]
    for team, failure in zip(teams, failures, strict=True):
        if failure is None:
            # Its members have started different numbers of operations.
            team.renumber()
    for failure in failures:
        if failure is not None:
            raise HorovodInternalError(failure)
    for tell in active.after_joining:
        tell()
    return teams[0].ranks[operations[0].rows()[0]]
