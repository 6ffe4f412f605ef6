"""Times allreduce in place: float32, sum, on ordinary tensors.

Every buffer is written immediately before every call, and not with zeros: a loop over untouched
buffers leaves them in the caches in a way that no training step ever sees. Contenders alternate in
every round, within the same processes. A barrier stands before each timing, outside of it; a
timing is each rank's own, from leaving the barrier to having the result. Beside the contenders
stands the bound: a copy of the buffer, by all ranks at once.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import hvdlite as hvd
from benchmarks.figures import BOUND, OURS, size_text
from benchmarks.plan import calls, rotated, rounds

PRIME = 4093  # of the pattern's period: no multiple of any chunk or block
WARM_UP_ROUNDS = 3

# Gets a buffer, and returns what allreduces it: anything that can be prepared is outside the time.
Contender = Callable[[Tensor], Callable[[], object]]


def contenders(mpi: Any, comm: Any) -> dict[str, Contender]:
    """By name. mpi: the module mpi4py.MPI; the default process group of torch must be Gloo's."""

    def hvdlite(buffer: Tensor) -> Callable[[], object]:
        # In flight one after the other: one name for each size is enough.
        return partial(hvd.allreduce_, buffer, op=hvd.Sum, name=f"bench.{buffer.numel()}")

    def gloo(buffer: Tensor) -> Callable[[], object]:
        return partial(dist.all_reduce, buffer)

    def plain_mpi(buffer: Tensor) -> Callable[[], object]:
        spec = [buffer.numpy(), buffer.numel(), mpi.FLOAT]
        return partial(comm.Allreduce, mpi.IN_PLACE, spec, mpi.SUM)

    def copy(buffer: Tensor) -> Callable[[], object]:
        return partial(torch.zeros_like(buffer).copy_, buffer)

    return {OURS: hvdlite, "Gloo": gloo, "MPI": plain_mpi, BOUND: copy}


def pattern(count: int, rank: int, size: int) -> Tensor:
    """x[j] = rank + 1 + size · (j mod 4093), which float32 holds exactly, as it does the sums.

    A rank that is dropped, doubled or shifted gives another sum.
    """
    return (torch.arange(count) % PRIME * size + rank + 1).to(torch.float32)


def expected_sum(count: int, size: int) -> Tensor:
    """The sum of pattern() over the ranks 0 … size-1."""
    return (torch.arange(count) % PRIME * size**2 + size * (size + 1) // 2).to(torch.float32)


def time_size(
    size_bytes: int, max_rounds: int, comm: Any, contenders: Mapping[str, Contender]
) -> dict[str, list[float]]:
    """This rank's seconds per allreduce of size_bytes, by contender and round. Collective."""
    count = size_bytes // 4
    ours = pattern(count, comm.rank, comm.size)
    expected = expected_sum(count, comm.size)
    buffers = [torch.empty(count) for _ in range(calls(size_bytes))]
    bound = {name: [bind(buffer) for buffer in buffers] for name, bind in contenders.items()}

    times_s: dict[str, list[float]] = {name: [] for name in contenders}
    for round_ in range(WARM_UP_ROUNDS + rounds(size_bytes, max_rounds)):
        shift = round_ % 64  # no round has the input of the one before
        for name in rotated(list(contenders), round_):
            for buffer in buffers:
                torch.add(ours, shift, out=buffer)
            comm.Barrier()

            start = time.perf_counter()
            for call in bound[name]:
                call()
            seconds = time.perf_counter() - start

            for buffer in buffers if name != BOUND else ():
                if not torch.equal(buffer.sub_(shift * comm.size), expected):
                    raise AssertionError(
                        f"{name}: wrong sum of {size_text(size_bytes)} on rank {comm.rank}"
                    )
            if round_ >= WARM_UP_ROUNDS:
                times_s[name].append(seconds / len(buffers))
    return times_s
