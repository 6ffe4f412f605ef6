"""The interface of a batch scheduler: a row, and a Starter if it can start ranks. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from hvdrun.plan.hosts import Host, Share
from hvdrun.ssh_errors import Trouble

if TYPE_CHECKING:
    from hvdrun.plan.flavour import Flavour

Environ = Mapping[str, str]


class Allocation(NamedTuple):
    """The hosts that a scheduler has allocated to this job."""

    scheduler: str  # its name
    hosts: tuple[Host, ...]
    here: str = ""  # this machine's name among them, if it is not one that it knows itself
    reach: Starter | None = None  # reaches the hosts; None: what was found on this machine does


class Starter(Protocol):
    """A scheduler's program that starts ranks instead of mpirun, and reaches the hosts of the
    allocation instead of ssh. A value that can be compared."""

    @property
    def scheduler(self) -> str: ...

    @property
    def program(self) -> str:
        """The path of the program. Messages show its name."""

    @property
    def unwanted(self) -> tuple[str, ...]:
        """Variables of the job that the program must not see when it starts the ranks."""

    @property
    def variables(self) -> Mapping[str, str]:
        """What `connection` needs in its environment."""

    def connection(self, host: str) -> list[str]:
        """The words before a command that run it on a host, connected to its stdin, stdout and
        stderr."""

    def rank_options(
        self,
        kind: str,
        allocation: Allocation,
        shares: Sequence[Share],
        environ: Environ,
        cwd: str,
        binding_args: Sequence[str],
    ) -> list[str]:
        """The program's options for ranks of an MPI of this kind. Raises UsageError for a layout of
        hosts and ranks that the program can't start."""


class Requeue(NamedTuple):
    """How to ask a scheduler to run the job in which hvdrun runs again."""

    ask: tuple[str, ...]  # a command
    look: tuple[str, ...]  # one that prints the job's state,
    ending: str  # and a pattern in that if the scheduler is ending the job already
    ended: str  # why it may do so, and how to be told before


class Scheduler(NamedTuple):
    name: str
    more: str  # how to ask for more slots
    # The hosts of the allocation that hvdrun runs in, or None. The second argument returns the text
    # of a file, or raises OSError. Raises HostListError, or UsageError if hvdrun must not run here.
    hosts: Callable[[Environ, Callable[[str], str]], tuple[Host, ...] | None]

    # The rest is for a scheduler with a Starter.
    option: str = ""  # the value of --mpi
    program: str = ""  # the Starter's
    # The Starter in PATH, if hvdrun runs inside a job of this scheduler.
    find_starter: Callable[[Environ], Starter | None] = lambda environ: None
    # The MPI, with the Starter that is to start its ranks. Raises UsageError or NoMpi if it can't.
    start_with: Callable[[Flavour, Starter | None, Allocation | None, Environ], Flavour] | None = (
        None
    )
    # Patterns of what the program prints to stderr if it can't reach a host, and their meaning.
    troubles: tuple[tuple[str, Trouble], ...] = ()

    # How to ask for the job in which hvdrun runs to run again; None outside of one. Raises
    # UsageError if the scheduler can't be asked.
    requeue: Callable[[Environ], Requeue | None] = lambda environ: None
