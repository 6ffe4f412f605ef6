"""The TCP ports that each MPI listens on: its own defaults, or the user's settings. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdrun.plan.flavour import OPENMPI, Flavour
from hvdrun.plan.request import Request

EPHEMERAL = "any free port (32768-60999 unless net.ipv4.ip_local_port_range differs)"


@dataclass(frozen=True)
class Range:
    low: int = 0  # 0: the kernel chooses
    high: int = 0

    def __str__(self) -> str:
        """After `on`."""
        return f"ports {self.low}-{self.high}" if self.low else EPHEMERAL


@dataclass(frozen=True)
class Ports:
    ranks: Range
    control: Range  # of mpirun
    limit: str  # the options that limit them

    @property
    def which(self) -> str:
        if self.ranks == self.control:
            return f"ranks and mpirun listen on {self.ranks}"
        return f"ranks listen on {self.ranks}, mpirun on {self.control}"


# Open MPI's defaults.
_MIN, _COUNT = 1024, 64511
# By the order in which they count; each with its lowest and its highest port.
_RANKS = ("UCX_TCP_PORT_RANGE", "MPICH_PORT_RANGE", "MPIR_CVAR_PORT_RANGE")
_CONTROL = ("MPIEXEC_PORT_RANGE", "MPICH_PORT_RANGE")


def ports_of(flavour: Flavour, request: Request, environ: Mapping[str, str]) -> Ports:
    if flavour.kind == OPENMPI:
        return _openmpi(flavour, request, environ)
    return Ports(
        _first_range(request, environ, _RANKS),
        _first_range(request, environ, _CONTROL),
        "-x UCX_TCP_PORT_RANGE=40000-40999 (ranks) and MPIEXEC_PORT_RANGE=41000:41099 (mpirun)",
    )


def _openmpi(flavour: Flavour, request: Request, environ: Mapping[str, str]) -> Ports:
    def value(name: str) -> str:
        in_words = _after(request.mpi_args, name)
        given = [in_words, *(environ.get(f"{p}_MCA_{name}", "") for p in ("PRTE", "OMPI"))]
        return next(filter(None, given), "")

    low = _number(value("btl_tcp_port_min_v4")) or _MIN
    high = low + (_number(value("btl_tcp_port_range_v4")) or _COUNT) - 1
    option = "--prtemca" if flavour.major >= 5 else "--mca"
    return Ports(
        Range(low, min(high, 65535)),
        _range(value("oob_tcp_static_ipv4_ports") or value("oob_tcp_dynamic_ipv4_ports")),
        "--mpi-args='--mca btl_tcp_port_min_v4 40000 --mca btl_tcp_port_range_v4 1000"
        f" {option} oob_tcp_dynamic_ipv4_ports 41000-41099'",
    )


def _after(words: Sequence[str], name: str) -> str:
    return next((value for word, value in itertools.pairwise(words) if word == name), "")


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and 0 < int(text) < 65536 else 0


def _first_range(request: Request, environ: Mapping[str, str], names: Sequence[str]) -> Range:
    found = (_range(request.variable(name, environ) or "") for name in names)
    return next((ports for ports in found if ports.low), Range())


def _range(text: str) -> Range:
    """'40000-40999', '40000:40999', or a list of them, of which the first counts."""
    match = re.match(r"(\d{1,5})(?:[-:](\d{1,5}))?", text)
    if not match:
        return Range()
    low, high = _number(match[1]), _number(match[2] or match[1])
    return Range(low, max(low, high)) if low else Range()
