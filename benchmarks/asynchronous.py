"""Asynchronous training beside synchronous: a program of its own, which each rank runs.

    hvdrun -np 5 --servers 1 python -m benchmarks.asynchronous '{"seconds": 8, …}'

Worker 0 writes the figures to the file "output". In the parts with a slow worker computing is
simulated by sleeping, as the processes may be more than the machine's cores. With "between" only
what a server takes and gives is measured, beside plain TCP: the server has a host of its own.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hvdlite as hvd
from benchmarks import reaching
from benchmarks.figures import BOUND, FLOOR, OURS, SYNCHRONOUS
from benchmarks.star import Centre, Ray

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


def computing_s() -> float:
    """Of this worker's step. One worker computes five times as long as the others."""
    return SLOW_S if hvd.rank() == hvd.size() - 1 else FAST_S


def straggler(seconds: float) -> dict[str, float]:
    """Steps per second of all workers, of which one is slow."""
    compute_s = computing_s()

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


def throughput(
    seconds: float, bounds: Callable[[torch.Tensor, torch.Tensor], dict[str, Callable[[], Any]]]
) -> dict[str, list[float]]:
    """Steps per second of all workers, which do nothing but push gradients and pull parameters.
    bounds: from a parameter and its gradient, what takes part beside that."""
    param = torch.nn.Parameter(torch.zeros(ELEMS))
    param.grad = torch.ones(ELEMS)
    optimizer = hvd.AsyncOptimizer(torch.optim.SGD([param], lr=1e-3))
    contenders = {**bounds(param.data, param.grad), OURS: optimizer.step}
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, step in contenders.items():
            step()  # the first one is slow
            found[name].append(steps_per_s(step, seconds, False))
        optimizer.synchronize()
    return found


def copying(param: torch.Tensor, gradient: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """What these processes do on one host if both are only copied; and if each makes the update,
    too, which is the server's work otherwise."""
    to, source = torch.zeros(ELEMS), torch.zeros(ELEMS)

    def copies() -> None:
        to.copy_(gradient)
        param.copy_(source)

    def copies_and_update() -> None:
        copies()
        source.add_(to, alpha=-1e-3)

    return {BOUND: copies, FLOOR: copies_and_update}


def measure_on_one_host(request: dict[str, Any]) -> dict[str, Any]:
    hvd.init()
    seconds, loss = request["seconds"], request["loss"]
    return {
        "straggler": straggler(seconds),
        "loss": loss,
        "loss_s": reaching.time_to_loss(loss, computing_s()),
        "throughput": throughput(seconds / 4, copying),
    }


def measure_between_hosts(request: dict[str, Any]) -> dict[str, Any]:
    """The last process is the server."""
    address = Path(request["output"]).with_name("address")
    if int(os.environ["RANK"]) == PROCESSES - 1:
        Centre(address)  # it does not return from init
    hvd.init()
    ray = Ray(address)

    def wire(param: torch.Tensor, gradient: torch.Tensor) -> dict[str, Callable[[], Any]]:
        return {BOUND: lambda: ray.exchange(gradient.nbytes)}

    found = throughput(request["seconds"], wire)
    ray.close()
    return {"throughput": found}


def main() -> None:
    torch.set_num_threads(1)
    request = json.loads(sys.argv[1])
    measure = measure_between_hosts if request["between"] else measure_on_one_host
    found = measure(request)
    about = {"workers": hvd.size(), "bytes": 4 * ELEMS}
    if hvd.rank() == 0:
        Path(request["output"]).write_text(json.dumps({**about, **found}))


if __name__ == "__main__":
    main()
