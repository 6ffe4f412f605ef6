"""The role `rank`: the program that MPI starts. `agent` has the picture."""

from __future__ import annotations

import errno
import os
import select
import time

from hvdrun.agent import signals
from hvdrun.agent.frames import (
    CLOSED,
    END,
    EXIT,
    GO,
    GRACE_S,
    LOOK,
    LOOKED,
    RANK,
    RELEASE,
    SHIM_GONE,
    SIGNAL,
    SIGNALLED,
    Suppress,
    Waker,
    frame,
    receive,
    send,
    unpack,
    write_all,
)
from hvdrun.agent.oom import oom_kills, was_out_of_memory
from hvdrun.agent.peers import Stranger, connect
from hvdrun.agent.pmi import Relay
from hvdrun.agent.rank_notes import RankNotes
from hvdrun.agent.shared_files import SharedFiles
from hvdrun.machine import binding
from hvdrun.machine.environment import (
    EXPORTED,
    FILES,
    KEEPER,
    LINK,
    PATIENCE,
    PLACE,
    with_host_variables,
)
from hvdrun.machine.limits import LACKING, set_open_files
from hvdrun.machine.shared_memory import what_is_full

# typing costs 10 ms of each start, and collections.abc as much.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    import socket
    from collections.abc import Mapping
    from typing import NoReturn
else:  # see frames
    import _signal as signal

PF_EXITING = 0x4  # of the flags in /proc/PID/stat
MOST_FDS = 256  # a keeper has about twenty
LOOK_AT_THE_DEAD = os.WEXITED | os.WNOHANG | os.WNOWAIT
UNREACHABLE = (
    "hvdrun: rank {rank} was not started: neither hvdrun nor its agent runs on {host}, so nothing"
    " would end the rank; hvdrun was killed, or MPI started its daemon without hvdrun's agent (see"
    " --mpi-args)\n"
)
LOOK_AGAIN_S = 1.0, 60.0  # the first and the longest pause between two checks

# Per MPI: rank, size, rank on the host, number of ranks on the host.
RANK_VARIABLES = (
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)


def by_launcher(given: Mapping[str, str]) -> dict[str, str]:
    """The launcher's variables of this process about the world, under torch's names."""
    found: dict[str, str] = {}
    for names in RANK_VARIABLES:
        if names[0] in given and len(found) < len(names):
            for name, source in zip(PLACE, names, strict=True):
                if source in given:
                    found.setdefault(name, given[source])
    per_node = found.get("LOCAL_WORLD_SIZE", "")
    if not per_node.isdigit():  # Slurm's, as in 2,1(x3)
        node = int(given.get("SLURM_NODEID", "0"))
        for part in per_node.split(","):
            count, _, times = part.partition("(x")
            found["LOCAL_WORLD_SIZE"] = count
            node -= int(times.rstrip(")") or 1)
            if node < 0:
                break
    return {name: value for name, value in found.items() if value}


def rank_environment(given: Mapping[str, str], cores: int) -> dict[str, str]:
    """More variables for a rank, beside the forwarded ones. Its place in the job replaces that of
    another job, which a container or the host may have set."""
    found = by_launcher(given)
    if int(found.get("LOCAL_WORLD_SIZE", "1")) > cores:
        # Otherwise Open MPI's waiting ranks would keep cores from those that compute.
        found["OMPI_MCA_mpi_yield_when_idle"] = given.get("OMPI_MCA_mpi_yield_when_idle", "1")
    return found


def escape(command: tuple[str, ...]) -> list[str]:
    """The command as arguments for mpirun, for which ':' separates two programs."""
    return ["\\" + word if word == ":" or word.startswith("\\") else word for word in command]


def unescape(arguments: list[str]) -> list[str]:
    return [word[1:] if word.startswith("\\") else word for word in arguments]


def local_rank_and_size(given: Mapping[str, str]) -> tuple[int, int]:
    """The local rank and the number of local ranks, from MPI or srun."""
    found = by_launcher(given)
    return int(found.get("LOCAL_RANK", "0")), int(found.get("LOCAL_WORLD_SIZE", "1"))


