"""The facts that a job's command depends on, as values: of this machine, which `gather` finds out
cheaply, and of other hosts, which preflight asks for them. Nothing else in hvdrun reads those of
this machine."""

from __future__ import annotations

import glob
import os
import pwd
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import hvdrun
from hvdrun.errors import UsageError
from hvdrun.machine import shared_memory
from hvdrun.machine.interfaces import interfaces
from hvdrun.machine.resources import gpu_count, physical_cores, temporary_path
from hvdrun.plan.flavour import MPICH
from hvdrun.plan.hosts import Host
from hvdrun.plan.request import Request, Starter
from hvdrun.plan.schedulers import find_starter

# -------------------------------------------------------------------- of another host


@dataclass(frozen=True)
class Interface:
    """One address of a host."""

    name: str
    address: str
    prefix: int  # bits of the subnet
    up: bool = True  # switched on; MPI checks no more than this
    running: bool = True  # and its cable is connected
    tunnel: bool = False  # a VPN's: it works, but slowly


@dataclass(frozen=True)
class SharedMemory:
    """A host's /dev/shm; all zero if there is none."""

    free_bytes: int
    size_bytes: int
    # Files of MPI that this user's earlier jobs have left, and that no process uses.
    leftovers: tuple[str, ...] = ()
    leftover_bytes: int = 0


@dataclass(frozen=True)
class Temporary:
    """The folder for temporary files."""

    path: str
    problem: str = ""  # why nothing can be written there
    free_bytes: int | None = None
    free_files: int | None = None  # None: unknown, or without limit


@dataclass(frozen=True)
class HostFacts:
    """The answer of one host. Texts about a thing that must exist are "" if it does, else the
    reason why not; None: it was not asked for."""

    hostname: str
    python: str  # version, as in 3.11.7
    machine: str  # as uname says: x86_64
    packages: Mapping[str, str]  # the versions of those asked for that are installed
    mpirun: str | None  # the output of `mpirun --version`; None: it is a package, or missing
    mpirun_missing: str
    cwd: str
    program: str
    script: str | None
    cores: int  # physical ones
    gpus: int
    memory_bytes: int | None  # free; None: unknown
    shm: SharedMemory
    interfaces: tuple[Interface, ...]
    resolved: Mapping[str, tuple[str, ...]]  # name → addresses, empty if the host does not know it
    ssh_address: str = ""  # the host's own end of the ssh connection
    ssh_client: str = ""  # the other end, as the host sees it
    temporary: Temporary = Temporary("/tmp")
    gpu_models: tuple[str, ...] = ()  # of all that the driver drives, in the order of addresses
    gpu_driver: str = ""  # version
    rdma: tuple[str, ...] = ()  # devices: InfiniBand, RoCE
    # Packages installed by `pip install -e` whose folders are not there.
    missing_links: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)  # checksums of our packages' files
    clock_skew_s: float = 0.0  # against hvdrun's clock, less what the call's own time explains

    @property
    def slots(self) -> int:
        """How many ranks it runs without a given number: one per GPU, else per physical core."""
        return self.gpus or self.cores


def from_answer(answer: Mapping[str, Any], clock_skew_s: float = 0.0) -> HostFacts:
    """From what `probe.answer` returns. Raises KeyError, TypeError or ValueError for all else."""
    fields = {name: value for name, value in answer.items() if name != "time_s"}
    fields["shm"] = shared_memory_from(answer["shm"])
    fields["interfaces"] = tuple(Interface(**found) for found in answer["interfaces"])
    fields["temporary"] = Temporary(**answer["temporary"])
    fields["resolved"] = {name: tuple(found) for name, found in answer["resolved"].items()}
    fields |= {name: tuple(answer[name]) for name in ("gpu_models", "rdma")}
    return HostFacts(**fields, clock_skew_s=clock_skew_s)


