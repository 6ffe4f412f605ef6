"""Which hosts connect to which before a job starts, and what the results mean.

A firewall between hosts may let only ssh through. So the hosts connect to each other as MPI will:
over the networks that it gets, to ports of the range that it uses. Two kinds of connections count:
between hosts with ranks, both ways, and from each host to hvdrun's, where mpirun listens for its
daemons.

With many hosts, each connects to those 1, 2, 4, 8 … places further and back in the list, and to
the first one and back. So every group of hosts has connections to the rest, wherever a firewall
divides them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from hvdrun.agent import connecting
from hvdrun.agent.connecting import PROOF_S, RESULTS
from hvdrun.errors import HostSetupError
from hvdrun.plan.facts import HostFacts, LocalFacts
from hvdrun.plan.flavour import Flavour
from hvdrun.plan.hosts import few
from hvdrun.plan.request import Request
from hvdrun.preflight.ask_hosts import Conversation
from hvdrun.preflight.cache import AnswerCache
from hvdrun.preflight.findings import Finding
from hvdrun.preflight.interface_options import daemons_call
from hvdrun.preflight.networks import Choice, Network, subnet_of
from hvdrun.preflight.ports import Ports, Range

HERE = ""  # hvdrun's machine
MOST_HOSTS = 100  # of a longer list, only the first are tested

_HOW = {
    connecting.REFUSED: "refused, so a firewall rejects the packets",
    connecting.NO_ROUTE: "there is no route, or a firewall rejects the packets",
    connecting.SILENT: "no answer, so a firewall drops the packets",
    connecting.STRANGER: "another program answers there: is the address translated on the way?",
    connecting.UNPROVEN: "it accepts the connection, but sends nothing",
}


@dataclass(frozen=True)
class Connection:
    source: str  # a host, or HERE
    target: str
    address: str
    ports: Range
    subnet: str  # of the address
    is_control: bool = False  # of MPI's daemons, not of ranks


def places(count: int) -> set[tuple[int, int]]:
    """Who connects to whom, by their places in the list."""
    chosen = {(0, i) for i in range(1, count)}
    step = 1
    while step < count:
        chosen |= {(i, (i + step) % count) for i in range(count)}
        step *= 2
    pairs = chosen | {(j, i) for i, j in chosen}
    return {(i, j) for i, j in pairs if i != j}


def between_ranks(
    hosts: Mapping[str, HostFacts], local: Iterable[str], choice: Choice, ports: Ports
) -> list[Connection]:
    """`local`: the names of this machine among the hosts."""
    machines: dict[object, str] = {}
    for name, facts in hosts.items():
        machines.setdefault((facts.hostname, facts.interfaces), name)
    names = list(machines.values())[:MOST_HOSTS]
    here = set(local)
    found = []
    for i, j in sorted(places(len(names))):
        one, other = names[i], names[j]
        for network in _common(choice.networks, one, other):
            found.append(
                Connection(
                    HERE if one in here else one,
                    HERE if other in here else other,
                    network.members[other].address,
                    ports.ranks,
                    network.subnet,
                )
            )
    return found


def _common(networks: Sequence[Network], one: str, other: str) -> list[Network]:
    """The networks for these two: those that both are in, else those of the target; only those of
    IPv4 if there are any, as MPIs do."""
    there = [network for network in networks if other in network.members]
    both = [network for network in there if one in network.members]
    found = both or there
    version_4 = [n for n in found if ip_address(n.members[other].address).version == 4]
    return version_4 or found


def of_daemons(
    hosts: Mapping[str, HostFacts],
    local: Iterable[str],
    here: HostFacts,
    addresses: Mapping[str, Iterable[str]],
    ports: Ports,
) -> list[Connection]:
    """From each other host to this machine's addresses, by host."""
    own = {i.address: subnet_of(i) for i in here.interfaces if i.up}
    remote = [name for name in hosts if name not in set(local)]
    return [
        Connection(name, HERE, address, ports.control, own[address], True)
        for name in remote[:MOST_HOSTS]
        for address in dict.fromkeys(addresses.get(name, ()))
        if address in own
    ]


