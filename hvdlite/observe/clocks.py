"""The clocks of a job's hosts: how far each is from rank 0's, measured by rounds of messages.

A round is a barrier; each rank notes on its own clock when it called it, and when it returned. No
rank returns before every other one has called. With o = this clock - rank 0's, that gives

    own begin - rank 0's end  <=  o  <=  own end - rank 0's begin

The shortest of many rounds leave the smallest interval, whose middle is the offset, and half of
whose width bounds the error: no assumption about the network is made. The same holds for every
collective in a timeline.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

# A barrier between hosts takes some 50 us.
ROUNDS = 24

Round = tuple[int, int]  # begin and end, in ns


class Offset(NamedTuple):
    """A clock minus rank 0's, and by how much that may be wrong; in ns."""

    offset: float
    error: float


SAME = Offset(0, 0)


def as_seen(monotonic_ns: int) -> int:
    """What a time of CLOCK_MONOTONIC is on this process's clock: the same. Tests shift it."""
    return monotonic_ns


def now_ns() -> int:
    return as_seen(time.monotonic_ns())


def identity(host: int) -> tuple[object, ...]:
    """Processes with the same one have the same CLOCK_MONOTONIC. host: the number of this host."""
    try:
        namespace = os.readlink("/proc/self/ns/time")
    except OSError:  # a kernel without time namespaces
        namespace = ""
    return host, namespace


def rounds(barrier: Callable[[], None]) -> list[Round]:
    """What this rank sees of some rounds. All ranks call it together."""
    seen = []
    for _ in range(ROUNDS):
        begin = now_ns()
        barrier()
        seen.append((begin, now_ns()))
    return seen


def offset(pairs: Iterable[tuple[tuple[float, float], tuple[float, float]]]) -> Offset:
    """pairs: of each round, what rank 0 and what the other clock has seen; at least one."""
    at_least, at_most = [], []
    for (begin_0, end_0), (begin, end) in pairs:
        at_least.append(begin - end_0)
        at_most.append(end - begin_0)
    low, high = max(at_least), min(at_most)
    # (They cross by what the clocks drift apart in these rounds.)
    return Offset((low + high) / 2, abs(high - low) / 2)


def offsets(identities: list[tuple[object, ...]], seen_by_rank: list[list[Round]]) -> list[Offset]:
    """Of each rank's clock. Ranks on one clock have the same offset, and share their rounds."""
    found: dict[tuple[object, ...], Offset] = {identities[0]: SAME}
    for own in identities:
        if own not in found:
            found[own] = offset(
                pair
                for other, seen in zip(identities, seen_by_rank, strict=True)
                if other == own
                for pair in zip(seen_by_rank[0], seen, strict=True)
            )
    return [found[own] for own in identities]


def between(start: tuple[float, Offset], end: tuple[float, Offset], at: float) -> Offset:
    """The offset at a time, from those measured at two times, if the clocks drift steadily."""
    (start_at, first), (end_at, last) = start, end
    share = (at - start_at) / (end_at - start_at) if end_at > start_at else 0.0
    drifted = first.offset + share * (last.offset - first.offset)
    return Offset(drifted, max(first.error, last.error))
