"""Finds the networks that connect the hosts of a job. Goes by subnet, as interfaces have different
names on different hosts, and never by what a name suggests.

A subnet counts if every host has an address of its own in it: the bridge of containers or virtual
machines has the same address on all hosts, or exists only on some, and connects nothing. A network
that an ssh connection came through works; hvdrun tries the others by a connection from here.
"""

from __future__ import annotations

import errno
import functools
import select
import socket
import time
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_interface, ip_network

from hvdrun.plan.facts import HostFacts, Interface


@dataclass(frozen=True)
class Network:
    subnet: str
    members: Mapping[str, Interface]  # by host


@dataclass(frozen=True)
class Choice:
    """The networks for the ranks, and why the others are left out."""

    networks: tuple[Network, ...] = ()
    # host, interface, why it is left out
    excluded: tuple[tuple[str, Interface, str], ...] = ()
    # The subnets that connect hvdrun with the hosts; empty if ssh's addresses do not show it.
    control: tuple[str, ...] = ()
    # Hosts without any interface that the user asked for.
    without: tuple[str, ...] = ()

    @property
    def subnets(self) -> tuple[str, ...]:
        """Only those of IPv4: MPI's options accept no others."""
        return tuple(n.subnet for n in self.networks if ip_network(n.subnet).version == 4)

    @property
    def matters(self) -> bool:
        """Whether an interface is left out that an MPI would use."""
        return bool(self.subnets) and any(
            found.up and ip_address(found.address).version == 4 for _, found, _ in self.excluded
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The interfaces' names on all hosts."""
        return tuple(dict.fromkeys(i.name for n in self.networks for i in n.members.values()))

    @property
    def common_name(self) -> str:
        """The interface of a network that has the same name on every host, or ""."""
        hosts = {host for network in self.networks for host in network.members}
        for network in self.networks:
            names = {found.name for found in network.members.values()}
            if len(names) == 1 and hosts == set(network.members):
                return names.pop()
        return ""


@functools.cache  # called for each pair of hosts
def subnet_of(found: Interface) -> str:
    return str(ip_interface(f"{found.address}/{found.prefix}").network)


def choose(
    hosts: Mapping[str, HostFacts],
    here: HostFacts,
    reached: Mapping[str, bool],
    wanted: Sequence[str] = (),
    useless: Mapping[str, str] = types.MappingProxyType({}),
) -> Choice:
    """For the hosts of a job. `reached`: subnets that were tried from here, and whether they
    answered; `wanted`: the user's names or subnets, which alone count if there are any; `useless`:
    subnets in which hosts can't connect to each other, and why."""
    proven = _proven(hosts, here)
    tried = {subnet for subnet, _ in to_try(hosts, here)}
    members: dict[str, dict[str, Interface]] = {}
    excluded = []
    for host, facts in hosts.items():
        for found in facts.interfaces:
            if ip_address(found.address).is_loopback:
                continue
            subnet = subnet_of(found)
            if wanted:
                why = "" if _matches(found, wanted) else "--network-interfaces leaves it out"
            elif subnet in useless:
                why = useless[subnet]
            elif subnet in proven and found.address in proven[subnet]:
                why = ""
            else:
                why = _why_not(hosts, found, subnet)
                if not why and subnet in tried and not reached.get(subnet, True):
                    why = f"nothing answers in {subnet}"
            if why:
                excluded.append((host, found, why))
            else:
                members.setdefault(subnet, {})[host] = found
    seen = {host for found in members.values() for host in found}
    return Choice(
        tuple(Network(subnet, found) for subnet, found in members.items()),
        tuple(excluded),
        tuple(subnet for subnet in _control(hosts, here, proven) if subnet not in useless),
        tuple(host for host in hosts if host not in seen) if wanted else (),
    )


def to_try(hosts: Mapping[str, HostFacts], here: HostFacts) -> list[tuple[str, list[str]]]:
    """The subnets of this machine that no ssh connection has proven, each with the other hosts'
    addresses in it."""
    proven = _proven(hosts, here)
    own = {subnet_of(i): i.address for i in here.interfaces if i.up}
    tries: dict[str, list[str]] = {}
    for facts in hosts.values():
        for found in facts.interfaces:
            subnet = subnet_of(found)
            if subnet in own and subnet not in proven and not _why_not(hosts, found, subnet):
                tries.setdefault(subnet, [])
                if found.address != own[subnet]:
                    tries[subnet].append(found.address)
    return [(subnet, addresses) for subnet, addresses in tries.items() if addresses]


def _matches(found: Interface, wanted: Sequence[str]) -> bool:
    for word in wanted:
        if "/" in word:
            network = ip_network(word, strict=False)
            if ip_address(found.address) in network:
                return True
        elif word in (found.name, found.address):
            return True
    return False


def _proven(hosts: Mapping[str, HostFacts], here: HostFacts) -> dict[str, set[str]]:
    """Subnets that an ssh connection came through, with the addresses at both ends."""
    ends = {a for facts in hosts.values() for a in (facts.ssh_address, facts.ssh_client) if a}
    proven: dict[str, set[str]] = {}
    for facts in (*hosts.values(), here):
        for found in facts.interfaces:
            if found.address in ends:
                proven.setdefault(subnet_of(found), set()).add(found.address)
    return proven


def _control(
    hosts: Mapping[str, HostFacts], here: HostFacts, proven: Mapping[str, set[str]]
) -> tuple[str, ...]:
    own = {found.address for found in here.interfaces}
    clients = {facts.ssh_client for facts in hosts.values() if facts.ssh_client}
    known = {i.address for facts in hosts.values() for i in facts.interfaces}
    servers = {facts.ssh_address for facts in hosts.values() if facts.ssh_address}
    if not clients or not clients <= own or not servers <= known:
        return ()  # addresses were translated on the way, so that the subnets are not known
    return tuple(subnet for subnet in proven if ip_network(subnet).version == 4)


def _why_not(hosts: Mapping[str, HostFacts], found: Interface, subnet: str) -> str:
    if not found.up:
        return "it is switched off"
    if not found.running:
        return "nothing is connected to it"
    if found.tunnel:
        return "it is a tunnel"
    have: dict[str, list[str]] = {}
    for host, facts in hosts.items():
        for other in facts.interfaces:
            if other.address == found.address:
                have.setdefault(found.address, []).append(host)
    twins = have[found.address]
    if len(twins) > 1 and len({hosts[host].hostname for host in twins}) > 1:
        return f"{' and '.join(twins[:3])} have the same address {found.address}"
    there = [h for h, f in hosts.items() if any(subnet_of(i) == subnet for i in f.interfaces)]
    if len(there) < len(hosts):
        return f"{subnet} is only on {' and '.join(there[:3])}"
    return ""


CONNECT_S = 1.0  # an answer comes much sooner, or never


def connect_all(addresses: Iterable[str], port: int) -> dict[str, bool]:
    """By address: whether a host has answered, if only with a refusal."""
    poll = select.poll()
    pending: dict[int, tuple[str, socket.socket]] = {}
    reached: dict[str, bool] = {}
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        reached[address] = False
        try:
            sock.connect((address, port))
        except BlockingIOError:
            poll.register(sock, select.POLLOUT)
            pending[sock.fileno()] = (address, sock)
            continue
        except OSError as error:
            reached[address] = isinstance(error, ConnectionRefusedError)
        sock.close()
    deadline = time.monotonic() + CONNECT_S
    while pending and (left := deadline - time.monotonic()) > 0:
        for fd, _ in poll.poll(left * 1000):
            address, sock = pending.pop(fd)
            error_number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            reached[address] = error_number in (0, errno.ECONNREFUSED)
            poll.unregister(fd)
            sock.close()
    for _, sock in pending.values():
        sock.close()
    return reached
