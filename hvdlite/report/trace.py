"""What is in a timeline's file: the operations, and what the programs did. Times are in us."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any

from hvdlite.observe.clocks import offset

# The timeline writes one event per line.
LONGEST_LINE = 1 << 16
# Of the operations before the end, so many show what the clocks differ by then.
LAST_ROUNDS = 64
# Of what else the ranks say, so many lines are shown.
MOST_NOTES = 20
_LOST = re.compile(r"(\d{1,12}) events were lost: too many at once")


class NotATimeline(Exception):
    """The file can't be reported on."""


@dataclass(slots=True)
class Operation:
    """One operation of one rank: when it was posted, and when it ended; None: not in the file."""

    rank: int
    process_set: int
    kind: str
    name: str
    posted: float | None = None
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
    optimizer: str
    number: int
    begin: float
    end: float


@dataclass
class Trace:
    """ranks: their labels. clocks: when each was compared with rank 0's. errors: by how many us
    each rank's times may be wrong, compared with rank 0's. notes: what is wrong with the file."""

    ranks: dict[int, str] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    clocks: dict[int, float] = field(default_factory=dict)
    errors: dict[int, float] = field(default_factory=dict)
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
    _correct_drift(trace)
    return trace


class _Reader:
    def __init__(self) -> None:
        self._trace = Trace()
        self._open: dict[tuple[int, str], Operation] = {}
        self._bad = 0
        self._lost: Counter[int] = Counter()  # by rank
        self._said: dict[str, None] = {}

    def read(self, file: IO[bytes]) -> Trace:
        num_events = 0
        for event in self._events(file):
            try:
                self._take(event)
                num_events += 1
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
                self._bad += 1
        trace = self._trace
        lost = (f"rank {r}: {n} events were lost: too many at once" for r, n in self._lost.items())
        trace.notes += sorted(lost)[:MOST_NOTES] + list(self._said)
        if not trace.operations and not trace.spans and not trace.ranks:
            raise NotATimeline(
                "it holds no event of a timeline of hvdlite; make one by hvdrun "
                "--timeline-filename, or hvd.start_timeline"
            )
        if self._bad:
            trace.notes.append(f"lines that are no events of a timeline: {self._bad}")
        if self._open:
            trace.notes.append(
                f"operations that had not ended when the file did: {len(self._open)}"
            )
        if not trace.ended:
            trace.notes.append(
                "the job ended without stop_timeline(), so the last quarter of a second may be "
                "missing"
            )
        if not any(span.kind == "STEP" for span in trace.spans):
            trace.notes.append(
                "the file holds no steps of a DistributedOptimizer, so figures of steps are missing"
            )
        return trace

    def _events(self, file: IO[bytes]) -> Iterator[Any]:
        first = file.readline(LONGEST_LINE).strip()
        if not first:
            raise NotATimeline("it is empty; the job may have ended before its timeline began")
        if first != b"[":
            raise NotATimeline(
                "it is no timeline as hvdlite writes them, which begin with a line of `[`"
            )
        while line := file.readline(LONGEST_LINE):
            text = line.strip().strip(b",")
            if text not in (b"", b"]"):
                try:
                    yield json.loads(text)
                except (ValueError, RecursionError):
                    self._bad += 1

    def _take(self, event: Any) -> None:
        phase, rank = event["ph"], event["pid"]
        if type(rank) is not int or rank < 0:
            raise ValueError(rank)
        trace = self._trace
        if phase in ("b", "e"):
            self._take_state(rank, event)
        elif phase == "X":
            args, begin = event["args"], _number(event["ts"])
            trace.spans.append(
                Span(
                    rank,
                    str(event["cat"]),
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
            if args["when"] == "start":
                trace.clocks[rank] = _number(args["at"])
                trace.errors[rank] = abs(_number(args["error_us"]))
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
        elif len(self._said) < MOST_NOTES:
            self._said[f"rank {rank}: {name}"] = None

    def _take_state(self, rank: int, event: Any) -> None:
        key, at = (rank, str(event["id"])), _number(event["ts"])
        args = event.get("args")
        if args is None:
            return  # the end of a state is the beginning of the next one
        operation = self._open.get(key)
        if event["ph"] == "b" and operation is None:
            kind, name = str(event["cat"]), str(event["name"])
            name = name.removeprefix(f"{kind} ")
            operation = Operation(rank, int(args["process_set"]), kind, name)
            if args["state"] == "POSTED":
                operation.posted = at
            self._open[key] = operation
            self._trace.operations.append(operation)
        elif event["ph"] == "e" and operation is not None:
            operation.done, operation.failed = at, args["state"] == "FAILED"
            del self._open[key]


def _number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number) or abs(number) > 1e18:
        raise ValueError(value)
    return number


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


def _correct_drift(trace: Trace) -> None:
    """The file has all times as the clocks were at the start. Moves them by what they have drifted
    until then, according to the last operations: none ends on one rank before the other one posts
    it. What these show holds for the middle of their time, and grows with time."""
    drifts: dict[int, float] = {}  # us per us since the start
    matched = match(trace.operations)
    for rank, start_at in trace.clocks.items():
        both = [each for each in matched if 0 in each and rank in each][-LAST_ROUNDS:]
        if not trace.errors[rank] or not both:
            continue  # it has rank 0's clock, or none has ended
        rounds = [(_round(each[0]), _round(each[rank])) for each in both]
        last = max(done for _, (_, done) in rounds)
        middle = (min(posted for _, (posted, _) in rounds) + last) / 2
        if middle > start_at:
            found = offset(rounds)
            drifts[rank] = found.offset / (middle - start_at)
            grown = found.error * (last - start_at) / (middle - start_at)
            trace.errors[rank] = max(trace.errors[rank], grown)

    def now(rank: int, at: float) -> float:
        return at - drifts[rank] * (at - trace.clocks[rank])

    for each in trace.operations:
        if each.rank in drifts and each.posted is not None:
            each.posted = now(each.rank, each.posted)
        if each.rank in drifts and each.done is not None:
            each.done = now(each.rank, each.done)
    for span in trace.spans:
        if span.rank in drifts:
            span.begin, span.end = now(span.rank, span.begin), now(span.rank, span.end)


def _round(operation: Operation) -> tuple[float, float]:
    return operation.posted or 0.0, operation.done or 0.0
