"""Lets the hosts connect to each other: the orders to the probes that wait on them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from hvdrun.agent.connecting import PROOF_S, RESULTS
from hvdrun.plan.facts import HostFacts, LocalFacts
from hvdrun.plan.flavour import Flavour
from hvdrun.plan.request import Request
from hvdrun.preflight import connections
from hvdrun.preflight.ask_hosts import Conversation
from hvdrun.preflight.cache import AnswerCache
from hvdrun.preflight.connections import Connection
from hvdrun.preflight.findings import Finding
from hvdrun.preflight.interface_options import daemons_call
from hvdrun.preflight.networks import Choice
from hvdrun.preflight.ports import Ports, Range

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
        planned = connections.between_ranks(hosts, local, choice, ports)
        planned += connections.of_daemons(hosts, local, self.here, calls, ports)
        results = run_test(conversation, planned)
        if not self.request.network_interfaces:
            here = local[0] if local else facts.hostname
            self.useless = connections.useless_subnets(results, here)
        found = connections.judge(
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
