"""Which messages between two ranks had no other side when a job failed, from the ranks' black
boxes. Pure.

The k-th send from one rank to another with a tag is for the k-th receive there from that rank with
that tag, as long as nothing is received from any rank. A rank that has kept all that it ever called
proves what it has not called; of any other one only its own part is told.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from hvdrun.machine.notes import ENTRIES
from hvdrun.reports.black_box import MESSAGES, Box, Operation

MOST_SHOWN = 3
MOST_IN_FILE = 64
ANY = -1
_SEND = MESSAGES[0]
_TAG = re.compile(r"with tag (-?[0-9]{1,10})$")


class _Stream(NamedTuple):
    """The messages of one kind that one rank has posted for another one (ANY: whoever sends), with
    one tag."""

    kind: str
    rank: int
    peer: int
    team: int
    tag: str

    @property
    def other_side(self) -> _Stream:
        kind = MESSAGES[1 - MESSAGES.index(self.kind)]
        return self._replace(kind=kind, rank=self.peer, peer=self.rank)


def report(boxes: Mapping[int, Box], most: int = MOST_SHOWN) -> list[str]:
    """For the screen, or with MOST_IN_FILE for the file."""
    lines = list(lines_of(boxes))
    more = len(lines) - most
    messages = "message" if more == 1 else "messages"
    rest = [f"and {more} more {messages} without another side"] if more > 0 else []
    return [*lines[:most], *rest]


def lines_of(boxes: Mapping[int, Box]) -> Iterator[str]:
    """A line for each stream, about its first message that had no other side; of those that have
    failed (a receive with a time limit), only where no other one waits."""
    failed: dict[_Stream, int] = {}
    waiting: dict[_Stream, int] = {}
    posted: Counter[_Stream] = Counter()
    withdrawn: Counter[_Stream] = Counter()
    for rank in sorted(boxes):
        for each in boxes[rank].operations:
            if (stream := _stream(rank, each)) is not None:
                posted[stream] += 1
                if not each.matched and not each.has_succeeded:
                    told = failed if each.failed else waiting
                    told.setdefault(stream, posted[stream] - withdrawn[stream])
                    withdrawn[stream] += each.failed
    for stream, number in (failed | waiting).items():
        other = stream.other_side
        known = {rank for rank in (stream.rank, stream.peer) if _keeps_all(boxes.get(rank))}
        receiver = stream if other.kind == _SEND else other
        takes_any = posted[receiver._replace(peer=ANY)] > 0
        is_sure = known == {stream.rank, stream.peer} and not takes_any
        yield _line(stream, number if is_sure else None, posted[other])


def _stream(rank: int, each: Operation) -> _Stream | None:
    tag = _TAG.search(each.name) if each.kind in MESSAGES else None
    return _Stream(each.kind, rank, each.peer, each.team, tag[1]) if tag else None


def _keeps_all(box: Box | None) -> bool:
    """Whether it has all operations that the rank ever called."""
    kept = box.operations if box else ()
    return bool(kept) and kept[0].number == 1 and kept[-1].number == len(kept) <= ENTRIES


def _line(stream: _Stream, number: int | None, others: int) -> str:
    """number: of the message in its stream; None: not known. others: what the other side has
    posted."""
    peer = "any rank" if stream.peer == ANY else f"rank {stream.peer}"
    if stream.kind == _SEND:
        begin = f"rank {stream.rank}'s send to {peer} with tag {stream.tag} was not received"
        call = "recv"
    else:
        begin = f"rank {stream.rank} waited to receive from {peer} with tag {stream.tag}"
        call = "send"
    if number is None or others >= number:
        return begin
    if others == 0:
        return f"{begin}: {peer} has called no {call} for it"
    calls = f"{others} {call}{'s'[: others != 1]}"
    return f"{begin}, no. {number}: {peer} has called only {calls} for it"
