"""What preflight has learned of a host, as values. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Interface:
    """One address of a host."""

    name: str
    address: str
    prefix: int  # bits of the subnet
    up: bool = True  # switched on; MPI looks at no more
    running: bool = True  # and something is at the other end of the cable
    tunnel: bool = False  # a VPN's: it carries packets, and slowly


@dataclass(frozen=True)
class HostFacts:
    """The answer of one host. A text about something that must be there is "" where it is, else
    the reason why not; None where nobody asked."""

    hostname: str
    python: str  # version, as in 3.11.7
    machine: str  # as uname says: x86_64
    packages: Mapping[str, str]  # of those asked for, the versions of those that are there
    mpirun: str | None  # what `mpirun --version` prints there; None: it is a package, or missing
    mpirun_missing: str
    cwd: str
    program: str
    script: str | None
    cores: int  # physical ones
    gpus: int
    memory_bytes: int | None  # free; None: unknown
    shm_bytes: int | None  # free in /dev/shm; None: there is none
    interfaces: tuple[Interface, ...]
    resolved: Mapping[str, tuple[str, ...]]  # name → addresses, empty where it is unknown there
    ssh_address: str = ""  # the host's own end of the ssh connection
    ssh_client: str = ""  # the other end, as the host sees it
    clock_skew_s: float = 0.0  # against hvdrun's clock, beyond what the way explains

    @property
    def slots(self) -> int:
        """How many ranks it runs where nobody says: one per GPU, else per physical core."""
        return self.gpus or self.cores


def from_answer(answer: Mapping[str, Any], clock_skew_s: float = 0.0) -> HostFacts:
    """Of what `probe.answer` gives. Raises KeyError, TypeError or ValueError for anything else."""
    fields = {name: value for name, value in answer.items() if name != "time_s"}
    fields["interfaces"] = tuple(Interface(**found) for found in answer["interfaces"])
    fields["resolved"] = {name: tuple(found) for name, found in answer["resolved"].items()}
    return HostFacts(**fields, clock_skew_s=clock_skew_s)
