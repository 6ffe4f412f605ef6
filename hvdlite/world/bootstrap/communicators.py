"""Creates and frees the communicators that hvdlite uses.

An MPI has room for a limited number of communicators (MPICH for some 2,000), so each one is freed,
by all its members together. `shutdown` is not collective: it only retires its communicators; the
next `init` in which all their members take part frees them.

Messages that no rank waits for may still be in flight by then, since a rank that leaves does not
wait for those that send to it. An MPI may give the number of a freed communicator to a new one,
which would receive these messages. So each member first receives everything that was sent to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

from hvdlite.errors import LaunchError

if TYPE_CHECKING:
    from mpi4py.MPI import Comm, Group, Intracomm

    from hvdlite.world.bootstrap.mpi import MpiRuntime

    Made = TypeVar("Made", bound=Comm)

# The last message on a communicator from each member to each other one. The engine has no such tag.
LAST_TAG = 2

# As in _core/engine/exit.c.
_LONGEST_LEFTOVER_BYTES = 65536
_QUIET_S, _QUIET_TIMES = 0.001, 5

_held = 0
# With their labels, see `retire`.
_retired: list[tuple[str, Intracomm]] = []


def num_held() -> int:
    """The number of communicators that this process has made and not freed."""
    return _held


def duplicate(mpi_runtime: MpiRuntime, comm: Intracomm) -> Intracomm:
    """A duplicate of `comm`. Collective over `comm`.

    Raises:
        LaunchError: MPI has no room for another one; here and below.
    """
    return _made(mpi_runtime, comm.Dup)


def part(mpi_runtime: MpiRuntime, comm: Intracomm, ranks: Sequence[int], tag: int = 0) -> Intracomm:
    """One of these ranks of `comm`, in this order. Collective over these ranks only.

    tag: those that are made at the same time by threads of a process need different ones.
    """
    group = comm.Get_group()
    members = group.Incl(list(ranks))
    try:
        return _made(mpi_runtime, lambda: comm.Create_group(members, tag))
    finally:
        members.Free()
        group.Free()


def split(
    mpi_runtime: MpiRuntime, comm: Intracomm, color: int, order: int | None = None
) -> Intracomm:
    """One of the ranks that pass the same color, by their `order`, which is by default their own.
    Collective over `comm`."""
    place = comm.Get_rank() if order is None else order
    return _made(mpi_runtime, lambda: cast("Intracomm", comm.Split(color, place)))


def split_by_host(mpi_runtime: MpiRuntime, comm: Intracomm) -> Comm:
    """One of the ranks of this host, in their order. Collective over `comm`."""
    shared = mpi_runtime.MPI.COMM_TYPE_SHARED
    return _made(mpi_runtime, lambda: comm.Split_type(shared, comm.Get_rank()))


def free(comm: Comm) -> None:
    """Every member calls it, after it has received everything that was sent to it."""
    global _held
    comm.Free()
    _held -= 1


def free_together(mpi_runtime: MpiRuntime, comm: Intracomm) -> None:
    """Every member calls it; blocks until no message is in flight."""
    _receive_all(mpi_runtime, comm)
    free(comm)


def retire(*comms: Intracomm | None, label: str = "") -> None:
    """Marks them as no longer used. Every member calls it at some time.

    label: those with the same label are freed in the order of retirement, which is the same on all
    members; those with another one by their labels.
    """
    _retired.extend((label, comm) for comm in comms if comm is not None)


def not_freed(mpi_runtime: MpiRuntime) -> list[Intracomm]:
    """Those that are retired, and whose members have not met since."""
    return [comm for _, comm in _retired if comm != mpi_runtime.MPI.COMM_NULL]


def receive_leftovers(mpi_runtime: MpiRuntime) -> None:
    """What the exit handlers of the C core do, where MPI is not hvdlite's to finalize: receives
    what ranks said last to teams that this one had left. All ranks have said all by now."""
    own = mpi_runtime.MPI
    status, comms, quiet = own.Status(), not_freed(mpi_runtime), 0
    while comms and quiet < _QUIET_TIMES:
        quiet += 1
        for comm in comms:
            for source in range(comm.Get_size()):
                while comm.Iprobe(source, own.ANY_TAG, status):
                    count = status.Get_count(own.BYTE)
                    if count > _LONGEST_LEFTOVER_BYTES:
                        break
                    comm.Recv((bytearray(count), own.BYTE), source, own.ANY_TAG)
                    quiet = 0
        time.sleep(_QUIET_S)


def free_retired(mpi_runtime: MpiRuntime, world_comm: Intracomm) -> None:
    """Frees the retired communicators whose members are all in `world_comm`. Collective over
    `world_comm`; each member has retired all that it is going to retire."""
    group = world_comm.Get_group()
    try:
        for entry in sorted(_retired, key=lambda entry: entry[0]):
            comm = entry[1]
            if comm == mpi_runtime.MPI.COMM_NULL:  # the user has freed it
                _retired.remove(entry)
            elif _is_within(mpi_runtime, comm, group):
                _retired.remove(entry)
                free_together(mpi_runtime, comm)
    finally:
        group.Free()


def free_common(mpi_runtime: MpiRuntime, comm: Intracomm) -> None:
    """Frees the retired communicators with a label whose members are all in `comm` and have all
    retired them. Collective over `comm`."""
    group = comm.Get_group()
    try:
        own: dict[str, list[Intracomm]] = {}
        for label, retired in _retired:
            alive = label and retired != mpi_runtime.MPI.COMM_NULL
            if alive and _is_within(mpi_runtime, retired, group):
                own.setdefault(label, []).append(retired)
        counts = comm.allgather({label: len(comms) for label, comms in own.items()})
        for label in sorted(own):
            members = own[label][0].Get_group()
            ranks = members.Translate_ranks(None, group)
            members.Free()
            if all(counts[rank].get(label) == len(own[label]) for rank in ranks):
                for retired in own[label]:
                    _retired.remove((label, retired))
                    free_together(mpi_runtime, retired)
    finally:
        group.Free()


def _is_within(mpi_runtime: MpiRuntime, comm: Intracomm, group: Group) -> bool:
    members = comm.Get_group()
    try:
        return mpi_runtime.MPI.UNDEFINED not in members.Translate_ranks(None, group)
    finally:
        members.Free()


def _receive_all(mpi_runtime: MpiRuntime, comm: Intracomm) -> None:
    """Receives all pending messages. Messages between two members arrive in the order of sending,
    so the one with LAST_TAG is the last."""
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
