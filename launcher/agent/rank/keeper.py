"""The parent of one rank's command. `agent` has the picture."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from typing import NoReturn

from hvdrun.agent import frames, signals
from hvdrun.agent.frames import Waker, frame, receive, send, unpack, write_all
from hvdrun.agent.rank.notes import RankBox, RankNotes, RankStacks
from hvdrun.agent.rank.oom import oom_kills, was_out_of_memory
from hvdrun.agent.rank.pmi import Relay
from hvdrun.agent.rank.spawn import bind, spawn
from hvdrun.machine.environment import (
    EXPORTED,
    KEEPER,
    with_host_variables,
    with_job_variables,
)
from hvdrun.machine.limits import LACKING
from hvdrun.machine.notes import BLACK_BOX as RANKS_BOX
from hvdrun.machine.notes import PREEMPTIBLE, RESULT_PIPE, STACK
from hvdrun.machine.shared_memory import SharedFiles, what_is_full

NOT_TOLD = (
    "hvdrun: rank {rank} was not started: hvdrun, or its agent on {host}, ended before the rank had"
    " its variables\n"
)
PF_EXITING = 0x4  # of the flags in /proc/PID/stat
MOST_FDS = 256  # a keeper has about twenty
LOOK_AT_THE_DEAD = os.WEXITED | os.WNOHANG | os.WNOWAIT
LOOK_AT_THE_STOPPED = os.WSTOPPED | os.WCONTINUED | os.WNOHANG
NOT_OFFERED = "it has not imported hvdlite"
LAST_WAITED = "it last waited for hvdlite here:"
GROUP_EVERY_S = 0.2  # while its processes end after the command
LOOK_AGAIN_S = 1.0, 60.0  # the first and the longest pause between two checks


def is_exiting(pid: int) -> bool:
    """Whether the process is ending in the kernel. Its connections may be closed before waitpid
    reports its end, and other ranks may fail from that meanwhile."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return False
    return bool(int(fields[6]) & PF_EXITING)


