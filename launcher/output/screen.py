"""The output of a job, set up by the options and the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from hvdrun.output.output import Output, targets
from hvdrun.output.output_dir import OutputDir
from hvdrun.output.terminal import is_coloured, terminals
from hvdrun.output.times import Stamped
from hvdrun.output.writer import Writer, write_all
from hvdrun.plan.request import Request


class Screen:
    """The output, its writer, and the files that get a copy."""

    def __init__(self, request: Request, num_proc: int, environ: Mapping[str, str]) -> None:
        self.writer = Writer()
        self._sinks = {fd: partial(write_all, fd) for fd in (1, 2)}
        self.files = OutputDir(request.output_dir, num_proc) if request.output_dir else None
        # With a live part: which of 1 and 2 are the terminal that has it, and what writes there.
        self.live: tuple[frozenset[int], Callable[[bytes], None]] | None = None
        self._stamped = Stamped() if request.timestamps else None
        self.output = Output(
            num_proc,
            self._write,
            self._keep if self.files else None,
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
        if self.files is not None:
            data = self._stamped(rank, fd, data) if self._stamped else data
            self.writer.write(self.files.sink(rank, fd), data)
