"""How far a rank is, for `hvdrun --monitor`, and how that travels to hvdrun: as JSON in a note.

Loaded beside each rank, hence little of the standard library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

# A rank sends a pulse so often; the ranks of a large job less often, so that all of them together
# send no more of them in a second than this.
EVERY_S = 2.0
MOST_PER_S = 200
# What a script may report: so many values, with names of so many characters.
MOST_VALUES = 8
LONGEST_NAME = 32
# A pulse has this many bytes at most.
LONGEST = 1000


class Pulse(NamedTuple):
    """`steps` to `data` are those of a Record (see `records`), of the optimizer that has made most
    steps lately: from the end of its first step to the end of its last one."""

    at: float  # seconds by a clock of the rank's own
    steps: float
    seconds: float
    waited: float
    data: float
    # What the script has reported last: its own number of the step, and values by name.
    step: float | None = None
    values: Mapping[str, float] = {}
    # Which of the script's optimizers it is, and the steps of all of them.
    optimizer: float = 0.0
    all_steps: float = 0.0


_NUMBERS = Pulse._fields[:5]
_OPTIONAL = Pulse._fields[7:]


def every_s(size: int) -> float:
    """How often each of so many ranks sends one."""
    return max(EVERY_S, size / MOST_PER_S)


def encode(pulse: Pulse) -> bytes:
    """At most LONGEST bytes. The names are those that `is_name` accepts."""
    given: dict[str, Any] = {name: round(getattr(pulse, name), 6) for name in _NUMBERS}
    given |= {name: number for name in _OPTIONAL if (number := getattr(pulse, name))}
    if pulse.step is not None:
        given["step"] = pulse.step
    if pulse.values:
        given["values"] = {name: float(f"{each:.6g}") for name, each in pulse.values.items()}
    return json.dumps(given, separators=(",", ":")).encode()


def parse(data: bytes) -> Pulse | None:
    """The pulse that a rank has sent; None if it is none: a rank may send anything."""
    try:
        given = json.loads(data)
        numbers = {name: float(given[name]) for name in _NUMBERS}
        numbers |= {name: float(given.get(name, 0)) for name in _OPTIONAL}
        step = None if given.get("step") is None else float(given["step"])
        values = {str(name): float(each) for name, each in given.get("values", {}).items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return None
    if not all(0 <= number < 1e12 for number in (*numbers.values(), step or 0.0)):
        return None
    if len(values) > MOST_VALUES or not all(map(is_name, values)):
        return None
    return Pulse(**numbers, step=step, values=values)


def is_name(name: str) -> bool:
    """Whether a value may have it: printable ASCII, so that it changes no terminal."""
    return 0 < len(name) <= LONGEST_NAME and name.isascii() and name.isprintable()
