"""Asynchronous training beside synchronous: a program of its own, which each rank runs.

    hvdrun -np 5 --servers 1 python -m benchmarks.asynchronous OUTPUT [SECONDS]

Rank 0 writes the figures to OUTPUT. In the first part computing is simulated by sleeping, as the
processes may be more than the machine's cores.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hvdlite as hvd
from benchmarks.figures import BOUND, FLOOR, OURS

SYNCHRONOUS = "allreduce"
PROCESSES, SERVERS = 5, 1
FAST_S, SLOW_S = 0.02, 0.1
LAYERS, WIDTH = 4, 128  # of the first part: some 260 KB of parameters
ELEMS = 16 << 20  # of the second part: 64 MiB of float32
ROUNDS = 3


def steps_per_s(step: Callable[[], Any], seconds: float, together: bool) -> float:
    """How many steps all workers make in a second, if they all begin at once. together: they make
    equally many, as they wait for each other in each."""
    hvd.barrier()
    begin = time.monotonic()
    count = 0
    if together:
        count = max(1, round(seconds / (SLOW_S + 0.01)))
        for _ in range(count):
            step()
    else:
        while time.monotonic() - begin < seconds:
            step()
            count += 1
    own = count / (time.monotonic() - begin)
    return float(hvd.allreduce(torch.tensor(own, dtype=torch.float64), op=hvd.Sum))


def straggler(seconds: float) -> dict[str, float]:
    """Steps per second of all workers, of which one computes five times as long."""
    compute_s = SLOW_S if hvd.rank() == hvd.size() - 1 else FAST_S

    def stepper(wrap: Callable[[Any], Any]) -> Callable[[], None]:
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=1e-3))
        samples = torch.randn(8, WIDTH)

        def step() -> None:
            time.sleep(compute_s)
            optimizer.zero_grad()
            model(samples).square().mean().backward()
            optimizer.step()

        return step

    steppers = {
        FLOOR: stepper(lambda optimizer: optimizer),
        SYNCHRONOUS: stepper(lambda o: hvd.DistributedOptimizer(o, check_start=False)),
        OURS: stepper(hvd.AsyncOptimizer),
    }
    found = {}
    for name, step in steppers.items():
        for _ in range(3):
            step()  # the first ones are slow
        found[name] = steps_per_s(step, seconds, name == SYNCHRONOUS)
    return found


def throughput(seconds: float) -> dict[str, list[float]]:
    """Steps per second of all workers, which do nothing but push gradients and pull parameters.
    Beside it what these processes do if both are only copied; and if each makes the update, too,
    which is the server's work otherwise."""
    param = torch.nn.Parameter(torch.zeros(ELEMS))
    param.grad = torch.ones(ELEMS)
    optimizer = hvd.AsyncOptimizer(torch.optim.SGD([param], lr=1e-3))
    to, source = torch.zeros(ELEMS), torch.zeros(ELEMS)
    gradient = param.grad

    def copies() -> None:
        to.copy_(gradient)
        param.data.copy_(source)

    def copies_and_update() -> None:
        copies()
        source.add_(to, alpha=-1e-3)

    contenders = {BOUND: copies, FLOOR: copies_and_update, OURS: optimizer.step}
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, step in contenders.items():
            step()  # the first one is slow
            found[name].append(steps_per_s(step, seconds, False))
    return found


def main() -> None:
    torch.set_num_threads(1)
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 8.0
    hvd.init()
    found = {
        "workers": hvd.size(),
        "straggler": straggler(seconds),
        "throughput": throughput(seconds / 4),
        "bytes": 4 * ELEMS,
    }
    if hvd.rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
