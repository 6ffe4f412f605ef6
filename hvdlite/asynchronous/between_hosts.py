"""Asynchronous training without servers on several hosts: Hogwild within a host, servers between
hosts.

Each part of the parameters has its home on one host. The workers there change it in place, each by
its own optimizer. Workers of other hosts send their gradients to the home, where a thread of the
first worker applies them in place too, and take its values into their own host's copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import cloudpickle
import torch

from hvdlite.asynchronous import optimizer_spec
from hvdlite.asynchronous.channel import channel_of
from hvdlite.asynchronous.hogwild import HogwildWorker
from hvdlite.asynchronous.home_server import Task
from hvdlite.asynchronous.homes import Clocks, Copies, Home, HomeLink, Marks, OwnHome
from hvdlite.asynchronous.messages import Kind
from hvdlite.asynchronous.partitioners import Partitioner
from hvdlite.asynchronous.parts import Layout, Part, deal
from hvdlite.asynchronous.served import Push, Record
from hvdlite.asynchronous.waiting import Waiting
from hvdlite.asynchronous.worker import gradient_of, parts_of, readable
from hvdlite.collectives.barrier import barrier
from hvdlite.collectives.broadcast import broadcast_
from hvdlite.collectives.objects import broadcast_object, gather_results
from hvdlite.optimizer.arguments import ParameterNames
from hvdlite.shared.parameters import require_shared
from hvdlite.world import world
from hvdlite.world.teams.process_sets import global_process_set

_INT64_BYTES = 8


class BetweenHostsWorker(HogwildWorker):
    """What a worker keeps of an optimizer without servers on several hosts.

    `step` number t (from 0) changes the parts at home on this host and sends the other gradients
    to their homes. At home it then waits for the clocks as on one host. Of the other homes it asks
    for parts that contain the first t + 2 - s steps of every worker, and loads what the `step`
    before has asked for.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: ParameterNames,
        staleness: int | None,
        partitioner: Partitioner | None,
    ) -> None:
        """Collective over the workers.

        Raises:
            HorovodInternalError: The optimizer can't be built for a host's parts; on every worker.
            LaunchError: A rank lacks memory, or MPI communicators; on every rank.
        """
        active = world.current()
        self._params = [p for group in optimizer.param_groups for p in group["params"]]
        self._named = [(names.of(param, i), param) for i, param in enumerate(self._params)]
        if not optimizer_spec.can_be_cut(optimizer):
            partitioner = None
        hosts = active.placement.hosts
        layouts = deal(parts_of(optimizer, names, partitioner), len(hosts))
        self._layout = layouts[active.placement.host]
        self._channel = channel_of(active)
        num_words = 1 + len(hosts)
        super().__init__(
            self._params,
            staleness,
            num_words * _INT64_BYTES + Marks.size_bytes(self._layout),
        )
        words = self._more[: num_words * _INT64_BYTES].view(torch.int64)
        # Not 0 once serving has failed on this host.
        self._failed = words[:1]
        self._copies = Copies(words[1:], self._region)
        marks = Marks(self._more[num_words * _INT64_BYTES :], self._layout)
        self._send_values()
        self._served_home: Home | None = None
        gather_results(
            "AsyncOptimizer",
            lambda: self._build(optimizer, marks),
            f"{self._name}.built",
            global_process_set,
        )
        wait = Waiting(self._channel.workers, active.config, staleness)
        self.links = [
            HomeLink(
                self._copies, host, self._channel.workers, ranks[0], self._number, layout, wait
            )
            for host, (ranks, layout) in enumerate(zip(hosts, layouts, strict=True))
            if host != active.placement.host and layout.parts
        ]
        barrier(name=f"{self._name}.ready")
        for link in self.links:
            link.attach()

    def _take_part(self) -> None:
        active = world.current()
        active.async_workers[self._number] = self
        self._channel.optimizers.append(self)

    def _build(self, optimizer: torch.optim.Optimizer, marks: Marks) -> None:
        """The optimizers of the parts at home on this host: this worker's own, and where it serves
        the one for the gradients of other hosts. Both begin with the optimizer's state."""
        state = self._state_of(optimizer.state, self._params)
        described = cloudpickle.dumps((optimizer_spec.describe(optimizer), state))
        record = Record(
            *(self._number, self._layout, described, self._staleness, None, world.size(), ())
        )
        # Tensors of their own on the same memory: each thread gives its tensors its gradients.
        self._own_home = OwnHome(record, self._places(self._layout), marks)
        if self._channel.server is not None:
            self._served_home = Home(record, self._places(self._layout), marks)
            task = Task(self._served_home, Clocks(self._clocks), self._failed)
            self._channel.server.add(task)
        optimizer.state.clear()  # it is the parts' from now on

    def _state_of(self, state: Mapping[Any, Any], keys: list[Any]) -> list[dict[str, Any]]:
        """By part at home, its part of an optimizer's state. keys: by parameter, where it is."""
        return [
            optimizer_spec.state_of(
                state, keys[part.param], part, tuple(self._params[part.param].shape)
            )
            for part in self._layout.parts
        ]

    def _places(self, layout: Layout) -> list[torch.Tensor]:
        """By part, where it lies in this host's parameters."""
        return [part.of(self._params[part.param].data) for part in layout.parts]

    def _send_values(self) -> None:
        """Gives all hosts the values that worker 0's parameters have now. All workers of a host
        write the same ones."""
        for index, param in enumerate(self._params):
            values = param.data.contiguous()
            broadcast_(values, 0, name=f"{self._name}.values.{index}")
            if world.rank() and values.data_ptr() != param.data_ptr():
                param.data.copy_(values)
        barrier(name=f"{self._name}.values")
        self._note_change()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Changes the parts at home, sends the other gradients, and loads parameters that are new
        enough for the next step."""
        require_shared(self._named)
        options = optimizer_spec.options_of(optimizer)
        gradients = [readable(param.grad) for param in self._params]
        for link in self.links:
            link.take_reply()
            with torch.no_grad():
                link.load(self._places(link.layout))
        self._check_serving()
        if self._layout.parts:
            self._own_home.step(self._push_of(gradients), options)
        self.clock += 1
        self._clocks[self._own] = self.clock
        needs = 0 if self._staleness is None else max(0, self.clock + 1 - self._staleness)
        for link in self.links:
            there = [gradient_of(part, gradients[part.param]) for part in link.layout.parts]
            link.push(there, self.clock - 1, needs, options)
        if self._staleness is not None and self._layout.parts:
            self._wait(self.clock - self._staleness)
        self._note_change()

    def _push_of(self, gradients: list[torch.Tensor | None]) -> Push:
        """The gradients of the parts at home."""
        push = Push(self._own, self.clock, 0)
        for index, part in enumerate(self._layout.parts):
            gradient = gradient_of(part, gradients[part.param])
            if gradient is None:
                continue
            if gradient.is_sparse:
                push.rows[index] = gradient.indices()[0], gradient.values()
            else:
                push.dense[index] = gradient
        return push

    def _note_change(self) -> None:
        """Tells autograd that the parameters have changed."""
        for param in self._params:
            torch.autograd.graph.increment_version(param)

    def _check_serving(self) -> None:
        if int(self._failed):
            self._channel.fail()

    def _look_for_the_dead(self) -> None:
        self._check_serving()
        super()._look_for_the_dead()

    def pull(self) -> None:
        self._check_serving()
        for link in self.links:
            with torch.no_grad():
                link.pull(self._places(link.layout))
        self._note_change()

    def synchronize(self) -> None:
        """Returns when the homes have applied everything that this worker has sent."""
        for link in self.links:
            link.look()

    def counters(self) -> dict[str, Any]:
        if self._layout.parts:
            return super().counters()
        return {"steps": self.links[0].look()["made"], "dropped": 0}

    def full_state(self) -> dict[int, dict[str, Any]]:
        """torch's format: this worker's own state of the parts at home on its host; of the others,
        that of the optimizer which applies other hosts' gradients at their home."""
        own = zip(self._layout.parts, self._own_home.state(), strict=True)
        pieces = list(own)
        for link in self.links:
            pieces += zip(link.layout.parts, link.state(), strict=True)
        by_param: dict[int, list[tuple[Part, dict[str, Any]]]] = {}
        for part, state in sorted(pieces, key=lambda piece: (piece[0].param, piece[0].begin)):
            by_param.setdefault(part.param, []).append((part, state))
        whole = {index: optimizer_spec.whole_state(found) for index, found in by_param.items()}
        return {index: state for index, state in whole.items() if state}

    def options_to_load(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Collective over the workers: what worker 0's argument has besides the state."""
        options = {name: value for name, value in state_dict.items() if name != "state"}
        found: dict[str, Any] = broadcast_object(options, 0, f"{self._name}.options")
        return found

    def load_state(self, state: Mapping[int, Any]) -> None:
        """Collective over the workers. All optimizers take worker 0's state, and all hosts the
        values that worker 0's parameters have now."""
        self.synchronize()
        state = broadcast_object(state, 0, f"{self._name}.state")
        barrier(name=f"{self._name}.before_load")  # nobody's step is under way now

        def load() -> int | None:
            keys = list(range(len(self._params)))
            self._own_home.overwrite(self._state_of(state, keys))
            if self._served_home is None:
                return None
            self._served_home.overwrite(self._state_of(state, keys))
            return self._served_home.version

        versions = gather_results(
            "AsyncOptimizer.load_state_dict", load, f"{self._name}.loaded", global_process_set
        )
        for link in self.links:
            # An answer that is on its way since before is older, and is not copied any more.
            link.is_newer(versions[link.server] or 0)
            link.forget_options()
        self._send_values()

    def leave(self) -> None:
        self._leave()

    def stop_counting(self) -> None:
        super().stop_counting()
        for link in self.links:
            link.tell(Kind.JOIN)

    def resume(self, clock: int) -> None:
        super().resume(clock)
        for link in self.links:
            link.resume(clock)

    def close(self) -> None:
        """This optimizer is not used any more on this worker."""
        if self in self._channel.optimizers:
            self._channel.optimizers.remove(self)
            self._leave()
            active = world.active
            if active is None or active.between_hosts is not self._channel:
                return
            active.async_workers.pop(self._number, None)
            # Nobody receives what comes after the goodbye: Python may collect this at its end.
            if self._channel.has_left:
                return
            # The engine is closed once the worker has left.
            with contextlib.suppress(RuntimeError):
                for link in self.links:
                    link.tell(Kind.RELEASE)
