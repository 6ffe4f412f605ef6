"""The folder of `--output-dir`: a file per rank and stream, and at the end what the ranks have
measured and, after a failure, their last operations."""

from __future__ import annotations

import contextlib
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping

from hvdrun.errors import UsageError
from hvdrun.machine.own_files import Identity, identity, open_file, remove_files
from hvdrun.output.writer import Sink, write_all

STREAMS = {1: "stdout", 2: "stderr"}
OURS = 2  # the names in a path that hvdrun adds: rank.N/stdout
# Jobs may have more ranks than a process may have open files.
OPEN_AT_ONCE = 128
_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
_BOXES = re.compile(r"rank\.[0-9]+\.jsonl|summary\.txt")


class OutputDir:
    """DIR/rank.N/stdout and DIR/rank.N/stderr, N with as many digits as the highest rank has.

    Raises UsageError if they can't be created, or another user has put something there (see
    own_files). An error in writing (a full disk) does not end the job: `failure` is the first.
    """

    def __init__(self, folder: str, num_proc: int) -> None:
        digits = len(str(num_proc - 1))
        self.folder = folder
        self.names = [f"rank.{rank:0{digits}}" for rank in range(num_proc)]
        self.failure: OSError | None = None
        self._open: OrderedDict[str, int] = OrderedDict()
        self._made: dict[str, Identity] = {}
        self._sinks: dict[tuple[int, int], Sink] = {}
        for rank, name in enumerate(self.names):
            try:
                for fd, stream in STREAMS.items():
                    path = os.path.join(folder, name, stream)
                    made = open_file(path, _NEW, make=True, ours=OURS)
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

    # What is written at the end: each returns a line to show, or "".

    def keep_operations(
        self, operations: Mapping[int, Iterable[str]], summary: Iterable[str]
    ) -> str:
        """DIR/black-box/summary.txt, and rank.N.jsonl for each rank; empty if nothing is known of
        the rank. Files of an earlier job, which may have had more ranks, are removed."""
        path = os.path.join(self.folder, "black-box")

        def write() -> None:
            remove_files(path, _BOXES)
            for rank, name in enumerate(self.names):
                _write(os.path.join(path, f"{name}.jsonl"), operations.get(rank, ()), 0o600)
            _write(os.path.join(path, "summary.txt"), summary, 0o600)

        what = "hvdrun: the ranks' last operations are"
        return _try(write, f"{what} not in --output-dir") or f"{what} in {path}"

    def keep_metrics(self, figures: str) -> str:
        path = os.path.join(self.folder, "metrics.json")
        return _try(lambda: _write(path, [figures]), "hvdrun: --output-dir has no metrics.json")

    def lost(self) -> str:
        """About output that is missing."""
        if self.failure is None:
            return ""
        why = f"{self.failure.strerror}; the files there are not complete"
        return f"hvdrun: --output-dir {self.folder}: {why}"


def _write(path: str, lines: Iterable[str], mode: int = 0o666) -> None:
    fd = open_file(path, _NEW, mode, make=True, ours=OURS)
    with open(fd, "w", encoding="utf-8", errors="replace") as file:
        file.writelines(f"{line}\n" for line in lines)


def _try(write: Callable[[], None], trouble: str) -> str:
    try:
        write()
    except OSError as error:
        why = error.strerror or str(error)
        return f"{trouble}: {why}" + (f" ({error.filename})" if error.filename else "")
    return ""
