"""The events of a rank's row in a trace viewer, made from what engine and program have recorded."""

from __future__ import annotations

import time
from typing import Any

from hvdlite.observe import clocks
from hvdlite.observe.clocks import Offset
from hvdlite.observe.program import Span


class TraceRow:
    """This rank's row in the trace viewer: makes trace events from the engines' events. Pure."""

    def __init__(self, rank: int, host: str) -> None:
        self._rank = rank
        self._host = host
        # All rows are on rank 0's clock, shown as its wall clock was at the timeline's start.
        self.to_wall_ns = time.time_ns() - clocks.now_ns()
        self._offset_ns = 0
        # The row below this one for each optimizer.
        self._threads: dict[str, int] = {}
        # The current state of each operation, by process set and number.
        self._states: dict[tuple[int, int], str] = {}

    def place_on(self, to_wall_ns: int, offset_ns: float) -> None:
        """to_wall_ns: rank 0's; offset_ns: this rank's clock minus rank 0's."""
        self.to_wall_ns, self._offset_ns = to_wall_ns, round(offset_ns)

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

    def dropped(self, count: int) -> dict[str, Any]:
        text = f"{count} events were dropped: the file, or rank 0, did not take them in time"
        return self._instant(text, time.monotonic_ns())

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

    def clocks(self, when: str, offsets: list[Offset], num_clocks: int) -> list[dict[str, Any]]:
        """What was measured of all ranks' clocks just now, when: at the start or the end."""
        at = self._micros(time.monotonic_ns())
        made: list[dict[str, Any]] = []
        for rank, (offset_ns, error_ns) in enumerate(offsets):
            about = {"ph": "M", "pid": rank, "tid": 0}
            args = {
                "when": when,
                "at": at,
                "offset_us": offset_ns / 1000,
                "error_us": error_ns / 1000,
                "clocks": num_clocks,
            }
            made.append({**about, "name": "hvdlite_clock", "args": args})
            if error_ns and when == "start":
                label = f"clock within {error_ns / 1000:.0f} us of rank 0's"
                made.append({**about, "name": "process_labels", "args": {"labels": label}})
        return made

    def spans(self, spans: list[Span]) -> list[dict[str, Any]]:
        """What the program did: its waits in the row itself, each optimizer in one below it."""
        made: list[dict[str, Any]] = []
        for span in spans:
            args: dict[str, Any] = {}
            if span.optimizer:
                args = {"optimizer": span.optimizer, "step": span.number}
            thread = self._threads.get(span.optimizer)
            if thread is None:
                thread = self._threads[span.optimizer] = len(self._threads) + 1
                name = span.optimizer or "waits for hvdlite"
                about = {"ph": "M", "pid": self._rank, "tid": thread}
                made.append({**about, "name": "thread_name", "args": {"name": name}})
            made.append(
                {
                    "ph": "X",
                    "cat": span.kind,
                    "name": span.name,
                    "pid": self._rank,
                    "tid": thread,
                    "ts": self._micros(span.begin_ns),
                    "dur": (span.end_ns - span.begin_ns) / 1000,
                    "args": args,
                }
            )
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
        return (clocks.as_seen(at_ns) - self._offset_ns + self.to_wall_ns) / 1000
