"""join: a rank that ran out of data keeps the others going."""

from __future__ import annotations

import torch

from hvdlite import _core
from hvdlite.collectives.handles import Handle, rows_of, synchronize
from hvdlite.process_sets import as_int, global_process_set, team_of

_NO_SHAPE = torch.Size([])


def join(device: int = -1) -> int:
    """This rank has no more data: it takes part in the allreduces of the others, with zeros, until
    all ranks have joined. Blocks until then.

    Zeros do not count for Min, Max and Product; Average still divides by the number of all ranks. A
    barrier takes a joined rank as present. Every other operation fails on every rank while a rank
    has joined. Afterwards all ranks are as before, and may join again.

    What this rank has in flight on a GPU is awaited first: every rank has to come to that.

    Args:
        device: Accepted for Horovod's sake; zeros need no device.

    Returns:
        The rank that joined last, the same on every rank: it has seen all batches.

    Raises:
        ValueError: `device` is no device's number.
        HorovodInternalError: A rank has left the world.
    """
    if as_int(device) is None:
        raise ValueError(f"join: device={device!r}, expected the number of a GPU, or -1")
    team = team_of("join", global_process_set)
    if team.lane is not None:
        # What is in it may still have something to post, which must be before the join.
        team.lane.settle()
    handle = Handle(
        team.post(
            _core.JOIN, "join", False, _core.UINT8, 0, 0, 0, 0, _NO_SHAPE, 1.0, 1.0, None, False
        )
    )
    synchronize(handle)
    # The ranks have made different numbers of operations.
    team.renumber()
    return team.ranks[rows_of(handle)[0]]
