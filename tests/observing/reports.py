"""The stall check's reports: the lines on the ranks' stderr, their expected texts, and operations
that are late.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest
import torch

import hvdlite as hvd
from hvdlite.collectives.handles import Handle
from hvdlite.world import world as worlds

WARNS = {"HVDLITE_STALL_CHECK_TIME_SECONDS": "1"}
FAILS = {**WARNS, "HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": "2"}
DEADLINE_S = 50.0
SITE = re.compile(r" \((?:reports|test_\w+)\.py:\d+\)")

# The barrier of `Said`, also where ranks have joined before.
BARRIER_ENDED = r"last finished an unnamed barrier \(no\. [^)]*\) \d+ s ago"
END = r"; do all ranks take the same path through the program\?"
UNEVEN = (
    r"do all ranks have the same number of batches\? A rank that runs out of them before the others"
    r" must call hvd\.join\(\); drop_last=True and a DistributedSampler give all ranks as many"
)
# How to let a wait end the job.
NO_LIMIT = "--stall-check-shutdown-time-seconds 600) all operations fail"
GIVES_UP = r"; all operations fail now \(HVDLITE_STALL_SHUTDOWN_TIME_SECONDS\)"


def works_again():
    """After a failure: the ranks meet in a new world and work there. It has no short limits, as a
    rank that was stopped may come late. All ranks call it."""
    hvd.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        for variable in FAILS:
            patch.delenv(variable, raising=False)
        hvd.init()
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    hvd.shutdown()


def plain(text: str) -> str:
    """Without the script's lines, which tests/test_sites.py holds."""
    return SITE.sub("", text)


class Said:
    """All that ranks write to stderr from now on. All ranks make one at the same place."""

    def __init__(self) -> None:
        folder = Path(os.environ["HVDLITE_TEST_FOLDER"])
        self._logs = [folder / f"{rank}.log" for rank in range(hvd.size())]
        self._begin = [log.stat().st_size for log in self._logs]
        # No rank begins to wait for an operation before all have noted where their logs end.
        hvd.barrier()

    def lines(self) -> list[str]:
        """The lines of hvdlite's core."""
        found = []
        for log, begin in zip(self._logs, self._begin, strict=True):
            # A line that is being written has no end yet.
            whole = plain(log.read_bytes()[begin:].rpartition(b"\n")[0].decode())
            found += [line for line in whole.split("\n") if line.startswith("hvdlite: ")]
        return found

    def ever(self, text: str) -> bool:
        """Whether some rank's process has said this, also before."""
        return any(text.encode() in log.read_bytes() for log in self._logs)

    def about(self, operation: str) -> list[str]:
        """The reports of an operation such as "allreduce 'x'"."""
        return [line for line in self.lines() if line.startswith(f"hvdlite: {operation} has ")]

    def wait_for(self, operation: str, count: int = 1) -> list[str]:
        """Waits until there are `count` reports of it, or more."""
        deadline = time.monotonic() + DEADLINE_S
        while len(found := self.about(operation)) < count:
            assert time.monotonic() < deadline, f"{operation}: {self.lines()}"
            time.sleep(0.02)
        return found

    def wait_for_line(self, pattern: str) -> None:
        """Waits until a whole line matches."""
        deadline = time.monotonic() + DEADLINE_S
        while not any(re.fullmatch(pattern, line) for line in self.lines()):
            assert time.monotonic() < deadline, self.lines()
            time.sleep(0.02)

    def wait_for_all(self, operations: Iterable[str]) -> list[str]:
        """Waits until each has a report, and returns all their reports."""
        wanted = {f"hvdlite: {operation}" for operation in operations}
        deadline = time.monotonic() + DEADLINE_S
        while True:
            found = [line for line in self.lines() if " has waited " in line]
            missing = wanted - {line.partition(" has waited ")[0] for line in found}
            if not missing:
                return [line for line in found if line.partition(" has waited ")[0] in wanted]
            assert time.monotonic() < deadline, f"{len(missing)} without report: {sorted(missing)}"
            time.sleep(0.1)


def start(name: str) -> Handle:
    """An allreduce that waits for all ranks."""
    return hvd.allreduce_async(torch.ones(3), name=name, op=hvd.Sum)


def end(handles: Mapping[str, Handle | None]) -> None:
    """Ends all operations: a rank that has not started one starts it now."""
    for name, handle in handles.items():
        assert hvd.synchronize(handle or start(name)).eq(hvd.size()).all()


def host_of(rank: int) -> str:
    """The name of its host, as a pattern."""
    placement = worlds.current().placement
    names = zip(placement.hosts, placement.host_names, strict=True)
    return next(re.escape(name) for ranks, name in names if rank in ranks)


def missing(rank: int, did: str) -> str:
    """The pattern for a rank that has not posted. did: what it did last."""
    return rf"rank {rank} on {host_of(rank)} \(which {did}\)"


def posted(*ranks: int) -> str:
    """The ranks that have posted, all on one host: 'rank 0', 'ranks 0, 1', 'ranks 0-2'."""
    if len(ranks) > 2:
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def report(operation: str, absent: Sequence[str], by: str, end: str = END) -> re.Pattern[str]:
    """The exact text, except for its numbers."""
    waited = rf"hvdlite: {re.escape(operation)} has waited \d+ s for {', '.join(absent)}"
    return re.compile(rf"{waited}; called by {by}{end}")
