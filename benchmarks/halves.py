"""Times and counts a reducescatter beside an allreduce of the same tensor, between hosts, where it
should send half as much.

As everywhere: inputs are written immediately before every call, contenders take turns in every
round, and every result is checked.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import hvdlite as hvd
from benchmarks.allreduce import SHIFTS, expected_sum, pattern
from benchmarks.figures import ALLREDUCE, REDUCESCATTER, TO_OWNERS, WHOLE_PLAN, size_text
from benchmarks.plan import Effort, rotated, warm_up_rounds
from hvdlite import _core
from hvdlite.world import world as worlds

Ranges = list[tuple[int, int]]


@dataclass(frozen=True)
class Half:
    """run() works on a buffer and returns where the result begins in memory; `ranges` are the
    elements of the sum that it then holds, one range after the other or, `in_place`, each where it
    is in the buffer."""

    run: Callable[[], Tensor]
    ranges: Ranges
    in_place: bool


def halves(buffer: Tensor, rank: int, size: int) -> dict[str, Half]:
    """By name; all work on the same buffer."""
    count = buffer.numel()
    engine = worlds.current().team.engine

    def plan(form: int) -> Callable[[], Tensor]:
        address = buffer.data_ptr()
        made = engine.plan(
            *(f"bench.{form}.{count}", _core.FLOAT32, _core.SUM, address, address, count),
            *(1.0, 1.0, buffer),
            form=form,
        )

        def run() -> Tensor:
            if text := made.start(buffer).wait():
                raise AssertionError(text)
            return buffer

        return run

    def reducescatter() -> Tensor:
        return hvd.reducescatter(buffer, op=hvd.Sum, name=f"bench.shares.{count}")

    def allreduce() -> Tensor:
        return hvd.allreduce_(buffer, op=hvd.Sum, name=f"bench.whole.{count}")

    each = count // size
    whole, share = [(0, count)], [(rank * each, (rank + 1) * each)]
    owned = engine.owned(count, _core.FLOAT32, _core.PLAN_TO_OWNERS, rank)
    return {
        ALLREDUCE: Half(allreduce, whole, in_place=True),
        REDUCESCATTER: Half(reducescatter, share, in_place=False),
        WHOLE_PLAN: Half(plan(_core.PLAN_WHOLE), whole, in_place=True),
        TO_OWNERS: Half(plan(_core.PLAN_TO_OWNERS), owned, in_place=True),
    }


def is_right(half: Half, result: Tensor, expected: Tensor, more: int) -> bool:
    """expected: the whole sum, less `more`."""
    wanted = [expected[begin:end] + more for begin, end in half.ranges]
    if not half.in_place:
        return torch.equal(result, torch.cat(wanted))
    parts = [result[begin:end] for begin, end in half.ranges]
    return all(map(torch.equal, parts, wanted))


def time_halves(
    size_bytes: int, effort: Effort, comm: Any
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """This rank's seconds per call, by contender and round, and the bytes that it sends to other
    hosts in one. Collective. size_bytes: a multiple of 4 bytes for each rank."""
    count = size_bytes // 4
    ours = pattern(count, comm.rank, comm.size)
    expected = expected_sum(count, comm.size)
    buffer = torch.empty(count)
    contenders: Mapping[str, Half] = halves(buffer, comm.rank, comm.size)
    engine = worlds.current().team.engine
    times_s: dict[str, list[float]] = {name: [] for name in contenders}
    sent_bytes: dict[str, int] = {}
    warm_up = warm_up_rounds(size_bytes)
    begin, round_, done = time.perf_counter(), 0, False
    while not done:
        shift = round_ % SHIFTS
        for name in rotated(list(contenders), round_):
            torch.add(ours, shift, out=buffer)
            before = engine.counters()["data_bytes"]
            comm.Barrier()
            start = time.perf_counter()
            result = contenders[name].run()
            seconds = time.perf_counter() - start
            sent_bytes[name] = engine.counters()["data_bytes"] - before
            if not is_right(contenders[name], result, expected, shift * comm.size):
                raise AssertionError(
                    f"{name}: wrong sum of {size_text(size_bytes)} on rank {comm.rank}"
                )
            if round_ >= warm_up:
                times_s[name].append(seconds)
        round_ += 1
        done = comm.bcast(effort.enough(round_ - warm_up, time.perf_counter() - begin))
    return times_s, sent_bytes
