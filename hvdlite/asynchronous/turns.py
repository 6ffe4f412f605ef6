"""Whose gradients come in now, where they share a server's link.

Workers that do the same work push at about the same time, and take what they get at the same time:
so all of them use one direction of the link, and then the other one. If half of them push first,
their parameters go out while the gradients of the other half come in.
"""

from __future__ import annotations

import threading
import time

_LEAST_PATIENCE_S = 0.5


class Turns:
    """Half of the workers push at once. One that stops in the middle of it holds up the others
    once, for about twice as long as a push takes: then another worker gets its turn."""

    def __init__(self, workers: int) -> None:
        """workers: How many push over the link."""
        self._at_once = max(1, workers // 2)
        # Since when each has its turn, the oldest first.
        self._since: dict[int, float] = {}
        self._changed = threading.Condition()
        self._patience_s = _LEAST_PATIENCE_S

    def begin(self, worker: int) -> None:
        """Blocks until it is the worker's turn."""
        with self._changed:
            if not self._changed.wait_for(self._is_one_free, self._patience_s):
                del self._since[next(iter(self._since))]
            self._since[worker] = time.monotonic()

    def end(self, worker: int) -> None:
        """The worker's gradients have come. Does nothing if another one has got its turn."""
        with self._changed:
            begun = self._since.pop(worker, None)
            if begun is not None:
                self._patience_s = max(_LEAST_PATIENCE_S, 2 * (time.monotonic() - begun))
                self._changed.notify()

    def _is_one_free(self) -> bool:
        return len(self._since) < self._at_once
