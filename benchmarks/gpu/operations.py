"""Times allreduces of one tensor: hvdlite's, and those of PyTorch's backends. Results are checked.

    python -m benchmarks.gpu.operations SECONDS BYTES,BYTES… BACKEND...

Backends: gloo, nccl. SECONDS are those of each size. Rank 0 prints a line of JSON: medians in
microseconds, of the slowest rank, and how fast pinned memory is copied.
"""

import functools
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import hvdlite as hvd
from benchmarks.gpu.contenders import (
    DEVICE,
    ON_GPU,
    Ranks,
    blocks,
    finish,
    groups_of,
    slowest,
    wait_for_device,
)

COPIED_BYTES = 64 << 20


def measure_size(size_bytes: int, groups: dict, ranks: Ranks, seconds: float) -> dict[str, float]:
    """Medians in microseconds. The tensor is written before every call."""
    pattern = torch.arange(max(1, size_bytes // 4)) % 7
    given = (pattern + ranks.rank).float().to(DEVICE)
    total = ranks.size * (ranks.size - 1) // 2
    expected = (pattern * ranks.size + total).float().to(DEVICE)
    tensor = given.clone()
    calls: dict[str, Callable[[], object]] = {
        "hvdlite": lambda: hvd.allreduce_(tensor, op=hvd.Sum, name=f"{size_bytes} bytes")
    }
    for backend, group in groups.items():
        calls[backend] = functools.partial(dist.all_reduce, tensor, group=group)
    for name, call in calls.items():
        for _ in range(2):
            tensor.copy_(given)
            call()
            wait_for_device()
        if not torch.equal(tensor, expected):
            raise AssertionError(f"{name}: wrong sum of {size_bytes} bytes")
    times: dict[str, list[float]] = {name: [] for name in calls}

    def once(name: str) -> None:
        tensor.copy_(given)
        wait_for_device()
        ranks.barrier()
        begin = time.perf_counter()
        calls[name]()
        wait_for_device()
        times[name].append(time.perf_counter() - begin)

    blocks(list(calls), once, ranks, seconds)
    return {name: 1e6 * slowest(of, ranks) for name, of in times.items()}


def pinned_copies() -> dict[str, float]:
    """GB/s between pinned memory and the device."""
    there = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=DEVICE)
    here = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    found = {}
    for name, target, source in (("to host", here, there), ("to GPU", there, here)):
        times = []
        for _ in range(9):
            wait_for_device()
            begin = time.perf_counter()
            target.copy_(source, non_blocking=True)
            wait_for_device()
            times.append(time.perf_counter() - begin)
        found[name] = COPIED_BYTES / statistics.median(times) / 1e9
    return found


def main() -> None:
    seconds, sizes, *backends = sys.argv[1:]
    ranks = Ranks()
    groups = groups_of(backends, ranks)
    sizes_bytes = [int(size) for size in sizes.split(",")]
    found: dict[str, object] = {
        "median_us": {
            str(size): measure_size(size, groups, ranks, float(seconds)) for size in sizes_bytes
        }
    }
    if ON_GPU:
        ranks.barrier()
        if ranks.rank == 0:
            found["pinned_GB_s"] = pinned_copies()
        ranks.barrier()
    if ranks.rank == 0:
        print(json.dumps(found), flush=True)
    ranks.barrier()
    finish()


main()
