"""Times a training step whose update is divided between the ranks, and the update alone.

hvdlite takes part three times: unsharded, with `shard=True` on ordinary parameters, and on shared
ones. Its peers are what torch has for the same: ZeroRedundancyOptimizer beside DDP, and FSDP2.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy

import hvdlite as hvd
from benchmarks import training, wrapped
from benchmarks.figures import ANY_CORE, FSDP2, GLOO, OURS, SHARDED, SHARED, ZERO
from benchmarks.groups import Group
from benchmarks.networks import Task, batch
from benchmarks.plan import Effort, rotated
from benchmarks.training import Trainer
from benchmarks.turns import rest


class Sharded(Trainer):
    """Each rank updates a part of the parameters, for all."""

    def __init__(self, task: Task, share: bool = False) -> None:
        super().__init__(task)
        if share:
            hvd.share_parameters(self.network)
        self.optimizer = hvd.DistributedOptimizer(
            self.optimizer, named_parameters=self.network.named_parameters(), shard=True
        )


class WithZeRO(wrapped.WithDDP):
    """torch's own: each rank updates whole parameters, and broadcasts them."""

    def __init__(self, task: Task, group: Group) -> None:
        super().__init__(task, group)
        (options,) = self.optimizer.param_groups
        self.optimizer = ZeroRedundancyOptimizer(
            self.network.parameters(),
            optimizer_class=type(self.optimizer),
            process_group=group.group,
            lr=options["lr"],
        )


def ours() -> dict[str, Callable[[Task], Trainer]]:
    return {
        OURS: training.Hvdlite,
        SHARDED: Sharded,
        SHARED: partial(Sharded, share=True),
    }


def peers(groups: Mapping[str, Group]) -> dict[str, Callable[[Task], Trainer]]:
    """Each on the cores of its rank, and where that is something else, free to run on any core."""
    kinds: dict[str, Any] = {ZERO: WithZeRO, FSDP2: wrapped.WithFSDP2}
    places = {GLOO: "", ANY_CORE: ", any core"}
    return {
        f"{name}{where}": partial(kind, group=groups[group])
        for name, kind in kinds.items()
        for group, where in places.items()
        if group in groups
    }


def time_updates(task: Task, effort: Effort, comm: Any) -> dict[str, list[float]]:
    """This rank's seconds per `optimizer.step()`, by contender and round: gradients are reduced
    before, and every rank has come. Collective."""
    trainers = {name: make(task) for name, make in ours().items()}
    times_s: dict[str, list[float]] = {name: [] for name in trainers}
    begin, round_, done = time.perf_counter(), 0, False
    while not done:
        samples, labels = batch(task, round_, comm.rank, comm.size)
        for name in rotated(list(trainers), round_):
            optimizer: Any = trainers[name].optimizer
            optimizer.zero_grad()
            cross_entropy(trainers[name].model(samples), labels).backward()
            optimizer.synchronize()
            comm.Barrier()
            start = time.perf_counter()
            with optimizer.skip_synchronize():
                optimizer.step()
            seconds = time.perf_counter() - start
            rest(comm)
            if round_ >= training.WARM_UP_ROUNDS:
                times_s[name].append(seconds)
        round_ += 1
        elapsed_s = time.perf_counter() - begin
        done = comm.bcast(effort.enough(round_ - training.WARM_UP_ROUNDS, elapsed_s))
    check(trainers)
    return times_s


def check(trainers: Mapping[str, Trainer]) -> None:
    """All have trained the same parameters, bit for bit."""
    for name, trainer in trainers.items():
        for own, wanted in zip(trainer.parameters(), trainers[OURS].parameters(), strict=True):
            if not torch.equal(own, wanted):
                raise AssertionError(f"{name}: other parameters than unsharded training gives")
