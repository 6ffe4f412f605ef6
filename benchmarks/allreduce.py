"""Times allreduce in place: a sum, on ordinary tensors.

Every buffer is written immediately before every call, and not with zeros: a loop over untouched
buffers leaves them in the caches in a way that no training step ever sees. Contenders alternate in
every round, within the same processes. A barrier stands before each timing, outside of it; a
timing is each rank's own, from leaving the barrier to having the result. Beside the contenders
stands the bound: on one host a copy of the buffer, by all ranks at once; between hosts plain TCP
streams (streams.py).
"""

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import hvdlite as hvd
from benchmarks import passes
from benchmarks.figures import BOUND, OURS, PASSES, PLAN, size_text
from benchmarks.plan import Effort, calls, rotated, warm_up_rounds
from benchmarks.streams import Streams
from hvdlite import _core
from hvdlite.world import world as worlds

# The pattern's period: no multiple of any chunk or block. For 16 bits so short that sums over 3
# ranks at most fit into the 8 bits of a mantissa, shifts included.
PERIODS = {torch.float32: 4093, torch.float16: 23, torch.bfloat16: 23}
Name = TypeVar("Name")
SHIFTS = 16  # that the input of a round takes, one after the other


@dataclass(frozen=True)
class Contender:
    """bind(buffer) → a function that allreduces it. All preparation happens in bind, outside
    the timing."""

    bind: Callable[[Tensor], Callable[[], object]]
    dtype: torch.dtype = torch.float32
    checked: bool = True  # False of a bound, which leaves the buffer as it was
    # Whether one call takes long enough at any size to be timed alone.
    slow: bool = False


def hvdlite(buffer: Tensor) -> Callable[[], object]:
    # In flight one after the other: one name for each size is enough.
    name = f"bench.{buffer.numel()}.{buffer.dtype}"
    return partial(hvd.allreduce_, buffer, op=hvd.Sum, name=name)


def gloo(buffer: Tensor) -> Callable[[], object]:
    return partial(dist.all_reduce, buffer)


def copy(buffer: Tensor) -> Callable[[], object]:
    return partial(torch.zeros_like(buffer).copy_, buffer)


def peers(mpi: Any, comm: Any, mpi_name: str) -> dict[str, Contender]:
    """By name, hvdlite first. mpi: the module mpi4py.MPI; torch's default group is Gloo's."""

    def plain_mpi(buffer: Tensor) -> Callable[[], object]:
        spec = [buffer.numpy(), buffer.numel(), mpi.FLOAT]
        return partial(comm.Allreduce, mpi.IN_PLACE, spec, mpi.SUM)

    return {
        OURS: Contender(hvdlite),
        "Gloo": Contender(gloo, slow=True),
        mpi_name: Contender(plain_mpi),
    }


def plans() -> dict[str, Contender]:
    """Does what DistributedOptimizer does for each bucket: makes a plan once, then runs it."""
    numbers = itertools.count()

    def bind(buffer: Tensor) -> Callable[[], object]:
        engine = worlds.current().team.engine
        plan = engine.plan(
            f"bench.{buffer.numel()}.{next(numbers)}",
            _core.FLOAT32,
            _core.SUM,
            buffer.data_ptr(),
            buffer.data_ptr(),
            buffer.numel(),
            1.0,
            1.0,
            buffer,
        )
        return lambda: plan.start(buffer).wait()

    return {PLAN: Contender(bind)}


def bounds(streams: Streams | None, size_bytes: int, ranks: int) -> dict[str, Contender]:
    """The bound: the least work that an allreduce needs. ranks: on this host."""
    if streams is not None:
        return {BOUND: Contender(streams.bind, checked=False)}
    found = {BOUND: Contender(copy, checked=False)}
    if size_bytes >= passes.LEAST_BYTES:
        found[PASSES] = Contender(partial(passes.bind, ranks=ranks), checked=False)
    return found


def types(ranks: int) -> dict[tuple[str, str], Contender]:
    """hvdlite and its passes with equal numbers of elements, by dtype."""
    found = {}
    for dtype in passes.DTYPES:
        name = str(dtype).removeprefix("torch.")
        found[name, OURS] = Contender(hvdlite, dtype)
        found[name, PASSES] = Contender(partial(passes.bind, ranks=ranks), dtype, checked=False)
    return found


def pattern(count: int, rank: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """x[j] = rank + 1 + size · (j mod period), which the dtype holds exactly, as it does the sums.

    A rank that is dropped, doubled or shifted gives another sum.
    """
    return _periodic(count, lambda j: j * size + rank + 1, dtype)


def expected_sum(count: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The sum of pattern() over the ranks 0 … size-1."""
    return _periodic(count, lambda j: j * size**2 + size * (size + 1) // 2, dtype)


def _periodic(count: int, value: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor:
    period = PERIODS[dtype]
    return value(torch.arange(period)).to(dtype).repeat(-(-count // period))[:count]


class Buffers:
    """The tensors of one dtype that a round works on, and what they must hold."""

    def __init__(self, count: int, calls: int, comm: Any, dtype: torch.dtype) -> None:
        self.size = comm.size
        self.ours = pattern(count, comm.rank, comm.size, dtype)
        self.expected = expected_sum(count, comm.size, dtype)
        self.tensors = [torch.empty(count, dtype=dtype) for _ in range(calls)]

    def write(self, shift: int, first: int) -> None:
        """So many of them."""
        for tensor in self.tensors[:first]:
            torch.add(self.ours, shift, out=tensor)

    def hold_the_sum(self, shift: int, first: int) -> bool:
        """So many of them, which this changes."""
        return all(
            torch.equal(tensor.sub_(shift * self.size), self.expected)
            for tensor in self.tensors[:first]
        )


def time_count(
    count: int,
    effort: Effort,
    comm: Any,
    contenders: Mapping[Name, Contender],
    cpu_s: dict[Name, list[float]] | None = None,
) -> dict[Name, list[float]]:
    """This rank's seconds per allreduce of count elements, by contender and round. Collective.

    cpu_s gets its process's CPU time the same way.
    """
    size_bytes = count * 4
    in_timing = calls(size_bytes)
    buffers = {
        dtype: Buffers(count, in_timing, comm, dtype)
        for dtype in {contender.dtype: None for contender in contenders.values()}
    }
    bound = {
        name: [
            contender.bind(buffer)
            for buffer in buffers[contender.dtype].tensors[: 1 if contender.slow else in_timing]
        ]
        for name, contender in contenders.items()
    }

    times_s: dict[Name, list[float]] = {name: [] for name in contenders}
    warm_up = warm_up_rounds(size_bytes)
    begin, round_, done = time.perf_counter(), 0, False
    while not done:
        shift = round_ % SHIFTS  # no round has the input of the one before
        for name in rotated(list(contenders), round_):
            own = buffers[contenders[name].dtype]
            own.write(shift, len(bound[name]))
            comm.Barrier()

            cpu, start = time.process_time(), time.perf_counter()
            for call in bound[name]:
                call()
            seconds, cpu = time.perf_counter() - start, time.process_time() - cpu

            if contenders[name].checked and not own.hold_the_sum(shift, len(bound[name])):
                raise AssertionError(
                    f"{name}: wrong sum of {size_text(size_bytes)} on rank {comm.rank}"
                )
            if round_ >= warm_up:
                times_s[name].append(seconds / len(bound[name]))
                if cpu_s is not None:
                    cpu_s.setdefault(name, []).append(cpu / len(bound[name]))
        round_ += 1
        done = comm.bcast(effort.enough(round_ - warm_up, time.perf_counter() - begin))
    return times_s
