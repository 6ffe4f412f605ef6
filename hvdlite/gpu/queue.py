"""The GPU queue: transfers are launched in the order of their sequence numbers, by one thread.

    posted ─► agreed: it has its number ─► [all know the members' rows] ─► its turn comes ─► over
      └─ the ranks disagree: it fails, and takes no number                 launched on the group

The engine numbers the transfers that all members agree on: 0, 1, 2, ..., the same on each, without
gaps. A member that can't launch its turn can't launch a later one either, as the others would match
it with this one. So the queue is then broken: all its transfers fail, present and future.

Where the members have no group (see `hvdlite.gpu.setup`) all transfers are staged, and the numbers
do not matter. A number below 0 is given where a member has joined, and so is not there to launch:
the tensors of the others go through host memory, where that member's engine adds its zeros by
itself.

A caller that waits for a transfer that is staged does all that is left to do for it. For the others
there are two threads, each of which waits for one thing: one for the engine, one for copies to the
host. So a device that is busy keeps the queue from no launch.
"""

from __future__ import annotations

import atexit
import collections
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
from hvdlite.gpu.host_buffers import HostBuffers
from hvdlite.gpu.process_group import Group, has_collective
from hvdlite.gpu.row_counts import counts_of, post_counts
from hvdlite.gpu.staging import KEPT_BYTES, Staging, Tracks, goes_in_pieces, lacks_data
from hvdlite.gpu.transfer import Transfer

if TYPE_CHECKING:
    from hvdlite.gpu.launches import Launches
    from hvdlite.world.teams.team import Team

# Between two looks where no thread serves the queue, or it ends.
PAUSE_S = 0.001
# How long the end of a queue waits for work that all members have agreed on.
PATIENCE_S = 10.0

Connect = Callable[["Team", Devices, torch.device], "Group | None"]


