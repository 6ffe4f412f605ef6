"""What a rank of these benchmarks needs: the ranks, process groups of the peers, times."""

import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

import hvdlite as hvd

DEVICE = os.environ.get("DEVICE", "cuda")
ON_GPU = DEVICE == "cuda"


class Ranks:
    """All ranks of this program, for what is outside of what is measured."""

    def __init__(self) -> None:
        hvd.init()
        # Before the first use of NCCL.
        if os.environ.get("OWN_NCCL_HOSTID"):
            os.environ["NCCL_HOSTID"] = str(hvd.rank())
        self.rank, self.size = hvd.rank(), hvd.size()
        self._comm: Any = None
        if self.size > 1:
            from mpi4py import MPI

            self._comm = MPI.COMM_WORLD.Dup()

    def barrier(self) -> None:
        if self._comm is not None:
            self._comm.Barrier()

    def of_first(self, value: Any) -> Any:
        """Rank 0's value."""
        return value if self._comm is None else self._comm.bcast(value)

    def gather(self, value: Any) -> list[Any]:
        """Everybody's."""
        return [value] if self._comm is None else self._comm.allgather(value)


def wait_for_device() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def groups_of(backends: Sequence[str], ranks: Ranks) -> dict[str, Any]:
    """A process group over all ranks for each of these backends of PyTorch."""
    groups: dict[str, Any] = {}
    for backend in backends:
        if groups:
            groups[backend] = dist.new_group(backend=backend)
            continue
        # A port that another program takes in between is an error here, and no wrong figure.
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = ranks.of_first(probe.getsockname()[1])
        store = TCPStore("127.0.0.1", port, ranks.size, ranks.rank == 0)
        dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.size)
        groups[backend] = dist.group.WORLD
    return groups


def blocks(
    contenders: Sequence[str], measure: Callable[[str], None], ranks: Ranks, budget_s: float
) -> int:
    """Measures the contenders in turn until the time is over; returns how many rounds."""
    end = time.monotonic() + budget_s
    rounds = 0
    while True:
        for name in contenders:
            ranks.barrier()
            measure(name)
        rounds += 1
        if not ranks.of_first(time.monotonic() < end or rounds < 3):
            return rounds


def slowest(times_s: Sequence[float], ranks: Ranks) -> float:
    """The median of a contender's times, on the rank where it is largest."""
    return float(max(ranks.gather(statistics.median(times_s))))


def finish() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    hvd.shutdown()
