"""Times training steps: plain PyTorch, DDP and DistributedOptimizer, block by block in one process.

    python -m benchmarks.gpu.steps NETWORK SAMPLES SECONDS CONTENDER...

Contenders: plain, ddp:nccl, ddp:gloo, hvdlite. Started on any number of ranks. Rank 0 prints a line
of JSON. What hvdlite uses, NCCL or host memory, is HVDLITE_GPU_COLLECTIVES's.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

import hvdlite as hvd
from benchmarks.gpu import networks
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

WARM_UP = 3
# A block is at least so long, that its end on the device weighs little.
BLOCK_S = 0.1
MIB = 1 << 20


@dataclass
class Contender:
    """A model that is trained in one way, and its times."""

    model: nn.Module
    step: Callable[[], None]
    held_bytes: int = 0
    peak_bytes: int = 0
    # Per step: until the host is through, and until the device is.
    host_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)


def prepared(network: str, samples: int, name: str, ranks: Ranks, groups: dict) -> Contender:
    """A contender after its first steps."""
    before = torch.cuda.memory_allocated() if ON_GPU else 0
    x, y = networks.batch(network, DEVICE, ranks.rank, samples)
    data_bytes = torch.cuda.memory_allocated() - before if ON_GPU else 0
    model = networks.make(network, DEVICE)
    net = model
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if name.startswith("ddp:"):
        net = nn.parallel.DistributedDataParallel(
            model, process_group=groups[name.split(":")[1]], gradient_as_bucket_view=True
        )
    elif name == "hvdlite":
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

    def step() -> None:
        optimizer.zero_grad()
        networks.loss_of(net, x, y, DEVICE).backward()
        optimizer.step()

    contender = Contender(model, step)
    for _ in range(WARM_UP):
        step()
    if ON_GPU:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        contender.held_bytes = torch.cuda.memory_allocated() - before - data_bytes
        contender.peak_bytes = torch.cuda.max_memory_allocated() - before - data_bytes
    return contender


def timed(contender: Contender, steps: int) -> None:
    """One block."""
    wait_for_device()
    begin = time.perf_counter()
    for _ in range(steps):
        contender.step()
    host = time.perf_counter()
    wait_for_device()
    contender.host_s.append((host - begin) / steps)
    contender.whole_s.append((time.perf_counter() - begin) / steps)


def synchronizes(contender: Contender) -> str:
    """The error of whatever makes the host wait for the device in a step; empty: nothing does."""
    wait_for_device()
    torch.cuda.set_sync_debug_mode("error")
    try:
        contender.step()
    except Exception as error:  # whatever the step makes of torch's
        return f"{type(error).__name__}: {error}"[:300]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def largest_difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def main() -> None:
    network, samples, seconds, *names = sys.argv[1:]
    ranks = Ranks()
    groups = groups_of([name.split(":")[1] for name in names if ":" in name], ranks)
    torch.backends.cuda.matmul.allow_tf32 = True
    contenders = {name: prepared(network, int(samples), name, ranks, groups) for name in names}
    for contender in contenders.values():
        timed(contender, 1)
    longest_s = max(contender.whole_s.pop() for contender in contenders.values())
    steps = max(ranks.gather(max(1, round(BLOCK_S / longest_s))))
    for contender in contenders.values():
        contender.host_s.clear()
    rounds = blocks(names, lambda name: timed(contenders[name], steps), ranks, float(seconds))
    found = {
        "rounds": rounds,
        "steps_per_block": steps,
        "step_ms": {n: 1e3 * slowest(c.whole_s, ranks) for n, c in contenders.items()},
        "host_ms": {n: 1e3 * slowest(c.host_s, ranks) for n, c in contenders.items()},
        "held_MiB": {n: c.held_bytes // MIB for n, c in contenders.items()},
        "peak_MiB": {n: c.peak_bytes // MIB for n, c in contenders.items()},
    }
    trained = [contender.model for name, contender in contenders.items() if name != "plain"]
    if len(trained) > 1:
        found["largest_difference_from_ddp"] = largest_difference(trained[0], trained[-1])
    if "hvdlite" in contenders and ON_GPU:
        # The last one: a step that fails leaves the ranks apart.
        reasons = ranks.gather(synchronizes(contenders["hvdlite"]))
        found["sync_in_step"] = next(filter(None, reasons), "")
    if ranks.rank == 0:
        print(json.dumps(found), flush=True)
    ranks.barrier()
    finish()


main()
