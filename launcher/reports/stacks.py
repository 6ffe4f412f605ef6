"""What hvdrun says about where the ranks of a job are in their Python code. Pure."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from hvdrun.output.folding import spans
from hvdrun.reports.looks import Frame, Look, activity

PYTHON = "Python"
_LOADER = re.compile(r"/torch/utils/data/(dataloader|_utils/\w+)\.py$")


class Seen(NamedTuple):
    """A rank's answers. before: the one before the last; now: None if none has come."""

    host: str
    before: Look | None
    now: Look | None


class Stall(NamedTuple):
    """What a report of the stall check says. missing, waiting: ranks; both empty if it names none
    by their numbers in the job."""

    operation: str
    missing: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()


def read_stall(text: str, num_ranks: int) -> Stall:
    """From the core's text (`_core/watching/report.c`), about ranks of a job of so many: a rank may
    send anything."""
    text = "".join(c if c.isprintable() else "?" for c in text)
    found = re.match(
        r"(.+?) (?:has waited|still waits, after) \d+ s,? for (.*?); called by ranks? ([\d, .-]+);",
        text,
    )
    if not found:
        return Stall(re.split(r" (?:has|still|did|does) ", text, maxsplit=1)[0])
    operation, late, posted = found.groups()
    named = (int(number) for number in re.findall(r"rank (\d{1,6}) on ", late))
    missing = tuple(rank for rank in dict.fromkeys(named) if rank < num_ranks)
    return Stall(operation, missing, tuple(dict.fromkeys(_numbers(posted, num_ranks))))


def _numbers(text: str, below: int) -> Iterable[int]:
    """'0, 2-4' → 0 2 3 4. Ends at what is no number of a rank."""
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?", part)
        if not found:
            return
        yield from range(int(found[1]), min(int(found[2] or found[1]) + 1, below))


def where_ranks_are(
    head: str, seen: Mapping[int, Seen], cwd: str, rest: int = 0, missing: Collection[int] = ()
) -> str:
    """Ranks that are at the same place are one entry. rest: how many ranks were not asked. missing:
    those that others wait for: they are shown apart, as only the stacks of main threads are read,
    and another thread may be what differs."""
    lines = [f"{head}:"]
    for ranks in _alike(seen, cwd, missing):
        lines += _entry(ranks, seen, cwd)
    if rest:
        lines.append(f"    and {rest} more ranks")
    return "\n".join(lines)


def _alike(seen: Mapping[int, Seen], cwd: str, missing: Collection[int]) -> list[list[int]]:
    """In the order of the first rank of each."""
    groups: dict[object, list[int]] = {}
    for rank, found in seen.items():
        stack = tuple(stack_lines(found.now, cwd))
        # Where a rank was earlier is no place at which it is with others.
        is_now = found.now is not None and not found.now.no_frames
        place = (stack, rank in missing) if stack and is_now else rank
        groups.setdefault(place, []).append(rank)
    return list(groups.values())


def _entry(ranks: Sequence[int], seen: Mapping[int, Seen], cwd: str) -> list[str]:
    _, before, now = first = seen[ranks[0]]
    if now is None:
        return [f"    rank {ranks[0]} on {first.host}: the host does not answer"]
    loads = "; it waits for its DataLoader" if waits_for_loader(now) else ""
    stack = [f"        {line}" for line in stack_lines(now, cwd)]
    if len(ranks) > 1:
        hosts = ", ".join(dict.fromkeys(seen[rank].host for rank in ranks))
        return [f"    ranks {spans(sorted(ranks))} on {hosts}{loads}", *stack]
    why = f"; {now.no_frames}" if now.no_frames and now.processes else ""
    return [
        f"    rank {ranks[0]} on {first.host} {activity(before, now, names_mpi=False)}{loads}{why}",
        *stack,
    ]


def waits_for_loader(now: Look) -> bool:
    """The code that it is in was called by torch's loader, and not by the script."""
    for frame in now.frames or ():
        if _LOADER.search(frame.file):
            return True
        if not frame.library:
            return False
    return False


def stack_lines(now: Look | None, cwd: str) -> list[str]:
    """The most recent call first. Of a library's calls in a row, the innermost; of hvdlite's, which
    change while a rank waits, the one that the script made. Python's own, which began the script,
    are left out."""
    if now is None or not now.frames:
        return []
    frames = list(now.frames)
    while len(frames) > 1 and frames[-1].library == PYTHON:
        frames.pop()
    lines = []
    for library, group in groupby(frames, lambda frame: frame.library):
        calls = list(group)
        if not library:
            lines += [_line(frame, cwd) for frame in calls]
            continue
        if library == "hvdlite":
            lines.append(_line(calls[-1], cwd))
            continue
        more = len(calls) - 1
        rest = f", and {more} more call{'s' if more > 1 else ''} of {library}" if more else ""
        lines.append(_line(calls[0], cwd) + rest)
    return lines


def _line(frame: Frame, cwd: str) -> str:
    return f"{_path(frame, cwd)}:{frame.line} in {frame.function}"


def _path(frame: Frame, cwd: str) -> str:
    """As short as it is clear: a library's from its folder, the script's from the job's folder."""
    if frame.library and frame.library != PYTHON:
        _, found, rest = frame.file.rpartition(f"/{frame.library}/")
        return f"{frame.library}/{rest}" if found else os.path.basename(frame.file)
    if frame.library:
        return os.path.basename(frame.file)
    inside = cwd not in ("", "/") and frame.file.startswith(f"{cwd}/")
    return frame.file[len(cwd) + 1 :] if inside else frame.file
