"""hvdrun's own failures: one class per cause, each with its exit code.

    LaunchError
    ├── UsageError           64  options that make no sense
    ├── HostListError        65  -H or a hostfile can't be read
    ├── TooManyProcesses     66  more than the slots that the user gave
    ├── NoMpi                67  no mpirun
    ├── MpiMismatch          68  mpirun and mpi4py belong to different MPIs
    ├── CommandNotFound      69  the program is missing, here or on a host
    ├── SshFailed            70  a host can't be reached: name, network, key
    ├── HostSetupError       71  a host is reached, but lacks what a rank needs
    ├── HostLost             72  a host died or was cut off during the job
    ├── MpirunFailed         73  mpirun could not start the job, or gave up on it
    │   └── LeftEarly        73  a rank ended with 0 while others needed it
    ├── OutputLost           74  the ranks' output can't be written
    ├── StartTimeout         75  ranks that did not start, or come to hvd.init(), in time
    └── LacksResource        76  hvdrun lacks processes, open files, memory or temporary files

All other codes are the program's: the code of the rank that failed first, 128+n for signal n.
"""

from __future__ import annotations


class LaunchError(Exception):
    """What went wrong and where, and what to do, in a line each (short ones in one line, with a
    semicolon); hvdrun prints it as `hvdrun: …`. rank, host: where it began, if that is known.
    word: what `--report-file` calls the cause."""

    code = 1
    cause = ""
    word = ""
    evidence: tuple[str, ...] = ()  # of preflight: its findings

    def __init__(
        self, what: str, remedy: str = "", rank: int | None = None, host: str | None = None
    ) -> None:
        super().__init__(f"{what}\n    {remedy}" if remedy else what)
        self.remedy, self.rank, self.host = remedy, rank, host


class UsageError(LaunchError):
    code = 64
    cause = "a wrong option, or options that contradict each other"
    word = "usage"


class HostListError(LaunchError):
    code = 65
    cause = "a host list or hostfile with a mistake"
    word = "host-list"


class TooManyProcesses(LaunchError):
    code = 66
    cause = "more processes than slots"
    word = "too-many-processes"


class NoMpi(LaunchError):
    code = 67
    cause = "no MPI: mpirun was not found"
    word = "no-mpi"


class MpiMismatch(LaunchError):
    code = 68
    cause = "mpirun and mpi4py belong to different MPIs"
    word = "mpi-mismatch"


class CommandNotFound(LaunchError):
    code = 69
    cause = "the program was not found"
    word = "command-not-found"


class SshFailed(LaunchError):
    code = 70
    cause = "a host that ssh can't reach"
    word = "ssh-failed"


class HostSetupError(LaunchError):
    code = 71
    cause = "a host that lacks what a rank needs"
    word = "host-not-ready"


class HostLost(LaunchError):
    code = 72
    cause = "a host that died, or was cut off"
    word = "host-lost"


class MpirunFailed(LaunchError):
    code = 73
    cause = "mpirun could not start the job, or gave up on it"
    word = "mpirun-failed"


class LeftEarly(MpirunFailed):
    cause = "a rank that ended with 0 while others needed it"
    word = "left-early"


class OutputLost(LaunchError):
    code = 74
    cause = "the ranks' output can't be written, for example to a full disk"
    word = "output-lost"


class StartTimeout(LaunchError):
    code = 75
    cause = "ranks that did not start, or did not come to hvd.init(), in time"
    word = "start-timeout"


class LacksResource(LaunchError):
    code = 76
    cause = "hvdrun lacks a resource: processes, open files, memory, temporary files"
    word = "lacks-resource"


def exit_codes() -> str:
    """The list for `--help`."""
    return "\n".join(f"{kind.code}  {kind.cause}" for kind in LaunchError.__subclasses__())
