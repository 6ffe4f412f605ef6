"""What a rank has measured of its steps, and how it travels to hvdrun: as JSON in a note. And the
summary of a job, in one line.

Loaded beside each rank, hence little of the standard library.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

# A record has no more samples, its recent part no more than these, both no more links each, and a
# note with all of it no more bytes.
MOST_SAMPLES = 128
MOST_RECENT = 64
MOST_LINKS = 16
LONGEST = 10_000
# The rate of small messages says how far hosts are from each other, and how much the network keeps
# in its buffers. So a connection counts that has carried so many bytes per step. And the kernel
# counts busy seconds in ticks of up to 10 ms: a rate takes so many.
LEAST_OF_A_STEP = 256 << 10
LEAST_BUSY_S = 0.5
# A rank sends its record as it leaves and, for those who ask meanwhile, so often, or after this
# part of the time that has passed, if that is longer, but at least so often: a job of many ranks
# must not keep hvdrun busy, and the recent parts of all ranks must overlap.
TELLS_EVERY_S = 5.0
TELLS_AGAIN_AFTER = 0.01
TELLS_AT_LEAST_EVERY_S = 15.0
# The recent part of a record is about the last so many seconds, and at least so many steps.
RECENT_S = 60.0
RECENT_STEPS = 32
# Fewer steps say nothing about which rank is late, or which link slow. A cgroup throttles its ranks
# if its quota was used up in this part of the periods.
FEWEST_STEPS = 20
THROTTLED = 0.25
_LONGEST_NAME = 80
_LONGEST_ADDRESS = 39  # of IPv6
_MOST = 1e12
_MOST_BYTES = 1e18
# A step's number, and seconds: all of it, waited, waited for data.
_SAMPLE = struct.Struct("<Ifff")


class Sample(NamedTuple):
    """A step. seconds: all of it; waited, data: the parts in which the rank's program waited for
    hvdlite, and for a DataLoader."""

    step: int
    seconds: float
    waited: float
    data: float


class Connection(NamedTuple):
    """All of a rank between two addresses, over TCP, as the kernel has counted. bytes: those that
    the peer has acknowledged; busy: for how many seconds the busiest of them had some under way,
    without those in which the peer had no room; rate: the highest of one of them, in bytes per
    second in which it had some under way, also without room, 0 if not known. The last two only of
    connections whose messages are LEAST_OF_A_STEP and more."""

    local: str
    peer: str
    bytes: float
    busy: float
    rate: float


class Record(NamedTuple):
    """Of the optimizer whose steps took most of the time. The first step warms up: all but `steps`
    counts from its end to the end of the last one."""

    steps: float
    seconds: float
    waited: float  # by the program, for hvdlite: for other ranks, and for data that moves
    data: float = 0.0  # in which it waited for a DataLoader
    cpu: float = 0.0  # seconds of CPU time of all threads of the process
    # Of the cgroup that has stopped it most: the CPU quota's periods, and in how many of them it
    # was used up. 0: there is no quota, or it is not known.
    periods: float = 0.0
    stopped: float = 0.0
    # How many cores all processes of that cgroup used, DataLoader workers too. 0: not known.
    cores: float = 0.0
    # What the members of an optimizer have in common: its name, and a hash of who they are.
    optimizer: str = ""
    members: int = 0
    # The rank's world. size 0: not known.
    rank: int = 0
    size: int = 0
    samples: tuple[Sample, ...] = ()
    # How many bytes of data collectives have sent to other hosts, each given by the lowest of its
    # ranks; and all connections to other hosts. Those with most bytes.
    sent: tuple[tuple[int, float], ...] = ()
    connections: tuple[Connection, ...] = ()
    # Of the last minute, once the job has run for longer: the numbers and the samples of another
    # record, whose `steps` counts the step before the minute, too. It may be of another optimizer:
    # that with most steps in this time. None: not known.
    recent: Record | None = None

    @property
    def throttled(self) -> float:
        """The part of its periods in which the quota was used up."""
        return self.stopped / self.periods if self.periods >= 1 else 0.0


def of_world(record: Record, **given: Any) -> Record:
    """The record and its recent part with these fields: optimizer, members, rank, size."""
    recent = record.recent._replace(**given) if record.recent else None
    return record._replace(**given, recent=recent)


def _named(record: Record) -> dict[str, Any]:
    # (In JSON other characters than ASCII take six bytes and more.)
    name = record.optimizer.encode("ascii", "replace").decode()[:_LONGEST_NAME]
    return {"optimizer": name, "members": record.members}


_NUMBERS = ("steps", "seconds", "waited", "data", "cpu", "periods", "stopped", "cores")
_REQUIRED = frozenset(_NUMBERS[:3])
_WHOLE = ("members", "rank", "size")


def encode(record: Record) -> bytes:
    """At most LONGEST bytes."""
    given = _measured(record, MOST_SAMPLES)
    given |= {name: getattr(record, name) for name in _WHOLE}
    given |= _named(record)
    if record.recent:
        given["recent"] = _measured(record.recent, MOST_RECENT)
        if _named(record.recent) != _named(record):
            given["recent"] |= _named(record.recent)
    return json.dumps(given, separators=(",", ":")).encode()


def _measured(record: Record, most_samples: int) -> dict[str, Any]:
    packed = b"".join(_SAMPLE.pack(*sample) for sample in record.samples[:most_samples])
    numbers = {name: round(getattr(record, name), 6) for name in _NUMBERS}
    measured: dict[str, Any] = {**numbers, "samples": base64.b64encode(packed).decode()}
    if record.sent:
        measured["sent"] = [[rank, int(count)] for rank, count in record.sent[:MOST_LINKS]]
    if record.connections:
        measured["connections"] = [
            [*each[:2], int(each.bytes), round(each.busy, 6), int(each.rate)]
            for each in record.connections[:MOST_LINKS]
        ]
    return measured


def parse(data: bytes) -> Record | None:
    """The record that a rank has sent; None if it is none: a rank may send anything."""
    try:
        given = json.loads(data)
        record = _read(given, MOST_SAMPLES)
        whole: dict[str, Any] = {name: int(given.get(name, 0)) for name in _WHOLE}
        _check(whole.values(), _MOST)
        whole["optimizer"] = str(given.get("optimizer", ""))[:_LONGEST_NAME]
        record = record._replace(**whole)
        if (recent := given.get("recent")) is not None:
            whole["members"] = int(recent.get("members", record.members))
            whole["optimizer"] = str(recent.get("optimizer", record.optimizer))[:_LONGEST_NAME]
            _check((whole["members"],), _MOST)
            record = record._replace(recent=_read(recent, MOST_RECENT)._replace(**whole))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return None
    except struct.error:
        return None
    return record


def _read(given: Any, most_samples: int) -> Record:
    """The numbers and the samples. Raises what `parse` catches."""
    numbers: dict[str, Any] = {
        name: float(given[name] if name in _REQUIRED else given.get(name, 0)) for name in _NUMBERS
    }
    packed = base64.b64decode(given.get("samples", ""), validate=True)
    samples = tuple(Sample(*each) for each in _SAMPLE.iter_unpack(packed))
    _check(numbers.values(), _MOST)
    _check((number for sample in samples for number in sample), _MOST)
    if len(samples) > most_samples:
        raise ValueError(len(samples))
    sent = tuple((int(rank), float(count)) for rank, count in given.get("sent", ()))
    connections = tuple(_connection(*each) for each in given.get("connections", ()))
    _check(number for each in sent for number in each)
    _check(each.bytes for each in connections)
    _check((number for each in connections for number in (each.busy, each.rate)), _MOST)
    if max(len(sent), len(connections)) > MOST_LINKS:
        raise ValueError(len(sent), len(connections))
    return Record(**numbers, samples=samples, sent=sent, connections=connections)


def _connection(local: Any, peer: Any, count: Any, busy: Any, rate: Any) -> Connection:
    local, peer = (str(address)[:_LONGEST_ADDRESS] for address in (local, peer))
    return Connection(local, peer, float(count), float(busy), float(rate))


def _check(numbers: Iterable[float], most: float = _MOST_BYTES) -> None:
    if not all(0 <= number < most for number in numbers):
        raise ValueError


def summary_of(records: Mapping[int, Record], num_proc: int) -> str:
    """The line. records: by rank, at least one."""
    steps = max(record.steps for record in records.values())
    told = "" if len(records) == num_proc else f" (of {len(records)} of {num_proc} ranks)"
    if steps < 2:
        made = "one step" if steps else "no step"
        seconds = max(record.seconds for record in records.values())
        waited = {rank: record.waited for rank, record in records.items()}
        return (
            f"{made} of DistributedOptimizer{told}; waiting and communication took"
            f" {_span(waited, ' s', 1)} of {seconds:.1f} s"
        )
    timed = {rank: record for rank, record in records.items() if record.steps > 1}
    step_ms = max(1000 * each.seconds / (each.steps - 1) for each in timed.values())
    shares = {r: 100 * each.waited / (each.seconds or 1) for r, each in timed.items()}
    return (
        f"{steps:.0f} steps{told}, {step_ms:.{0 if step_ms >= 100 else 1}f} ms each;"
        f" waiting and communication took {_span(shares, ' %', 0)} of a step"
    )


def _span(by_rank: dict[int, float], unit: str, digits: int) -> str:
    """The least and the most of them."""
    least, most = min(by_rank.items(), key=_second), max(by_rank.items(), key=_second)
    texts = [f"{number:.{digits}f}{unit}" for _, number in (least, most)]
    if len(by_rank) == 1 or texts[0] == texts[1]:
        return texts[1]
    return f"{texts[0]} (rank {least[0]}) to {texts[1]} (rank {most[0]})"


def _second(item: tuple[int, float]) -> float:
    return item[1]
