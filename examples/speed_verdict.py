"""What the times of normal and distributed training say. Nothing here knows of hvdlite."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

# From this efficiency on, in per cent, nothing is said to limit.
ENOUGH = 90


class Time(NamedTuple):
    """The seconds of a step, and how many of them it waits for its batch."""

    total_s: float
    data_s: float

    @property
    def compute_s(self) -> float:
        return self.total_s - self.data_s


class Times(NamedTuple):
    alone: Time  # rank 0, the whole batch
    part: Time  # rank 0, one rank's part of the batch
    unsent: Time  # all ranks, each its part, nothing sent
    distributed: Time
    all_cores: Time | None = None  # rank 0, the whole batch, with all cores of its host


def median(times: Sequence[Time]) -> Time:
    return Time(*(statistics.median(column) for column in zip(*times, strict=True)))


def reasons(ranks: int, times: Times) -> dict[str, float]:
    """The seconds that each adds to the ideal step; their sum is all that is added."""
    ideal = Time(*(seconds / ranks for seconds in times.alone))
    return {
        "batch size": times.part.compute_s - ideal.compute_s,
        "cores": times.unsent.compute_s - times.part.compute_s,
        "data": times.distributed.data_s - ideal.data_s,
        "communication": times.distributed.compute_s - times.unsent.compute_s,
    }


def verdict(ranks: int, times: Times) -> str:
    """One line: how much faster, how good that is, and what limits.

    >>> time = Time(0.010, 0)
    >>> verdict(2, Times(time, Time(0.005, 0), Time(0.005, 0), Time(0.008, 0)))
    'Verdict: speed-up 1.25 on 2 ranks (efficiency 62 %); limited by communication: 3.00 of 8.00 ms'
    """
    total_s = times.distributed.total_s
    speedup = times.alone.total_s / total_s
    efficiency = 100 * speedup / ranks
    line = f"Verdict: speed-up {speedup:.2f} on {ranks} ranks (efficiency {efficiency:.0f} %)"
    if times.all_cores is not None:
        line += f", {times.all_cores.total_s / total_s:.2f} over one process with all cores"
    if efficiency >= ENOUGH:
        return f"{line}; nothing limits much"
    reason, added_s = max(reasons(ranks, times).items(), key=lambda item: item[1])
    return f"{line}; limited by {reason}: {1e3 * added_s:.2f} of {1e3 * total_s:.2f} ms"
