"""A rank's place in the job, from MPI's or srun's variables, and what the rank gets from that."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hvdrun.agent.frames import write_all
from hvdrun.machine.binding import here, thread_variables
from hvdrun.machine.environment import PLACE
from hvdrun.machine.gpus import prefer_memory_of

BOUND, VERBOSE, UNBOUND = ("rank", "verbose-rank", "unbound-rank")

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
