"""Compares DDP's and FSDP2's steps through backends of torch.distributed: "nccl", "hvdlite" and
"cpu:hvdlite,cuda:nccl" on GPUs, "gloo" and "hvdlite" on CPUs.

    hvdrun -np 2 python -m benchmarks.gpu_c10d [cuda|cpu] [SECONDS of each kind of step]

All groups are in one process, and take turns block by block; a ratio is the median of those within
a round, as ratios of 1.02 drown in what changes from one run to the next. Every block begins and
ends with an idle device and the same barrier, that of the first group. On one rank only the host's
work for the collectives is compared. Two ranks on one GPU take turns there: only ratios say much.

Rank 0 prints a line of JSON. By kind and backend: ms, the whole time of a step; host_ms, until the
script has called all of it; ratio and host_ratio, to the first backend, with their quartiles. For
`calls` the step is an all_reduce of one element, called from Python and from C++.
"""

import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hvdlite as hvd

# The first one is what the others are held against.
BACKENDS = {
    "cuda": ("nccl", "hvdlite", "cpu:hvdlite,cuda:nccl"),
    "cpu": ("gloo", "hvdlite"),
}
# Width of the layers, samples of a batch.
SIZES = {"cuda": (1024, 64), "cpu": (128, 16)}
LAYERS, BLOCK_STEPS, BLOCK_CALLS, WARM_UP = 8, 5, 50, 3
LEAST_ROUNDS, MOST_ROUNDS = 5, 400
LIMIT = timedelta(seconds=60)

Group = dist.ProcessGroup
TCPStore: Any = dist.__dict__["TCPStore"]
# What a block repeats.
Turn = Callable[[], None]


def meet(kind: str) -> tuple[torch.device, dict[str, Any]]:
    """Begins the world under any launcher. Returns this rank's device, and the groups."""
    os.environ.setdefault("HVDLITE_GPU", "none")  # ranks may share a GPU
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    device = torch.device(kind)
    if kind == "cuda":
        count = torch.cuda.device_count()
        device = torch.device(kind, hvd.local_rank() % count)
        torch.cuda.set_device(device)
        if hvd.local_size() > count:
            os.environ.setdefault("NCCL_HOSTID", f"rank {rank}")  # NCCL refuses to share otherwise
    name = socket.gethostname() if hvd.cross_size() > 1 else "localhost"
    server = TCPStore(name, 0, size, True, LIMIT, wait_for_workers=False) if not rank else None
    name, port = hvd.broadcast_object((name, server.port if server else 0))
    store = server or TCPStore(name, port, size, False, LIMIT)
    first, *others = BACKENDS[kind]
    dist.init_process_group(first, store=store, rank=rank, world_size=size, timeout=LIMIT)
    groups: dict[str, Any] = {first: dist.group.WORLD}
    return device, groups | {name: dist.new_group(backend=name) for name in others}


def network(width: int, device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS)]
    return nn.Sequential(*layers).to(device)


def with_ddp(net: nn.Sequential, group: Group, device: torch.device) -> nn.Module:
    return DistributedDataParallel(net, process_group=group, gradient_as_bucket_view=True)


def with_fsdp2(net: nn.Sequential, group: Group, device: torch.device) -> nn.Module:
    mesh = DeviceMesh.from_group(group, device.type)
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


KINDS = {"ddp": with_ddp, "fsdp2": with_fsdp2}


class Training:
    """A network and its optimizer, over one group."""

    def __init__(self, kind: str, group: Group, device: torch.device) -> None:
        width, samples = SIZES[device.type]
        self.net = KINDS[kind](network(width, device), group, device)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        torch.manual_seed(dist.get_rank())
        self.batch = torch.randn(samples, width, device=device)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.net(self.batch).square().mean().backward()
        self.optimizer.step()

    def checksum(self) -> float:
        """Of what this rank has of the parameters."""
        local = (getattr(p, "to_local", lambda p=p: p)() for p in self.net.parameters())
        return sum(float(part.detach().double().abs().sum()) for part in local)


