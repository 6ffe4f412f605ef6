"""Refuses two launchers of which one starts the other: each would start a whole set of ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from hvdrun.errors import UsageError
from hvdrun.machine.environment import KEEPER, is_in_step
from hvdrun.plan.python_command import MODULE, SCRIPT, what_runs

OVERRIDE = "HVDLITE_NESTED"
# Programs and Python modules that start ranks.
LAUNCHERS = frozenset(
    (
        *("torchrun", "torch.distributed.run", "torch.distributed.launch", "deepspeed"),
        *("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "srun"),
        *("hvdrun", "horovodrun", "accelerate.commands.launch"),
    )
)
# A variable that a launcher sets for each of its ranks, that with their number, and its name.
PARENTS = (
    (KEEPER, "WORLD_SIZE", "hvdrun"),
    ("TORCHELASTIC_RUN_ID", "WORLD_SIZE", "torchrun"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "mpirun"),
    ("PMI_RANK", "PMI_SIZE", "mpirun"),
)


def check(command: Sequence[str], environ: Mapping[str, str], is_alone: bool = True) -> None:
    """`environ`: hvdrun's own; is_alone: not each host of the job starts one. Raises UsageError."""
    if environ.get(OVERRIDE) == "1":
        return
    if child := _launcher_in(command):
        raise UsageError(
            f"{child} starts the ranks of a job itself, so each of hvdrun's ranks would start a"
            f" whole job: leave {child} and its options out, as in `hvdrun -np 4 python train.py`,"
            f" or leave hvdrun out; if you mean it, set {OVERRIDE}=1"
        )
    # srun starts an hvdrun on each host of a job, and hvdrun itself says what is wrong with that.
    if is_alone and (parent := _parent(environ)) and not is_in_step(environ):
        name, size = parent
        raise UsageError(
            f"{name} has started this hvdrun as one of {size} processes, each of which would start"
            f" a whole job: leave {name} out, as in `hvdrun -np {size} python train.py`, or leave"
            f" hvdrun out; if you mean it, set {OVERRIDE}=1"
        )


def _launcher_in(command: Sequence[str]) -> str:
    """The name of the launcher that the command runs, or ""."""
    if not command:
        return ""
    runs = what_runs(command)
    if runs is not None and runs.kind not in (SCRIPT, MODULE):
        return ""
    name, arguments = (runs.name, runs.arguments) if runs else (command[0], command[1:])
    name = os.path.basename(name)
    if name == "accelerate":
        return "accelerate launch" if "launch" in arguments[:1] else ""
    return name if name in LAUNCHERS else ""


def _parent(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """The launcher that has started this process as one of several ranks, and their number."""
    for mark, size_variable, name in PARENTS:
        size = environ.get(size_variable, "")
        if mark in environ and size.isdecimal() and int(size) > 1:
            return name, int(size)
    return None
