"""`hvd.join` and asynchronous optimizers: after it, all workers go on from the greatest clock.

One operation serves all optimizers of the job, by their numbers: the workers' garbage collectors
free optimizers that are no longer used at different moments, so their lists may differ.
"""

from __future__ import annotations

import torch

from hvdlite.collectives.allreduce import allreduce
from hvdlite.collectives.barrier import barrier
from hvdlite.ops import Max
from hvdlite.world import world


def next_number(active: world.World) -> int:
    """The number of an optimizer that all workers begin to make."""
    number = active.next_async_optimizer
    if not number:
        active.before_joining.append(_before)
        active.after_joining.append(_after)
    active.next_async_optimizer += 1
    return number


def _before() -> None:
    for worker in tuple(world.current().async_workers.values()):
        worker.stop_counting()


def _after() -> None:
    active = world.current()
    workers = dict(active.async_workers)
    clocks = torch.zeros(active.next_async_optimizer, dtype=torch.int64)
    for number, worker in workers.items():
        clocks[number] = worker.clock
    clocks = allreduce(clocks, op=Max, name="hvdlite.AsyncOptimizer.clocks")
    for number, worker in workers.items():
        worker.resume(int(clocks[number]))
    # Nobody makes a step before all count again.
    barrier(name="hvdlite.AsyncOptimizer.resumed")
