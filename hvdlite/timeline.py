"""The timeline: a file for trace viewers that shows the states of every operation.

There is one file per job, in Chrome's JSON array format, with a row for each rank. Each rank drains
the events of its engines four times a second. Ranks that can open rank 0's file write to it; ranks
on other hosts send their lines to rank 0. So events reach the file soon, and the file of a killed
job shows it up to its last moments. It is valid JSON at every moment (`trace_file`).
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hvdlite.collectives.barrier import barrier
from hvdlite.collectives.objects import allgather_object, broadcast_object
from hvdlite.observe import clocks, program, trace_file
from hvdlite.observe.clocks import Offset
from hvdlite.observe.trace_file import TraceFile, encoded
from hvdlite.observe.trace_row import TraceRow
from hvdlite.world import world
from hvdlite.world.bootstrap import communicators
from hvdlite.world.teams.team import Team

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

log = logging.getLogger("hvdlite")

PAUSE_S = 0.25
# How long the ranks wait for the last messages.
LAST_WORDS_S = 10.0
# How many events an engine keeps between two drains: 8 MB.
CAPACITY = 32768
# The size of a message: so small that every MPI sends it without waiting for the receiver, which
# may be gone when a job ends.
MESSAGE_BYTES = 3000
# How many lines may wait to be written, and how many messages to be received: some 20 MB each. What
# comes after that is dropped, and counted.
MOST_UNWRITTEN, MOST_SENDING = 100_000, 7000

_active: Timeline | None = None


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Writes a timeline of all operations from now on. Blocks.

    Every rank calls it, at any time after `init`. The file is created, or emptied, on rank 0's
    host. Open it in https://ui.perfetto.dev or chrome://tracing: it has a row per rank, with each
    operation from POSTED to DONE, and its bytes.

    Args:
        file_path: The file; a relative path is relative to rank 0's working directory.
        mark_cycles: Accepted for Horovod's sake: there are no cycles to mark.

    Raises:
        ValueError: The file can't be written, or a timeline is already being written; on every
            rank.

    Example:
        >>> hvd.start_timeline("run.json")
        >>> mean = hvd.allreduce(torch.ones(1), name="mean")
        >>> hvd.stop_timeline()
    """
    global _active
    active = world.current()
    problem = "a timeline is already being written; call stop_timeline() first" if _active else None
    row = TraceRow(active.rank, active.placement.host_names[active.placement.host])
    clock = clocks.identity(active.placement.host)
    file: TraceFile | None = None
    place: Any = None
    if active.rank == 0 and problem is None:
        try:
            file, *place = trace_file.create(os.fspath(file_path), encoded(row.title()))
        except Exception as error:  # whatever it is, as the other ranks wait
            problem = f"can't write {file_path!r}: {error}"
    problem, place, to_wall_ns = broadcast_object(
        (problem, place, row.to_wall_ns), 0, "hvdlite.start_timeline"
    )
    if problem is not None:
        raise ValueError(f"start_timeline: {problem}")
    if file is None:
        file = trace_file.open_shared(*place)
    of_ranks = allgather_object((file is not None, clock), "hvdlite.start_timeline")
    senders = [rank for rank, (opened, _) in enumerate(of_ranks) if not opened]
    identities = [identity for _, identity in of_ranks]
    offsets = _measured(identities)
    row.place_on(to_wall_ns, offsets[active.rank].offset)
    comm = None
    if senders and active.mpi_runtime is not None:
        if active.mpi_runtime.threads_supported() and active.team.comm is not None:
            comm = communicators.duplicate(active.mpi_runtime, active.team.comm)
        elif active.rank == 0:
            log.warning(
                "timeline: it lacks the ranks %s, which can't open %s, because %s lets only one "
                "thread at a time call it, so they can't send their events",
                senders,
                place[0],
                active.mpi_runtime.version(),
            )
    _active = Timeline(active, row, file, comm, senders if active.rank == 0 else [], identities)
    if active.rank == 0:
        _active.write_clocks("start", offsets)
    if leave_timeline not in active.before_leaving:
        active.before_leaving.append(leave_timeline)
    _at_exit()


def stop_timeline() -> None:
    """Ends the timeline; the file is complete when this returns on rank 0. Blocks.

    Every rank calls it. Does nothing if no timeline is being written.

    Example:
        >>> hvd.start_timeline("run.json")
        >>> hvd.stop_timeline()
    """
    global _active
    timeline, _active = _active, None
    if timeline is None:
        return
    timeline.stop()
    complete = world.is_initialized()
    if complete:
        timeline.exchange()
        offsets = _measured(timeline.identities)
        if world.rank() == 0:
            timeline.write_clocks("end", offsets)
        barrier(name="hvdlite.stop_timeline")  # all have written, or sent, their events
    timeline.close(complete and world.rank() == 0)
    timeline.release_comm(together=complete)


def _measured(identities: list[tuple[object, ...]]) -> list[Offset]:
    """How far each rank's clock is from rank 0's now. Every rank calls it; blocks."""
    if len(set(identities)) == 1:
        return [clocks.SAME] * len(identities)
    seen = clocks.rounds(lambda: barrier(name="hvdlite.clocks"))
    return clocks.offsets(identities, allgather_object(seen, "hvdlite.clocks"))


@functools.cache
def _at_exit() -> None:
    """Registers, once per process, what to do if it ends without `shutdown`."""
    atexit.register(leave_timeline)


def leave_timeline() -> None:
    """Writes the remaining events; waits for no other rank, as this one leaves the world."""
    global _active
    timeline, _active = _active, None
    if timeline is not None:
        timeline.stop()
        timeline.close(False)
        timeline.release_comm(together=False)


def _after_fork_in_child() -> None:
    """In a forked child: the timeline belongs to the parent."""
    global _active
    _active = None
    program.stop()


os.register_at_fork(after_in_child=_after_fork_in_child)


class Timeline:
    """Writes or sends the events of one rank, in a thread of its own."""

    def __init__(
        self,
        active: world.World,
        row: TraceRow,
        file: TraceFile | None,
        comm: Intracomm | None,
        senders: list[int],
        identities: list[tuple[object, ...]],
    ) -> None:
        """identities: of all ranks' clocks."""
        self.identities = identities
        self._world = active
        self._file = file
        self._comm = comm
        self._senders = senders
        self._sending: list[Any] = []
        self._row = row
        self._teams: dict[int, Team] = {}
        self._unwritten: list[bytes] = []
        self._dropped = 0  # events, since the last that was written or sent
        self._broken = False
        self._is_late = False  # another rank holds the lock, and a warning has said so
        self._stopping = threading.Event()
        if active.rank:
            self._write_events(self._row.title())
        program.record()
        self._watch()
        active.teams_changed.append(self._watch)
        self._thread = threading.Thread(target=self._run, name="hvdlite timeline", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Writes or sends the last events."""
        self._world.teams_changed.remove(self._watch)
        self._stopping.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._drain_events()
        program.stop()
        for team in self._teams.values():
            team.engine.record(0)
        if self._comm is not None and self._file is None:
            self._sending.append(self._comm.isend([], 0))  # nothing follows

    def write_clocks(self, when: str, offsets: list[Offset]) -> None:
        """On rank 0. when: start or end."""
        self._write_events(self._row.clocks(when, offsets, len(set(self.identities))))

    def exchange(self) -> None:
        """Waits until all messages are received. Every rank calls it: some MPIs move messages only
        while both ends call them."""
        deadline = time.monotonic() + LAST_WORDS_S
        while (self._senders or self._sending) and time.monotonic() < deadline:
            self._receive()
            self._forget_sent()
            time.sleep(0.001)

    def close(self, complete: bool) -> None:
        """complete: all events of all ranks are written, which the file then says."""
        self._receive()
        file = self._file
        last = [self._row.dropped(self._dropped)] if self._dropped else []
        lines = encoded([*last, self._row.end()] if complete else last)
        if file is not None:
            self._write(lines)
            if self._unwritten:
                log.warning("timeline: it lacks the last events of rank %d", self._world.rank)
            self._file = None
            file.close()

    def release_comm(self, together: bool) -> None:
        """together: all ranks call it now, and free the communicator; otherwise it is retired."""
        comm, self._comm = self._comm, None
        if comm is None:
            return
        if together and self._world.mpi_runtime is not None:
            communicators.free_together(self._world.mpi_runtime, comm)
        else:
            communicators.retire(comm)

    def _run(self) -> None:
        while not self._stopping.wait(PAUSE_S):
            self._drain_events()
            self._receive()

    def _watch(self) -> None:
        """Makes the engines of new process sets keep their events."""
        for number, process_set in list(self._world.process_sets.items()):
            team = process_set.team
            if team is not None and number not in self._teams:
                team.engine.record(CAPACITY)
                self._teams[number] = team

    def _drain_events(self) -> None:
        """Writes or sends the events of the engines, also of process sets removed by now."""
        for number, team in list(self._teams.items()):
            events, lost = team.engine.drain_events()
            self._write_events(self._row.lines(number, events, lost))
        self._write_events(self._row.spans(program.drain()))

    def _write_events(self, events: Iterable[dict[str, Any]]) -> None:
        lines = encoded(events)
        self._forget_sent()
        if len(self._unwritten) >= MOST_UNWRITTEN or len(self._sending) >= MOST_SENDING:
            self._dropped += len(lines)
            lines = []
        elif self._dropped:
            lines = encoded([self._row.dropped(self._dropped)]) + lines
            self._dropped = 0
        if self._file is not None:
            self._write(lines)
        elif self._comm is not None:
            self._send(lines)

    def _write(self, lines: list[bytes]) -> None:
        if self._broken or self._file is None:
            return
        self._unwritten += lines
        try:
            self._file.write(self._unwritten)
            self._is_late = False
        except TimeoutError as error:
            if not self._is_late:
                log.warning(
                    "timeline: it gets the events of rank %d later: %s", self._world.rank, error
                )
            self._is_late = True
        except OSError as error:
            self._broken, self._unwritten = True, []
            # The same text on all ranks, which hvdrun shows once.
            log.warning(
                "timeline: writing has stopped; the file is complete up to here, and the job goes "
                "on: %s",
                error,
            )

    def _send(self, lines: list[bytes]) -> None:
        assert self._comm is not None
        batch: list[bytes] = []
        for line in [*lines, b""]:
            if batch and (not line or sum(map(len, batch)) + len(line) > MESSAGE_BYTES):
                self._sending.append(self._comm.isend(batch, 0))
                batch = []
            batch.append(line)

    def _forget_sent(self) -> None:
        self._sending = [request for request in self._sending if not request.test()[0]]

    def _receive(self) -> None:
        if self._comm is None:
            return
        for rank in list(self._senders):
            while rank in self._senders and self._comm.iprobe(source=rank):
                lines = self._comm.recv(source=rank)
                self._write(lines)
                if not lines:
                    self._senders.remove(rank)