def shared_memory_from(answer: Mapping[str, Any]) -> SharedMemory:
    """From what `machine.shared_memory.facts` returns."""
    return SharedMemory(**{**answer, "leftovers": tuple(answer["leftovers"])})


# -------------------------------------------------------------------- of this machine

# With their numbers, Open MPI's and MPICH's names for the hosts of a job, in which they can find no
# other host's. MPICH asks name servers for all but addresses, and no host has one that begins so.
NUMBERED_HOST = "hvdrun-host-"
NUMBERED_ADDRESS = "0.1."
_NUMBERED = re.compile(
    rf"{NUMBERED_HOST}(\d{{1,9}})|(?<![\d.]){re.escape(NUMBERED_ADDRESS)}(\d{{1,3}})\.(\d{{1,3}})\b"
)

# Each machine's names for itself.
LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class LocalFacts:
    """What the command depends on besides the request: mostly, this machine."""

    environ: Mapping[str, str]
    cwd: str
    python: str  # hvdrun's interpreter, at the same place on every host
    agent: str  # the path of agent.py, the same on every host
    hostname: str
    local_names: frozenset[str]  # names and addresses of this host
    cores: int
    gpus: int
    is_root: bool
    has_fabric: bool  # a network that libfabric supports
    master_port: int
    user: str = ""  # the account that hvdrun runs under
    hosts_path: str = ""  # where hvdrun may write the list of hosts for mpirun
    path_is_changed: bool = False  # PATH in `environ` is not the caller's
    starter: Starter | None = None  # inside a job of its scheduler
    # Other hosts by name; hosts that are not listed are assumed to be like this one.
    others: Mapping[str, HostFacts] = field(default_factory=dict)
    # The choice of networks: options of mpirun, and variables of the ranks that are not set yet.
    network_options: tuple[str, ...] = ()
    network_variables: Mapping[str, str] = field(default_factory=dict)
    shm: SharedMemory | None = None  # None: unknown

    def default_slots(self, host: Host) -> tuple[int, str]:
        """How many ranks a host runs without a given number, and the unit: one per GPU or core."""
        other = None if is_local(host, self) else self.others.get(host.name)
        gpus, cores = (self.gpus, self.cores) if other is None else (other.gpus, other.cores)
        if gpus:
            return gpus, "GPU"
        return host.cpus or cores, "core"


def is_local(host: Host, facts: LocalFacts) -> bool:
    return host.name.lower() in facts.local_names and host.user in (None, facts.user)


def mpi_name(host: Host, facts: LocalFacts) -> str:
    """The name of a host for an MPI that knows it by no number. All MPIs split an IPv6 address at
    its colons, even in brackets; the agent in ssh's place knows what the name stands for."""
    if ":" not in host.name:
        return host.name
    if is_local(host, facts):
        return facts.hostname
    return "ipv6-" + re.sub(r"[^0-9a-z]", "-", host.name.lower())


def numbered_name(kind: str, number: int, host: Host, facts: LocalFacts) -> str:
    """The name for Open MPI or MPICH of the job's host with this number. Both take a host for this
    machine if it has this machine's name, and Open MPI cuts names at the first dot."""
    if is_local(host, facts):
        return "localhost"
    if kind == MPICH:
        return f"{NUMBERED_ADDRESS}{number >> 8}.{number & 255}"
    return f"{NUMBERED_HOST}{number}"


def in_users_words(line: str, hosts: Sequence[str]) -> str:
    """MPI's line with the names that the user gave in place of those by `numbered_name`."""

    def name(match: re.Match[str]) -> str:
        number = int(match[1]) if match[1] else int(match[2]) << 8 | int(match[3])
        return hosts[number] if number < len(hosts) else match[0]

    return _NUMBERED.sub(name, line)


# Networks that libfabric's providers serve: InfiniBand and RoCE, Omni-Path, Slingshot.
_FABRICS = ("/sys/class/infiniband", "/sys/class/hfi1", "/sys/class/cxi", "/sys/class/cxi_user")

