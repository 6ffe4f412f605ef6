"""How a rank ends: a failed rank ends the job at once, a rank that succeeds waits for the others.

MPI_Finalize waits for all ranks. A rank that failed must never enter it, as the others wait for
that rank in a collective: no rank would end. If hvdlite started MPI, the C core decides in the C
library's exit handlers, where the exit code is known (see `_core.finish_on_exit`).

If the user has imported mpi4py.MPI first, mpi4py finalizes MPI while Python ends, before the exit
code is known. Then this module notes what it can learn earlier: an uncaught exception, and the
argument of `sys.exit`. (It does not see a bare `raise SystemExit(3)`; then the other ranks fail at
their next operation, which needs this rank, and so end the job.)
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from hvdlite import _core
from hvdlite.errors import HorovodInternalError
from hvdlite.world.bootstrap import communicators
from hvdlite.world.process import full_disk
from hvdrun.for_hvdlite import ENDING

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

    from hvdlite.world.bootstrap.mpi import MpiRuntime

# Another rank's failure reaches this one as an error of a collective. The rank that failed then
# ends the job with its own exit code; ranks that only heard of the failure give it this long.
ORIGIN_FIRST_S = 1.0
LONGEST_PAUSE_S = 0.02

_OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep


# What notes how this process ends: one, or none before `init`.
_noting: list[_ExitCode] = []


def is_failing() -> bool:
    """While the process ends: whether it is known to have failed."""
    return any(each.code for each in _noting)


class _NotedExit(SystemExit):
    """What `sys.exit` raises: tells whether it ended the process or was caught.

    If it ends the process, Python drops it after reading the exit code, when no Python code is
    running. If a function catches it, it is dropped while that function runs.
    """

    note: Callable[[object], None] | None = None

    def __del__(self) -> None:
        try:
            sys._getframe(1)
        except ValueError:
            if self.note is not None:
                self.note(self.code)


def _end_at_script(trace: TracebackType | None) -> None:
    """Cuts what hvdlite has called itself off the end of a traceback: of an operation that failed,
    the user's call is the place."""
    last = None
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_OWN_FOLDER):
            last = trace
        trace = trace.tb_next
    if last is not None:
        last.tb_next = None


