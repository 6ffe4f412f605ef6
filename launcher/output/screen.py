"""The output of a job, set up by the options and the terminal."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from hvdrun.machine.own_files import open_file
from hvdrun.output.box_files import write_boxes
from hvdrun.output.output import Output, targets
from hvdrun.output.rank_files import RankFiles
from hvdrun.output.terminal import is_coloured, terminals
from hvdrun.output.times import Stamped
from hvdrun.output.writer import Writer, write_all
from hvdrun.plan.request import Request


class Screen:
    """The output, its writer, and the files that get a copy."""

    def __init__(self, request: Request, num_proc: int, environ: Mapping[str, str]) -> None:
        self.writer = Writer()
        self._sinks = {fd: partial(write_all, fd) for fd in (1, 2)}
        self._folder = request.output_dir
        self._num_proc = num_proc
        self._files = RankFiles(self._folder, num_proc) if self._folder else None
        # With a live part: which of 1 and 2 are the terminal that has it, and what writes there.
        self.live: tuple[frozenset[int], Callable[[bytes], None]] | None = None
        self._stamped = Stamped() if request.timestamps else None
        self.output = Output(
            num_proc,
            self._write,
            self._keep if self._files else None,
            terminals=terminals(),
            targets=targets(),
            coloured=is_coloured(environ),
            timestamps=request.timestamps,
        )

    def _write(self, fd: int, data: bytes) -> None:
        if self.live is not None and fd in self.live[0]:
            self.live[1](data)
        else:
            self.write_at_once(fd, data)

    def write_at_once(self, fd: int, data: bytes) -> None:
        """Not by way of the live part."""
        self.writer.write(self._sinks[fd], data)

    def _keep(self, rank: int, fd: int, data: bytes) -> None:
        if self._files is not None:
            data = self._stamped(rank, fd, data) if self._stamped else data
            self.writer.write(self._files.sink(rank, fd), data)

    @property
    def keeps_files(self) -> bool:
        """There is an --output-dir."""
        return bool(self._folder)

    def keep_operations(self, operations: Mapping[int, Iterable[str]], summary: list[str]) -> str:
        """After a failure: writes the ranks' last operations into --output-dir. Returns a line that
        says where, or ""."""
        if not self._folder:
            return ""
        try:
            path = write_boxes(self._folder, self._num_proc, operations, summary)
        except OSError as error:
            return f"hvdrun: the ranks' last operations are not in --output-dir: {_reason(error)}"
        return f"hvdrun: the ranks' last operations are in {path}"

    def keep_metrics(self, figures: str) -> str:
        """Writes metrics.json into --output-dir, if there is one. Returns a line about what goes
        wrong, or ""."""
        if self._folder:
            path = os.path.join(self._folder, "metrics.json")
            try:
                fd = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                with open(fd, "w", encoding="utf-8", errors="replace") as file:
                    file.write(f"{figures}\n")
            except OSError as error:
                return f"hvdrun: --output-dir has no metrics.json: {_reason(error)}"
        return ""

    def lost(self) -> str:
        """A line about output that is missing in --output-dir, or ""."""
        if self._files is None or self._files.failure is None:
            return ""
        failure = self._files.failure
        why = f"{failure.strerror}; the files there are not complete"
        return f"hvdrun: --output-dir {self._folder}: {why}"


def _reason(error: OSError) -> str:
    why = error.strerror or str(error)
    return why if error.filename is None else f"{why} ({error.filename})"
