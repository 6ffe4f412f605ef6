"""The files of `--output-dir`: one per rank and stream."""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict

from hvdrun.errors import UsageError
from hvdrun.machine.own_files import Identity, identity, open_file
from hvdrun.output.writer import Sink, write_all

STREAMS = {1: "stdout", 2: "stderr"}
OURS = 2  # the names in a path that hvdrun adds: rank.N/stdout
# Jobs may have more ranks than a process may have open files.
OPEN_AT_ONCE = 128


class RankFiles:
    """DIR/rank.N/stdout and DIR/rank.N/stderr, N with as many digits as the highest rank has.

    Raises UsageError if they can't be created, or another user has put something there (see
    own_files). An error in writing (a full disk) does not end the job: `failure` is the first.
    """

    def __init__(self, folder: str, num_proc: int) -> None:
        digits = len(str(num_proc - 1))
        self.failure: OSError | None = None
        self._open: OrderedDict[str, int] = OrderedDict()
        self._made: dict[str, Identity] = {}
        self._sinks: dict[tuple[int, int], Sink] = {}
        for rank in range(num_proc):
            of_rank = os.path.join(folder, f"rank.{rank:0{digits}}")
            try:
                for fd, stream in STREAMS.items():
                    path = os.path.join(of_rank, stream)
                    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
                    made = open_file(path, flags, make=True, ours=OURS)
                    self._made[path] = identity(made)
                    os.close(made)
                    self._sinks[rank, fd] = self._sink(path)
            except OSError as error:
                raise UsageError(
                    f"--output-dir {folder}: {error.strerror} ({error.filename}); name a folder"
                    " that you can write to"
                ) from error

    def sink(self, rank: int, fd: int) -> Sink:
        """The function that appends to the file of that rank and stream."""
        return self._sinks[rank, fd]

    def _sink(self, path: str) -> Sink:
        def append(data: bytes) -> None:
            try:
                write_all(self._descriptor(path), data)
            except OSError as error:
                self.failure = self.failure or error

        return append

    def _descriptor(self, path: str) -> int:
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        if len(self._open) >= OPEN_AT_ONCE:
            _, oldest = self._open.popitem(last=False)
            with contextlib.suppress(OSError):
                os.close(oldest)
        flags = os.O_WRONLY | os.O_APPEND
        self._open[path] = open_file(path, flags, ours=OURS, same_as=self._made[path])
        return self._open[path]
