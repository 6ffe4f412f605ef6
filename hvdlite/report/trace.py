"""What is in a timeline's file: the operations, and what the programs did. Times are in us since
the first event."""

from __future__ import annotations

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import IO, Any

from hvdlite.observe.clocks import Offset, between, offset

# The timeline writes one event per line. Another program may have written it as a single one.
LONGEST_LINE = 1 << 16
LARGEST_IN_ONE_LINE = 64 << 20
# Of the operations before the end, so many show what the clocks differ by then.
LAST_ROUNDS = 64
# Of what else the ranks say, so many lines are shown.
MOST_NOTES = 20
_LOST = re.compile(r"(\d{1,12}) events were lost: too many at once")
STATES = ("POSTED", "MATCHED", "RUNNING")


class NotATimeline(Exception):
    """The file can't be reported on."""


@dataclass(slots=True)
class Operation:
    """One operation of one rank, with the times of its states; None: not in the file."""

    rank: int
    process_set: int
    kind: str
    name: str
    size_bytes: int = 0
    posted: float | None = None
    matched: float | None = None
    running: float | None = None
    done: float | None = None
    failed: bool = False

    @property
    def label(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(slots=True)
class Span:
    """What a rank's program did. kind: STEP, BACKWARD or WAIT; number: of the step."""

    rank: int
    kind: str
    name: str
    optimizer: str
    number: int
    begin: float
    end: float


@dataclass
class Trace:
    """ranks: their labels. errors: by how many us each rank's times may be wrong, compared with
    rank 0's. drifts: how many us its clock has moved until the end. notes: what is wrong with the
    file."""

    ranks: dict[int, str] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    clocks: dict[str, dict[int, tuple[float, Offset]]] = field(default_factory=dict)
    errors: dict[int, float] = field(default_factory=dict)
    drifts: dict[int, float] = field(default_factory=dict)
    drift_from: str = ""
    ended: bool = False
    notes: list[str] = field(default_factory=list)

    def error_between(self, a: int, b: int) -> float:
        return self.errors.get(a, 0.0) + self.errors.get(b, 0.0)


def read(path: str) -> Trace:
    """The whole file, corrected for the drift of clocks.

    Raises:
        NotATimeline: It is not a timeline, or there is nothing in it.
        OSError: It can't be read.
    """
    with open(path, "rb") as file:
        trace = _Reader().read(file)
    matched = match(trace.operations)
    _correct_drift(trace, matched)
    return trace


class _Reader:
    def __init__(self) -> None:
        self._trace = Trace()
        self._open: dict[tuple[int, str], Operation] = {}
        self._bad = 0
        self._lost: dict[int, int] = defaultdict(int)  # by rank
        self._said: list[str] = []
        self._num_said = 0

    def read(self, file: IO[bytes]) -> Trace:
        num_events = 0
        for event in self._events(file):
            try:
                self._take(event)
                num_events += 1
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
                self._bad += 1
        trace = self._trace
        trace.notes += self._notes()
        if not trace.operations and not trace.spans and not trace.ranks:
            raise NotATimeline(
                "it holds no event of a timeline of hvdlite; make one by hvdrun "
                "--timeline-filename, or hvd.start_timeline"
            )
        if self._bad:
            trace.notes.append(f"{self._bad} entries are not events of a timeline and are left out")
        if self._open:
            several = "operations" if len(self._open) > 1 else "operation"
            trace.notes.append(f"{len(self._open)} {several} had not ended when the file did")
        if not trace.ended:
            trace.notes.append(
                "the job ended without stop_timeline(), so the last quarter of a second may be "
                "missing"
            )
        if "start" not in trace.clocks:
            trace.notes.append(
                "the file does not say how far the clocks of hosts differ: an older version made it"
            )
        if not any(span.kind == "STEP" for span in trace.spans):
            trace.notes.append(
                "the file holds no steps of a DistributedOptimizer, so figures of steps are missing"
            )
        self._to_first_event()
        return trace

    def _events(self, file: IO[bytes]) -> Iterator[Any]:
        size = os.fstat(file.fileno()).st_size
        first = file.readline(LONGEST_LINE)
        if not first.strip():
            raise NotATimeline("it is empty; the job may have ended before its timeline began")
        if first.strip() != b"[":
            if size > LARGEST_IN_ONE_LINE:
                raise NotATimeline(
                    "it is no timeline as hvdlite writes them, which begin with a line of `[`"
                )
            yield from _whole(first + file.read())
            return
        torn = None
        while line := file.readline(LONGEST_LINE):
            text = line.strip().strip(b",")
            if text in (b"", b"]"):
                continue
            if torn is not None:
                self._bad += 1
            try:
                torn = None
                yield json.loads(text)
            except (ValueError, RecursionError):
                torn = text
        if torn is not None:
            self._trace.notes.append("the last event is cut off, as the job was killed in a write")

    def _take(self, event: Any) -> None:
        phase, rank = event["ph"], event["pid"]
        if type(rank) is not int or rank < 0:
            raise ValueError(rank)
        trace = self._trace
        if phase in ("b", "e"):
            self._take_state(rank, event)
        elif phase == "X":
            args, begin = event["args"], _number(event["ts"])
            kind = str(event["cat"])
            trace.spans.append(
                Span(
                    rank,
                    kind,
                    str(event["name"]),
                    str(args.get("optimizer", "")),
                    int(args.get("step", 0)),
                    begin,
                    begin + max(0.0, _number(event["dur"])),
                )
            )
        elif phase == "M" and event["name"] == "process_name":
            trace.ranks[rank] = str(event["args"]["name"])
        elif phase == "M" and event["name"] == "hvdlite_clock":
            args = event["args"]
            found = Offset(_number(args["offset_us"]), abs(_number(args["error_us"])))
            when = str(args["when"])
            trace.clocks.setdefault(when, {})[rank] = _number(args["at"]), found
        elif phase == "i":
            name = str(event["name"])
            if name == "the timeline ends":
                trace.ended = True
            else:
                self._note(rank, name)

    def _note(self, rank: int, name: str) -> None:
        """Ranks may say the same four times a second, for hours."""
        if lost := _LOST.fullmatch(name):
            self._lost[rank] += int(lost[1])
            return
        self._num_said += 1
        if len(self._said) < MOST_NOTES:
            self._said.append(f"rank {rank}: {name}")

    def _notes(self) -> list[str]:
        lost = [
            f"rank {rank}: {number} events were lost: too many at once"
            for rank, number in sorted(self._lost.items())
        ]
        notes = [*lost[:MOST_NOTES], *self._said]
        if more := len(lost) + self._num_said - len(notes):
            notes.append(f"and {more} more notes of ranks")
        return notes

    def _take_state(self, rank: int, event: Any) -> None:
        key, at = (rank, str(event["id"])), _number(event["ts"])
        args = event.get("args")
        if args is None:
            return  # the end of a state is the beginning of the next one
        state, size_bytes = args["state"], int(args["bytes"])
        operation = self._open.get(key)
        if event["ph"] == "b":
            if operation is None:
                kind, name = str(event["cat"]), str(event["name"])
                operation = Operation(
                    rank, int(args["process_set"]), kind, name.removeprefix(f"{kind} ")
                )
                self._open[key] = operation
                self._trace.operations.append(operation)
            operation.size_bytes = max(0, size_bytes)
            if state in STATES:
                setattr(operation, state.lower(), at)
        elif operation is not None:
            operation.done, operation.failed = at, state == "FAILED"
            operation.size_bytes = max(0, size_bytes)
            del self._open[key]

    def _to_first_event(self) -> None:
        trace = self._trace
        times = [span.begin for span in trace.spans]
        times += [at for each in trace.operations for at in _times(each)]
        first = min(times, default=0.0)
        for each in trace.operations:
            _move(each, lambda at: at - first)
        for span in trace.spans:
            span.begin, span.end = span.begin - first, span.end - first
        trace.clocks = {
            when: {rank: (at - first, found) for rank, (at, found) in of_ranks.items()}
            for when, of_ranks in trace.clocks.items()
        }


def _whole(text: bytes) -> Iterator[Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NotATimeline(f"it is no JSON: {error}") from error
    if isinstance(found, dict):
        found = found.get("traceEvents")
    if not isinstance(found, list):
        raise NotATimeline("it is JSON, but no array of trace events")
    yield from found


def _number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number) or abs(number) > 1e18:
        raise ValueError(value)
    return number


def _times(operation: Operation) -> list[float]:
    states = (operation.posted, operation.matched, operation.running, operation.done)
    return [at for at in states if at is not None]


def _move(operation: Operation, moved: Any) -> None:
    for name in ("posted", "matched", "running", "done"):
        at = getattr(operation, name)
        if at is not None:
            setattr(operation, name, moved(at))


def match(operations: list[Operation]) -> list[dict[int, Operation]]:
    """The operations of all ranks that belong together, by rank: those of a process set with the
    same kind and name, in the order in which each rank posts them. Only those that all ranks of the
    set have ended."""
    found: dict[tuple[int, str, str, int], dict[int, Operation]] = defaultdict(dict)
    counts: dict[tuple[int, int, str, str], int] = defaultdict(int)
    members: dict[int, set[int]] = defaultdict(set)
    for each in operations:
        if each.posted is None:
            continue  # it began before the timeline
        members[each.process_set].add(each.rank)
        own = (each.rank, each.process_set, each.kind, each.name)
        found[each.process_set, each.kind, each.name, counts[own]][each.rank] = each
        counts[own] += 1
    return [
        of_ranks
        for (process_set, *_), of_ranks in found.items()
        if len(of_ranks) == len(members[process_set])
        and all(each.done is not None and not each.failed for each in of_ranks.values())
    ]


def in_line(trace: Trace, matched: list[dict[int, Operation]]) -> list[dict[int, Operation]]:
    """Those that end on no rank before all have posted them. Others do not belong together: events
    were lost."""
    kept = []
    for of_ranks in matched:
        posted, last = max((each.posted or 0.0, rank) for rank, each in of_ranks.items())
        done, first = min((each.done or 0.0, rank) for rank, each in of_ranks.items())
        if done >= posted - trace.error_between(last, first):
            kept.append(of_ranks)
    return kept


def _correct_drift(trace: Trace, matched: list[dict[int, Operation]]) -> None:
    """The file has all times as the clocks were at the start. Moves them by what they have drifted
    until then, according to the measurement at the end or else the last operations."""
    start, end = trace.clocks.get("start", {}), trace.clocks.get("end", {})
    moved: dict[int, tuple[tuple[float, Offset], tuple[float, Offset]]] = {}
    for rank, (start_at, first) in start.items():
        trace.errors[rank] = first.error
        if not first.error:
            continue  # it has rank 0's clock
        residual = Offset(0.0, first.error)
        last: tuple[float, Offset] | None = None
        if rank in end:
            end_at, found = end[rank]
            last = end_at, Offset(found.offset - first.offset, found.error)
            trace.drift_from = "measured"
        else:
            last = _from_operations(rank, start_at, matched)
            if last is not None:
                trace.drift_from = "operations"
        if last is None or last[0] <= start_at:
            continue
        moved[rank] = (start_at, residual), last
        trace.drifts[rank] = last[1].offset
        trace.errors[rank] = max(first.error, last[1].error)

    def now(rank: int, at: float) -> float:
        return at - between(*moved[rank], at).offset

    for each in trace.operations:
        if each.rank in moved:
            _move(each, lambda at, rank=each.rank: now(rank, at))
    for i, span in enumerate(trace.spans):
        if span.rank in moved:
            begin, end_at = now(span.rank, span.begin), now(span.rank, span.end)
            trace.spans[i] = replace(span, begin=begin, end=end_at)


def _from_operations(
    rank: int, start_at: float, matched: list[dict[int, Operation]]
) -> tuple[float, Offset] | None:
    """When the clock ran last, and what it differed by then: no operation ends on one rank before
    the other one posts it. What the last operations show holds for the middle of their time, and
    grows with time."""
    both = [of_ranks for of_ranks in matched if 0 in of_ranks and rank in of_ranks]
    rounds = []
    for of_ranks in both[-LAST_ROUNDS:]:
        pair = []
        for each in (of_ranks[0], of_ranks[rank]):
            assert each.posted is not None
            assert each.done is not None
            pair.append((each.posted, each.done))
        rounds.append((pair[0], pair[1]))
    if not rounds:
        return None
    first, last = min(mine[0] for _, mine in rounds), max(mine[1] for _, mine in rounds)
    middle = (first + last) / 2
    if middle <= start_at:
        return None
    found, grown = offset(rounds), (last - start_at) / (middle - start_at)
    return last, Offset(found.offset * grown, found.error * grown)