class GpuQueue:
    """The transfers of one team, as this process has them."""

    def __init__(self, team: Team, devices: Devices, connect: Connect | None) -> None:
        """connect: makes the group, or None where all is staged. Called by the thread at number 0,
        on every member; it may block, and raise. No function: every member knows that all is
        staged."""
        self.devices = devices
        self._team = team
        self._own = team.ranks[team.rank]
        self._connect = connect
        self._process = os.getpid()
        # Any thread's, under the lock: the transfers that are not over, by their keys; of these,
        # what the stepper does not know yet, and what must be copied to the host.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._copying = threading.Condition(self._lock)
        self._ended = threading.Condition(self._lock)
        self._flying: dict[tuple[int, str], Transfer] = {}
        self._posted: list[Transfer] = []
        self._uncopied: collections.deque[Transfer] = collections.deque()
        self._broken = ""
        self._closing = False
        self._threads: list[threading.Thread] = []
        # Of each device: what its stagings share.
        self._tracks: dict[torch.device, Tracks] = {}
        self._buffers = HostBuffers(devices, KEPT_BYTES)
        # The stepper's: the queue's thread or, if the team has none, a caller that waits or polls.
        self._stepping = threading.Lock()
        self._unagreed: list[Transfer] = []
        self._agreed: dict[int, Transfer] = {}
        # Those that their callers will carry themselves, until one of these waits: the turn of
        # another one may come first.
        self._unserved: list[Transfer] = []
        self._staged: list[Transfer] = []
        self._next_sequence = 0
        # Any thread's to read: that there is no group, and will be none.
        self._stages_all = connect is None
        self._group: Group | None = None
        self._group_tracks: dict[torch.device, Track] = {}
        # On further communicators of the same members; they end with the queue. At most one of them
        # has a round open, in which it launches in its own order.
        self.launches: weakref.WeakSet[Launches] = weakref.WeakSet()
        self.in_round: weakref.ref[Launches] | None = None
        # The groups of those that are gone, with work that was not done.
        self.left_over: list[Group] = []
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
                for what gathers, whose result the queue makes.
            wake: False where the caller waits for it next.
            then: Called after it is launched on the group, before anything else is: all members
                call theirs in the same order.

        Raises:
            ValueError: One of this kind and name is in flight.
            RuntimeError: The engine is closed.
        """
        request = posting.replace(place=_core.ORDERED)
        transfer = Transfer(self, request, tensor, result)
        transfer.then = then
        with self._lock:
            if self._broken:
                transfer.end(f"{request}: {self._broken}")
                return transfer
            if transfer.key in self._flying:
                raise ValueError(
                    f"{request}: an operation of this kind and name is in flight already; wait for "
                    "it first, or give this one another name"
                )
            self._flying[transfer.key] = transfer
        is_staged = self._is_staged(transfer)
        # A piece would not tell the members what the whole is.
        if not is_staged or goes_in_pieces(self._team, posting, tensor):
            transfer.ready = self.devices.ready(tensor)
            try:
                transfer.awaited = self._team.post(request, wake)
            except BaseException as error:
                self._end(transfer, in_words(error))
                raise
        if is_staged:
            self._stage(transfer, is_callers=True)
        if wake or not self._team.progress_thread:
            self._serve(transfer)
        else:
            with self._lock:
                self._unserved.append(transfer)
        return transfer

    def wait_for(self, transfer: Transfer) -> None:
        """Returns when it is over. A signal handler's exception is raised here."""
        with self._lock:
            unserved, self._unserved = self._unserved, []
        try:
            for other in unserved:
                if other is not transfer and not other.served:
                    self._serve(other)
            if self._team.progress_thread:
                self._carry(transfer)
            else:
                self._step_until_over(transfer)
        finally:
            if not transfer.served:
                self._serve(transfer)
        with self._ended:
            while not transfer.over:
                self._ended.wait()

    @property
    def never_launches(self) -> bool:
        """Whether the members know that they can't form a group."""
        return self._stages_all

    def settle(self) -> None:
        """Returns when all transfers in the queue are over."""
        pause_s = None if self._team.progress_thread else PAUSE_S
        while self.is_busy():
            self.look()
            with self._ended:
                if self._flying:
                    self._ended.wait(pause_s)

    def look(self) -> None:
        """Moves the transfers if the queue has no thread. Does not wait for a caller that moves
        them now."""
        if not self._team.progress_thread and self._stepping.acquire(blocking=False):
            try:
                self._step_locked()
            finally:
                self._stepping.release()

    def close(self, patient: bool = True) -> None:
        """Ends the queue; the team's engine was closed before, so nothing more is agreed on.

        What the members have agreed on is launched and awaited, as they do the same; all else
        fails. Not collective. Safe to call twice, and in a forked child.

        Args:
            patient: False where this process has failed: then nothing is awaited.
        """
        text = f"rank {self._own} called shutdown before the operation had ended"
        with self._lock:
            if self._closing or self._process != os.getpid():
                return
            self._closing = True
            self._changed.notify()
            self._copying.notify()
        self._team.engine.wake()
        _alive.discard(self)
        deadline = time.monotonic() + (PATIENCE_S if patient else 0.0)
        for thread in self._threads:
            thread.join(max(0.1, deadline - time.monotonic()))
            if thread.is_alive() and self._group is not None:
                self._group.end()  # it waits in there
        for transfer in list(self._uncopied):
            self._end(transfer, text)
        if self._stepping.acquire(timeout=1.0):
            try:
                while self.is_busy() and time.monotonic() < deadline:
                    if not self._step_locked():
                        time.sleep(PAUSE_S)
                tracks = list(self._group_tracks.values())
                for shared in self._tracks.values():
                    tracks += [shared.outward, shared.inward]
                marks = [track.mark() for track in tracks]
                while not all(mark.query() for mark in marks) and time.monotonic() < deadline:
                    time.sleep(PAUSE_S)
            finally:
                self._stepping.release()
        for launches in list(self.launches):
            launches.end(max(0.0, deadline - time.monotonic()))
        for group in self.left_over:
            group.end()
        self._break(text)
        self._buffers.free()

    def is_busy(self) -> bool:
        """Whether a transfer in the queue is not over."""
        with self._lock:
            return bool(self._flying)

    def _is_closing(self) -> bool:
        return self._closing

    def close_at_exit(self, failed: bool) -> None:
        """`close` where Python is about to end. failed: by an exception."""
        if self._process != os.getpid():
            return
        if self.is_busy() and not failed:
            # No more agreements: this process could not launch their transfers.
            self._team.engine.close()
        self.close(patient=not failed)

    def _carry(self, transfer: Transfer) -> None:
        """Waits for the members' agreement, driving the engine; then does all that is left to do
        if the transfer is staged. An exception of a signal handler leaves the rest to `_serve`."""
        agreement = transfer.awaited
        if agreement is not None:
            failure = agreement.wait()
            if failure is not None and not lacks_data(failure):
                self._end(transfer, failure)
        staging = transfer.staging
        if staging is None:
            return
        while not transfer.over and (copied := staging.uncopied()) is not None:
            self.devices.wait(copied)
            with self._failing_alone(transfer):
                staging.post(wake=False)
        while not transfer.over:
            operation = staging.in_engine()
            if operation is not None:
                operation.wait()
            self._take_back(transfer, staging, is_callers=True)

    # The threads.

    def _serve(self, transfer: Transfer) -> None:
        """Has the threads do what is left to do. Without any, callers that poll or wait do it; at
        the end `close` does."""
        with self._lock:
            if transfer.over:
                return
            transfer.served = True
            if self._team.progress_thread and not self._threads and not self._closing:
                assert transfer.tensor is not None
                device = transfer.tensor.device
                for name, run in (
                    ("hvdlite-gpu-queue", self._run),
                    ("hvdlite-gpu-queue-out", self._run_out),
                ):
                    thread = threading.Thread(target=run, args=(device,), name=name, daemon=True)
                    self._threads.append(thread)
                    thread.start()
            if transfer.awaited is None and self._threads and not self._closing:
                self._uncopied.append(transfer)
                self._copying.notify()
                return
            self._posted.append(transfer)
            self._changed.notify()
        self._team.engine.wake()

    def _run(self, device: torch.device) -> None:
        """Steps when an operation of the engine has ended."""
        self.devices.enter(device)
        engine = self._team.engine
        while True:
            ends = engine.ends()
            moved = self._step()
            with self._changed:
                if self._closing:
                    return
                if not (self._posted or self._unagreed or self._agreed or self._staged):
                    self._changed.wait()
                    continue
            if not moved:
                engine.await_end(ends)

    def _run_out(self, device: torch.device) -> None:
        """Posts the data when it is copied to the host."""
        self.devices.enter(device)
        while True:
            with self._copying:
                self._copying.wait_for(lambda: self._uncopied or self._closing)
            if self._is_closing():
                return
            # In a frame of its own: a thread that sleeps must hold no transfer.
            self._post_when_copied(self._uncopied[0])

    def _post_when_copied(self, transfer: Transfer) -> None:
        staging = transfer.staging
        while staging is not None and (copied := staging.uncopied()) is not None:
            with self._failing_alone(transfer):
                self.devices.wait(copied)
                if self._is_closing():
                    return
                staging.post()
            if transfer.over:
                break
        with self._lock:
            self._uncopied.popleft()
            self._posted.append(transfer)
            self._changed.notify()
        self._team.engine.wake()

    def _step_until_over(self, transfer: Transfer) -> None:
        while not transfer.over:
            with self._stepping:
                moved = self._step_locked()
            if moved or transfer.over:
                continue
            staging = transfer.staging
            operation = transfer.awaited or (None if staging is None else staging.in_engine())
            if operation is None:
                time.sleep(PAUSE_S)
            else:
                operation.drive(PAUSE_S)

    def _step(self) -> bool:
        with self._stepping:
            return self._step_locked()

    def _step_locked(self) -> bool:
        """Moves all transfers as far as they can go now; whether one moved."""
        try:
            return self._advance()
        except BaseException as error:
            # A turn may be half launched.
            self._break(f"the GPU queue of rank {self._own} has failed: {in_words(error)}")
            if isinstance(error, Exception):
                return True
            raise

    def _advance(self) -> bool:
        with self._lock:
            posted, self._posted = self._posted, []
        for transfer in posted:
            (self._staged if transfer.awaited is None else self._unagreed).append(transfer)
        ended = [t for t in self._unagreed if t.awaited is None or t.awaited.poll()]
        if ended:
            self._unagreed = [t for t in self._unagreed if t not in ended]
        for transfer in ended:
            self._agree(transfer)
        moved = self._launch_due() or bool(ended)
        for transfer in self._staged:
            staging = transfer.staging
            if staging is not None:
                with self._failing_alone(transfer):
                    staging.post()
                self._take_back(transfer, staging)
        left = [t for t in self._staged if not t.over]
        moved |= len(left) < len(self._staged)
        self._staged = left
        return moved

    def _agree(self, transfer: Transfer) -> None:
        agreement, transfer.awaited = transfer.awaited, None
        if agreement is None or transfer.over:
            return
        text = agreement.wait()
        if text is not None and not lacks_data(text):
            self._end(transfer, text)
            return
        sequence = -1 if text is not None else agreement.rows()[0]
        if sequence < 0 or self._is_staged(transfer):
            self._stage(transfer)
            self._serve(transfer)
        else:
            self._agreed[sequence] = transfer

    def _launch_due(self) -> bool:
        """Launches the transfers whose turn has come."""
        before = self._next_sequence
        for transfer in self._agreed.values():
            self._count(transfer)
        while (transfer := self._agreed.get(self._next_sequence)) is not None:  # type: ignore[assignment]
            if self._group is None and not self._has_connected(transfer):
                return True
            self._count(transfer)
            if transfer.awaited is not None:
                break
            del self._agreed[self._next_sequence]
            self._next_sequence += 1
            if not transfer.over:
                self._launch(transfer)
        return self._next_sequence != before

    def _has_connected(self, transfer: Transfer) -> bool:
        """Whether there is a group. Else all transfers are staged now, or have failed."""
        assert transfer.tensor is not None
        assert self._connect is not None
        try:
            self._group = self._connect(self._team, self.devices, transfer.tensor.device)
        except HorovodInternalError as error:
            self._break(str(error))
            return False
        if self._group is not None:
            return True
        self._stages_all = True
        agreed, self._agreed = self._agreed, {}
        for sequence in sorted(agreed):
            self._stage(agreed[sequence])
            self._serve(agreed[sequence])
        return False

    def _is_staged(self, transfer: Transfer) -> bool:
        """Whether it is known to go through host memory. Other members may not know it yet."""
        return self._stages_all or not has_collective(transfer.request)

    def _count(self, transfer: Transfer) -> None:
        """Asks for the members' rows if the transfer gathers; `awaited` is set until they come."""
        if (
            not transfer.gathers
            or self._group is None
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
        track = self._group_track(group.device)
        try:
            with contextlib.ExitStack() as queued:
                if tensor.device != group.device:
                    queued.enter_context(self._group_track(tensor.device).behind(ready))
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
            self._break(
                f"the GPU queue of rank {self._own} is broken by an earlier failure: {text}"
            )
        else:
            self._end(transfer, None)

    def _group_track(self, device: torch.device) -> Track:
        track = self._group_tracks.get(device)
        if track is None:
            track = self._group_tracks[device] = self.devices.track(device)
        return track

    def _stage(self, transfer: Transfer, is_callers: bool = False) -> None:
        """Starts to copy it to the host, unless that has happened."""
        if transfer.staging is not None:
            return
        assert transfer.tensor is not None
        device = transfer.tensor.device
        with self._failing_alone(transfer):
            with self._lock:
                if device not in self._tracks:
                    self._tracks[device] = Tracks(self._team, self.devices, device, self._buffers)
                tracks = self._tracks[device]
            transfer.staging = Staging(tracks, transfer, is_callers)

    def _take_back(self, transfer: Transfer, staging: Staging, is_callers: bool = False) -> None:
        with self._failing_alone(transfer):
            if staging.take_back(is_callers):
                self._end(transfer, staging.failure)

    # Endings.

    def _end(self, transfer: Transfer, failure: str | None) -> None:
        with self._lock:
            if not transfer.over:
                transfer.end(failure)
                del self._flying[transfer.key]
                self._ended.notify_all()

    @contextlib.contextmanager
    def _failing_alone(self, transfer: Transfer) -> Iterator[None]:
        """An error inside fails this transfer and no other: this member skips no number."""
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
            left = list(self._flying.values())
            self._posted = []
        self._unagreed, self._agreed, self._staged = [], {}, []
        for transfer in left:
            self._end(transfer, f"{transfer.request}: {text}")
        if self._group is not None:
            self._group.end()


def in_words(error: BaseException) -> str:
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text}"


_alive: weakref.WeakSet[GpuQueue] = weakref.WeakSet()


def _close_at_exit(queue: GpuQueue) -> None:
    """Registers the queue: its thread and group end before the interpreter does."""
    # The last one registered runs first: before `hvdlite.world.process.exits`, which `init` has
    # registered.
    atexit.unregister(_close_all)
    atexit.register(_close_all)
    _alive.add(queue)


def _close_all() -> None:
    # Set where an exception that nobody caught was printed.
    failed = getattr(sys, "last_value", None) is not None
    for queue in list(_alive):
        queue.close_at_exit(failed)
