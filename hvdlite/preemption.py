"""preempted: whether the job is to end soon, as a batch system says by a signal."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from hvdlite.collectives.allreduce import allreduce_
from hvdlite.ops import Max
from hvdlite.world import world
from hvdlite.world.process import c_handlers
from hvdlite.world.telling import launcher_link, logs
from hvdrun.for_hvdlite import notes

# By TERM batch systems and Kubernetes end a job; by the others Slurm warns before that, if it is
# told to (--signal).
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# The stall check and the timeline show it.
NAME = "hvd.preempted"


class _Notice:
    """The signals of this process, from the first call on. One per process."""

    def __init__(self) -> None:
        """Installs the handlers. Raises RuntimeError outside of the main thread."""
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "hvd.preempted(): its first call installs signal handlers, which Python allows only"
                " in the main thread; call it there once, before other threads call it"
            )
        self.pid = os.getpid()
        self.came = False  # to this rank, or to another one that has told
        self.is_known = False  # all ranks have agreed, and hvdrun knows
        self.former: dict[int, Any] = {}
        self.in_c: dict[int, Callable[[int], object]] = {}  # handlers that Python does not know
        for number in SIGNALS:
            former = signal.getsignal(number)
            if former != signal.SIG_IGN:  # whoever ignores a signal means it
                self.former[number] = former
                self._keep_handler_in_c(number)
                signal.signal(number, self.on_signal)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        former = self.former[number]
        if os.getpid() == self.pid:
            self.came = True
        elif number == signal.SIGTERM and not callable(former):  # see _after_fork_in_child
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if callable(former):
            former(number, frame)
        elif number in self.in_c:
            self.in_c[number](number)

    def _keep_handler_in_c(self, number: int) -> None:
        try:
            handler = c_handlers.find(number)
        except c_handlers.NotCallable:
            name = signal.Signals(number).name
            logs.log.warning(
                "hvd.preempted() takes %s from a handler that a library has installed in C; install"
                " that after the first call of preempted(), and let it call the one before",
                name,
            )
            return
        if handler is not None:
            self.in_c[number] = handler


_notice: _Notice | None = None


def preempted() -> bool:
    """Whether the job is to end soon: at least one rank has got SIGTERM, SIGUSR1 or SIGUSR2, with
    which batch systems announce the end. True on all ranks in the same call, and from then on.

    Collective: every rank of the world calls it at the same points of the script, between other
    collectives; once per step is usual. Blocks until all have called it, as an allreduce of one
    byte does: some microseconds within a host, a round trip between hosts. A rank that has joined
    counts as one without a signal. A signal interrupts no collective: the next call reports it.

    The first call installs handlers for the three signals, in the main thread. They also call a
    handler that the script installed before, faulthandler's too, but only while Python runs, not
    within C code. A handler installed later must call the one that it replaces, as
    `faulthandler.register(signal.SIGUSR1, chain=True)` does, which works within C code. An ignored
    signal stays ignored. From then on none of the three ends the process: the script must save what
    it needs and leave. Call it once before the first step, because an earlier signal ends the
    process, or hvdrun keeps it back. Processes that the rank forks still end at SIGTERM. In a
    program that a rank starts, a world of one, it reports that process's own signals, and hvdrun
    does not hear of it.

    Returns:
        True once the job is to end: save a checkpoint, leave the loop and let the script end.
        hvdrun then exits with 143, and with --requeue asks Slurm to run the job again.

    Raises:
        ValueError: Before `init`.
        RuntimeError: The first call is not in the main thread.
        HorovodInternalError: A rank has left the world, or the ranks call different operations.

    Example:
        >>> for step in range(3):
        ...     loss = hvd.allreduce(torch.ones(1))  # train
        ...     if hvd.preempted():
        ...         break  # and save
    """
    global _notice
    active = world.current()
    notice = _notice
    if notice is None:
        notice = _notice = _Notice()
        launcher_link.tell(notes.PREEMPTIBLE, str(notice.pid).encode())
    if active.size > 1:
        came = torch.full((1,), notice.came, dtype=torch.uint8)
        agreed = bool(allreduce_(came, name=NAME, op=Max))
    else:
        agreed = notice.came
    if agreed and not notice.is_known:
        notice.came = notice.is_known = True
        launcher_link.tell(notes.PREEMPTED)
    return agreed


# Signals that were blocked before a fork in progress.
_blocked: set[int] = set()


def _before_fork() -> None:
    """Python drops what comes before it is ready in the child: TERM waits until then."""
    global _blocked
    if _notice is not None:
        _blocked = set(signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}))


def _after_fork_in_parent() -> None:
    if _notice is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _blocked)


def _after_fork_in_child() -> None:
    """A child of a rank ends at TERM, as multiprocessing needs it. USR1 and USR2, which Slurm may
    send to all processes of a step, do not end it."""
    if _notice is None:
        return
    former = _notice.former.get(signal.SIGTERM)
    if signal.getsignal(signal.SIGTERM) == _notice.on_signal:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if former is None else former)
    signal.pthread_sigmask(signal.SIG_SETMASK, _blocked)


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