Results = Mapping[Connection, str]


def useless_subnets(results: Results, here: str) -> dict[str, str]:
    """The subnets that do not connect all hosts with ranks, with the reason; only if other subnets
    connect them all. Then MPI needs to be told."""
    ranks = {c: result for c, result in results.items() if not c.is_control}
    bad: dict[str, str] = {}
    for connection, result in ranks.items():
        if result != connecting.CONNECTED:
            why = f"{connection.source or here} can't connect to {connection.address}"
            bad.setdefault(connection.subnet, why)
    pairs = {(c.source, c.target) for c in ranks}
    good = {(c.source, c.target) for c in ranks if c.subnet not in bad}
    return bad if pairs == good else {}


def judge(
    hosts: Sequence[str],
    local: Iterable[str],
    results: Results,
    left_out: Iterable[str],
    ports: Ports,
    ranks_need_tcp: bool,
    hostname: str,
) -> Iterator[Finding]:
    """A finding per host: good, or by which hosts it can't be reached. `local`: the names of this
    machine among them; `left_out`: subnets that MPI does not get; `hostname`: this machine's."""
    used = {c: r for c, r in results.items() if c.is_control or c.subnet not in set(left_out)}
    reached = {_key(c) for c, r in used.items() if r == connecting.CONNECTED}
    own = list(local)
    # What concerns this machine is said with the first host, if it is no host itself.
    here = own[0] if own else hosts[0]
    named = {HERE: own[0] if own else hostname}
    for host in hosts:
        ends = {host, *([HERE] if host == here else [])}
        mine = {c: r for c, r in used.items() if ends & {c.source, c.target}}
        if not mine or (host in own and host != here):
            continue
        failed = {c: r for c, r in mine.items() if c.target in ends and r != connecting.CONNECTED}
        cut_off = {c: r for c, r in failed.items() if _key(c) not in reached}
        if cut_off:
            yield from _cut_off(host, cut_off, ports, ranks_need_tcp, named)
        elif ranks := {c: r for c, r in failed.items() if not c.is_control}:
            text = _by_whom(ranks, named) + "; over another network it can"
            remedy = "leave that network out with --network-interfaces"
            yield Finding(host, "connections", text, remedy)
        else:
            itself = {HERE} if host in own else {host}
            others = {
                n for c in mine if itself & {c.source, c.target} for n in (c.source, c.target)
            }
            names = sorted(named.get(name, name) for name in others - itself)
            text = f"TCP between it and {few(names)}"
            yield Finding(host, "connections", text)


def _key(connection: Connection) -> tuple[str, str, bool]:
    return connection.source, connection.target, connection.is_control


def _cut_off(
    host: str,
    cut_off: Results,
    ports: Ports,
    ranks_need_tcp: bool,
    named: Mapping[str, str],
) -> Iterator[Finding]:
    """One finding for each way in which it fails."""
    needed = {c: r for c, r in cut_off.items() if c.is_control or ranks_need_tcp}
    group = needed or cut_off
    remedy = (
        f"open TCP between the hosts, both ways ({ports.which}), or choose another network with"
        f" --network-interfaces; to use fewer ports: {ports.limit}"
    )
    for result in dict.fromkeys(group.values()):
        same = {c: r for c, r in group.items() if r == result}
        yield Finding(
            host, "connections", _by_whom(same, named), remedy, HostSetupError if needed else None
        )


def _by_whom(failed: Results, named: Mapping[str, str]) -> str:
    result = next(iter(failed.values()))
    sources = list(dict.fromkeys(named.get(c.source, c.source) for c in failed))
    addresses = list(dict.fromkeys(c.address for c in failed))
    return f"{few(sources)} can't connect to {few(addresses)} over TCP: {_HOW[result]}"


LISTEN_S = 5.0


