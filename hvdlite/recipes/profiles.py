"""Traces of torch.profiler, one file per rank in a common folder.

The practice of torch.profiler.tensorboard_trace_handler, whose names have host and process: here
they have the rank, which is also in the trace: in the names of the viewer's rows, and in
"distributedInfo", where HolisticTraceAnalysis looks for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from hvdlite.world import world
from hvdrun.for_hvdlite import open_folder

if TYPE_CHECKING:
    from torch.profiler import profile as Profiler

_HEAD_BYTES = 1 << 16
_ROW_NAME = re.compile(rb'"name": "process_name",[^{}]*"args": \{\s*"name": "')


@contextlib.contextmanager
def profile(
    folder: str | os.PathLike[str],
    *,
    schedule: Callable[[int], Any] | None = None,
    on_trace_ready: Callable[[Profiler], Any] | None = None,
    **options: Any,
) -> Iterator[Profiler]:
    """A context: profiles the block by `torch.profiler.profile`, and writes this rank's trace to
    `folder/rankN-HOST.json`.

    Any rank may enter it, alone too; nothing is sent. Perfetto (ui.perfetto.dev), chrome://tracing
    and HolisticTraceAnalysis read the files.

    Args:
        folder: Made if it is missing; of each host, where hosts do not share it. Files of an
            earlier run with these names are replaced.
        schedule: As for `torch.profiler.profile`, mostly made by `torch.profiler.schedule`; then
            call `step()` on what the context gives after every step. A further trace of the same
            context is `rankN-HOST.2.json`, and so on.
        on_trace_ready: Called with the profiler after each trace is written.
        options: The other arguments of `torch.profiler.profile`: `activities`, `record_shapes`,
            `profile_memory`, `with_stack`.

    Raises:
        OSError: The folder or file can't be written; a PermissionError, if a symlink of another
            user leads there.

    Example:
        >>> from hvdlite.recipes import profile
        >>> with profile("traces") as profiler:
        ...     total = torch.ones(100).sum()
        >>> import glob
        >>> glob.glob("traces/rank0-*.json")
        ['traces/rank0-...json']
    """
    # Opened now: a script may change its working directory, and an error after hours is late.
    opened = open_folder(os.fspath(folder), 0o777)
    try:
        base = f"rank{world.rank()}-{socket.gethostname()}"
        count = 0

        def write(profiler: Profiler) -> None:
            nonlocal count
            count += 1
            name = f"{base}.json" if count == 1 else f"{base}.{count}.json"
            _write(profiler, opened, name)
            if on_trace_ready is not None:
                on_trace_ready(profiler)

        with _profiler_class()(schedule=schedule, on_trace_ready=write, **options) as profiler:
            yield profiler
    finally:
        os.close(opened)


def _profiler_class() -> type[Profiler]:
    """Made when it is needed, as torch loads its profiler late."""
    import torch.distributed
    from torch.profiler import profile as Profiler

    class ProfilerOfRank(Profiler):
        # Where step() raises, as the disk is full, the end of the context would do the same once
        # more: torch crashes if it stops a trace that is not running.
        _has_failed = False

        def step(self) -> None:
            try:
                super().step()
            except BaseException:
                self._has_failed = True
                raise

        def stop(self) -> None:
            if not self._has_failed:
                super().stop()

        def prepare_trace(self) -> None:
            with warnings.catch_warnings():
                # It says that a trace forgets the one before, which is in a file by then.
                warnings.filterwarnings("ignore", ".*Profiler clears events at the end")
                super().prepare_trace()

        def start_trace(self) -> None:
            super().start_trace()
            self.add_metadata_json("rank", str(world.rank()))
            # torch says this itself if there is a process group.
            if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
                place = {"backend": "hvdlite", "rank": world.rank(), "world_size": world.size()}
                self.add_metadata_json("distributedInfo", json.dumps(place))

    return ProfilerOfRank


def _write(profiler: Profiler, folder: int, name: str) -> None:
    """Writes the trace to a file of that open folder, at once: other users' links have no effect,
    and a reader sees a whole trace."""
    own = f".{name}.{secrets.token_hex(4)}"
    os.mkdir(own, 0o700, dir_fd=folder)
    # By way of the open folder, which nobody can exchange. Kineto opens what it writes by name, so
    # it writes where only this user can put files.
    place = f"/proc/self/fd/{folder}/{own}"
    try:
        profiler.export_chrome_trace(f"{place}/trace.json")
        _name_rows(f"{place}/trace.json", f"{place}/named.json")
        os.replace(f"{own}/named.json", name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        shutil.rmtree(place)


def _name_rows(trace: str, named: str) -> None:
    """Copies a trace, in which the rows of the viewer then have the name of the rank."""
    row = f"rank {world.rank()} on {socket.gethostname()}: "
    with open(trace, "rb") as source, open(named, "wb") as target:
        # The names come first. A trace is too large to be parsed.
        head = source.read(_HEAD_BYTES)
        target.write(_ROW_NAME.sub(rb"\g<0>" + json.dumps(row)[1:-1].encode(), head))
        shutil.copyfileobj(source, target)
