"""Parameters whose new values are in flight from other ranks.

`step` adds them, and goes on. A read through a module waits for them first, and so does all that
would write these parameters, or use the memory in which they come.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Iterable, Sequence

import torch

from hvdlite.collectives.handles import Waitable
from hvdlite.errors import HorovodInternalError
from hvdlite.observe import waits
from hvdlite.world import world
from hvdlite.world.process import exits

log = logging.getLogger("hvdlite")


class Arrival:
    """Parameters that come together, by one operation in each update. Subclasses post it and write
    the values."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self.params = params
        # Of this update; and, when it is over, the text of its failure.
        self._operation: Waitable | None = None
        self._is_over = False
        self._text: str | None = None
        # Several threads may read at once. Reentrant, as a signal's handler may read.
        self._lock = threading.RLock()

    def reset(self) -> None:
        """An update begins."""
        self._operation, self._is_over, self._text = None, False, None

    def start(self) -> None:
        """Does not block. Does nothing if it has started in this update."""
        if self._operation is None:
            self._operation = self._post()

    def finish(self) -> str | None:
        """After `start`: blocks until the parameters are whole. Returns the text of the failure, or
        None. After an interruption it goes on; when it is over, it returns the same at once."""
        assert self._operation is not None
        if waits.observed():
            with waits.waiting(self._operation):
                return self._finish(self._operation)
        return self._finish(self._operation)

    def _finish(self, operation: Waitable) -> str | None:
        with self._lock, torch.no_grad():
            if not self._is_over:
                self._text = operation.wait()
                if self._text is None:
                    self._write()
                self._is_over = True
            return self._text

    def _post(self) -> Waitable:
        """Starts to send what this rank has updated."""
        raise NotImplementedError

    def _write(self) -> None:
        """The operation has ended well. May be called again."""


# By id, the parameters in flight. An arrival keeps its parameters, and so their ids.
by_param: dict[int, Arrival] = {}
_exit_is_watched = False


def add(arrivals: Iterable[Arrival]) -> None:
    """They have started. May be called again."""
    _watch_the_end()
    by_param.update({id(param): arrival for arrival in arrivals for param in arrival.params})


def wait_for(params: Iterable[torch.Tensor]) -> None:
    """Blocks until those of these parameters that are in flight are whole.

    Raises:
        HorovodInternalError: They did not come; on every rank, at each call.
    """
    if by_param:
        for param in params:
            if (arrival := by_param.get(id(param))) is not None:
                wait_for_arrival(arrival)


def wait_for_arrival(arrival: Arrival) -> None:
    """Blocks until its parameters are whole. See `wait_for`."""
    text = arrival.finish()
    if text is not None:
        raise HorovodInternalError(text)
    for param in arrival.params:
        by_param.pop(id(param), None)


def wait_for_all() -> None:
    """Blocks until no parameters are in flight. See `wait_for`."""
    while by_param:
        wait_for_arrival(next(iter(by_param.values())))


def _watch_the_end() -> None:
    """Other ranks need this one for their parameters, until it has its own."""
    global _exit_is_watched
    leaving = world.current().before_leaving
    if _end not in leaving:
        leaving.append(_end)
    if not _exit_is_watched:
        _exit_is_watched = True
        # Called before what `init` has registered, which leaves the world.
        atexit.register(_end_at_exit)


def _end_at_exit() -> None:
    # A rank that failed ends the job.
    if not exits.is_failing():
        _end()


def _end() -> None:
    """The world ends. What has not come never will."""
    arrivals = {id(arrival): arrival for arrival in by_param.values()}
    texts = [arrival.finish() for arrival in arrivals.values()]
    text = next((text for text in texts if text is not None), None)
    if text is not None:
        log.warning(
            "rank %d: the world ends before all parameters of the last optimizer.step() have come "
            "from other ranks, so the model has old values among the new: %s",
            world.rank() if world.is_initialized() else -1,
            text,
        )
    by_param.clear()


def _before_fork() -> None:
    # In the child nothing moves.
    wait_for_all()


os.register_at_fork(before=_before_fork)
