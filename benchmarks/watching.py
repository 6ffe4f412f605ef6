"""Times what it costs a training step that hvdlite watches it; a program of its own.

    hvdrun -np 2 python -m benchmarks.watching [--task mlp] [--rounds 15] [--steps 100]

In each round the variants train in turn, in an order that rotates: all in one job, with an `init`
of their own, which reads the variant's knobs. What a variant costs is the time of all its steps
over that of the steps in the same round which nothing watches, less 1; the first row has two of
those, and shows what such a comparison can tell at all. A check of the parameters comes once in
`--steps` steps, so it is in each variant's time as often as in a training.

What is less than the machine's noise, `benchmarks.watching_instructions` counts.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from rich.console import Console
from rich.table import Table

import hvdlite as hvd
from benchmarks.networks import TASKS, Task, batch
from benchmarks.plan import rotated

NOTHING = {"HVDLITE_BLACK_BOX": "0", "HVDLITE_STALL_CHECK_DISABLE": "1"}
# The others are watched as every job is, unless they say otherwise.
NOTHING_WATCHES, DEFAULT = "nothing watches", "stall check and black box: the default"
VARIANTS: dict[str, Mapping[str, str]] = {
    NOTHING_WATCHES: NOTHING,
    f"{NOTHING_WATCHES}, once more": NOTHING,
    "stall check": {"HVDLITE_BLACK_BOX": "0"},
    DEFAULT: {},
    "and --summary": {"HVDLITE_SUMMARY": "1"},
    "and HVDLITE_CHECK_NUMERICS=1": {"HVDLITE_CHECK_NUMERICS": "1"},
    "and HVDLITE_CHECK_PARAMETERS=100": {"HVDLITE_CHECK_PARAMETERS": "100"},
}
KNOBS = sorted({name for knobs in VARIANTS.values() for name in knobs})
WARM_UP_STEPS = 10


def training(task: Task, knobs: Mapping[str, str], rate: float | None = None) -> Callable[[], None]:
    """One step of a training that begins with these knobs, after the first ones. Collective.

    rate: of learning; by default the task's.
    """
    hvd.shutdown()
    for name in KNOBS:
        os.environ.pop(name, None)
    os.environ.update(knobs)
    hvd.init()
    network = task.network()
    plain = task.make_optimizer(network.parameters())
    for group in plain.param_groups if rate is not None else ():
        group["lr"] = rate
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=network.named_parameters())
    samples, labels = batch(task, 0, hvd.rank(), hvd.size())

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(samples), labels).backward()
        optimizer.step()

    for _ in range(WARM_UP_STEPS):
        step()
    return step


def seconds_of(task: Task, knobs: Mapping[str, str], steps: int) -> float:
    """The seconds of so many steps of a training with these knobs. Collective."""
    step = training(task, knobs)
    hvd.barrier()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    hvd.barrier()
    return time.perf_counter() - begin


def measure(task: Task, rounds: int, steps: int) -> dict[str, list[float]]:
    """By variant, the seconds of its steps in each round. Collective."""
    found: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for number in range(rounds):
        for name in rotated(list(VARIANTS), number):
            found[name].append(seconds_of(task, VARIANTS[name], steps))
    return found


def costs(found: Mapping[str, list[float]]) -> dict[str, tuple[float, float, float]]:
    """By variant: the lower quartile, the median and the upper quartile of what it costs.

    >>> costs({"nothing watches": [1.0, 2.0, 4.0], "it": [1.5, 2.5, 4.5]})["it"][1]
    0.25
    """
    usual = found[NOTHING_WATCHES]
    more = {
        name: sorted(mine / its - 1 for mine, its in zip(times, usual, strict=True))
        for name, times in found.items()
        if name != NOTHING_WATCHES
    }
    quartiles = {name: statistics.quantiles(each, n=4) for name, each in more.items()}
    return {name: (low, middle, high) for name, (low, middle, high) in quartiles.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=TASKS, default="mlp")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    task = TASKS[args.task]
    found = measure(task, args.rounds, args.steps)
    if hvd.rank():
        return
    usual_s = statistics.median(found[NOTHING_WATCHES]) / args.steps
    size = f"{args.rounds} rounds of {args.steps} steps of {usual_s * 1e3:.2f} ms"
    table = Table("", "costs of a step", "quartiles", title=f"{task.title}: {size}")
    for name, (low, middle, high) in costs(found).items():
        table.add_row(name, f"{middle:+.2%}", f"{low:+.2%} to {high:+.2%}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
