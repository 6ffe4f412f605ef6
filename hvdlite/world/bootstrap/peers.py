"""The world's and the teams' view of a communicator: it carries small objects, and has parts.

`MpiPeers` has an MPI communicator. `hvdlite.world.bootstrap.host_peers` has sockets within a host,
for worlds without MPI.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from hvdlite.world.bootstrap import communicators

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

    from hvdlite.world.bootstrap.mpi import MpiRuntime

# The MPI standard guarantees tags up to 32767. 0 is that of process sets, which all ranks make in
# the same order.
_NUM_TAGS = 32767


class Peers(Protocol):
    """Some processes that talk before, and beside, an engine. Every method but `free`, `retire` and
    the properties is collective over them, and blocks."""

    @property
    def rank(self) -> int:
        """This process's number among them, from 0."""

    @property
    def size(self) -> int: ...

    @property
    def comm(self) -> Intracomm | None:
        """Their mpi4py communicator; None without MPI."""

    @property
    def passes_descriptors(self) -> bool:
        """Whether `pass_descriptor` can be called."""

    @property
    def any_thread(self) -> bool:
        """Whether the engine may use their wire while another thread uses MPI."""

    def allgather(self, thing: Any) -> list[Any]:
        """The things of all, by rank."""

    def bcast(self, thing: Any, root: int = 0) -> Any:
        """The root's thing, on all."""

    def pass_descriptor(self, descriptor: int) -> int:
        """Rank 0's file descriptor, as one of each process (which closes it); -1 if rank 0 passes
        -1."""

    def host_leader(self) -> int:
        """The lowest rank on this host: of those that can share memory with this process."""

    def part(self, ranks: Sequence[int], key: str = "") -> Peers:
        """Those of these ranks, in this order. Collective over them only.

        key: the same on all of them. Parts of the same ranks that are made at the same time need
        different ones.
        """

    def split(self, color: int) -> Peers:
        """Those that pass the same color, in their order."""

    def duplicate(self) -> Peers:
        """The same processes again: messages of the two never mix."""

    def wire(self) -> dict[str, int] | None:
        """How the engine sends between hosts; they are the engine's alone then. None without MPI.
        Not collective."""

    def version(self) -> str:
        """What carries their messages, for texts. Not collective."""

    def free(self) -> None:
        """Called by each of them when all that was sent to it has been received."""

    def free_together(self) -> None:
        """As `free`, for any time: first receives what was sent to it."""

    def retire(self, label: str = "") -> None:
        """Not used any more by this process; they are freed together later, if they must be.

        label: see `communicators.retire`.
        """


class MpiPeers:
    """Those of an MPI communicator, which belongs to this object."""

    passes_descriptors = False

    def __init__(self, mpi_runtime: MpiRuntime, comm: Intracomm) -> None:
        self._mpi_runtime = mpi_runtime
        self.comm: Intracomm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()

    @property
    def any_thread(self) -> bool:
        return self._mpi_runtime.threads_supported()

    def allgather(self, thing: Any) -> list[Any]:
        return self.comm.allgather(thing)

    def bcast(self, thing: Any, root: int = 0) -> Any:
        return self.comm.bcast(thing, root=root)

    def pass_descriptor(self, descriptor: int) -> int:
        raise NotImplementedError("MPI passes no descriptors")

    def host_leader(self) -> int:
        local = communicators.split_by_host(self._mpi_runtime, self.comm)
        leader: int = local.bcast(self.rank, root=0)
        communicators.free(local)
        return leader

    def part(self, ranks: Sequence[int], key: str = "") -> MpiPeers:
        # Groups that overlap are made in any order on different threads; a tag tells them apart.
        tag = 1 + zlib.crc32(key.encode()) % _NUM_TAGS if key else 0
        return MpiPeers(
            self._mpi_runtime, communicators.part(self._mpi_runtime, self.comm, ranks, tag)
        )

    def split(self, color: int) -> MpiPeers:
        return MpiPeers(self._mpi_runtime, communicators.split(self._mpi_runtime, self.comm, color))

    def duplicate(self) -> MpiPeers:
        return MpiPeers(self._mpi_runtime, communicators.duplicate(self._mpi_runtime, self.comm))

    def wire(self) -> dict[str, int]:
        return self._mpi_runtime.wire(self.comm)

    def version(self) -> str:
        return self._mpi_runtime.version()

    def free(self) -> None:
        communicators.free(self.comm)

    def free_together(self) -> None:
        communicators.free_together(self._mpi_runtime, self.comm)

    def free_common(self) -> None:
        """Collective: frees what earlier groups have left that were of members of this one alone.
        So an MPI has room for any number of groups that follow each other."""
        communicators.free_common(self._mpi_runtime, self.comm)

    def retire(self, label: str = "") -> None:
        communicators.retire(self.comm, label=label)
