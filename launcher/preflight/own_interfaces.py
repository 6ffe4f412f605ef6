"""Whether this machine has an interface that the user has asked for, where all ranks run here."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from ipaddress import ip_address, ip_network

from hvdrun.errors import HostSetupError
from hvdrun.machine.interfaces import interfaces
from hvdrun.plan.facts import LocalFacts
from hvdrun.plan.job_hosts import is_remote
from hvdrun.plan.request import Request


def check(request: Request, facts: LocalFacts) -> None:
    """Raises HostSetupError if none of `--network-interfaces` is of this machine, loopback
    included."""
    wanted = request.network_interfaces  # names, addresses or subnets
    if not wanted or is_remote(request, facts):
        return
    names = [name for _, name in socket.if_nameindex()]
    addresses = ["127.0.0.1", "::1", *(str(found["address"]) for found in interfaces())]
    if not any(_is_here(word, names, addresses) for word in wanted):
        raise HostSetupError(
            f"--network-interfaces {','.join(wanted)}: this machine has no such interface; it has "
            f"{', '.join(names)} (`ip address` lists their addresses)"
        )


def _is_here(word: str, names: Sequence[str], addresses: Sequence[str]) -> bool:
    if "/" in word:
        return any(ip_address(own) in ip_network(word, strict=False) for own in addresses)
    return word in names or word in addresses