def main(arguments: list[str], bound: bool) -> NoReturn:
    """bound: hvdrun gives the rank its cores; otherwise MPI or the user does."""
    command = unescape(arguments)
    environment = dict(os.environ)
    rank = int(by_launcher(environment).get("RANK", "0"))
    cpus = None
    if bound:
        given = binding.here(*local_rank_and_size(environment))
        environment.update(binding.thread_variables(given.threads, environment))
        cpus = given.cpus
    environment.update(rank_environment(environment, len(os.sched_getaffinity(0))))
    secret, patience_s = environment.pop(LINK, ""), environment.pop(PATIENCE, "")
    if not secret:
        _become(command, environment, cpus)
    try:
        sock = _supervisor(secret, float(patience_s or 0))
    except (Stranger, OSError) as problem:
        write_all(2, f"hvdrun: rank {rank} was not started: {problem}\n".encode())
        os._exit(1)
    if sock is None:
        write_all(2, UNREACHABLE.format(rank=rank, host=os.uname().nodename).encode())
        os._exit(1)
    for number in signals.NOT_FOR_AGENTS:  # of MPI's signals to the shim, only KILL counts
        signal.signal(number, signal.SIG_IGN)
    daemon = os.getppid()
    try:
        reader, writer = os.pipe()
        pid = os.fork()
    except OSError as error:
        _lacks(sock, rank, error)
    if pid == 0:
        try:
            os.close(reader)
            Keeper(sock, writer, rank, daemon).keep(command, environment, cpus)
        except OSError as error:
            if error.errno in LACKING:
                _lacks(sock, rank, error)
            raise
        finally:
            os._exit(1)
    sock.close()
    os.close(writer)
    os._exit((os.read(reader, 1) or b"\1")[0])


def _lacks(sock: socket.socket, rank: int, error: OSError) -> NoReturn:
    """Tells the supervisor why the rank was not started."""
    how = f"lacks {error.errno} {time.monotonic_ns()}".encode()
    with Suppress(OSError):
        send(sock, frame(EXIT, rank, how))
    os._exit(1)


def _supervisor(secret: str, patience_s: float) -> socket.socket | None:
    """Waits for the supervisor: srun starts a rank at the same time as its host's agent."""
    give_up_at = time.monotonic() + patience_s
    while (sock := connect(secret)) is None and time.monotonic() < give_up_at:
        time.sleep(0.02)
    return sock


def _become(
    command: list[str], environment: dict[str, str], cpus: frozenset[int] | None
) -> NoReturn:
    _bind(cpus)
    signals.set_default()
    _give_back_files(environment)
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        write_all(2, f"{command[0]}: {error.strerror}\n".encode())
    os._exit(127)


def _bind(cpus: frozenset[int] | None) -> None:
    """Binds this process for good. A cpuset that has changed meanwhile is no reason to fail."""
    if cpus is not None:
        with Suppress(OSError):
            os.sched_setaffinity(0, cpus)


def _give_back_files(environment: dict[str, str]) -> None:
    """Sets the user's own limit of open files, which was raised for MPI."""
    if FILES in environment:
        set_open_files(int(environment.pop(FILES)))


