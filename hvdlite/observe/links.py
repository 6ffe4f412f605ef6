"""What this rank has sent to other hosts, and for how long the network was busy with it.

The engine counts the bytes of its messages, by host. How fast a link is, it can't tell: how long a
message takes depends on when both ranks have come to it, and on the messages before it. The kernel
knows better. It counts per TCP connection

    busy = the time in which bytes had been sent and were not yet acknowledged,
           but for the part in which the peer had no room, because its program did not read

so it gave at least bytes / busy. See "How fast links are" in docs/design/between-hosts.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from hvdlite import _core
from hvdlite.world import world
from hvdlite.world.teams import sent_bytes
from hvdrun.for_hvdlite import MOST_LINKS, Connection


class Traffic(NamedTuple):
    """Since the process began. sent: bytes, by the lowest rank of each other host. connections:
    bytes and busy seconds, by local and peer's address."""

    sent: Mapping[int, int] = {}
    connections: Mapping[tuple[str, str], tuple[int, float]] = {}


def read() -> Traffic:
    """Nothing in a world of one host, or in a forked child. Some microseconds per open file."""
    active = world.active
    if active is None or len(active.placement.hosts) < 2:
        return Traffic()
    leaders = {rank: ranks[0] for ranks in active.placement.hosts for rank in ranks}
    sent: dict[int, int] = {}
    try:
        counts = sent_bytes.by_rank()
    except RuntimeError:  # a forked child
        return Traffic()
    for rank, count in counts.items():
        sent[leaders[rank]] = sent.get(leaders[rank], 0) + count
    return Traffic(sent, _connections())


def _connections() -> dict[tuple[str, str], tuple[int, float]]:
    found: dict[tuple[str, str], tuple[int, float]] = {}
    for name in os.listdir("/proc/self/fd"):
        if (known := _core.tcp_connection(int(name))) is not None:
            local, peer, count, busy = known
            other_count, other_busy = found.get((local, peer), (0, 0.0))
            # At the same time, they share the link.
            found[local, peer] = other_count + count, max(busy, other_busy)
    return found


def sent_between(begin: Traffic, end: Traffic) -> tuple[tuple[int, int], ...]:
    """Those with most bytes; ascending."""
    # (Less than before, if another world has begun.)
    counts = {rank: max(0, count - begin.sent.get(rank, 0)) for rank, count in end.sent.items()}
    most = sorted(counts, key=counts.__getitem__)[-MOST_LINKS:]
    return tuple((rank, counts[rank]) for rank in sorted(most) if counts[rank])


def connections_between(begin: Traffic, end: Traffic) -> tuple[Connection, ...]:
    """Those with most bytes; ascending."""
    found = []
    for addresses, (count, busy) in sorted(end.connections.items()):
        count_before, busy_before = begin.connections.get(addresses, (0, 0.0))
        if count >= count_before:  # else a connection was closed meanwhile
            count, busy = count - count_before, max(0.0, busy - busy_before)
        if count:
            found.append(Connection(*addresses, count, busy))
    most = sorted(found, key=_bytes)[-MOST_LINKS:]
    return tuple(sorted(most))


def _bytes(connection: Connection) -> float:
    return connection.bytes
