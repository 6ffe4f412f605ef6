"""One optimizer on one worker: its parts, its links to the servers, its clock."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import cloudpickle
import torch

from hvdlite.asynchronous import optimizer_spec
from hvdlite.asynchronous.joining import next_number
from hvdlite.asynchronous.messages import Kind
from hvdlite.asynchronous.partitioners import Partitioner
from hvdlite.asynchronous.parts import Part, cut, deal
from hvdlite.asynchronous.served import Record
from hvdlite.asynchronous.server_link import ServerLink
from hvdlite.asynchronous.waiting import Waiting
from hvdlite.collectives.allreduce import allreduce
from hvdlite.collectives.objects import broadcast_object
from hvdlite.errors import HorovodInternalError
from hvdlite.ops import Max
from hvdlite.optimizer.arguments import ParameterNames
from hvdlite.world import world
from hvdlite.world.teams.roles import Everyone

# Numbers are 16 bits in a header.
_MOST_OPTIMIZERS = 1 << 16


class Worker:
    """What a worker keeps of an optimizer whose parameters live on servers.

    The invariant of `clocks` holds with these steps: `step` number t (from 0) sends the gradients
    of step t. With a bound s > 0, or none, it asks for parameters that contain the first
    t + 2 - s steps of every worker, and loads what the `step` before has asked for: so they come
    while step t + 1 is computed, and serve for step t + 2. With s = 0 it waits for what it asks for
    itself.
    """

    def __init__(
        self,
        everyone: Everyone,
        optimizer: torch.optim.Optimizer,
        names: ParameterNames,
        *,
        servers: Sequence[int],
        partitioner: Partitioner | None,
        staleness: int | None,
        replicas: int | None,
    ) -> None:
        """Collective over the workers. servers: their ranks in the job.

        Raises:
            HorovodInternalError: A server can't build the optimizer; on every worker.
        """
        active = world.current()
        self.params = [p for group in optimizer.param_groups for p in group["params"]]
        self._num_params = len(self.params)
        self._forms = [
            (names.of(param, index), param.shape, param.dtype)
            for index, param in enumerate(self.params)
        ]
        self._staleness = staleness
        # Whether all workers make each step together.
        self.in_rounds = replicas is not None
        self.clock = 0
        if not optimizer_spec.can_be_cut(optimizer):
            partitioner = None
        layouts = deal(parts_of(optimizer, names, partitioner), len(servers))
        number = self._number = next_number(active)
        if number >= _MOST_OPTIMIZERS:
            raise ValueError(f"AsyncOptimizer: more than {_MOST_OPTIMIZERS} optimizers")
        self._name = f"hvdlite.AsyncOptimizer.{number}"
        wait = Waiting(everyone, active.config, staleness, replicas)
        self.links = [
            ServerLink(everyone, server, number, layout, wait)
            for server, layout in zip(servers, layouts, strict=True)
        ]
        self._set_up(optimizer, number, staleness, replicas)
        for link in self.links:
            link.attach()
        self.pull()
        self._pid = os.getpid()
        self._is_open = True
        active.async_workers[number] = self

    def _places(self, link: ServerLink) -> list[torch.Tensor]:
        """By part of a link, its place in the model: where the parameter lies now.

        Raises:
            RuntimeError: A parameter has got another shape or dtype, as by `model.to()`.
        """
        for param, (name, shape, dtype) in zip(self.params, self._forms, strict=True):
            if param.shape != shape or param.dtype != dtype:
                raise RuntimeError(
                    f"AsyncOptimizer: parameter {name!r} is now {list(param.shape)}, {param.dtype};"
                    f" the servers have it as {list(shape)}, {dtype}; change the model before you "
                    "make its optimizer asynchronous"
                )
        return [part.of(self.params[part.param].data) for part in link.layout.parts]

    def _set_up(
        self,
        optimizer: torch.optim.Optimizer,
        number: int,
        staleness: int | None,
        replicas: int | None,
    ) -> None:
        """Worker 0 gives the servers the optimizer; all learn whether that went well."""
        problems: list[str | None] = []  # by link
        failure: Exception | None = None
        if world.rank() == 0:
            try:
                plan = optimizer_spec.describe(optimizer)
                for link in self.links:
                    state = self._state_of(link, optimizer.state, self.params)
                    described = cloudpickle.dumps((plan, state))
                    record = Record(
                        *(number, link.layout, described, staleness, replicas, world.size()),
                        tuple(each.server for each in self.links),
                    )
                    problems.append(link.set_up(record, self._places(link)))
            except Exception as error:
                failure = error
                text = f"worker 0: {type(error).__name__}: {error}"
                problems += [text] * (len(self.links) - len(problems))
        problems = broadcast_object(problems, 0, f"{self._name}.set_up")
        if any(problems):
            for link, problem in zip(self.links, problems, strict=True):
                if not problem:
                    link.tell(Kind.RELEASE)
            raise HorovodInternalError(
                "AsyncOptimizer: the servers can't take the optimizer: "
                + "; ".join(dict.fromkeys(filter(None, problems)))
            ) from failure
        optimizer.state.clear()  # it is the servers' from now on

    def _state_of(
        self, link: ServerLink, state: Mapping[Any, Any], keys: Sequence[Any]
    ) -> list[dict[str, Any]]:
        """By part of a link, its part of an optimizer's state. keys: by parameter, where it is."""
        return [
            optimizer_spec.state_of(
                state, keys[part.param], part, tuple(self.params[part.param].shape)
            )
            for part in link.layout.parts
        ]

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Sends the gradients, and loads parameters that are new enough for the next step."""
        options = optimizer_spec.options_of(optimizer)
        if not self.in_rounds:
            self._finish_reply()
        gradients = [readable(param.grad) for param in self.params]
        self.clock += 1
        for link in self.links:
            own = [gradient_of(part, gradients[part.param]) for part in link.layout.parts]
            if self.in_rounds:
                # The first server's round: it is the one that decides.
                link.push(own, self.clock - 1, self.clock, options)
            else:
                needs = 0 if self._staleness is None else self.clock + 1 - self._staleness
                link.push(own, self.clock - 1, max(0, needs), options)
        if self.in_rounds:
            self._finish_reply()
            self.clock = self.links[0].clock

    def _finish_reply(self) -> None:
        for link in self.links:
            link.take_reply()
            with torch.no_grad():
                link.load(self._places(link))
        self._note_change()

    def _note_change(self) -> None:
        """Tells autograd that the parameters have changed."""
        for param in self.params:
            torch.autograd.graph.increment_version(param)

    def pull(self) -> None:
        for link in self.links:
            with torch.no_grad():
                link.pull(self._places(link))
        self._note_change()

    def synchronize(self) -> None:
        """Returns when the servers have applied everything that this worker has sent."""
        for link in self.links:
            link.look()

    def counters(self) -> dict[str, Any]:
        found = self.links[0].look()
        return {"steps": found["made"], "dropped": found["dropped"]}

    def full_state(self) -> dict[int, dict[str, Any]]:
        """torch's format, from the servers."""
        by_param: dict[int, list[tuple[Part, dict[str, Any]]]] = {}
        for link in self.links:
            for part, state in zip(link.layout.parts, link.state(), strict=True):
                by_param.setdefault(part.param, []).append((part, state))
        whole = {
            index: optimizer_spec.whole_state(sorted(pieces, key=lambda piece: piece[0].begin))
            for index, pieces in sorted(by_param.items())
        }
        return {index: state for index, state in whole.items() if state}

    def options_to_load(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Collective over the workers: what worker 0's argument has besides the state, which goes
        to the servers. It fits, or does not, on all workers alike."""
        options = {name: value for name, value in state_dict.items() if name != "state"}
        found: dict[str, Any] = broadcast_object(options, 0, f"{self._name}.options")
        return found

    def load_state(self, state: Mapping[int, Any]) -> None:
        """Collective over the workers. The servers take this state, and the values that worker 0's
        parameters have now; then all workers have these values."""
        self.settle()
        # Before: nobody's step may come after the new state.
        self._agree("before_load", None)
        problem: str | None = None
        if world.rank() == 0:
            try:
                keys = list(range(self._num_params))
                for link in self.links:
                    own = self._state_of(link, state, keys)
                    problem = problem or link.load_state(own, self._places(link))
            except Exception as error:
                problem = f"worker 0: {type(error).__name__}: {error}"
        self._agree("load", problem)
        for link in self.links:
            link.forget_options()
        self.pull()

    def _agree(self, what: str, problem: str | None) -> None:
        """Waits for all workers. Raises HorovodInternalError if worker 0 has a problem."""
        allreduce(torch.zeros(1), op=Max, name=f"{self._name}.{what}")
        problem = broadcast_object(problem, 0, f"{self._name}.{what}.problem")
        if problem:
            raise HorovodInternalError(f"AsyncOptimizer.load_state_dict: {problem}")

    def settle(self) -> None:
        """Takes the reply that is awaited, and waits until everything sent has been applied."""
        if not self.in_rounds:
            self._finish_reply()
        self.synchronize()

    def stop_counting(self) -> None:
        for link in self.links:
            link.tell(Kind.JOIN)

    def resume(self, clock: int) -> None:
        self.clock = clock

    def close(self) -> None:
        """This optimizer is not used any more on this worker. Does not wait. In a process that was
        forked off it does nothing."""
        if self._is_open and os.getpid() == self._pid:
            self._is_open = False
            active = world.active
            if active is None or active.async_workers.get(self._number) is not self:
                return
            del active.async_workers[self._number]
            # The engine is closed once the worker has left.
            with contextlib.suppress(RuntimeError):
                for link in self.links:
                    link.tell(Kind.RELEASE)


def parts_of(
    optimizer: torch.optim.Optimizer, names: ParameterNames, partitioner: Partitioner | None
) -> list[Part]:
    parts: list[Part] = []
    index = 0
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            parts += cut(index, names.of(param, index), number, param, partitioner)
            index += 1
    return parts


def readable(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Sparse ones with ascending rows, each once."""
    if gradient is None or not gradient.is_sparse:
        return gradient
    if gradient.sparse_dim() != 1:
        raise ValueError(
            f"AsyncOptimizer: a sparse gradient with {gradient.sparse_dim()} sparse dimensions; "
            "only rows can be sparse, as those of nn.Embedding(sparse=True)"
        )
    return gradient.coalesce()


def gradient_of(part: Part, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """A part's rows of a gradient."""
    if gradient is None or not gradient.is_sparse:
        return gradient if gradient is None else part.of(gradient)
    if part.shape[0] == gradient.shape[0]:
        return gradient
    rows, values = gradient.indices()[0], gradient.values()
    begin, end = torch.searchsorted(rows, torch.tensor([part.begin, part.end], device=rows.device))
    return torch.sparse_coo_tensor(
        (rows[begin:end] - part.begin)[None],
        values[begin:end],
        part.shape,
        is_coalesced=True,
        check_invariants=False,
    )
