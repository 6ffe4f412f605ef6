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
    ├── OutputLost           74  the ranks' output can't be written
    ├── StartTimeout         75  ranks that did not start, or come to hvd.init(), in time
    └── LacksResource        76  hvdrun lacks processes, open files, memory or temporary files

All other codes are the program's: the code of the rank that failed first, 128+n for signal n.
"""

from __future__ import annotations


class LaunchError(Exception):
    """Says what went wrong, where, and what to do; hvdrun prints it as `hvdrun: …`."""

    code = 1
    cause = ""


class UsageError(LaunchError):
    code = 64
    cause = "a wrong option, or options that contradict each other"


class HostListError(LaunchError):
    code = 65
    cause = "a host list or hostfile with a mistake"


class TooManyProcesses(LaunchError):
    code = 66
    cause = "more processes than slots"


class NoMpi(LaunchError):
    code = 67
    cause = "no MPI: mpirun was not found"


class MpiMismatch(LaunchError):
    code = 68
    cause = "mpirun and mpi4py belong to different MPIs"


class CommandNotFound(LaunchError):
    code = 69
    cause = "the program was not found"


class SshFailed(LaunchError):
    code = 70
    cause = "a host that ssh can't reach"


class HostSetupError(LaunchError):
    code = 71
    cause = "a host that lacks what a rank needs"


class HostLost(LaunchError):
    code = 72
    cause = "a host that died, or was cut off"


class MpirunFailed(LaunchError):
    code = 73
    cause = "mpirun could not start the job, or gave up on it"


class OutputLost(LaunchError):
    code = 74
    cause = "the ranks' output can't be written, for example to a full disk"


class StartTimeout(LaunchError):
    code = 75
    cause = "ranks that did not start, or did not come to hvd.init(), in time"


class LacksResource(LaunchError):
    code = 76
    cause = "hvdrun lacks a resource: processes, open files, memory, temporary files"


def exit_codes() -> str:
    """The list for `--help`."""
    return "\n".join(f"{kind.code}  {kind.cause}" for kind in LaunchError.__subclasses__())
