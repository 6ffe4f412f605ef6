"""Who is slow now, in the words of `--summary` and `--metrics`. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from hvdrun.records import FEWEST_STEPS, Record
from hvdrun.reports.late import compare, verdicts, with_steps


class Verdicts(NamedTuple):
    """texts: of the last minute, once the ranks tell of it. communication_s: what it takes of a
    step, by rank, of the ranks of which that is known."""

    texts: tuple[str, ...] = ()
    communication_s: Mapping[int, float] = {}


def judge(records: Mapping[int, Record], host_of: Callable[[int], str]) -> Verdicts:
    """Says nothing while too few steps can be compared."""
    timed = with_steps(records)
    recent = with_steps({rank: record.recent for rank, record in records.items() if record.recent})
    head = ""
    if recent and len(recent) == len(timed):
        timed = recent
        head = f"last {max(record.seconds for record in recent.values()):.0f} s: "
    if not timed:
        return Verdicts()
    found = compare(timed)
    known = {
        rank: each.communication_s for each in found or () if each.steps for rank in each.ranks
    }
    if found is not None:
        found = [each for each in found if each.steps >= FEWEST_STEPS]
    return Verdicts(tuple(f"{head}{text}" for text in verdicts(timed, found, host_of)), known)