class ConnectionTest:
    """The test of one job's hosts. `local`: the names of this machine among them; `key`: for the
    cache, everything that the result depends on."""

    def __init__(
        self,
        request: Request,
        flavour: Flavour,
        facts: LocalFacts,
        here: HostFacts,
        local: Sequence[str],
        ports: Ports,
        key: object,
    ) -> None:
        self.request = request
        self.flavour = flavour
        self.facts = facts
        self.here = here
        self.local = local
        self.ports = ports
        self.key = [key, request.network_interfaces]
        self.is_known = False
        self.useless: dict[str, str] = {}  # subnets that MPI must not get, and why

    def remember(self, cache: AnswerCache) -> None:
        useless = cache.get(self.key)
        if isinstance(useless, dict):
            self.is_known, self.useless = True, useless

    def run(
        self,
        conversation: Conversation,
        hosts: Mapping[str, HostFacts],
        choice: Choice,
        cache: AnswerCache,
    ) -> list[Finding]:
        """What is found; puts a good result into the cache. `hosts`: all of the job, in order."""
        local, ports, facts = self.local, self.ports, self.facts
        calls = daemons_call(self.flavour, choice, self.request, facts, hosts, self.here)
        planned = between_ranks(hosts, local, choice, ports)
        planned += of_daemons(hosts, local, self.here, calls, ports)
        results = run_test(conversation, planned)
        if not self.request.network_interfaces:
            here = local[0] if local else facts.hostname
            self.useless = useless_subnets(results, here)
        found = judge(
            *(list(hosts), local, results, self.useless, ports),
            ranks_need_tcp=not facts.has_fabric,
            hostname=facts.hostname,
        )
        findings = list(found)
        if set(results) == set(planned) and not any(finding.remedy for finding in findings):
            cache.put(self.key, self.useless)
        return findings


Listener = tuple[str, Range]  # an address of the host that listens, and its ports


def run_test(hosts: Conversation, planned: Sequence[Connection]) -> dict[Connection, str]:
    """The results of those connections whose both ends took part in the test. The secret goes to
    the hosts through the commands' input: it stands in no command line and in no file."""
    wanted: dict[str, list[Listener]] = {}
    for connection in planned:
        listeners = wanted.setdefault(connection.target, [])
        if (listener := (connection.address, connection.ports)) not in listeners:
            listeners.append(listener)
    orders: dict[str, object] = {
        host: {"listen": [[address, ports.low, ports.high] for address, ports in listeners]}
        for host, listeners in wanted.items()
    }
    ports = _ports(wanted, hosts.order(orders, LISTEN_S))
    calls: dict[str, list[Connection]] = {host: [] for host in wanted}
    for connection in planned:
        if (connection.target, connection.address, connection.ports) in ports:
            calls.setdefault(connection.source, []).append(connection)
    secret = os.urandom(32).hex()
    orders = {
        host: {
            "secret": secret,
            "connect": [(c.address, ports[c.target, c.address, c.ports]) for c in mine],
        }
        for host, mine in calls.items()
    }
    answers = hosts.order(orders, PROOF_S + LISTEN_S)
    told = {host: _results(calls[host], answer) for host, answer in answers.items()}
    return {
        connection: told[connection.source][connection]
        for connection in planned
        if connection in told.get(connection.source, {}) and connection.target in told
    }


def _ports(
    wanted: Mapping[str, Sequence[Listener]], answers: Mapping[str, Mapping[str, Any]]
) -> dict[tuple[str, str, Range], int]:
    """Without those that a host could not listen on."""
    found = {}
    for host, answer in answers.items():
        ports = answer.get("listening")
        if isinstance(ports, list) and len(ports) == len(wanted[host]):
            for (address, wish), port in zip(wanted[host], ports, strict=True):
                if isinstance(port, int) and 0 < port < 65536:
                    found[host, address, wish] = port
    return found


def _results(calls: Sequence[Connection], answer: Mapping[str, Any]) -> dict[Connection, str]:
    results = answer.get("results")
    if not isinstance(results, list) or len(results) != len(calls):
        return {}
    pairs = zip(calls, results, strict=True)
    return {connection: result for connection, result in pairs if result in RESULTS}