class Keeper:
    """The parent of one rank's command, in a session of its own: MPI's daemons kill by process
    group, and a keeper that is killed can't report.

    It ends when the command has ended with 0, or once all ranks have ended or KILL is due. Until
    then it hides the end of a rank that has failed, or ended without MPI_Finalize, from MPI, which
    must not notice it first, or end ranks that still have time to end.
    """

    def __init__(self, sock: socket.socket, shim: int, rank: int, daemon: int) -> None:
        self.sock = sock
        self.shim = shim  # a pipe to the shim, which reads one byte: its exit code
        self.rank = rank
        self.pid = 0  # of the command, while it runs
        self.status = 127
        self.stopped_at: float | None = None  # when a signal stopped it; None: it may run
        self.outlived = False  # by processes of its group that may still save
        self.asked = False  # the keeper was told to end the command, or had to
        self.released = False  # the keeper may end with the command
        self.deadlines: list[tuple[float, int]] = []  # when to send which signal
        self.is_ending = False
        self.preemptible = 0  # the rank's process that TERM does not end; 0: there is none
        self.stacks = RankStacks()
        self.box = RankBox()
        self.oom_kills = oom_kills()
        self.session = os.environ.get("PMIX_SERVER_TMPDIR", "")
        self.daemon = daemon  # MPI's, the shim's parent
        self.orphaned = False  # the supervisor is gone, so the keeper must clean up
        self.shared_files = SharedFiles()
        self.look_at = time.monotonic() + LOOK_AGAIN_S[0]
        self.pause_s = LOOK_AGAIN_S[0]
        self.poll = select.poll()
        self.buffer = bytearray()

    def keep(self, command: list[str], environment: dict[str, str], role: str) -> NoReturn:
        """role: see `spawn.bind`."""
        os.setsid()
        outputs = [os.pipe() for _ in range(3 if RESULT_PIPE in environment else 2)]
        readers = [reader for reader, _ in outputs]
        self._tell(frames.RANK, self.session.encode(), readers)
        stdin, host, variables = self._await_go()
        if variables is not None:
            environment = with_job_variables(environment, variables)
        if host:
            environment = with_host_variables(environment, host)
        cpus = bind(environment, self.rank, role)
        environment.pop(EXPORTED, None)
        environment[KEEPER] = str(os.getpid())
        waker = Waker([signal.SIGCHLD])
        stdio = (stdin, outputs[0][1], outputs[1][1])
        results = [writer for _, writer in outputs[2:]]
        for writer in results:
            environment[RESULT_PIPE] = str(writer)
            os.set_inheritable(writer, True)
        relay = Relay(environment, self.poll, self._tell)
        notes = RankNotes(environment, self.poll, self._on_note)
        if self.is_ending:
            self._tell_end(f"asked signal {signal.SIGTERM}")
        else:
            files = {**dict(enumerate(stdio)), **relay.for_rank}
            self.pid, missing = spawn(command, environment, files, cpus)
            if missing:
                self._tell_end(f"{'lacks' if missing in LACKING else 'missing'} {missing}")
        for fd in (*stdio, *results, *readers):
            os.close(fd)
        relay.begin()
        notes.begin()
        self.poll.register(self.sock, select.POLLIN)
        self.poll.register(waker.fd, select.POLLIN)
        self.poll.register(self.shim, 0)  # POLLERR when the shim has ended
        while self.pid or not self.released:
            ready = self._wait()
            waker.read()
            if self.shim in ready:
                self._shim_gone()
            are_open = relay.hear(ready), notes.hear()
            if not all(are_open) and self.pid and not (self.is_ending or is_exiting(self.pid)):
                self._tell(frames.CLOSED, b"closed %d" % time.monotonic_ns())
            self._notice_stops()
            self._reap(relay, notes)
            if self.sock.fileno() in ready:
                self._hear()
            self._signal()
        if self.status or self.asked or relay.is_in_mpi:
            self.shared_files.remove(relay.job, relay.topology_file)
        with contextlib.suppress(OSError):
            os.write(self.shim, bytes([self.status]))
        if self.orphaned and self.session:
            self._remove_session()
        os._exit(0)

    def _remove_session(self) -> None:
        """Removes the session folder, which the daemon leaves behind if it is killed."""
        os.closerange(0, MOST_FDS)  # the daemon waits until the rank's descriptors are closed
        end = time.monotonic() + frames.GRACE_S
        with contextlib.suppress(OSError):
            while time.monotonic() < end:
                os.kill(self.daemon, 0)
                time.sleep(0.05)
            return
        from hvdrun.machine.processes import remove_sessions

        remove_sessions([self.session])

    def _tell(self, kind: bytes, payload: bytes = b"", fds: list[int] | None = None) -> None:
        with contextlib.suppress(OSError):  # reading notices that the supervisor is gone
            send(self.sock, frame(kind, self.rank, payload), fds or ())

    def _on_note(self, note: bytes, fds: list[int]) -> None:
        if note.startswith(PREEMPTIBLE):
            self.preemptible = int(note[1:]) if note[1:].isdigit() else 0
        elif note.startswith(STACK) and fds:
            with contextlib.suppress(ValueError):
                self.stacks.add(note[1:], fds[0])
                del fds[0]
        elif note.startswith(RANKS_BOX) and fds:
            self.box.keep(fds.pop(0))
        else:
            self._tell(frames.NOTE, note)
        for fd in fds:
            os.close(fd)

    def _tell_end(self, how: str) -> None:
        self._tell(frames.EXIT, f"{how} {time.monotonic_ns()}".encode())

    def _await_go(self) -> tuple[int, bytes, bytes | None]:
        """Standard input for the command; the variables of this host, if hvdrun runs on another
        one; and those of the job, if MPI has not brought them."""
        stdin, host, variables = None, b"", None
        given: list[int] = []
        while stdin is None:
            data, fds = receive(self.sock)
            if not data:
                write_all(2, NOT_TOLD.format(rank=self.rank, host=os.uname().nodename).encode())
                os._exit(1)
            self.buffer += data
            given += fds
            for kind, _, payload in unpack(self.buffer):
                if kind == frames.VARIABLES:
                    variables = payload
                elif kind == frames.END:
                    self.asked = True
                    self._end(time.monotonic(), *signals.unpack(payload))
                elif kind == frames.SIGNAL:
                    self._pass_on(payload)
                elif kind == frames.GO:
                    host = payload
                    stdin = given[0] if given else os.open(os.devnull, os.O_RDONLY)
        return stdin, host, variables

    def _wait(self) -> set[int]:
        now = time.monotonic()
        times = [at for at, _ in self.deadlines]
        if self.pid:
            if now >= self.look_at:
                self.shared_files.look(self.pid)
                self.pause_s = min(2 * self.pause_s, LOOK_AGAIN_S[1])
                self.look_at = now + self.pause_s
            times.append(now + GROUP_EVERY_S if self.outlived else self.look_at)
        timeout = max(0.0, 1000 * (min(times) - now)) if times else None
        return {fd for fd, _ in self.poll.poll(timeout)}

    def _notice_stops(self) -> None:
        """The kernel tells the parent as it happens, and keeps no record of when."""
        with contextlib.suppress(OSError):
            while self.pid and (found := os.waitid(os.P_PID, self.pid, LOOK_AT_THE_STOPPED)):
                has_stopped = found.si_code == os.CLD_STOPPED
                self.stopped_at = time.monotonic() if has_stopped else None

    def _reap(self, relay: Relay, notes: RankNotes) -> None:
        if not self.pid or (dead := os.waitid(os.P_PID, self.pid, LOOK_AT_THE_DEAD)) is None:
            return
        # A shell without a trap, or another wrapper, does not wait for the program that it runs.
        # That has its grace too, and the group keeps its number meanwhile.
        by_term = (dead.si_code, dead.si_status) == (os.CLD_KILLED, signal.SIGTERM)
        self.outlived = (
            by_term and bool(self.deadlines) and signals.is_handled_in(self.pid, signal.SIGTERM)
        )
        if self.outlived:
            return
        # A rank that loses its shim loses its daemon, and may fail from that before its keeper
        # notices.
        late = self._has_ended(self.shim)
        # Its background processes, as long as no other group can have the number.
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.status = code if code >= 0 else 128 - code
        text = f"code {code}" if code >= 0 else f"signal {-code}"
        if (
            -code == signal.SIGKILL
            and not self.asked
            and was_out_of_memory(self.pid, self.oom_kills)
        ):
            text = f"oom {-code}"
        elif (
            -code in (signal.SIGBUS, signal.SIGSEGV) and not self.asked and (full := what_is_full())
        ):
            text = f"shm {-code} {full}"
        self.pid = 0
        relay.hear({fd for fd, _ in self.poll.poll(0)})  # its last message may be unread
        notes.hear()
        if operations := self.box.read(all_of_them=code != 0):
            self._tell(frames.BLACK_BOX, operations)
        self._tell_end(f"{'asked ' if self.asked else 'late ' if late else ''}{text}")
        if code == 0 and not relay.is_in_mpi and not self.is_ending:
            self.released = True

    @staticmethod
    def _has_ended(shim: int) -> bool:
        poll = select.poll()
        poll.register(shim, 0)
        return bool(poll.poll(0))

    def _shim_gone(self) -> None:
        """MPI has killed the shim, as it kills all ranks after MPI_Abort or the loss of a daemon.
        The keeper kills the command; how that ends is only a consequence. If the job is being
        ended already, the command keeps its grace."""
        self.poll.unregister(self.shim)
        self.released = True
        if not self.is_ending:
            self._end(time.monotonic(), signal.SIGTERM, 0)

    def _hear(self) -> None:
        try:
            data, _ = receive(self.sock)
        except OSError:
            data = b""
        if not data:
            self.poll.unregister(self.sock)
            self.released = self.orphaned = True
            self._end(time.monotonic(), signal.SIGTERM, frames.GRACE_S)
        self.buffer += data
        for kind, _, payload in unpack(self.buffer):
            if kind == frames.END:
                self._end(time.monotonic(), *signals.unpack(payload))
            elif kind == frames.RELEASE:
                self.released = True
            elif kind == frames.SIGNAL:
                self._pass_on(payload)
            elif kind == frames.LOOK:
                answer = b""  # which hvdrun drops
                with contextlib.suppress(OSError, ValueError):
                    answer = self._look(payload)
                self._tell(frames.LOOKED, answer)

    def _look(self, what: bytes) -> bytes:
        from hvdrun.machine.looks import look

        stack = None
        if what == frames.WITH_STACK_AND_BOX and (operations := self.box.read(all_of_them=True)):
            self._tell(frames.BLACK_BOX_NOW, operations)
        if what in (frames.WITH_STACK, frames.WITH_STACK_AND_BOX):
            stack = self._stack()
        stopped_s = None if self.stopped_at is None else time.monotonic() - self.stopped_at
        return look(self.pid, stack, stopped_s)

    def _stack(self) -> tuple[list[list[object]], str]:
        stack = self.stacks.newest()
        if stack is None:
            return [], NOT_OFFERED
        found, why = stack.read()
        if not found and (last := stack.frames_in(self.box.lines())):
            return last, f"{why}; {LAST_WAITED}" if why else LAST_WAITED
        return found, why

    def _pass_on(self, request: bytes) -> None:
        answer = signals.pass_on(self.pid, int(request.split()[0])) if self.pid else b"absent"
        self._tell(frames.SIGNALLED, b"%s %s" % (request, answer))

    def _end(self, begin: float, first: int, grace_s: float) -> None:
        self.shared_files.look(self.pid)
        steps = signals.steps(first, grace_s)
        if self.is_ending:  # a rank gets the first signals once: it may be saving
            steps = steps[-1:]
        self.is_ending = True
        signals.show_ending()
        self.deadlines += [(begin + after_s, number) for after_s, number in steps]

    def _signal(self) -> None:
        now = time.monotonic()
        for deadline in sorted(self.deadlines):
            if deadline[0] <= now:
                self.deadlines.remove(deadline)
                self.released = self.released or deadline[1] == signal.SIGKILL
                self.asked = self.asked or not is_exiting(self.pid)
                if self.pid:
                    self._send(deadline[1])

    def _send(self, number: int) -> None:
        """To the command's process group. If the rank has said that it will save and leave after
        TERM, or has a handler for it, only that process gets it, and the command: the rank may
        still need its children, such as a DataLoader's workers, which end when it has ended."""
        rank = self.preemptible
        if number == signal.SIGTERM and not rank:
            newest = self.stacks.newest()  # of a process that has imported hvdlite
            candidates = (newest.pid if newest is not None else 0, self.pid)
            caught = (pid for pid in candidates if pid and signals.is_caught(pid, number))
            rank = next(caught, 0)
        with contextlib.suppress(OSError):
            if number != signal.SIGTERM or not rank or self._group_of(rank) != self.pid:
                os.killpg(self.pid, number)
                return
            os.kill(rank, number)
            if rank != self.pid:
                os.kill(self.pid, number)

    @staticmethod
    def _group_of(pid: int) -> int:
        """0 if there is no such process."""
        with contextlib.suppress(OSError):
            return os.getpgid(pid)
        return 0
