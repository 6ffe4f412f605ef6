"""The parameters of one optimizer on one server: their memory, the optimizer, what has changed."""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.sparse import check_sparse_tensor_invariants

from hvdlite.asynchronous.messages import ABSENT, DENSE
from hvdlite.asynchronous.optimizer_spec import OptimizerSpec
from hvdlite.asynchronous.parts import Layout
from hvdlite.world.teams.shared_memory import lack_of_memory, offer_memory


@dataclass(frozen=True)
class Record:
    """What worker 0 tells a server of an optimizer.

    number: The same on all ranks. layout: Of this server's parts.
    staleness: None: no bound. replicas: How many workers' gradients make a step; None: each alone.
    servers: All of this optimizer, by their ranks. The first one decides whose gradients make a
        step, if not all workers' do.
    described: A pickle of the optimizer's `OptimizerSpec` and of its state, by part. By itself, so
        that one which can't be read here is a problem of this optimizer alone.
    """

    number: int
    layout: Layout
    described: bytes
    staleness: int | None
    replicas: int | None
    num_workers: int
    servers: tuple[int, ...]


@dataclass
class Push:
    """A worker's gradients: dense ones by part, and rows (indices, values) by part."""

    worker: int
    clock: int
    needs: int
    dense: dict[int, torch.Tensor] = field(default_factory=dict)
    rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Offer:
    """Memory that the workers of the server's host may open: the parameters, then a place for the
    gradients of each of these workers, which are listed."""

    path: str
    nonce: bytes
    size_bytes: int
    workers: tuple[int, ...]


class SharedMemory:
    """A mapping of an offered memory: the parameters, and the places of gradients by worker."""

    # The nonce, by which the memory is known, stands before.
    BEGIN = 4096

    def __init__(self, descriptor: int, size_bytes: int, layout_bytes: int, num: int) -> None:
        mapped = mmap.mmap(descriptor, size_bytes)
        memory = torch.frombuffer(mapped, dtype=torch.uint8)
        ends = [self.BEGIN + layout_bytes * i for i in range(num + 2)]
        self.parameters = memory[ends[0] : ends[1]]
        self.gradients = [memory[ends[i] : ends[i + 1]] for i in range(1, num + 1)]

    @classmethod
    def size(cls, layout_bytes: int, num: int) -> int:
        return cls.BEGIN + layout_bytes * (1 + num)


