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
import threading
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
    each one that is open. carried: bytes and busy seconds between two addresses, see `Sums`."""

    sent: Mapping[int, int] = {}
    connections: Mapping[Key, Counts] = {}
    carried: Mapping[tuple[str, str], tuple[int, float]] = {}


class Sums:
    """What TCP has carried between each two addresses, look by look. The numbers never fall,
    whatever is closed: they are counters to other programs, too.

    Bytes add up. Seconds of connections that are busy at the same time don't: of each stretch of
    time between two looks, those of the busiest one count, without those in which its peer had no
    room, and only of connections that have carried LEAST_OF_A_STEP per step in it. A stretch has a
    step or more, once there are steps. What a connection carries after the last look at it, before
    it is closed, is not known.
    """

    def __init__(self) -> None:
        self.steps = 0  # of all optimizers
        self._lock = threading.Lock()
        # Where the stretch began, and the latest counts, also of those closed in it.
        self._steps_before = 0
        self._before: dict[Key, Counts] = {}
        self._latest: dict[Key, Counts] = {}
        self._carried: dict[tuple[str, str], tuple[int, float]] = {}

    def look(self, now: Mapping[Key, Counts] | None) -> Mapping[tuple[str, str], tuple[int, float]]:
        """now: the open connections; None: they can't be listed at the moment. Any thread."""
        with self._lock:
            for key, counts in (now or {}).items():
                before = self._latest.get(key, Counts())
                if counts.bytes < before.bytes:  # an old kernel: the ports of one that was closed
                    before = self._before[key] = Counts()
                self._latest[key] = counts
                self._add(key, counts.bytes - before.bytes, 0.0)
            if now is not None and (self.steps > self._steps_before or not self.steps):
                self._end_stretch(now)
            return dict(self._carried)

    def _end_stretch(self, now: Mapping[Key, Counts]) -> None:
        least = LEAST_OF_A_STEP * (self.steps - self._steps_before)
        busiest: dict[tuple[str, str], tuple[float, Key]] = {}
        for key, counts in self._latest.items():
            since = _since(self._before.get(key, Counts()), counts)
            if since.bytes >= least:
                one = since.busy - since.full, key
                busiest[key[:2]] = max(busiest.get(key[:2], one), one)
        for busy, key in busiest.values():
            self._add(key, 0, max(0.0, busy))
        self._steps_before = self.steps
        self._before, self._latest = dict(now), dict(now)

    def _add(self, key: Key, count: int, busy: float) -> None:
        old_count, old_busy = self._carried.get(key[:2], (0, 0.0))
        self._carried[key[:2]] = old_count + count, old_busy + busy


_sums = Sums()


def step_ended() -> None:
    _sums.steps += 1


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
    found = open_connections()
    return Traffic(sent, found or {}, _sums.look(found))


def open_connections() -> dict[Key, Counts] | None:
    """To other hosts; see `Traffic`. None: they can't be listed."""
    found: dict[Key, Counts] = {}
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:  # no descriptor is left for it, or there is no /proc
        return None
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
    rates: dict[tuple[str, str], float] = {}
    for key, now in end.connections.items():
        before = begin.connections.get(key, Counts())
        if now.bytes < before.bytes:  # an old kernel: the ports of one that was closed
            before = Counts()
        # They may be busy at the same time or in turns. So their rates don't add up.
        rates[key[:2]] = max(rates.get(key[:2], 0.0), _rate(_since(before, now), steps))
    found = []
    for pair, (count, busy) in end.carried.items():
        count_before, busy_before = begin.carried.get(pair, (0, 0.0))
        if count > count_before:
            since = count - count_before, busy - busy_before
            found.append(Connection(*pair, *since, rates.get(pair, 0.0)))
    return tuple(sorted(sorted(found, key=_bytes)[-MOST_LINKS:]))


def _since(before: Counts, now: Counts) -> Counts:
    return Counts(now.bytes - before.bytes, now.busy - before.busy, now.full - before.full)


def _rate(counts: Counts, steps: int) -> float:
    """Of a single connection; 0: not known."""
    is_known = counts.bytes >= LEAST_OF_A_STEP * steps and counts.busy >= LEAST_BUSY_S
    return counts.bytes / counts.busy if is_known else 0.0


def _bytes(connection: Connection) -> float:
    return connection.bytes
