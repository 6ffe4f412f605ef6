"""Asynchronous training without servers: the workers of one host update the parameters in place.

The parameters lie once, in memory that all workers share, and each worker's own optimizer changes
them there, without a lock (Hogwild; Recht et al., 2011): a change may be lost where two workers
write the same element at the same moment. The optimizer's state is each worker's own.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from typing import Any

import torch

from hvdlite.asynchronous.homes import AWAY
from hvdlite.asynchronous.joining import next_number
from hvdlite.asynchronous.optimizer_methods import AsyncMethods
from hvdlite.errors import HorovodInternalError
from hvdlite.shared.memory import PAGE_BYTES, open_region
from hvdlite.shared.parameters import share_parameters
from hvdlite.world import world

log = logging.getLogger("hvdlite")

_FIRST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 1e-3
# How often a worker that waits asks whether another one has died.
_LOOK_S = 1.0
_TAG = (1 << 31) - 3


class HogwildMethods(AsyncMethods):
    """The methods of an asynchronous optimizer without servers."""

    _hvdlite_worker: HogwildWorker

    def step(self, closure: Any = None) -> Any:
        """The step of the wrapped class, on parameters that all workers share. Waits until no
        worker is more than `max_staleness` steps behind.

        Raises:
            HorovodInternalError: It waits for a worker that has died.
            ValueError: A closure is given.
        """
        self._hvdlite_refuse_closure(closure)
        result = super(AsyncMethods, self).step()
        self._hvdlite_worker.made_step()
        return result

    def state_dict(self) -> dict[str, Any]:
        """This worker's own state, in torch's own format."""
        return super(AsyncMethods, self).state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Loads this worker's own state."""
        super(AsyncMethods, self).load_state_dict(state_dict)


class HogwildWorker:
    """What a worker keeps of an optimizer whose parameters all workers share.

    Invariant: `clocks[w]`, in shared memory, is the number of steps that worker w has made. Worker
    w alone writes it, after it has written the parameters. A worker that has made t steps goes on
    when every other one has made t - s: so the parameters contain these, as with servers.
    """

    def __init__(
        self, params: list[torch.Tensor], staleness: int | None, more_bytes: int = 0
    ) -> None:
        """Collective over the workers. more_bytes: that they share behind the clocks."""
        active = world.current()
        self._staleness = staleness
        self._own = active.rank
        self._team = active.team
        self._names = active.placement.host_names[active.placement.host]
        disabled = active.config.stall_check_disable
        self._warning_s = 0 if disabled else active.config.stall_check_time_seconds
        self._shutdown_s = 0 if disabled else active.config.stall_shutdown_time_seconds
        self._number = next_number(active)
        self._name = f"hvdlite.AsyncOptimizer.{self._number}"
        share_parameters(torch.nn.ParameterList(params))
        size_bytes = 8 * active.size + more_bytes
        self._region = open_region("AsyncOptimizer", size_bytes, "start fewer ranks")
        memory = torch.empty(0, dtype=torch.uint8).set_(
            self._region.storage(PAGE_BYTES, size_bytes)
        )
        self._clocks = memory[: 8 * active.size].view(torch.int64)
        self._more = memory[8 * active.size :]
        self.clock = 0
        self._pid = os.getpid()
        self._take_part()

    def _take_part(self) -> None:
        active = world.current()
        active.async_workers[self._number] = self
        active.before_leaving.append(self._leave)
        atexit.register(self._leave)

    def made_step(self) -> None:
        self.clock += 1
        self._clocks[self._own] = self.clock
        if self._staleness is not None:
            self._wait(self.clock - self._staleness)

    def _wait(self, needs: int) -> None:
        """Until every worker has made so many steps."""
        pause_s = _FIRST_PAUSE_S
        begun = looked = warned = time.monotonic()
        while int(self._clocks.min()) < needs:
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
            now = time.monotonic()
            if now - looked > _LOOK_S:
                self._look_for_the_dead()
                looked = time.monotonic()
            if self._shutdown_s and now - begun > self._shutdown_s:
                raise HorovodInternalError(self._text(needs, now - begun))
            if self._warning_s and warned == begun and now - begun > self._warning_s:
                log.warning("%s", self._text(needs, now - begun))
                warned = now

    def _look_for_the_dead(self) -> None:
        """Raises HorovodInternalError if a worker has died: no worker
        sends this message, and it fails when one of them has gone."""
        receive = self._team.engine.recv(torch.empty(1, dtype=torch.uint8), -1, _TAG)
        if self._team.size > 1 and receive.drive(0.01):
            failure = receive.wait()
            raise HorovodInternalError(f"AsyncOptimizer: {failure}")
        receive.withdraw()

    def _text(self, needs: int, passed_s: float) -> str:
        clocks = self._clocks.tolist()
        late = [str(worker) for worker, made in enumerate(clocks) if made < needs]
        return (
            f"worker {self._own} (on {self._names}) has waited {passed_s:.0f} s for step "
            f"{needs - 1} of worker {', '.join(late[:8])} (max_staleness={self._staleness})"
        )

    def _leave(self) -> None:
        """This worker does not count, until `resume`. In a process that was forked off this
        does nothing: its end is not the worker's."""
        if os.getpid() == self._pid:
            self._clocks[self._own] = AWAY + self.clock

    def stop_counting(self) -> None:
        self._leave()

    def resume(self, clock: int) -> None:
        self.clock = clock
        self._clocks[self._own] = clock

    def pull(self) -> None:
        """The parameters are the newest ones always."""

    def synchronize(self) -> None:
        """Each step is done when it returns."""

    def counters(self) -> dict[str, Any]:
        return {"steps": [made % AWAY for made in self._clocks.tolist()], "dropped": 0}

    def close(self) -> None:
        """This optimizer is not used any more on this worker."""
        self._leave()
        atexit.unregister(self._leave)
        active = world.active
        if active is not None and active.async_workers.get(self._number) is self:
            del active.async_workers[self._number]
            active.before_leaving.remove(self._leave)
