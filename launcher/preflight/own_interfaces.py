"""Whether this machine has an interface that the user has asked for, where all ranks run here."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from ipaddress import ip_address, ip_network

from hvdrun.errors import HostSetupError
from hvdrun.machine.interfaces import interfaces


def check(wanted: Sequence[str]) -> None:
    """wanted: names, addresses or subnets of `--network-interfaces`.

    Raises HostSetupError if none is of this machine, loopback included.
    """
    names = [name for _, name in socket.if_nameindex()]
    addresses = ["127.0.0.1", "::1", *(str(found["address"]) for found in interfaces())]
    if wanted and not any(_is_here(word, names, addresses) for word in wanted):
        raise HostSetupError(
            f"--network-interfaces {','.join(wanted)}: this machine has no such interface; it has "
            f"{', '.join(names)} (`ip address` lists their addresses)"
        )


def _is_here(word: str, names: Sequence[str], addresses: Sequence[str]) -> bool:
    if "/" in word:
        return any(ip_address(own) in ip_network(word, strict=False) for own in addresses)
    return word in names or word in addresses
