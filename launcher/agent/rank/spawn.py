"""From an agent to the user's command: a rank's place in the job, from MPI's or srun's variables,
and what it gets from that; then cores, signals and open files, and exec."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping
from typing import NoReturn

from hvdrun.agent import signals
from hvdrun.agent.frames import write_all
from hvdrun.machine.binding import here, thread_variables
from hvdrun.machine.environment import FILES, PLACE
from hvdrun.machine.gpus import prefer_memory_of
from hvdrun.machine.limits import set_open_files
from hvdrun.machine.remote_words import UNBOUND, VERBOSE

# Per MPI: rank, size, rank on the host, number of ranks on the host.
RANK_VARIABLES = (
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)


def by_launcher(given: Mapping[str, str]) -> dict[str, str]:
    """The launcher's variables of this process about the world, under torch's names."""
    found: dict[str, str] = {}
    for names in RANK_VARIABLES:
        if names[0] in given and len(found) < len(names):
            for name, source in zip(PLACE, names, strict=True):
                if source in given:
                    found.setdefault(name, given[source])
    per_node = found.get("LOCAL_WORLD_SIZE", "")
    if not per_node.isdigit():  # Slurm's, as in 2,1(x3)
        node = int(given.get("SLURM_NODEID", "0"))
        for part in per_node.split(","):
            count, _, times = part.partition("(x")
            found["LOCAL_WORLD_SIZE"] = count
            node -= int(times.rstrip(")") or 1)
            if node < 0:
                break
    return {name: value for name, value in found.items() if value}


def rank_environment(given: Mapping[str, str], cores: int) -> dict[str, str]:
    """More variables for a rank, beside the forwarded ones. Its place in the job replaces that of
    another job, which a container or the host may have set."""
    found = by_launcher(given)
    if int(found.get("LOCAL_WORLD_SIZE", "1")) > cores:
        # Otherwise Open MPI's waiting ranks would keep cores from those that compute.
        found["OMPI_MCA_mpi_yield_when_idle"] = given.get("OMPI_MCA_mpi_yield_when_idle", "1")
    return found


def bind(environment: dict[str, str], rank: int, role: str) -> frozenset[int] | None:
    """The hardware threads of the rank, once the job's variables are there (None: those that it
    has); adds its own variables, and has its memory come from near its GPU.

    role: an `unbound-rank` gets its cores from MPI or the user, all others from hvdrun; a
    `verbose-rank` says where its GPU is.
    """
    cpus = None
    if role != UNBOUND:
        given = here(*local_rank_and_size(environment), environment)
        environment.update(thread_variables(given.threads, environment))
        cpus = given.cpus
        if given.near is not None:
            prefer_memory_of(given.near.node)
            if role == VERBOSE:
                host, where = os.uname().nodename, given.near
                write_all(2, f"hvdrun: rank {rank} on {host} is bound: {where}\n".encode())
    environment.update(rank_environment(environment, len(os.sched_getaffinity(0))))
    return cpus


def local_rank_and_size(given: Mapping[str, str]) -> tuple[int, int]:
    """The local rank and the number of local ranks, from MPI or srun."""
    found = by_launcher(given)
    return int(found.get("LOCAL_RANK", "0")), int(found.get("LOCAL_WORLD_SIZE", "1"))


def spawn(
    command: list[str],
    environment: dict[str, str],
    files: Mapping[int, int],
    cpus: frozenset[int] | None,
) -> tuple[int, int]:
    """Starts the command on these hardware threads, in a process group of its own: (pid, 0), or
    (0, errno). `files`: its descriptors → ours. It inherits all others, as some may be MPI's."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            for number, fd in files.items():
                os.dup2(fd, number)
            become(command, environment, cpus)
        except OSError as error:
            os.write(writer, b"%d" % (error.errno or errno.EIO))
        finally:
            os._exit(127)
    os.close(writer)
    with contextlib.suppress(OSError):  # the child does it too, in case it comes first
        os.setpgid(pid, pid)
    failure = os.read(reader, 16)
    os.close(reader)
    if failure:
        os.waitpid(pid, 0)
        return 0, int(failure)
    return pid, 0


def become(
    command: list[str], environment: dict[str, str], cpus: frozenset[int] | None
) -> NoReturn:
    """Raises OSError if there is no such program."""
    if cpus is not None:
        # For good. A cpuset that has changed meanwhile is no reason to fail.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cpus)
    signals.set_default()
    if FILES in environment:
        # The user's own limit of open files, which was raised for MPI. Last, as this process has
        # files with numbers above that limit, and can open no more then.
        os.get_exec_path(environment)  # imports what execvpe needs
        set_open_files(int(environment.pop(FILES)))
    os.execvpe(command[0], command, environment)
