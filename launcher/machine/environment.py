"""Decides which variables the ranks get, and how a command passes through mpirun. Pure, and without
imports that would slow the agents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hvdrun.machine.notes import RESULT_PIPE

# The job's name for its own processes, by which they find their supervisor (see peers). MPI sends
# it unencrypted, and who knows it can do nothing with it but take a socket's name.
LINK = "HVDRUN_LINK"
KEEPER = "HVDRUN_KEEPER"  # the process number of the keeper that started the command
# The keeper's name while it ends its rank. A rank that leaves then need not wait for the others
# (hvdlite/world/process/exits.py, _core/engine/exit.c).
ENDING = "hvdrun-ending"
SSH = "HVDRUN_SSH"  # ssh's options, for the role `ssh`
# For that role, separated by commas: for each host that MPI knows by another name, or that has
# options of its own, MPI's name, the options for ssh, and the user's name for the host. Or the path
# of mpirun's list of hosts, a file in which these words are comments.
HOSTS = "HVDRUN_HOSTS"
# The program that replaces ssh, and its options, such as `srun --nodelist={host}`.
REACH = "HVDRUN_REACH"
# By which the role `reach` finds hvdrun's connections to other nodes.
NODES = "HVDRUN_NODES"
PATIENCE = "HVDRUN_PATIENCE"  # seconds that a shim waits for the supervisor of its host
# hvdrun's interpreter and its agent.py, if their paths contain blanks.
PYTHON, AGENT = "HVDRUN_PYTHON", "HVDRUN_AGENT"
PREFIX = "HVDRUN_PREFIX"  # for the remote shell: the installation's folder
EXPORTED = "HVDRUN_EXPORTED"  # the names that the user gave with -x
# The number that hvdrun has put into OMP_NUM_THREADS, to tell it from a user's.
THREADS = "HVDRUN_THREADS"

# The user's soft limit of open files, where hvdrun or a host agent has raised it.
FILES = "HVDRUN_FILES"

# A rank's place in the job, under the names of torch.distributed: keepers set them.
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# Of the job that hvdrun was started in, if it was: a rank, torchrun, or a container has set them.
_OF_ANOTHER_JOB = (
    *(*PLACE, "MASTER_ADDR", "MASTER_PORT", "HVDLITE_RANK_PROCESS"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"),
)
# Set by MPI, Slurm or torchrun for one process: hvdrun must not pass them on.
_PER_PROCESS_PREFIXES = (
    *("OMPI_", "PMIX_", "PMI_", "PMI2_", "PRTE_", "HYDI_", "MPI_LOCAL", "HVDRUN_"),
    *("SLURM_STEP", "SLURM_SRUN_", "SLURM_LAUNCH_", "SLURM_TOPOLOGY_", "TORCHELASTIC_"),
)
# What hosts prove to each other that each start hvdrun (see rendezvous.secret): not for ranks.
RENDEZVOUS_SECRET = "HVDLITE_RENDEZVOUS_SECRET"
_PER_PROCESS = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_TASK_PID", "SLURM_GTIDS")
# Platforms that start the same command on each host tell it by these which one it is.
_WHICH_HOST = ("NODE_RANK", "PET_NODE_RANK", "JOB_COMPLETION_INDEX", "TF_CONFIG", "SM_CURRENT_HOST")
_OF_THE_JOB = ("SLURM_JOB", "SLURM_CONF", "SLURM_CLUSTER_NAME", "SLURM_SUBMIT_", "SLURM_GPUS")
# The user's settings of MPI begin like that too, except for those that mpirun sets for its ranks.
_SETTINGS_PREFIXES = ("OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_")
_TOLD_TO_RANKS = tuple(
    f"OMPI_MCA_{name}" for name in ("PREFIXES", "cpu_type", "initial_wdir", "num_procs")
)

# Of a host or a login: right where they are set, wrong on other hosts.
_OF_THE_HOST = frozenset(
    (
        *("HOSTNAME", "HOST", "HOSTTYPE", "MACHTYPE", "OSTYPE", "TMPDIR", "TMP", "TEMP", "TTY"),
        *("PWD", "OLDPWD", "SHLVL", "_", "DISPLAY", "XAUTHORITY", "WINDOWID"),
        *("MAIL", "HOME", "USER", "LOGNAME", "SHELL", FILES, *_WHICH_HOST),
    )
)
_OF_THE_HOST_PREFIXES = ("XDG_", "SSH_", "DBUS_", "TERM_")


def is_per_process(name: str) -> bool:
    if name.startswith(_SETTINGS_PREFIXES):
        return name in _TOLD_TO_RANKS
    return name in (*_PER_PROCESS, *_OF_ANOTHER_JOB, RENDEZVOUS_SECRET) or name.startswith(
        _PER_PROCESS_PREFIXES
    )


def is_of_the_host(name: str) -> bool:
    return name in _OF_THE_HOST or name.startswith(_OF_THE_HOST_PREFIXES)


def is_in_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process."""
    return "SLURM_STEP_ID" in environ


