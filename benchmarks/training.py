"""Times one training step, zero_grad to step(), with the gradients averaged in different ways.

All contenders start from the same parameters and get the same batches, a fresh one in each round,
so that what they have trained can be compared at the end.
"""

import hashlib
import time
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import hvdlite as hvd
from benchmarks.figures import DDP, FLOOR, OURS
from benchmarks.networks import Task, batch
from benchmarks.plan import Effort, rotated
from benchmarks.turns import rest

WARM_UP_ROUNDS = 3


class Trainer:
    """A network, its optimizer, and how the gradients of the ranks become one."""

    def __init__(self, task: Task) -> None:
        self.network = task.network()
        self.model: nn.Module = self.network
        self.optimizer = task.make_optimizer(self.network.parameters())

    def enter(self) -> None:
        """Between the barrier and the timing of a step."""

    def leave(self) -> None:
        """After the timing."""

    def average_gradients(self) -> None:
        """Between backward() and step(); nothing where backward() has done it."""

    def parameters(self) -> list[Tensor]:
        """All of them, on every rank. Collective."""
        return list(self.network.parameters())

    def step(self, samples: Tensor, labels: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model(samples), labels)
        loss.backward()
        self.average_gradients()
        self.optimizer.step()
        return loss.detach()


class Hvdlite(Trainer):
    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.optimizer = hvd.DistributedOptimizer(
            self.optimizer, named_parameters=self.network.named_parameters()
        )


class WithDDP(Trainer):
    """torch's own, over the default process group. It does not send the statistics of batch norm,
    as the others don't; its other options are the default ones."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.model = DistributedDataParallel(self.network, forward_sync_buffers=False)


class MPIByHand(Trainer):
    """What a user of mpi4py would write: all gradients in one buffer, one Allreduce."""

    def __init__(self, task: Task, mpi: Any, comm: Any) -> None:
        super().__init__(task)
        self.own = self.parameters()
        self.flat = torch.empty(sum(p.numel() for p in self.own))
        parts = self.flat.split([p.numel() for p in self.own])
        self.views = [part.view_as(p) for part, p in zip(parts, self.own, strict=True)]
        self.mpi, self.comm = mpi, comm

    def average_gradients(self) -> None:
        for view, parameter in zip(self.views, self.own, strict=True):
            view.copy_(parameter.grad)
            parameter.grad = view
        self.comm.Allreduce(self.mpi.IN_PLACE, self.flat.numpy(), self.mpi.SUM)
        self.flat.div_(self.comm.size)


def contenders(mpi: Any, comm: Any) -> dict[str, Callable[[Task], Trainer]]:
    """By name; FLOOR, which trains each rank for itself, is what no contender can beat."""
    return {
        OURS: Hvdlite,
        DDP: WithDDP,
        "MPI by hand": lambda task: MPIByHand(task, mpi, comm),
        FLOOR: Trainer,
    }


def time_task(
    task: Task,
    effort: Effort,
    comm: Any,
    contenders: dict[str, Callable[[Task], Trainer]],
    reference: str = DDP,
    unchecked: Collection[str] = (FLOOR,),
) -> dict[str, list[float]]:
    """This rank's seconds per step, by contender and round. Collective.

    The losses of all contenders but the unchecked ones must be those of `reference`.
    """
    trainers = {name: make(task) for name, make in contenders.items()}
    times_s: dict[str, list[float]] = {name: [] for name in trainers}
    losses: dict[str, list[float]] = {name: [] for name in trainers}

    begin, round_, done = time.perf_counter(), 0, False
    while not done:
        samples, labels = batch(task, round_, comm.rank, comm.size)
        for name in rotated(list(trainers), round_):
            comm.Barrier()
            trainers[name].enter()
            start = time.perf_counter()
            loss = trainers[name].step(samples, labels)
            seconds = time.perf_counter() - start
            trainers[name].leave()
            rest(comm)
            losses[name].append(loss.item())
            if round_ >= WARM_UP_ROUNDS:
                times_s[name].append(seconds)
        round_ += 1
        done = comm.bcast(effort.enough(round_ - WARM_UP_ROUNDS, time.perf_counter() - begin))

    for name in trainers:
        if name not in unchecked:
            check(name, trainers[name], losses[name], losses[reference], comm)
    return times_s


def check(
    name: str, trainer: Trainer, losses: list[float], reference: list[float], comm: Any
) -> None:
    """The parameters are the same on all ranks, bit for bit, and the losses are the reference's.

    The latter to 1 %: sums in another order round differently, and training amplifies that.
    """
    hashed = hashlib.sha256()
    for parameter in trainer.parameters():
        hashed.update(parameter.detach().numpy().tobytes())
    if len(set(comm.allgather(hashed.digest()))) != 1:
        raise AssertionError(f"{name}: the parameters differ between the ranks")
    for step, (loss, wanted) in enumerate(zip(losses, reference, strict=True)):
        if abs(loss - wanted) > 0.01 * abs(wanted):
            raise AssertionError(f"{name}: step {step} has the loss {loss}, not {wanted}")
