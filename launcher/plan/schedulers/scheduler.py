"""What a batch scheduler is to hvdrun: a row, and for one that starts ranks a Starter. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from hvdrun.plan.hosts import Host, Share

if TYPE_CHECKING:
    from hvdrun.plan.flavour import Flavour
    from hvdrun.ssh_errors import Trouble

Environ = Mapping[str, str]


class Allocation(NamedTuple):
    """The hosts that a scheduler has given to this job."""

    scheduler: str  # its name
    hosts: tuple[Host, ...]


class Starter(Protocol):
    """A scheduler's program that starts ranks in mpirun's place, and reaches the hosts of the
    allocation in ssh's place. A value that can be compared."""

    @property
    def scheduler(self) -> str: ...

    @property
    def program(self) -> str:
        """The path of the program. Its name stands in messages."""

    @property
    def unwanted(self) -> tuple[str, ...]:
        """Variables of the job that the program must not see when it starts the ranks."""

    def connection(self, host: str) -> list[str]:
        """What runs the command behind it on a host, with its stdin, stdout and stderr."""

    def rank_options(
        self,
        kind: str,
        allocation: Allocation,
        shares: Sequence[Share],
        environ: Environ,
        cwd: str,
        binding_args: Sequence[str],
    ) -> list[str]:
        """The program's options for ranks of an MPI of this kind. Raises UsageError for hosts and
        numbers that the program can't do."""


class Scheduler(NamedTuple):
    name: str
    more: str  # how to ask for more slots
    # The hosts of the allocation that hvdrun runs in, or None. The second argument gives the text
    # of a file, or raises OSError. Raises HostListError, or UsageError where hvdrun must not run.
    hosts: Callable[[Environ, Callable[[str], str]], tuple[Host, ...] | None]

    # The rest is for a scheduler with a Starter.
    option: str = ""  # of --mpi
    # The Starter in PATH, inside a job of this scheduler.
    find_starter: Callable[[Environ], Starter | None] = lambda environ: None
    # The MPI with the Starter to start it. Raises UsageError or NoMpi where it can't.
    start_with: Callable[[Flavour, Starter | None, Allocation | None, Environ], Flavour] | None = (
        None
    )
    # What the program says on stderr where it can't reach a host, and what it means.
    troubles: tuple[tuple[str, Trouble], ...] = ()
