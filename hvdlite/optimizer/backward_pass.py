"""One backward pass of autograd: its identity, whether it still runs, and its end."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

import torch

_queue_callback = torch.autograd.Variable._execution_engine.queue_callback

# The number of the graph task whose hooks run in this thread.
current_task: Callable[[], int] = torch._C._current_graph_task_id


class BackwardPass:
    """The backward pass in whose hook this object is made. A backward pass inside another one (a
    reentrant checkpoint) is one of its own."""

    def __init__(
        self,
        at_end: Callable[[], None],
        raised: Callable[[object], None],
        communicates: bool = False,
    ) -> None:
        """at_end: called by autograd when all gradients are there, unless the backward raises.
        raised: called if the backward has raised, provided this object still lives. communicates:
        whether it counts on other ranks, which are not told if it raises."""
        self.task = current_task()
        self.communicates = communicates
        # Not a Python function: the traceback of an exception in it would keep it alive.
        end = partial(at_end)
        _queue_callback(end)
        # Autograd alone keeps it alive, and drops it without a call where the backward raises.
        self._end = weakref.ref(end, raised)

    def runs(self) -> bool:
        """Whether it has not ended yet, neither normally nor by an exception."""
        return self._end() is not None
