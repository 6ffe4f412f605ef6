"""What a batch scheduler has given this job: its hosts, and a program that starts ranks on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from hvdrun.plan.hosts import Host, Share

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
