"""The communicators that hvdlite makes, and their end.

An MPI has room for a limited number of them (MPICH for some 2,000), so each is freed, which all its
members do together. `shutdown` is not collective: what it leaves is retired, and freed by the next
`init` in which all members take part.

Messages that nobody waits for may be on their way then, since a rank that leaves does not wait for
those who send to it. An MPI may give the number of a freed communicator to a new one, which would
receive them. So each member first receives all that was sent to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from hvdlite.errors import LaunchError

if TYPE_CHECKING:
    from mpi4py.MPI import Comm, Group, Intracomm

    from hvdlite.world.mpi import MpiRuntime

    Made = TypeVar("Made", bound=Comm)

# The last message on a communicator from each member to each other one. The engine has no such tag.
LAST_TAG = 2

_held = 0
# In the order in which they were given up, which is the same on all members.
_retired: list[Intracomm] = []


def num_held() -> int:
    """How many this process has made and not freed."""
    return _held


def duplicate(mpi_runtime: MpiRuntime, comm: Intracomm) -> Intracomm:
    """One more of the same members. Collective over `comm`.

    Raises:
        LaunchError: MPI has no room for it; here and below.
    """
    return _made(mpi_runtime, comm.Dup)


def part(mpi_runtime: MpiRuntime, comm: Intracomm, ranks: Sequence[int]) -> Intracomm:
    """Of these ranks of `comm`, in this order. Collective over them alone."""
    everyone = comm.Get_group()
    members = everyone.Incl(list(ranks))
    try:
        return _made(mpi_runtime, lambda: comm.Create_group(members))
    finally:
        members.Free()
        everyone.Free()


def split(mpi_runtime: MpiRuntime, comm: Intracomm, color: int) -> Comm:
    """Of those who say the same color, in their order. Collective over `comm`."""
    return _made(mpi_runtime, lambda: comm.Split(color, comm.Get_rank()))


def split_by_host(mpi_runtime: MpiRuntime, comm: Intracomm) -> Comm:
    """Of the ranks of this host, in their order. Collective over `comm`."""
    shared = mpi_runtime.MPI.COMM_TYPE_SHARED
    return _made(mpi_runtime, lambda: comm.Split_type(shared, comm.Get_rank()))


def free(comm: Comm) -> None:
    """Every member calls it, and has received all that was sent to it."""
    global _held
    comm.Free()
    _held -= 1


def free_together(mpi_runtime: MpiRuntime, comm: Intracomm) -> None:
    """Every member calls it; blocks until nothing is on its way any more."""
    _receive_all(mpi_runtime, comm)
    free(comm)


def retire(*comms: Intracomm | None) -> None:
    """They are not used any more. Every member calls it sometime, in the same order."""
    _retired.extend(comm for comm in comms if comm is not None)


def free_retired(mpi_runtime: MpiRuntime, everyone: Intracomm) -> None:
    """Frees those whose members are all among `everyone`. Collective over that, and each member has
    retired what it will."""
    group = everyone.Get_group()
    try:
        for comm in list(_retired):
            if comm == mpi_runtime.MPI.COMM_NULL:  # the user has freed it
                _retired.remove(comm)
            elif _is_within(mpi_runtime, comm, group):
                _retired.remove(comm)
                free_together(mpi_runtime, comm)
    finally:
        group.Free()


def _is_within(mpi_runtime: MpiRuntime, comm: Intracomm, group: Group) -> bool:
    members = comm.Get_group()
    try:
        return mpi_runtime.MPI.UNDEFINED not in members.Translate_ranks(None, group)
    finally:
        members.Free()


def _receive_all(mpi_runtime: MpiRuntime, comm: Intracomm) -> None:
    """What one member sends to another one comes in the order of sending: the mark comes last."""
    own, byte = comm.Get_rank(), mpi_runtime.MPI.BYTE
    others = [rank for rank in range(comm.Get_size()) if rank != own]
    marks = [comm.Isend((bytearray(), byte), rank, LAST_TAG) for rank in others]
    status = mpi_runtime.MPI.Status()
    for rank in others:
        tag = None
        while tag != LAST_TAG:
            comm.Probe(rank, mpi_runtime.MPI.ANY_TAG, status)
            tag = status.Get_tag()
            comm.Recv((bytearray(status.Get_count(byte)), byte), rank, tag)
    mpi_runtime.MPI.Request.Waitall(marks)


def _made(mpi_runtime: MpiRuntime, make: Callable[[], Made]) -> Made:
    global _held
    try:
        comm = make()
    except mpi_runtime.MPI.Exception as error:
        raise LaunchError(
            f"{mpi_runtime.version()} can't create another communicator ({error}); hvdlite has "
            f"{_held} in this process. Remove process sets that you no longer use (each has up to "
            "two), and free your own communicators"
        ) from error
    _held += 1
    return comm