def spawn(
    command: list[str],
    environment: dict[str, str],
    files: Mapping[int, int],
    cpus: frozenset[int] | None,
) -> tuple[int, int]:
    """Starts the command on these hardware threads, in a process group of its own: (pid, 0), or
    (0, errno). `files`: its descriptors → ours. It inherits all others, as some may be MPI's."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            _bind(cpus)
            for number, fd in files.items():
                os.dup2(fd, number)
            signals.set_default()
            _give_back_files(environment)  # last: a number in `files` may be above that limit
            os.execvpe(command[0], command, environment)
        except OSError as error:
            os.write(writer, b"%d" % (error.errno or errno.EIO))
        finally:
            os._exit(127)
    os.close(writer)
    with Suppress(OSError):  # the child does it too, in case it comes first
        os.setpgid(pid, pid)
    failure = os.read(reader, 16)
    os.close(reader)
    if failure:
        os.waitpid(pid, 0)
        return 0, int(failure)
    return pid, 0


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
        self.asked = False  # the keeper was told to end the command, or had to
        self.released = False  # the keeper may end with the command
        self.deadlines: list[tuple[float, int]] = []  # when to send which signal
        self.is_ending = False
        self.oom_kills = oom_kills()
        self.session = os.environ.get("PMIX_SERVER_TMPDIR", "")
        self.daemon = daemon  # MPI's, the shim's parent
        self.orphaned = False  # the supervisor is gone, so the keeper must clean up
        self.shared_files = SharedFiles()
        self.look_at = time.monotonic() + LOOK_AGAIN_S[0]
        self.pause_s = LOOK_AGAIN_S[0]
        self.poll = select.poll()
        self.buffer = bytearray()

    def keep(
        self, command: list[str], environment: dict[str, str], cpus: frozenset[int] | None
    ) -> NoReturn:
        os.setsid()
        outputs = [os.pipe(), os.pipe()]
        readers = [reader for reader, _ in outputs]
        self._tell(RANK, self.session.encode(), readers)
        stdin, host = self._await_go()
        if host:
            environment = with_host_variables(environment, host)
        environment.pop(EXPORTED, None)
        environment[KEEPER] = str(os.getpid())
        waker = Waker([signal.SIGCHLD])
        stdio = (stdin, outputs[0][1], outputs[1][1])
        relay = Relay(environment, self.poll, self._tell)
        notes = RankNotes(environment, self.poll, self._tell)
        if self.is_ending:
            self._tell_end(f"asked signal {signal.SIGTERM}")
        else:
            files = {**dict(enumerate(stdio)), **relay.for_rank}
            self.pid, missing = spawn(command, environment, files, cpus)
            if missing:
                self._tell_end(f"{'lacks' if missing in LACKING else 'missing'} {missing}")
        for fd in (*stdio, *readers):
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
                self._tell(CLOSED, b"closed %d" % time.monotonic_ns())
            self._reap(relay, notes)
            if self.sock.fileno() in ready:
                self._hear()
            self._signal()
        if self.status or self.asked or relay.is_in_mpi:
            self.shared_files.remove(relay.job, relay.topology_file)
        with Suppress(OSError):
            os.write(self.shim, bytes([self.status]))
        if self.orphaned and self.session:
            self._remove_session()
        os._exit(0)

    def _remove_session(self) -> None:
        """Removes the session folder, which the daemon leaves behind if it is killed."""
        os.closerange(0, MOST_FDS)  # the daemon waits until the rank's descriptors are closed
        end = time.monotonic() + GRACE_S
        with Suppress(OSError):
            while time.monotonic() < end:
                os.kill(self.daemon, 0)
                time.sleep(0.05)
            return
        from hvdrun.machine.processes import remove_sessions

        remove_sessions([self.session])

    def _tell(self, kind: bytes, payload: bytes = b"", fds: list[int] | None = None) -> None:
        with Suppress(OSError):  # reading notices that the supervisor is gone
            send(self.sock, frame(kind, self.rank, payload), fds or ())

    def _tell_end(self, how: str) -> None:
        self._tell(EXIT, f"{how} {time.monotonic_ns()}".encode())

    def _await_go(self) -> tuple[int, bytes]:
        """Standard input for the command; and the variables of this host, if hvdrun runs on another
        one."""
        stdin, host = None, b""
        while stdin is None:
            data, fds = receive(self.sock)
            if not data:
                os._exit(1)
            self.buffer += data
            for kind, _, payload in unpack(self.buffer):
                if kind == END:
                    self.asked = True
                    self._end(time.monotonic(), *signals.unpack(payload))
                elif kind == SIGNAL:
                    self._pass_on(payload)
                elif kind == GO:
                    host = payload
                    stdin = fds[0] if fds else os.open(os.devnull, os.O_RDONLY)
        return stdin, host

    def _wait(self) -> set[int]:
        now = time.monotonic()
        times = [at for at, _ in self.deadlines]
        if self.pid:
            if now >= self.look_at:
                self.shared_files.look(self.pid)
                self.pause_s = min(2 * self.pause_s, LOOK_AGAIN_S[1])
                self.look_at = now + self.pause_s
            times.append(self.look_at)
        timeout = max(0.0, 1000 * (min(times) - now)) if times else None
        return {fd for fd, _ in self.poll.poll(timeout)}

    def _reap(self, relay: Relay, notes: RankNotes) -> None:
        if not self.pid or os.waitid(os.P_PID, self.pid, LOOK_AT_THE_DEAD) is None:
            return
        # A rank that loses its shim loses its daemon, and may fail from that before its keeper
        # notices.
        late = self._has_ended(self.shim)
        # Its background processes, as long as no other group can have the number.
        with Suppress(OSError):
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
        self._tell(SHIM_GONE)
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
            self._end(time.monotonic(), signal.SIGTERM, GRACE_S)
        self.buffer += data
        for kind, _, payload in unpack(self.buffer):
            if kind == END:
                self._end(time.monotonic(), *signals.unpack(payload))
            elif kind == RELEASE:
                self.released = True
            elif kind == SIGNAL:
                self._pass_on(payload)
            elif kind == LOOK:
                from hvdrun.machine.looks import look

                self._tell(LOOKED, look(self.pid))

    def _pass_on(self, request: bytes) -> None:
        answer = signals.pass_on(self.pid, int(request.split()[0])) if self.pid else b"absent"
        self._tell(SIGNALLED, b"%s %s" % (request, answer))

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
                    with Suppress(OSError):
                        os.killpg(self.pid, deadline[1])
