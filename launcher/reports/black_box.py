"""A rank's last operations, from what its keeper has sent (`agent.rank.notes`). Pure.

The bytes are the rank's own: whatever stands there, reading it ends, and texts are printable.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from hvdrun.machine.notes import ENTRIES, ENTRY_BYTES, FORMAT, HEAD_BYTES, TOTAL_BYTES

# hvdl_box_entry of the core's operations/black_box.h.
_ENTRY = struct.Struct("=QQQQQQQIIIIiBBBx112s")
assert _ENTRY.size == ENTRY_BYTES
_NUMBER = struct.Struct("=Q")
_MOST_KINDS = 256
_SHOWN_OF_KIND = 32
_LINE = re.compile(r'^  File "(.*)", line ([0-9]{1,9}) in (.*)$', re.MULTILINE)
# Messages between two ranks: no other ranks take part.
MESSAGES = ("send", "recv")


class Operation(NamedTuple):
    """As one rank has it. Times are nanoseconds of its host's monotonic clock; 0: not yet.

    number: the order in which the rank posted them. team: the ranks that take part, as a number.
    key: of kind and name. round: how many of that key there have been; epoch: since all ranks
    joined so often. peer: the rank at the other end of a message; else the rank that was the last
    to call it, where that is known; -1: not known. in_words: of an operation of hvdlite's own,
    whose name here is what users read of it.
    """

    number: int
    team: int
    key: int
    round: int
    epoch: int
    kind: str
    name: str
    bytes: int
    members: int
    peer: int
    posted: int
    matched: int
    started: int
    ended: int
    failed: bool
    in_words: bool = False

    @property
    def has_succeeded(self) -> bool:
        return self.ended > 0 and not self.failed

    @property
    def identity(self) -> tuple[int, int, int, int]:
        """The same on all ranks that take part."""
        return self.team, self.epoch, self.key, self.round

    @property
    def title(self) -> str:
        """As the core's `hvdl_put_title`."""
        if self.in_words:
            return f"the set-up of {self.name}" if self.kind == "plan" else self.name
        if self.name.startswith("unnamed."):
            return f"an unnamed {self.kind} (no. {self.name.removeprefix('unnamed.')})"
        if self.name.startswith("hvdlite."):
            return f"the {self.kind} in {self.name.split('.')[1]}"
        return f"{self.kind} '{self.name}'"


class Box(NamedTuple):
    """to_wall_ns: what to add to a time to get nanoseconds since 1970. waited_at: the lines of the
    script from which it has waited for hvdlite last, the innermost first, as file, line and
    function."""

    to_wall_ns: int
    operations: tuple[Operation, ...]
    waited_at: tuple[tuple[str, int, str], ...] = ()


def read_box(data: bytes, most: int = ENTRIES + HEAD_BYTES // ENTRY_BYTES) -> Box | None:
    """The last operations, so many at most. None if this is no black box."""
    unpacker = zlib.decompressobj()
    try:
        text, _, rest = unpacker.decompress(data, TOTAL_BYTES).partition(b"\0")
        lines, found, rest = rest.partition(b"\0")
        head = json.loads(text)
        kinds = [_printable(str(kind)[:_SHOWN_OF_KIND]) for kind in head["kinds"][:_MOST_KINDS]]
        to_wall_ns = int(head["to_wall_ns"])
        is_known = head["format"] == FORMAT
    except (zlib.error, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    if not found or not is_known or abs(to_wall_ns) >= 1 << 63:
        return None
    waited_at = tuple(
        (_printable(file), int(line), _printable(function))
        for file, line, function in _LINE.findall(lines.decode(errors="replace"))
    )
    return Box(to_wall_ns, tuple(_operations(rest, kinds, most)), waited_at)


def _operations(rest: bytes, kinds: list[str], most: int) -> Iterator[Operation]:
    places = range(0, len(rest) - ENTRY_BYTES + 1, ENTRY_BYTES)
    place_of = {_NUMBER.unpack_from(rest, at)[0]: at for at in places}
    for at in (place_of[number] for number in sorted(place_of)[-most:]):
        words = _ENTRY.unpack_from(rest, at)
        number, key, posted, matched, started, ended, size_bytes = words[:7]
        team, round_, epoch, members, peer, kind, failed, in_words, name = words[7:]
        kind_name = kinds[kind] if kind < len(kinds) else f"operation {kind}"
        title = _printable(name.partition(b"\0")[0].decode(errors="replace"))
        identity = number, team, key, round_, epoch, kind_name, title
        times = posted, matched, started, ended
        yield Operation(*identity, size_bytes, members, peer, *times, bool(failed), bool(in_words))


def lines_of(box: Box) -> Iterator[str]:
    """Each operation in JSON, with times in seconds since 1970; null: not yet."""

    def wall(at_ns: int) -> float | None:
        return round((at_ns + box.to_wall_ns) / 1e9, 6) if at_ns else None

    for each in box.operations:
        row = each._asdict()
        row.update({name: wall(row[name]) for name in ("posted", "matched", "started", "ended")})
        row["peer"] = None if each.peer < 0 else each.peer
        yield json.dumps(row)


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)
