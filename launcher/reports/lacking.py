"""What hvdrun itself lacks: processes, open files, memory, room for temporary files. Found before
mpirun starts, in what the system then refuses, or in mpirun's words."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace

from hvdrun.errors import LacksResource
from hvdrun.machine.environment import FILES as FILES_VARIABLE
from hvdrun.machine.limits import (
    LACKING,
    open_files,
    raise_open_files,
    room_for_processes,
)
from hvdrun.machine.resources import temporary_folder, temporary_path
from hvdrun.plan.command import Command
from hvdrun.plan.facts import LocalFacts, is_local
from hvdrun.plan.flavour import OPENMPI, Flavour

# Measured with hvdrun, mpirun and its daemon on one host: the lowest limit of open files under
# which n ranks start is 23 + 4 n (Open MPI) and less (MPICH). The limit is raised to twice that.
FILES, FILES_PER_RANK = 24, 4
# mpirun with its threads or its daemon, and hvdrun's writer; the shim, the keeper and the command
# of each rank; a connection to each other host.
# Of a host: ssh, and the role that stands in its place.
PROCESSES, PROCESSES_PER_RANK, PROCESSES_PER_HOST = 4, 3, 2

MORE_PROCESSES = (
    "raise that limit (docker --pids-limit, Kubernetes' podPidsLimit, systemd's TasksMax, `ulimit"
    " -u`), end other programs, or start fewer ranks"
)
MORE_FILES = (
    "raise that limit (`ulimit -n 4096`; above the hard limit by /etc/security/limits.conf, docker"
    " --ulimit nofile=…, systemd's LimitNOFILE), or start fewer ranks"
)
MORE_MEMORY = "allow more memory (`ulimit -v`, the limit of the container or the batch job)"
MORE_ROOM = "remove old files there, or set TMPDIR to another folder"
# Words of MPI's programs and of Python, and the errno that they mean.
_WORDS = (
    ("Too many open files", errno.EMFILE),
    ("PMIX_ERR_SYS_LIMITS", errno.EMFILE),
    ("Resource temporarily unavailable", errno.EAGAIN),
    ("can't start new thread", errno.EAGAIN),
    ("Cannot allocate memory", errno.ENOMEM),
    ("No space left on device", errno.ENOSPC),
    ("PMIX_ERR_FILE_WRITE_FAILURE", errno.ENOSPC),
    ("Read-only file system", errno.EROFS),
)


def within_limits(
    command: Command, mpi: Flavour, facts: LocalFacts, files_before: int | None
) -> Command:
    """The command, after the limit of open files was raised if it is low for it. `files_before`:
    that limit, if it was raised earlier.

    Raises LacksResource if this machine's limits are too low.
    """
    here = [share for share in command.shares if is_local(share.host, facts)]
    ranks, others = sum(share.count for share in here), len(command.shares) - len(here)
    if mpi.kind == OPENMPI and mpi.starter is None:
        check_temporary_folder(command.environment)
    check(ranks, others)
    raised = raise_files(ranks, others)
    before = raised if files_before is None else files_before
    if before is None:
        return command
    return replace(command, environment={**command.environment, FILES_VARIABLE: str(before)})


def check(ranks: int, other_hosts: int) -> None:
    """Raises LacksResource if the limits do not suffice for that many ranks on this host."""
    files = FILES + FILES_PER_RANK * (ranks + other_hosts)
    if 0 <= (most := open_files()[1]) < files:
        raise LacksResource(
            f"with -np {ranks}, hvdrun and mpirun need {files} open files, and the hard limit"
            f" (`ulimit -Hn`) is {most}",
            MORE_FILES,
        )
    processes = PROCESSES + PROCESSES_PER_RANK * ranks + PROCESSES_PER_HOST * other_hosts
    room = room_for_processes()
    if room is not None and room[0] < processes:
        raise LacksResource(
            f"with -np {ranks}, hvdrun and mpirun need {processes} more processes and threads,"
            f" and {room[1]}",
            MORE_PROCESSES,
        )


def raise_files(ranks: int, other_hosts: int = 0) -> int | None:
    """Raises the soft limit of open files where it is low; the one before, for the ranks."""
    return raise_open_files(2 * (FILES + FILES_PER_RANK * (ranks + other_hosts)))


def check_temporary_folder(environ: Mapping[str, str]) -> None:
    """Raises LacksResource if Open MPI can't make its folder, and files in it."""
    name, path = temporary_path(environ)
    problem = temporary_folder(environ)["problem"]
    if not problem:
        return
    where = f"{path} ({name})" if name else path
    remedy = {
        os.strerror(errno.ENOENT): f"make {path}" + (f", or unset {name}" if name else ""),
        os.strerror(errno.ENOSPC): MORE_ROOM,
        os.strerror(errno.EDQUOT): MORE_ROOM,
    }.get(str(problem), "set TMPDIR to a folder that you may write to")
    raise LacksResource(
        f"mpirun needs a folder for temporary files, and nothing can be written to {where}:"
        f" {problem}",
        remedy,
    )


def of(error: BaseException) -> LacksResource | None:
    """The error of hvdrun itself that this exception is, if it is one."""
    if isinstance(error, MemoryError):
        return _lacks("hvdrun", errno.ENOMEM)
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return _lacks("hvdrun", errno.EAGAIN)
    if isinstance(error, OSError) and error.errno in LACKING:
        return _lacks("hvdrun", error.errno)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return LacksResource(f"{error.filename or 'a file'}: {error.strerror}", MORE_ROOM)
    return None


def of_rank(rank: int, host: str, number: int) -> LacksResource:
    """hvdrun's agent beside the rank could not start the command."""
    who = f"rank {rank} was not started: hvdrun on {host}"
    return _lacks(who, number, is_here=False, rank=rank, host=host)


def of_host(host: str, number: int) -> LacksResource:
    return _lacks(f"hvdrun's agent on {host}", number, is_here=False, host=host)


def in_words(starter: str, said: Iterable[str]) -> LacksResource | None:
    """What mpirun lacks, by its own words. Pure."""
    for line in said:
        for words, number in _WORDS:
            if words in line:
                return _lacks(starter, number, is_here=False)
    return None


def _lacks(
    who: str, number: int, is_here: bool = True, rank: int | None = None, host: str | None = None
) -> LacksResource:
    what, remedy = f"{who}: {os.strerror(number)}", MORE_ROOM
    if number in (errno.EMFILE, errno.ENFILE):
        limit = f" (`ulimit -n` is {open_files()[0]})" if is_here else ""
        what, remedy = f"{who} can't open any more files{limit}", MORE_FILES
    elif number == errno.EAGAIN:
        room = room_for_processes() if is_here else None
        limit = f" ({room[1]})" if room else ""
        what = f"{who} can't start any more processes or threads{limit}"
        remedy = MORE_PROCESSES if room else f"{MORE_PROCESSES}; or {MORE_MEMORY}"
    elif number == errno.ENOMEM:
        what, remedy = f"{who} gets no more memory", MORE_MEMORY
    return LacksResource(what, remedy, rank, host)
