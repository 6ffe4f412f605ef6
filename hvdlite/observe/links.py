"""What this rank has sent to other hosts, and for how long the network was busy with it.

The engine counts the bytes of its messages, by host. It can't tell how fast a link is: the time of
a message depends on when both ranks begin it, and on the messages before it. The kernel can. It
counts per TCP connection

    busy = the time in which bytes had been sent and were not yet acknowledged
    full = the part of it in which the peer had no room, because its program did not read

so the network gave at least bytes / busy. Bytes trickle through while the peer reads a little, so
bytes / (busy - full) may be more than the network gives: that is an upper bound only. See "How fast
links are" in docs/design/between-hosts.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from hvdlite import _core
from hvdlite.world import world
from hvdlite.world.teams import sent_bytes
from hvdrun.for_hvdlite import LEAST_BUSY_S, LEAST_OF_A_STEP, MOST_LINKS, Connection

# The local and the peer's address, and a number that tells connections between them apart.
Key = tuple[str, str, int]


class Counts(NamedTuple):
    """Of one connection: acknowledged bytes, and seconds."""

    bytes: int = 0
    busy: float = 0.0
    full: float = 0.0


class Traffic(NamedTuple):
    """Since the process began. sent: bytes, by the lowest rank of each other host. connections:
    each one that is open."""

    sent: Mapping[int, int] = {}
    connections: Mapping[Key, Counts] = {}


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
    return Traffic(sent, open_connections())


def open_connections() -> dict[Key, Counts]:
    """To other hosts; see `Traffic`."""
    found: dict[Key, Counts] = {}
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:  # no descriptor is left for it, or there is no /proc
        return {}
    for name in names:
        if (known := _core.tcp_connection(int(name))) is not None:
            local, peer, number, count, busy, full = known
            found[local, peer, number] = Counts(count, busy, full)
    return found


def sent_between(begin: Traffic, end: Traffic) -> tuple[tuple[int, int], ...]:
    """Those with most bytes; ascending."""
    # (Less than before, if another world has begun.)
    counts = {rank: max(0, count - begin.sent.get(rank, 0)) for rank, count in end.sent.items()}
    most = sorted(counts, key=counts.__getitem__)[-MOST_LINKS:]
    return tuple((rank, counts[rank]) for rank in sorted(most) if counts[rank])


def connections_between(begin: Traffic, end: Traffic, steps: int) -> tuple[Connection, ...]:
    """Those with most bytes; ascending. steps: how many the optimizer has made meanwhile."""
    found: dict[tuple[str, str], Connection] = {}
    for key, now in end.connections.items():
        before = begin.connections.get(key, Counts())
        if now.bytes < before.bytes:  # an old kernel: the ports of one that was closed
            before = Counts()
        if now.bytes > before.bytes:
            since = Counts(now.bytes - before.bytes, now.busy - before.busy, now.full - before.full)
            one = _one(key, since, steps)
            old = found.get(key[:2], one)
            found[key[:2]] = one if old is one else _together(old, one)
    most = sorted(found.values(), key=_bytes)[-MOST_LINKS:]
    return tuple(sorted(most))


def _one(key: Key, counts: Counts, steps: int) -> Connection:
    """Of a single connection."""
    count, busy, full = counts
    if count < LEAST_OF_A_STEP * steps:
        return Connection(*key[:2], count, 0.0, 0.0)
    rate = count / busy if busy >= LEAST_BUSY_S else 0.0
    return Connection(*key[:2], count, max(0.0, busy - full), rate)


def _together(one: Connection, other: Connection) -> Connection:
    """At the same time or by turns, nobody knows. So their rates don't add up."""
    return one._replace(
        bytes=one.bytes + other.bytes,
        busy=max(one.busy, other.busy),
        rate=max(one.rate, other.rate),
    )


def _bytes(connection: Connection) -> float:
    return connection.bytes