AMPLE_BYTES = 2 << 30  # of /dev/shm, for hundreds of ranks


def gather(request: Request) -> LocalFacts:
    """Raises UsageError if the working directory has been removed."""
    environ = dict(os.environ)
    path = own_path(os.environ.get("PATH", ""), sys.prefix, sys.base_prefix)
    user, home = own_account()
    temporary = os.path.abspath(temporary_path(environ)[1])
    return LocalFacts(
        environ={"HOME": home, **environ, "PATH": path},
        user=user,
        hosts_path=f"{temporary}/hvdrun-hosts-{os.getpid()}-{os.urandom(8).hex()}",
        path_is_changed=path != os.environ.get("PATH", ""),
        cwd=_working_directory(),
        python=sys.executable,
        agent=os.path.join(os.path.dirname(os.path.abspath(hvdrun.__file__)), "agent", "agent.py"),
        hostname=socket.gethostname(),
        local_names=_local_names(request, environ.get("SLURMD_NODENAME", "")),
        cores=physical_cores(),
        gpus=gpu_count(request.variable("CUDA_VISIBLE_DEVICES", environ)),
        is_root=os.geteuid() == 0,
        has_fabric=any(glob.glob(f"{folder}/*") for folder in _FABRICS),
        master_port=_free_port(),
        starter=find_starter(environ),
        shm=_shared_memory(),
    )


def _shared_memory() -> SharedMemory:
    """Old files are looked for only if space is short: that means a look at all processes."""
    free_bytes, size_bytes = shared_memory.space()
    if free_bytes >= AMPLE_BYTES:
        return SharedMemory(free_bytes, size_bytes)
    return shared_memory_from(shared_memory.facts())


def own_path(path: str, prefix: str, base_prefix: str) -> str:
    """PATH with hvdrun's own folder first, so that `python` is the one that hvdrun is installed in,
    even if its virtual environment is not active (`.venv/bin/hvdrun python train.py`)."""
    path = path or os.defpath  # what the system uses without the variable
    folder = f"{prefix}/bin"
    if prefix == base_prefix or folder in path.split(":"):
        return path
    return f"{folder}:{path}"


def own_account() -> tuple[str, str]:
    """Name and home folder. Open MPI does not start without HOME, which cron and containers may not
    set."""
    try:
        account = pwd.getpwuid(os.getuid())
    except KeyError:  # a number without an account, as in some containers
        return str(os.getuid()), "/"
    return account.pw_name, account.pw_dir


def _working_directory() -> str:
    """The shell's name for it: behind an automounter's links the real path may exist only here."""
    logical = os.environ.get("PWD", "")
    try:
        if os.path.isabs(logical) and os.path.samefile(logical, "."):
            return logical
    except OSError:
        pass
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        raise UsageError("the working directory has been removed: cd to one that exists") from error


def _local_names(request: Request, node: str) -> frozenset[str]:
    """A name that the others know this machine by may be unknown to itself."""
    here = request.allocation.here if request.allocation else ""
    return local_names(node, hosts_file()) | ({here.lower()} if here else set())


def local_names(node: str, hosts_file: str) -> frozenset[str]:
    """This host's names and addresses, without asking a name server. `node`: its name in Slurm;
    `hosts_file`: the content of /etc/hosts."""
    name = socket.gethostname().lower()
    names = {"localhost", node.lower()} - {""}
    names |= {"127.0.0.1", "::1", *(str(found["address"]) for found in interfaces())}
    others: set[str] = set()
    for line in hosts_file.splitlines():
        address, *aliases = line.partition("#")[0].lower().split() or [""]
        if address in names or address.startswith("127."):
            names |= {address, *aliases}
        else:
            others.update(aliases)
    # In a host list, its own name may mean another machine: -H server2 is where ssh would go.
    return frozenset(names | ({name, name.partition(".")[0]} - others))


def hosts_file() -> str:
    try:
        with open("/etc/hosts", encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])
