"""The facts that the command depends on, which `facts` gathers, and the names of hosts on this
machine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hvdrun.plan.flavour import MPICH
from hvdrun.plan.host_facts import HostFacts, SharedMemory
from hvdrun.plan.hosts import Host
from hvdrun.plan.starter import Starter

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
