"""Times a training step without weights, and with weights that are 1, equal and unequal.

All steps are of one optimizer, in turn: what differs is `set_weight` and what follows from it.
"""

import time
from typing import Any

import torch
from torch import Tensor

from benchmarks import training
from benchmarks.figures import EQUAL, ONES, PLAIN, UNEQUAL
from benchmarks.networks import Task, batch
from benchmarks.plan import Effort, rotated
from benchmarks.turns import rest


def weights(rank: int) -> dict[str, float | None]:
    """This rank's, by contender; None: it gives none."""
    return {PLAIN: None, ONES: 1.0, EQUAL: 64.0, UNEQUAL: 50.0 + rank}


class Weighted(training.Hvdlite):
    weight: float | None = None

    def step(self, samples: Tensor, labels: Tensor) -> Tensor:
        if self.weight is not None:
            optimizer: Any = self.optimizer
            optimizer.set_weight(self.weight)
        return super().step(samples, labels)


def time_weights(task: Task, effort: Effort, comm: Any) -> dict[str, list[float]]:
    """This rank's seconds per step, by contender and round. Collective."""
    trainer = Weighted(task)
    given = weights(comm.rank)
    times_s: dict[str, list[float]] = {name: [] for name in given}
    begin, round_, done = time.perf_counter(), 0, False
    while not done:
        samples, labels = batch(task, round_, comm.rank, comm.size)
        for name in rotated(list(given), round_):
            trainer.weight = given[name]
            comm.Barrier()
            start = time.perf_counter()
            trainer.step(samples, labels)
            seconds = time.perf_counter() - start
            rest(comm)
            if round_ >= training.WARM_UP_ROUNDS:
                times_s[name].append(seconds)
        round_ += 1
        elapsed_s = time.perf_counter() - begin
        done = comm.bcast(effort.enough(round_ - training.WARM_UP_ROUNDS, elapsed_s))
    check(task, comm)
    return times_s


def check(task: Task, comm: Any) -> None:
    """The gradients of a step are the weighted mean, formed here, of those of all ranks."""
    samples, labels = batch(task, 0, comm.rank, comm.size)
    alone = training.Trainer(task)
    alone.step(samples, labels)
    of_ranks = comm.allgather([gradient.numpy() for gradient in gradients(alone)])
    for name in weights(comm.rank):
        trainer = Weighted(task)
        trainer.weight = weights(comm.rank)[name]
        trainer.step(samples, labels)
        shares = torch.tensor([weights(rank)[name] or 1.0 for rank in range(comm.size)])
        shares /= shares.sum()
        for index, found in enumerate(gradients(trainer)):
            stacked = torch.stack([torch.from_numpy(own[index]) for own in of_ranks], -1)
            if not torch.allclose(found, stacked @ shares, rtol=1e-4, atol=1e-6):
                raise AssertionError(f"{name}: gradient {index} is not the weighted mean")


def gradients(trainer: training.Trainer) -> list[Tensor]:
    return [parameter.grad for parameter in trainer.parameters() if parameter.grad is not None]