def without_step_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without srun's variables of a step, which another step, or MPI within this
    step, must not use."""
    return {
        name: value
        for name, value in inheritable(environ).items()
        if not name.startswith("SLURM_") or name.startswith(_OF_THE_JOB)
    }


def for_connections(environ: Mapping[str, str]) -> dict[str, str]:
    """What ssh gets, or a scheduler's program that reaches hosts in its place."""
    found = (without_step_variables if REACH in environ else inheritable)(environ)
    return found | {name: environ[name] for name in (NODES,) if name in environ}


def inheritable(environ: Mapping[str, str]) -> dict[str, str]:
    """hvdrun's environment without the variables that belong to one process."""
    ours = {"OMP_NUM_THREADS"} if environ.get(THREADS) == environ.get("OMP_NUM_THREADS") else ()
    return {n: v for n, v in environ.items() if n not in ours and not is_per_process(n)}


def forwarded(names: Iterable[str], exports: Iterable[str]) -> tuple[str, ...]:
    """The names of the variables that remote ranks get, sorted: also those that only `env` can set,
    and a shell's exported functions."""
    wanted = {name for name in names if not is_of_the_host(name)} | set(exports)
    return tuple(sorted(wanted))


# What mpirun and srun themselves read, on this host and others, and what holds no secret. The
# ranks' variables travel over hvdrun's own connections.
_FOR_LAUNCHERS = frozenset(
    (
        *("PATH", "LD_LIBRARY_PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TERM", "PWD"),
        *("TMPDIR", "TMP", "TEMP", "HOSTNAME", "PYTHONHASHSEED", RESULT_PIPE),
    )
)
_FOR_LAUNCHERS_PREFIXES = (
    *("OMPI_", "OPAL_", "PMIX_", "PRTE_", "HYDRA_", "MPIEXEC_", "MPIR_", "MPICH_", "I_MPI_"),
    *("UCX_", "FI_"),
    *("PSM2_", "PSM3_", "HWLOC_", "SLURM_", "HVDRUN_", "SSH_", "XDG_", "LC_"),
)


def for_launchers(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of the environment that mpirun and srun get if they send it to other hosts."""
    return {
        name: value
        for name, value in environ.items()
        if (name in _FOR_LAUNCHERS or name.startswith(_FOR_LAUNCHERS_PREFIXES))
        and name != "SLURM_JWT"  # opens Slurm's REST interface
    }


def pack(environ: Mapping[str, str]) -> bytes:
    return b"\0".join(
        f"{name}={value}".encode(errors="surrogateescape") for name, value in environ.items()
    )


def unpack(packed: bytes) -> dict[str, str]:
    words = packed.decode(errors="surrogateescape").split("\0") if packed else []
    return dict(word.split("=", 1) for word in words if "=" in word)


def with_job_variables(environ: Mapping[str, str], packed: bytes) -> dict[str, str]:
    """The environment that MPI or srun gave to a rank, with the job's variables. What MPI and Slurm
    have set for this rank stays."""
    ours = dict(environ)
    for name, value in unpack(packed).items():
        if name not in ours or not name.startswith((*_SETTINGS_PREFIXES, "SLURM_")):
            ours[name] = value
    return ours


def pack_host_variables(environ: Mapping[str, str]) -> bytes:
    """The variables of this host, as a host agent sends them to its keepers."""
    return pack({name: value for name, value in environ.items() if is_of_the_host(name)})


def with_host_variables(environ: Mapping[str, str], packed: bytes) -> dict[str, str]:
    """A rank's environment with the variables of its own host in place of those of hvdrun's host,
    which some MPIs pass on. Variables that the user gave with -x stay."""
    exported = environ.get(EXPORTED, "").split()
    ours = {n: v for n, v in environ.items() if n in exported or not is_of_the_host(n)}
    for name, value in unpack(packed).items():
        if is_of_the_host(name):  # ignores all other variables
            ours.setdefault(name, value)
    return ours
