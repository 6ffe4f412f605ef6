"""Measures how the times of single small allreduces are distributed: the tail shows ranks that
slept too long.

Two situations: all ranks come at once (a barrier), and one of them, each in turn, comes up to 1 ms
late, by when the others have begun to sleep. A time is that from the arrival of the last rank to
the result on the last one. So it needs ranks on one host, whose clocks are the same.
"""

import random
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.allreduce import SHIFTS, Buffers, Contender
from benchmarks.plan import Effort, rotated

LATE_S = 1e-3
WARM_UP_ROUNDS = 20
SITUATIONS = ("at once", "one late")


def time_calls(
    count: int, effort: Effort, comm: Any, contenders: Mapping[str, Contender], situation: str
) -> dict[str, list[float]]:
    """Seconds by contender and round, on every rank alike. Collective."""
    buffers = Buffers(count, 1, comm, next(iter(contenders.values())).dtype)
    calls = {name: contender.bind(buffers.tensors[0]) for name, contender in contenders.items()}
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    delays = random.Random(0)  # alike on all ranks
    begin, round_, done = time.perf_counter(), 0, False
    while not done:
        shift = round_ % SHIFTS
        delay_s = delays.uniform(0, LATE_S) if situation == "one late" else 0.0
        for name in rotated(list(contenders), round_):
            buffers.write(shift, 1)
            comm.Barrier()
            if delay_s and round_ % comm.size == comm.rank:
                time.sleep(delay_s)
            start = time.perf_counter()
            calls[name]()
            spans[name].append((start, time.perf_counter()))
            if not buffers.hold_the_sum(shift, 1):
                raise AssertionError(f"{name}: wrong sum on rank {comm.rank}")
        round_ += 1
        done = comm.bcast(effort.enough(round_ - WARM_UP_ROUNDS, time.perf_counter() - begin))
    of_ranks = comm.allgather(spans)
    return {
        name: after_the_last([of[name][WARM_UP_ROUNDS:] for of in of_ranks]) for name in contenders
    }


def after_the_last(spans: list[list[tuple[float, float]]]) -> list[float]:
    """spans[rank][round] = (arrival, result) → from the last arrival to the last result.

    >>> after_the_last([[(1.0, 9.5)], [(9.0, 9.25)]])
    [0.5]
    """
    return [
        max(end for _, end in of_round) - max(start for start, _ in of_round)
        for of_round in zip(*spans, strict=True)
    ]
