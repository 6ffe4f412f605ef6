"""The facts that preflight has asked a host for, as values. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
    reason why not; None if nobody asked."""

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
