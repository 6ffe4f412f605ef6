"""What a rank has measured of its steps, and how it travels to hvdrun: as JSON in a note.

Loaded beside each rank, hence little of the standard library.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

# A record has no more samples, and a note with it this many bytes at most.
MOST_SAMPLES = 128
LONGEST = 4000
# A rank sends its record as it leaves and, for those who ask meanwhile, so often, or after this
# part of the time that has passed, if that is longer: its keeper takes a limited number of notes,
# and a job of many ranks must not keep hvdrun busy.
TELLS_EVERY_S = 5.0
TELLS_AGAIN_AFTER = 0.01
_LONGEST_NAME = 100
# A step's number, and seconds: all of it, waited, waited for data.
_SAMPLE = struct.Struct("<Ifff")


class Sample(NamedTuple):
    """A step. seconds: all of it; waited, data: the parts in which the rank's program waited for
    hvdlite, and for a DataLoader."""

    step: int
    seconds: float
    waited: float
    data: float


class Record(NamedTuple):
    """Of the optimizer with most steps. The first step warms up: all but `steps` counts from its
    end to the end of the last one."""

    steps: float
    seconds: float
    waited: float  # by the program, for hvdlite: for other ranks, and for data that moves
    data: float = 0.0  # in which it waited for a DataLoader
    cpu: float = 0.0  # seconds of CPU time of all threads of the process
    # Of the cgroup that has stopped it most: the CPU quota's periods, and in how many of them it
    # was used up. 0: there is no quota, or it is not known.
    periods: float = 0.0
    stopped: float = 0.0
    # What the members of an optimizer have in common: its name, and a hash of who they are.
    optimizer: str = ""
    members: int = 0
    # The rank's world. size 0: not known.
    rank: int = 0
    size: int = 0
    samples: tuple[Sample, ...] = ()


_NUMBERS = ("steps", "seconds", "waited", "data", "cpu", "periods", "stopped")
_REQUIRED = frozenset(_NUMBERS[:3])
_WHOLE = ("members", "rank", "size")


def encode(record: Record) -> bytes:
    """At most LONGEST bytes."""
    given: dict[str, Any] = {name: round(getattr(record, name), 6) for name in _NUMBERS}
    given |= {name: getattr(record, name) for name in _WHOLE}
    # (In JSON other characters than ASCII take six bytes and more.)
    given["optimizer"] = record.optimizer.encode("ascii", "replace").decode()[:_LONGEST_NAME]
    packed = b"".join(_SAMPLE.pack(*sample) for sample in record.samples[:MOST_SAMPLES])
    given["samples"] = base64.b64encode(packed).decode()
    return json.dumps(given, separators=(",", ":")).encode()


def parse(data: bytes) -> Record | None:
    """The record that a rank has sent; None if it is none: a rank may send anything."""
    try:
        given = json.loads(data)
        numbers: dict[str, Any] = {
            name: float(given[name] if name in _REQUIRED else given.get(name, 0))
            for name in _NUMBERS
        }
        whole = {name: int(given.get(name, 0)) for name in _WHOLE}
        name = str(given.get("optimizer", ""))[:_LONGEST_NAME]
        packed = base64.b64decode(given.get("samples", ""), validate=True)
        samples = tuple(Sample(*each) for each in _SAMPLE.iter_unpack(packed))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return None
    except struct.error:
        return None
    known = (*numbers.values(), *whole.values())
    measured = (number for sample in samples for number in sample)
    if not _are_sane(known) or not _are_sane(measured) or len(samples) > MOST_SAMPLES:
        return None
    return Record(**numbers, **whole, optimizer=name, samples=samples)


def _are_sane(numbers: Iterable[float]) -> bool:
    return all(0 <= number < 1e12 for number in numbers)
