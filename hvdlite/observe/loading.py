"""The time in which the program waits for a DataLoader, seen without a change in the script.

Every iterator of torch's DataLoader inherits `__next__` from one class, where it is replaced. The
replacement does what the original does, and reads a clock before and after.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

from hvdlite.observe.waits import Waits


class Loading:
    """The time that threads have been in a DataLoader's `next`, by thread: a thread that loads
    ahead holds up no other. The loader's own waits for hvdlite count as such."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self._thread = threading.local()

    def read(self) -> float:
        """This thread's, in seconds."""
        loaded_s: float = getattr(self._thread, "loaded_s", 0.0)
        return loaded_s

    def counts(self, following: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The same function, whose time is counted. That of a loader inside another counts once."""
        thread, waits = self._thread, self._waits

        @functools.wraps(following)
        def __next__(self: Any) -> Any:
            if getattr(thread, "loads", False):
                return following(self)
            thread.loads = True
            waits.forget_question()
            waited_s, begin_s = waits.read_own(), time.perf_counter()
            try:
                return following(self)
            finally:
                loaded_s = time.perf_counter() - begin_s - (waits.read_own() - waited_s)
                thread.loaded_s = getattr(thread, "loaded_s", 0.0) + max(0.0, loaded_s)
                thread.loads = False
                waits.forget_question()

        return __next__


_counted: Loading | None = None


def count_time(waits: Waits) -> Loading:
    """Counts from now on. With a torch that has no such class, it counts nothing."""
    global _counted
    if _counted is None:
        _counted = Loading(waits)
        try:
            from torch.utils.data.dataloader import _BaseDataLoaderIter as Base
        except ImportError:
            return _counted
        following: Callable[[Any], Any] = _counted.counts(Base.__next__)
        Base.__next__ = following  # type: ignore[assignment, method-assign]
    return _counted
