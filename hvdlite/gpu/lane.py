"""The lane: transfers are launched in the order of their turns, by one thread.

    posted ─► agreed: it has its turn ─► [all know the members' rows] ─► its turn comes ─► over
      │                                                                    ├─ launched on the group
      └─ the ranks disagree: it fails, and takes no turn                   └─ begun to be staged

The engine numbers the transfers that all members agree on: 0, 1, 2, ..., the same on each, without
gaps. A member that can't launch its turn can't launch a later one either, as the others would match
it with this one. So the lane is then broken: all its transfers fail, present and future.

Where the members have no group (see `hvdlite.gpu.setup`) the turns only say in which order copies
begin. A turn below 0 is given where a member has joined, and so is not there to launch: the tensors
of the others go through host memory, where that member's engine adds its zeros by itself.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from hvdlite import _core
from hvdlite.errors import HorovodInternalError
from hvdlite.gpu.devices import Devices, Track
from hvdlite.gpu.process_group import Group, has_collective
from hvdlite.gpu.row_counts import counts_of, post_counts
from hvdlite.gpu.staging import Staging
from hvdlite.gpu.transfer import Transfer

if TYPE_CHECKING:
    from hvdlite.gpu.launches import Launches
    from hvdlite.world.teams.team import Team

FIRST_PAUSE_S = 0.00002
LONGEST_PAUSE_S = 0.001
# How long the end of a lane waits for work that all members have agreed on.
PATIENCE_S = 10.0

Connect = Callable[["Team", Devices, torch.device], "Group | None"]


class Lane:
    """The transfers of one team, as this process has them."""

    def __init__(self, team: Team, devices: Devices, connect: Connect) -> None:
        """connect: makes the group, or None where all is staged. Called by the thread at turn 0, on
        every member; it may block, and raise."""
        self.devices = devices
        self._team = team
        self._own = team.ranks[team.rank]
        self._connect = connect
        self._process = os.getpid()
        # Any thread's, under the lock: what is posted and not seen by the stepper yet, the keys of
        # what is not over, and how many these are.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._ended = threading.Condition(self._lock)
        self._posted: list[Transfer] = []
        self._keys: set[tuple[int, str]] = set()
        self._broken = ""
        self._closing = False
        self._thread: threading.Thread | None = None
        # The stepper's: the lane's thread or, if the team has none, a caller that waits or polls.
        self._stepping = threading.Lock()
        self._unagreed: list[Transfer] = []
        self._agreed: dict[int, Transfer] = {}
        self._staged: dict[Transfer, Staging] = {}
        self._next_turn = 0
        self._connected = False
        self._group: Group | None = None
        # Of each device: the group's, those out to the host and those in from it.
        self._tracks: dict[tuple[torch.device, str], Track] = {}
        # On further communicators of the same members; they end with the lane. At most one of them
        # has a round open, in which it launches in its own order.
        self.launches: weakref.WeakSet[Launches] = weakref.WeakSet()
        self.in_round: Launches | None = None
        _close_at_exit(self)

    # What callers do.

    def start(
        self,
        posting: _core.Posting,
        tensor: torch.Tensor,
        result: torch.Tensor | None,
        wake: bool = True,
        then: Callable[[Group], None] | None = None,
    ) -> Transfer:
        """Posts a collective of a tensor on a device, and returns.

        Args:
            posting: What to do with it; its own tensors do not count.
            tensor: Contiguous; must not change before the transfer is over.
            result: Where the result goes, on the same device; `tensor` itself for in place. None
                for what gathers, whose result the lane makes.
            wake: False where the caller waits for it next.
            then: Called after it is launched on the group, before anything else is: all members
                call theirs in the same order.

        Raises:
            ValueError: One of this kind and name is in flight.
            RuntimeError: The engine is closed.
        """
        request = posting.replace(place=_core.ORDERED)
        transfer = Transfer(self, request, tensor, result, self.devices.ready(tensor))
        transfer.then = then
        with self._lock:
            if self._broken:
                transfer.end(f"{request}: {self._broken}")
                return transfer
            if transfer.key in self._keys:
                raise ValueError(
                    f"{request}: an operation of this kind and name is in flight already; wait for "
                    "it first, or give this one another name"
                )
            transfer.awaited = self._team.post(request, wake)
            self._keys.add(transfer.key)
            self._posted.append(transfer)
            if self._thread is None and self._team.progress_thread:
                self._thread = threading.Thread(
                    target=self._run, args=(tensor.device,), name="hvdlite-lane", daemon=True
                )
                self._thread.start()
            elif wake:
                self._changed.notify()
        return transfer

    def wait_for(self, transfer: Transfer) -> None:
        """Returns when it is over. A signal handler's exception is raised here."""
        agreement = transfer.awaited
        try:
            if not transfer.over and agreement is not None:
                agreement.wait()  # this thread drives the engine meanwhile
            if self._thread is None:
                self._step_until_over(transfer)
        finally:
            with self._lock:
                self._changed.notify()
        with self._ended:
            while not transfer.over:
                self._ended.wait()

    @property
    def never_launches(self) -> bool:
        """Whether the members know that they can't form a group."""
        return self._connected and self._group is None

    def settle(self) -> None:
        """Returns when all transfers in the lane are over."""
        while self.is_busy():
            if self._thread is None:
                self._step()
            with self._ended:
                if self._keys:
                    self._ended.wait(None if self._thread else FIRST_PAUSE_S)

    def look(self) -> None:
        """Moves the transfers if the lane has no thread. Does not wait for a caller that moves them
        now."""
        if self._thread is None and self._stepping.acquire(blocking=False):
            try:
                self._step_locked()
            finally:
                self._stepping.release()

    def close(self, patient: bool = True) -> None:
        """Ends the lane; the team's engine was closed before, so nothing more is agreed on.

        What the members have agreed on is launched and awaited, as they do the same; all else
        fails. Not collective. Safe to call twice, and in a forked child.

        Args:
            patient: False where this process has failed: then nothing is awaited.
        """
        with self._lock:
            if self._closing or self._process != os.getpid():
                return
            self._closing = True
            self._changed.notify()
        _alive.discard(self)
        deadline = time.monotonic() + (PATIENCE_S if patient else 0.0)
        if self._thread is not None:
            self._thread.join(max(0.1, deadline - time.monotonic()))
            if self._thread.is_alive() and self._group is not None:
                self._group.end()  # it waits in there
        if self._stepping.acquire(timeout=1.0):
            try:
                while self.is_busy() and time.monotonic() < deadline:
                    if not self._step_locked():
                        time.sleep(LONGEST_PAUSE_S)
                marks = [track.mark() for track in self._tracks.values()]
                while not all(mark.query() for mark in marks) and time.monotonic() < deadline:
                    time.sleep(LONGEST_PAUSE_S)
            finally:
                self._stepping.release()
        for launches in list(self.launches):
            launches.end(max(0.0, deadline - time.monotonic()))
        self._break(f"rank {self._own} called shutdown before the operation had ended")

    def is_busy(self) -> bool:
        """Whether a transfer in the lane is not over."""
        with self._lock:
            return bool(self._keys)

    def close_at_exit(self, failed: bool) -> None:
        """`close` where Python is about to end. failed: by an exception."""
        if self._process != os.getpid():
            return
        if self.is_busy() and not failed:
            # No more agreements: this process could not launch their transfers.
            self._team.engine.close()
        self.close(patient=not failed)

    # The thread.

    def _run(self, device: torch.device) -> None:
        self.devices.enter(device)
        pause_s = FIRST_PAUSE_S
        while True:
            with self._changed:
                if not self._closing:
                    # Idle: sleeps until a transfer is posted, or a caller waits.
                    self._changed.wait(pause_s if self._keys else None)
                if self._closing:
                    return
            moved = self._step()
            pause_s = FIRST_PAUSE_S if moved else min(2 * pause_s, LONGEST_PAUSE_S)

    def _step_until_over(self, transfer: Transfer) -> None:
        pause_s = FIRST_PAUSE_S
        while not transfer.over:
            moved = self._step()
            if not moved:
                time.sleep(pause_s)
            pause_s = FIRST_PAUSE_S if moved else min(2 * pause_s, LONGEST_PAUSE_S)

    def _step(self) -> bool:
        with self._stepping:
            return self._step_locked()

    def _step_locked(self) -> bool:
        """Moves all transfers as far as they can go now; whether one moved."""
        try:
            return self._advance()
        except BaseException as error:
            # A turn may be half launched.
            self._break(f"the GPU lane of rank {self._own} has failed: {in_words(error)}")
            if isinstance(error, Exception):
                return True
            raise

    def _advance(self) -> bool:
        with self._lock:
            self._unagreed += self._posted
            self._posted.clear()
        ended = [t for t in self._unagreed if t.awaited is not None and t.awaited.poll()]
        if ended:
            self._unagreed = [t for t in self._unagreed if t not in ended]
        for transfer in ended:
            self._agree(transfer)
        moved = self._launch_due() or bool(ended)
        for transfer, staging in list(self._staged.items()):
            with self._failing_alone(transfer):
                moved |= staging.advance()
            if staging.finished:
                self._end(transfer, staging.failure)
            if transfer.over:
                del self._staged[transfer]
        return moved

    def _agree(self, transfer: Transfer) -> None:
        agreement, transfer.awaited = transfer.awaited, None
        assert agreement is not None
        text = agreement.wait()
        if text is not None:
            self._end(transfer, text)
            return
        turn = agreement.rows()[0]
        if turn < 0:
            self._stage(transfer)
        else:
            self._agreed[turn] = transfer

    def _launch_due(self) -> bool:
        """Launches the transfers whose turn has come."""
        before = self._next_turn
        for transfer in self._agreed.values():
            self._count(transfer)
        while (transfer := self._agreed.get(self._next_turn)) is not None:  # type: ignore[assignment]
            if not self._connected:
                assert transfer.tensor is not None
                try:
                    self._group = self._connect(self._team, self.devices, transfer.tensor.device)
                except HorovodInternalError as error:
                    self._break(str(error))
                    return True
                self._connected = True
            self._count(transfer)
            if transfer.awaited is not None:
                break
            del self._agreed[self._next_turn]
            self._next_turn += 1
            if transfer.over:
                continue
            if self._goes_by_group(transfer):
                self._launch(transfer)
            else:
                self._stage(transfer)
        return self._next_turn != before

    def _goes_by_group(self, transfer: Transfer) -> bool:
        """Whether it is launched on the group; else it is staged."""
        return self._group is not None and has_collective(transfer.request)

    def _count(self, transfer: Transfer) -> None:
        """Asks for the members' rows if the transfer gathers; `awaited` is set until they come."""
        if (
            not transfer.gathers
            or not self._goes_by_group(transfer)
            or transfer.counts is not None
            or transfer.over
        ):
            return
        with self._failing_alone(transfer):
            if transfer.awaited is None:
                assert transfer.tensor is not None
                rows = transfer.tensor.shape[0]
                transfer.awaited = post_counts(self._team, transfer.request, rows)
            if transfer.awaited.poll():
                counting, transfer.awaited = transfer.awaited, None
                text = counting.wait()
                if text is None:
                    transfer.counts = counts_of(counting)
                else:
                    self._end(transfer, text)

    def _launch(self, transfer: Transfer) -> None:
        """Its turn has come on all members. Queues all work for it."""
        group, tensor, ready = self._group, transfer.tensor, transfer.ready
        assert group is not None
        assert tensor is not None
        assert ready is not None
        track = self._track(group.device, "group")
        try:
            with contextlib.ExitStack() as queued:
                if tensor.device != group.device:
                    queued.enter_context(self._track(tensor.device, "group").behind(ready))
                queued.enter_context(track.behind(ready))
                transfer.result = group.run(transfer)
            track.keep(tensor)
            track.keep(transfer.result)
            transfer.done = track.mark()
            if transfer.then is not None:
                transfer.then(group)
        except Exception as error:
            text = f"{transfer.request}: failed on rank {self._own}: {in_words(error)}"
            self._end(transfer, text)
            self._break(f"the GPU lane of rank {self._own} is broken by an earlier failure: {text}")
        else:
            self._end(transfer, None)

    def _stage(self, transfer: Transfer) -> None:
        assert transfer.tensor is not None
        device = transfer.tensor.device
        with self._failing_alone(transfer):
            self._staged[transfer] = Staging(
                self._team,
                self.devices,
                self._track(device, "out"),
                self._track(device, "in"),
                transfer,
            )

    def _track(self, device: torch.device, purpose: str) -> Track:
        track = self._tracks.get((device, purpose))
        if track is None:
            track = self._tracks[device, purpose] = self.devices.track(device)
        return track

    # Endings.

    def _end(self, transfer: Transfer, failure: str | None) -> None:
        with self._lock:
            transfer.end(failure)
            self._keys.discard(transfer.key)
            self._ended.notify_all()

    @contextlib.contextmanager
    def _failing_alone(self, transfer: Transfer) -> Iterator[None]:
        """An error inside fails this transfer and no other: this member skips no turn."""
        try:
            yield
        except Exception as error:
            self._end(
                transfer, f"{transfer.request}: failed on rank {self._own}: {in_words(error)}"
            )

    def _break(self, text: str) -> None:
        """Fails all transfers, now and later."""
        with self._lock:
            self._broken = self._broken or text
            left = [*self._posted, *self._unagreed, *self._agreed.values(), *self._staged]
            self._posted, self._unagreed = [], []
        self._agreed.clear()
        self._staged.clear()
        for transfer in left:
            self._end(transfer, f"{transfer.request}: {text}")
        if self._group is not None:
            self._group.end()


def in_words(error: BaseException) -> str:
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text}"


_alive: weakref.WeakSet[Lane] = weakref.WeakSet()


def _close_at_exit(lane: Lane) -> None:
    """Registers the lane: its thread and group end before the interpreter does."""
    # The last one registered runs first: before `hvdlite.world.process.exits`, which `init` has
    # registered.
    atexit.unregister(_close_all)
    atexit.register(_close_all)
    _alive.add(lane)


def _close_all() -> None:
    # Set where an exception that nobody caught was printed.
    failed = getattr(sys, "last_value", None) is not None
    for lane in list(_alive):
        lane.close_at_exit(failed)