class _ExitCode:
    """Notes how this process is about to end, and says which rank it is; one per process."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._pid = os.getpid()
        self.code = 0
        _noting.append(self)
        self._leave: Callable[[], None] = lambda: None
        self._former_hook = sys.excepthook
        sys.excepthook = self._uncaught
        self._former_exit = sys.exit
        sys.exit = self._exit
        atexit.register(self._at_exit)

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> Any:
        if os.getpid() != self._pid:
            return self._former_hook(kind, error, trace)
        self.code = 130 if issubclass(kind, KeyboardInterrupt) else 1
        only_heard = issubclass(kind, HorovodInternalError)
        # Without hvdrun, an abort by the rank that failed is about to end this one, whose traceback
        # would add nothing to that rank's.
        if only_heard and not is_supervised():
            time.sleep(ORIGIN_FIRST_S)
        if only_heard and not logging.getLogger("hvdlite").isEnabledFor(logging.DEBUG):
            _end_at_script(trace)
        if not issubclass(kind, KeyboardInterrupt):
            print(
                f"hvdlite: rank {self.rank} on {socket.gethostname()} failed:",
                file=sys.stderr,
            )
        self._former_hook(kind, error, trace)
        with contextlib.suppress(Exception):  # whatever it is, the rank fails of `error`
            if found := full_disk.hint(error):
                print(found, file=sys.stderr)
        _flush()
        if only_heard:
            time.sleep(ORIGIN_FIRST_S)

    def _exit(self, code: Any = None, /) -> NoReturn:
        if os.getpid() != self._pid:
            self._former_exit(code)
        error = _NotedExit(code) if code is not None else _NotedExit()
        error.note = self._note
        raise error

    def _note(self, code: object) -> None:
        # As Python does it: None is 0; anything but a number is printed and gives 1.
        self.code = 0 if code is None else code if isinstance(code, int) else 1

    def _at_exit(self) -> None:
        if os.getpid() == self._pid:
            _flush()
            self._end()

    def _end(self) -> None:
        raise NotImplementedError


class HostExits(_ExitCode):
    """Ends this process as a rank of a world without MPI.

    A rank that failed does not leave: the others notice its end when it has ended, so whoever has
    started them sees it end first.
    """

    def __init__(self, rank: int, leave: Callable[[], None]) -> None:
        """leave: called when the process ends, unless it is known to have failed."""
        super().__init__(rank)
        self._leave = leave

    def _end(self) -> None:
        if not self.code:
            self._leave()


class Exits(_ExitCode):
    """Ends this process as a rank of an MPI job, from the first init on."""

    def __init__(self, mpi_runtime: MpiRuntime, world_comm: Intracomm, rank: int) -> None:
        """Collective over `world_comm`, the communicator of all ranks that end together."""
        self._mpi_runtime = mpi_runtime
        self._comm = communicators.duplicate(mpi_runtime, world_comm)
        _core.finish_on_exit(
            abort=mpi_runtime.address("MPI_Abort"),
            ibarrier=mpi_runtime.address("MPI_Ibarrier"),
            test=mpi_runtime.address("MPI_Test"),
            finalized=mpi_runtime.address("MPI_Finalized"),
            finalize=mpi_runtime.address("MPI_Finalize") if mpi_runtime.finalize else 0,
            comm=mpi_runtime.handle(self._comm),
            supervised=is_supervised(),
        )
        super().__init__(rank)

    def before_finalize(self, leave: Callable[[], None]) -> None:
        """leave: called before mpi4py finalizes MPI, unless this rank is known to have failed."""
        self._leave = leave

    def _end(self) -> None:
        if self._mpi_runtime.MPI.Is_finalized():
            return
        if self._mpi_runtime.finalize:  # the exit handlers of the C core do the rest
            self._receive_on_exit()
            return
        # A rank that failed does not tell the others that it leaves: the job must end with its exit
        # code, not with the errors that this would raise on them.
        if self.code and is_supervised():
            os._exit(self.code & 0xFF)
        if self.code:
            self._comm.Abort(self.code & 0xFF)
        self._leave()
        if not wait_quietly(self._comm):
            os._exit(self.code)
        communicators.receive_leftovers(self._mpi_runtime)

    def _receive_on_exit(self) -> None:
        """Messages to teams that this rank has left by `shutdown` before the others did."""
        mpi_runtime = self._mpi_runtime
        left = communicators.not_freed(mpi_runtime)
        _core.receive_on_exit(
            iprobe=mpi_runtime.address("MPI_Iprobe"),
            get_count=mpi_runtime.address("MPI_Get_count"),
            recv=mpi_runtime.address("MPI_Recv"),
            byte=mpi_runtime.handle(mpi_runtime.MPI.BYTE),
            any_tag=mpi_runtime.MPI.ANY_TAG,
            comms=tuple((mpi_runtime.handle(comm), comm.Get_size()) for comm in left),
        )


def is_supervised() -> bool:
    """Whether hvdrun's keeper started this process: it reports how the process ends, and hvdrun
    ends the job. Better than MPI_Abort, after which it is hard to tell which rank failed first."""
    return os.environ.get("HVDRUN_KEEPER") == str(os.getppid())


def is_being_ended() -> bool:
    """Whether hvdrun ends the job: other ranks may have ended by a signal, and never come."""
    if not is_supervised():
        return False
    try:
        with open(f"/proc/{os.getppid()}/comm") as name:
            return name.read() == f"{ENDING}\n"
    except OSError:
        return False


def wait_quietly(comm: Intracomm) -> bool:
    """A barrier that uses no core, for however long the others take. False if the job is being
    ended: no rank may enter MPI_Finalize then, as one that has left in mid-wait may have completed
    the barrier for another."""
    request = comm.Ibarrier()
    pause_s = 0.0001
    while not request.Test():
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        if pause_s == LONGEST_PAUSE_S and is_being_ended():
            return False
    return not is_being_ended()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue
