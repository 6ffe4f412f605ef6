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

from hvdlite.collectives import allgather_object, broadcast_object
from hvdlite.collectives.barrier import barrier
from hvdlite.observe import trace_file
from hvdlite.observe.trace_file import TraceFile, encoded
from hvdlite.world import communicators, world
from hvdlite.world.teams import Team

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

_active: Timeline | None = None


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Writes a timeline of all operations from now on. Blocks.

    Every rank calls it, at any time after `init`. The file is made, or emptied, where rank 0 runs.
    Open it in https://ui.perfetto.dev or chrome://tracing: a row per rank, in it each operation
    from POSTED to DONE, with its bytes.

    Args:
        file_path: Where; a relative path is relative to rank 0's working directory.
        mark_cycles: Accepted for Horovod's sake: there are no cycles to mark.

    Raises:
        ValueError: The file can't be written, or a timeline is being written already; on every
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
    file: TraceFile | None = None
    place: Any = None
    if active.rank == 0 and problem is None:
        try:
            file, *place = trace_file.create(os.fspath(file_path), encoded(row.title()))
        except Exception as error:  # whatever it is, as the other ranks wait
            problem = f"can't write {file_path!r}: {error}"
    problem, place = broadcast_object((problem, place), 0, "hvdlite.start_timeline")
    if problem is not None:
        raise ValueError(f"start_timeline: {problem}")
    if file is None:
        file = trace_file.open_shared(*place)
    opened_by_rank = allgather_object(file is not None, "hvdlite.start_timeline")
    senders = [rank for rank, opened in enumerate(opened_by_rank) if not opened]
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
    _active = Timeline(active, row, file, comm, senders if active.rank == 0 else [])
    if leave_timeline not in active.before_leaving:
        active.before_leaving.append(leave_timeline)
    _at_exit()


def stop_timeline() -> None:
    """Ends the timeline; the file is complete when this returns on rank 0. Blocks.

    Every rank calls it. Does nothing where no timeline is being written.

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
        barrier(name="hvdlite.stop_timeline")  # all have written, or sent, their events
    timeline.close(complete and world.rank() == 0)
    timeline.release_comm(together=complete)


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
    ) -> None:
        self._world = active
        self._file = file
        self._comm = comm
        self._senders = senders
        self._sending: list[Any] = []
        self._row = row
        self._teams: dict[int, Team] = {}
        self._unwritten: list[bytes] = []
        self._broken = False
        self._stopping = threading.Event()
        if active.rank:
            self._write_events(self._row.title())
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
        for team in self._teams.values():
            team.engine.record(0)
        if self._comm is not None and self._file is None:
            self._sending.append(self._comm.isend([], 0))  # nothing follows

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
        file, lines = self._file, encoded([self._row.end()] if complete else [])
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

    def _write_events(self, events: Iterable[dict[str, Any]]) -> None:
        lines = encoded(events)
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
        except TimeoutError as error:
            log.warning(
                "timeline: it gets the events of rank %d later: %s", self._world.rank, error
            )
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
        self._forget_sent()

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


class TraceRow:
    """This rank's row in the trace viewer: makes trace events from the engines' events. Pure."""

    def __init__(self, rank: int, host: str) -> None:
        self._rank = rank
        self._host = host
        # The engines use the monotonic clock, which differs between hosts; the wall clock does not.
        self._to_wall_ns = time.time_ns() - time.monotonic_ns()
        # The current state of each operation, by process set and number.
        self._states: dict[tuple[int, int], str] = {}

    def title(self) -> list[dict[str, Any]]:
        """The events that give this row its name and its place."""
        label = f"rank {self._rank} on {self._host}"
        return [
            {"ph": "M", "pid": self._rank, "name": "process_name", "args": {"name": label}},
            {
                "ph": "M",
                "pid": self._rank,
                "name": "process_sort_index",
                "args": {"sort_index": self._rank},
            },
        ]

    def end(self) -> dict[str, Any]:
        return self._instant("the timeline ends", time.monotonic_ns())

    def lines(
        self, process_set: int, events: list[tuple[int, int, str, str, str, int]], lost: int
    ) -> list[dict[str, Any]]:
        """An operation is a span; each of its states is a span inside it."""
        made: list[dict[str, Any]] = []
        if lost:
            at = events[0][0] if events else time.monotonic_ns()
            made.append(self._instant(f"{lost} events were lost: too many at once", at))
        for at_ns, number, kind, name, state, size_bytes in events:
            about = {
                "cat": kind,
                "id": f"{self._rank}.{process_set}.{number}",
                "pid": self._rank,
                "tid": 0,
                "ts": self._micros(at_ns),
            }
            key = (process_set, number)
            before = self._states.get(key)
            title = f"{kind} {name}"
            args = {"state": state, "bytes": size_bytes, "process_set": process_set}
            if before is None:
                made.append({"ph": "b", "name": title, **about, "args": args})
            else:
                made.append({"ph": "e", "name": before, **about})
            if state in ("DONE", "FAILED"):
                self._states.pop(key, None)
                made.append({"ph": "e", "name": title, **about, "args": args})
            else:
                self._states[key] = state
                made.append({"ph": "b", "name": state, **about, "args": args})
        return made

    def _instant(self, name: str, at_ns: int) -> dict[str, Any]:
        return {
            "ph": "i",
            "s": "p",
            "name": name,
            "pid": self._rank,
            "tid": 0,
            "ts": self._micros(at_ns),
        }

    def _micros(self, at_ns: int) -> float:
        return (at_ns + self._to_wall_ns) / 1000
