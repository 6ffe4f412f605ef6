"""barrier: every rank waits until all ranks have called it."""

from __future__ import annotations

from hvdlite import _core
from hvdlite.collectives.handles import Handle, synchronize
from hvdlite.collectives.posting import named
from hvdlite.sites import site
from hvdlite.world.teams.process_sets import ProcessSet, global_process_set, team_of

_BARRIER = _core.BARRIER
_UINT8 = _core.UINT8


def barrier(process_set: ProcessSet = global_process_set, name: str | None = None) -> None:
    """Blocks until every member has called it. Does not wait for other operations.

    Args:
        process_set: The ranks that take part.
        name: As for `allreduce`.

    Raises:
        ValueError: A bad argument.
        HorovodInternalError: A rank has left the world.

    Example:
        >>> hvd.barrier()
    """
    team = team_of("barrier", process_set)
    name, unnamed = named(team, name)
    posting = _core.posting(_BARRIER, name, unnamed, _UINT8, site=site(2))
    synchronize(Handle(team.post(posting, False)))
