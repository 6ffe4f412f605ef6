"""From times to figures. Pure."""

import statistics
from collections.abc import Mapping, Sequence

OURS = "hvdlite"
FLOOR = "no communication"  # what no contender can beat
BOUND = "copy"  # each rank reads and writes the buffer once, all at once: likewise


def slowest(times_s: Sequence[Sequence[float]]) -> list[float]:
    """times_s[rank][round] → the time of the slowest rank in each round."""
    return [max(of_round) for of_round in zip(*times_s, strict=True)]


def algbw(size_bytes: int, time_s: float) -> float:
    """Bytes of the buffer per second: what a user sees."""
    return size_bytes / time_s


def busbw(size_bytes: int, time_s: float, ranks: int) -> float:
    """algbw · 2(n-1)/n: what each rank must at least send, per second.

    Comparable for any number of ranks, as an allreduce sends 2(n-1)/n times the buffer at best.
    """
    return algbw(size_bytes, time_s) * 2 * (ranks - 1) / ranks


def medians(times_s: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.median(times) for name, times in times_s.items()}


def ratio(medians_s: Mapping[str, float]) -> float:
    """The best peer's time over ours: above 1 hvdlite is faster."""
    peers = [time_s for name, time_s in medians_s.items() if name not in (OURS, FLOOR, BOUND)]
    return min(peers) / medians_s[OURS]


def of_bound(medians_s: Mapping[str, float]) -> float:
    """Which part of the copy bound's speed hvdlite reaches."""
    return medians_s[BOUND] / medians_s[OURS]


def size_text(size_bytes: int) -> str:
    """
    >>> size_text(4), size_text(65536), size_text(64 << 20)
    ('4 B', '64 KiB', '64 MiB')
    """
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:g} {unit}"
    return f"{size_bytes} B"