def fence(device: torch.device) -> None:
    """All ranks are here, and their devices idle."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        dist.barrier(device_ids=[device.index])
        torch.cuda.synchronize()
    else:
        dist.barrier()


def block(turn: Turn, repeats: int, device: torch.device) -> tuple[float, float]:
    """Seconds of one turn: until its last call has returned, and until the device is idle."""
    fence(device)
    start = time.perf_counter()
    for _ in range(repeats):
        turn()
    called = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (called - start) / repeats, (time.perf_counter() - start) / repeats


def compare(
    turns: dict[str, Turn], repeats: int, seconds: float, device: torch.device
) -> dict[str, dict[str, Any]]:
    """By name: medians of the slowest ranks, and ratios to the first one."""
    start = time.perf_counter()
    for _ in range(WARM_UP):
        for turn in turns.values():
            block(turn, repeats, device)
    fit = seconds / ((time.perf_counter() - start) / WARM_UP)
    rounds = hvd.broadcast_object(int(min(max(fit, LEAST_ROUNDS), MOST_ROUNDS)))
    names = list(turns)
    own: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(rounds):
        for i in range(len(names)):
            name = names[(number + i) % len(names)]
            own[name].append(block(turns[name], repeats, device))
    ranks = hvd.allgather_object(own)
    slowest = {
        name: torch.tensor([each[name] for each in ranks], dtype=torch.float64).amax(0)
        for name in names
    }
    first = slowest[names[0]]
    found: dict[str, dict[str, Any]] = {}
    for name, times in slowest.items():
        found[name] = {}
        for column, key in enumerate(("host_", "")):
            found[name][f"{key}ms"] = round(float(times[:, column].median()) * 1e3, 4)
            ratios = (times[:, column] / first[:, column]).tolist()
            quartiles = statistics.quantiles(ratios, n=4)
            found[name][f"{key}ratio"] = round(quartiles[1], 4)
            found[name][f"{key}quartiles"] = [round(quartiles[0], 4), round(quartiles[2], 4)]
    return found | {"rounds": {"count": rounds}}


def calls(groups: dict[str, Group], device: torch.device) -> dict[str, dict[str, Turn]]:
    """An all_reduce by who calls it."""
    one = torch.ones(1, device=device)
    functional: Any = torch.ops._c10d_functional

    def by_python(group: Group) -> Turn:
        def call() -> None:
            work: Any = dist.all_reduce(one, group=group, async_op=True)
            work.wait()

        return call

    def by_cpp(group: Group) -> Turn:
        return lambda: functional.wait_tensor(functional.all_reduce_(one, "avg", group.group_name))

    return {
        "python": {name: by_python(group) for name, group in groups.items()},
        "c++": {name: by_cpp(group) for name, group in groups.items()},
    }


def main(arguments: list[str]) -> None:
    default = "cuda" if torch.cuda.is_available() else "cpu"
    kind, seconds, *_ = [*arguments, *(default, "10")[len(arguments) :]]
    torch.set_num_threads(1)
    device, groups = meet(kind)
    found: dict[str, Any] = {"device": kind, "ranks": hvd.size(), "torch": torch.__version__}
    if kind == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["gpus"] = min(torch.cuda.device_count(), hvd.local_size())
    for name in KINDS:
        trainings = {each: Training(name, group, device) for each, group in groups.items()}
        turns: dict[str, Turn] = {each: training.step for each, training in trainings.items()}
        found[name] = compare(turns, BLOCK_STEPS, float(seconds), device)
        sums = {each: training.checksum() for each, training in trainings.items()}
        expected = next(iter(sums.values()))
        if any(abs(each - expected) > 1e-5 * abs(expected) for each in sums.values()):
            raise AssertionError(f"{name}: the parameters differ between backends: {sums}")
    found["calls"] = {
        name: compare(turns, BLOCK_CALLS, float(seconds) / 2, device)
        for name, turns in calls(groups, device).items()
    }
    if hvd.rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()
    hvd.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
