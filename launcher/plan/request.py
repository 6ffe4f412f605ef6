"""The user's request, as one value, and what a batch scheduler has given this job: its hosts, and a
program that starts ranks on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from hvdrun.agent.silence import HOST_TIMEOUT_S
from hvdrun.plan.hosts import Host, Share

Environ = Mapping[str, str]


class Allocation(NamedTuple):
    """The hosts that a scheduler has allocated to this job."""

    scheduler: str  # its name
    hosts: tuple[Host, ...]
    here: str = ""  # this machine's name among them, if it is not one that it knows itself
    reach: Starter | None = None  # reaches the hosts; None: what was found on this machine does


@dataclass(frozen=True)
class Starter:
    """A scheduler's program that starts ranks instead of mpirun, and reaches the hosts of the
    allocation instead of ssh."""

    scheduler: ClassVar[str]
    # Variables of the job that the program must not see when it starts the ranks.
    unwanted: ClassVar[tuple[str, ...]] = ()

    program: str  # its path; messages show its name

    @property
    def variables(self) -> Mapping[str, str]:
        """What `connection` needs in its environment."""
        return {}

    def connection(self, host: str) -> list[str]:
        """The words before a command that run it on a host, connected to its stdin, stdout and
        stderr."""
        raise NotImplementedError

    def rank_options(
        self,
        kind: str,
        allocation: Allocation,
        shares: Sequence[Share],
        environ: Environ,
        cwd: str,
        binding_args: Sequence[str] = (),
    ) -> list[str]:
        """The program's options for ranks of an MPI of this kind. Raises UsageError for a layout of
        hosts and ranks that the program can't start."""
        raise NotImplementedError


@dataclass(frozen=True)
class Request:
    command: tuple[str, ...]
    num_proc: int | None = None
    hosts: tuple[Host, ...] = ()  # empty: the allocation's, or this machine
    allocation: Allocation | None = None  # of a batch scheduler
    # VAR → value, or None for the value in hvdrun's own environment.
    exports: dict[str, str | None] = field(default_factory=dict)
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    network_interfaces: tuple[str, ...] = ()  # names or subnets; empty: preflight chooses
    # The runtime's variables that the user's options set.
    settings: dict[str, str] = field(default_factory=dict)
    mpi: str = "auto"
    mpi_args: tuple[str, ...] = ()
    binding_args: tuple[
        str, ...
    ] = ()  # for mpirun, which then binds the ranks; without them hvdrun does
    start_timeout_s: float = 60.0  # for hosts to be ready, and then for the ranks to start
    host_timeout_s: float = HOST_TIMEOUT_S  # of silence, after which a host is lost
    # for the ranks to end after a signal to hvdrun; None: it depends on the signal
    grace_period_s: float | None = None
    requeue: bool = False  # the scheduler is to run a job again that it has preempted
    output_dir: str | None = None  # gets a file per rank and stream
    metrics_file: str = ""  # replaced now and then with what the ranks have measured
    timestamps: bool = False  # in front of each line
    monitor: bool = False  # shows the job while it runs
    verbose: bool = False
    check: bool = False  # asks the hosts, and starts nothing
    dry_run: bool = False  # shows the command, and runs nothing
    disable_cache: bool = False  # asks hosts whose answers are remembered, too
    notes: tuple[str, ...] = ()  # about options that have no effect

    def variable(self, name: str, environ: Mapping[str, str]) -> str | None:
        """Its value in the ranks; `environ` is hvdrun's own. An option counts before -x."""
        given = self.settings.get(name, self.exports.get(name))
        return environ.get(name) if given is None else given