class Served:
    """One optimizer's parameters on this server. Used by one thread, but for `place_for`."""

    def __init__(
        self,
        record: Record,
        local_workers: Sequence[int],
        params: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """local_workers: those on this host that may open its memory.
        params: the parts, where they lie already; None: they get memory of their own.
        Raises what the optimizer's own code raises."""
        spec: OptimizerSpec
        spec, state = pickle.loads(record.described)
        self.record = record
        self.layout = record.layout
        self.digest = record.layout.digest()
        self.offer, shared = self._share(local_workers)
        if shared is None:
            size_bytes = self.layout.size_bytes if params is None else 0
            self.memory = torch.zeros(size_bytes, dtype=torch.uint8)
            self._places: dict[int, torch.Tensor] = {}
        else:
            self.memory = shared.parameters
            self._places = dict(zip(local_workers, shared.gradients, strict=True))
        self.params = self.layout.views(self.memory) if params is None else list(params)
        by_group: list[list[torch.Tensor]] = [[] for _ in spec.options]
        for part, param in zip(self.layout.parts, self.params, strict=True):
            by_group[part.group].append(param)
        try:
            self.optimizer = spec.build(by_group)
        except BaseException:
            self.close()
            raise
        self.set_state(state)
        self._options: dict[int, list[dict[str, Any]]] = {}
        # How often anything has changed; by part, when all of it has, and when each row has (None:
        # only whole parts have).
        self.version = 1
        self._changed = [1] * len(self.params)
        self._rows_changed: list[torch.Tensor | None] = [None] * len(self.params)

    def _share(self, local_workers: Sequence[int]) -> tuple[Offer | None, SharedMemory | None]:
        num = len(local_workers)
        size_bytes = SharedMemory.size(self.layout.size_bytes, num)
        if not num or lack_of_memory(size_bytes):
            return None, None
        try:
            descriptor, (path, nonce) = offer_memory(size_bytes)
        except OSError:
            return None, None
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
            shared = SharedMemory(descriptor, size_bytes, self.layout.size_bytes, num)
        except OSError:
            os.close(descriptor)
            return None, None
        self._descriptor = descriptor  # kept open: workers open it by its number
        return Offer(path, nonce, size_bytes, tuple(local_workers)), shared

    def close(self) -> None:
        """Its memory goes when the last mapping does."""
        descriptor, self._descriptor = getattr(self, "_descriptor", -1), -1
        if descriptor >= 0:
            os.close(descriptor)

    def place_for(self, worker: int) -> torch.Tensor:
        """Where the gradients of a worker come to lie, until its push is applied."""
        place = self._places.get(worker)
        if place is None:
            place = torch.empty(self.layout.size_bytes, dtype=torch.uint8)
            self._places[worker] = place
        return place

    def set_options(self, worker: int, options: list[dict[str, Any]]) -> None:
        """From now on this worker's gradients are applied with these."""
        self._options[worker] = options

    def use_options(self, options: list[dict[str, Any]] | None) -> None:
        for group, its in zip(self.optimizer.param_groups, options or (), strict=False):
            group.update(its)

    def apply(self, push: Push) -> None:
        """A step of the optimizer with these gradients, by the options of their worker. Parts
        without one are left alone."""
        self.use_options(self._options.get(push.worker))
        for index, gradient in push.dense.items():
            self.params[index].grad = gradient
        for index, (rows, values) in push.rows.items():
            shape = self.layout.parts[index].shape
            self.params[index].grad = torch.sparse_coo_tensor(
                rows[None], values, shape, is_coalesced=True, check_invariants=False
            )
        # torch's Adagrad makes sparse tensors, and torch warns if nobody has said whether it is to
        # check them: it is what it is.
        checks: Any = check_sparse_tensor_invariants
        with torch.no_grad(), checks(checks.is_enabled()):
            self.optimizer.step()
        for param in self.params:
            param.grad = None
        self.version += 1
        for index in push.dense:
            self._changed[index] = self.version
        for index, (rows, _) in push.rows.items():
            self._note_rows(index, rows)

    def _note_rows(self, index: int, rows: torch.Tensor) -> None:
        noted = self._rows_changed[index]
        if noted is None:
            noted = torch.zeros(self.layout.parts[index].shape[0], dtype=torch.int64)
            self._rows_changed[index] = noted
        noted[rows] = self.version

    def news(self, known: int) -> tuple[list[int], dict[int, torch.Tensor]]:
        """What has changed since a version: a table, and by part the rows that have changed."""
        table, rows_by_part = [], {}
        for index, changed in enumerate(self._changed):
            noted = self._rows_changed[index]
            if changed > known:
                table.append(DENSE)
            elif noted is None:
                table.append(ABSENT)
            else:
                rows_by_part[index] = rows = (noted > known).nonzero().view(-1)
                table.append(len(rows))
        return table, rows_by_part

    def overwrite(self, state: list[dict[str, Any]]) -> None:
        """The memory has got new values, and the optimizer a new state."""
        self.set_state(state)
        self._options.clear()
        self.version += 1
        self._changed = [self.version] * len(self.params)

    def set_state(self, state: Sequence[Mapping[str, Any]]) -> None:
        self.optimizer.state.clear()
        for param, its in zip(self.params, state, strict=True):
            if its:
                self.optimizer.state[param] = dict(its)

    def state(self) -> list[dict[str, Any]]:
        """By part."""
        return [dict(self.optimizer.state.get(param, {})) for param in self.params]


def mean(pushes: Sequence[Push], layout: Layout) -> Push:
    """The mean of several workers' gradients, added in the order given; one that a worker lacks
    counts as zeros. Changes the gradients of the first one."""
    first = pushes[0]
    if len(pushes) == 1:
        return first
    result = Push(first.worker, first.clock, first.needs)
    for index in range(len(layout.parts)):
        rows = [push.rows[index] for push in pushes if index in push.rows]
        dense = [push.dense[index] for push in pushes if index in push.dense]
        if dense:
            total = dense[0]
            for gradient in dense[1:]:
                total += gradient
            for indices, values in rows:
                total.index_add_(0, indices, values)
            result.dense[index] = total.div_(len(pushes))
        elif rows:
            summed = torch.sparse_coo_tensor(
                torch.cat([indices for indices, _ in rows])[None],
                torch.cat([values for _, values in rows]),
                layout.parts[index].shape,
                check_invariants=False,
            ).coalesce()
            result.rows[index] = summed.indices()[0], summed.values().div_(len(pushes))
    return result
