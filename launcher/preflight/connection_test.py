"""Lets the hosts connect to each other: the orders to the probes that wait on them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from hvdrun.agent.connecting import PROOF_S, RESULTS
from hvdrun.preflight.ask_hosts import Conversation
from hvdrun.preflight.connections import Connection
from hvdrun.preflight.ports import Range

LISTEN_S = 5.0
Listener = tuple[str, Range]  # an address of the host that listens, and its ports


def run_test(hosts: Conversation, connections: Sequence[Connection]) -> dict[Connection, str]:
    """The results of those connections whose both ends took part in the test. The secret goes to
    the hosts through the commands' input: it stands in no command line and in no file."""
    wanted: dict[str, list[Listener]] = {}
    for connection in connections:
        listeners = wanted.setdefault(connection.target, [])
        if (listener := (connection.address, connection.ports)) not in listeners:
            listeners.append(listener)
    orders: dict[str, object] = {
        host: {"listen": [[address, ports.low, ports.high] for address, ports in listeners]}
        for host, listeners in wanted.items()
    }
    ports = _ports(wanted, hosts.order(orders, LISTEN_S))
    calls: dict[str, list[Connection]] = {host: [] for host in wanted}
    for connection in connections:
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
        connection: result
        for results in told.values()
        for connection, result in results.items()
        if told.get(connection.target) is not None
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
