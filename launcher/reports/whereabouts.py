"""What hvdrun says about ranks that wait: for which, and what all of them do, and where they are in
their Python code. Pure."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from hvdrun.errors import LaunchError
from hvdrun.reports.failure_report import duration, error, named
from hvdrun.reports.looks import Frame, Look, activity

PYTHON = "Python"
_LOADER = re.compile(r"/torch/utils/data/(dataloader|_utils/\w+)\.py$")
# An entry names no more hosts.
MOST_HOSTS = 8
HVD_INIT, MPI_INIT = "hvd.init()", "MPI_Init"
# What is known of a rank that was not seen, and of one that was.
ENDED = "ended with exit code 0"
NOT_STARTED = "not started"
FAILED = "its hvd.init() has raised an error"

SHUTDOWN_VARIABLE = "HVDLITE_STALL_SHUTDOWN_TIME_SECONDS"


class Seen(NamedTuple):
    """A rank's answers: the one before the last, and the last; None: it has not come. note: what
    else is known."""

    host: str
    before: Look | None = None
    now: Look | None = None
    note: str = ""


class Stall(NamedTuple):
    """What a report of the stall check says. missing, waiting: ranks; both empty if it names none
    by their numbers in the job."""

    operation: str
    missing: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()

    @property
    def head(self) -> str:
        if self.missing:
            return f"where the ranks are that {self.operation} waits for, and those in it"
        return f"where the ranks are while {self.operation} waits"


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


def _numbers(text: str, below: int) -> Iterator[int]:
    """'0, 2-4' → 0 2 3 4. Ends at what is no number of a rank."""
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?", part)
        if not found:
            return
        yield from range(int(found[1]), min(int(found[2] or found[1]) + 1, below))


# ---- a wait in hvd.init() or MPI_Init


def in_init(
    where: str,
    waits: Collection[int],
    missing: Collection[int],
    for_s: float,
    shutdown_s: float,
) -> str:
    """waits: empty if all have called it and the missing ones are still in it."""
    limit = f"; the job ends at {shutdown_s:g} s ({SHUTDOWN_VARIABLE})" if shutdown_s else ""
    who = (
        f"{named(waits)} wait{'s'[len(waits) > 1 :]} in {where} for {named(missing)}, which"
        f" {_have(missing)} not called it"
        if waits
        else f"all ranks have called {where}, but it has not ended on {named(missing)}"
    )
    return f"{who} ({duration(for_s)} so far{limit})"


def gathered(where: str, after_s: float, has_ended: bool) -> str:
    what = f"{where} has ended on all ranks" if has_ended else f"all ranks are in {where}"
    return f"hvdrun: {what}, after {duration(after_s)}"


def not_in_init(
    where: str, waits: Collection[int], hosts: Mapping[int, str], limit_s: float
) -> LaunchError:
    """hosts: of the missing ranks. waits: empty if they are in it."""
    by_host = groupby(hosts, hosts.__getitem__)
    facts = {
        "missing": " and ".join(f"{named(list(ranks))} on {host}" for host, ranks in by_host),
        "where": where,
        "limit_s": limit_s,
        "variable": SHUTDOWN_VARIABLE,
    }
    rank, host = next(iter(hosts.items())) if len(hosts) == 1 else (None, None)
    if not waits:
        return error("init does not end", rank, host, **facts)
    wait = f"{named(waits)} {_have(waits)} waited"
    return error("not in init", rank, host, have=_have(hosts), wait=wait, **facts)


def _have(ranks: Collection[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


# ---- where the ranks are


def entries(
    seen: Mapping[int, Seen],
    cwd: str,
    rest: int = 0,
    apart: Collection[int] = (),
    where: str = "",
) -> Iterator[str]:
    """Ranks that are at the same place are one entry. rest: how many ranks were not asked. apart:
    those that others wait for, as only the stacks of main threads are read, and another thread may
    be what differs. where: these are the ranks that others wait for in HVD_INIT or MPI_INIT."""
    groups: dict[object, list[int]] = {}
    for rank, each in seen.items():
        groups.setdefault((_place(rank, each, cwd), rank in apart), []).append(rank)
    for ranks in groups.values():
        yield from _entry(ranks, seen, cwd, where)
    if rest:
        yield f"    and {rest} more rank{'s' * (rest > 1)}"


def _place(rank: int, each: Seen, cwd: str) -> object:
    if each.now is None:
        return each.note
    # Where a rank was earlier is no place at which it is with others.
    stack = [] if each.now.no_frames else stack_lines(each.now, cwd)
    return (each.note, *stack) if stack else rank


def _entry(ranks: Sequence[int], seen: Mapping[int, Seen], cwd: str, where: str) -> Iterator[str]:
    _, before, now, note = seen[ranks[0]]
    hosts = list(dict.fromkeys(seen[rank].host for rank in ranks))
    more = f" and {len(hosts) - MOST_HOSTS} more hosts" if len(hosts) > MOST_HOSTS else ""
    head = f"    {named(ranks)} on {', '.join(hosts[:MOST_HOSTS])}{more}"
    if now is None:
        no_answer = "the host does not answer" if len(hosts) == 1 else "their hosts do not answer"
        yield f"{head}: {note or no_answer}"
        return
    stack = stack_lines(now, cwd)
    loads = "it waits for its DataLoader" if waits_for_loader(now) else ""
    does = f" {activity(before, now, bool(where) and not stack)}" if len(ranks) == 1 else ""
    # A program that starts MPI by itself need not import hvdlite.
    why = _why_no_stack(now) if stack or where != MPI_INIT else ""
    yield "; ".join([head + does, *filter(None, (note, loads, why))])
    yield from (f"        {line}" for line in stack)


def _why_no_stack(now: Look) -> str:
    if not now.no_frames or not now.processes:
        return ""
    names = (process.command.partition(" ")[0] for process in now.processes)
    has_python = any(re.search("python|pypy", name, re.IGNORECASE) for name in names)
    return now.no_frames + ("" if has_python else ": no process of it is named python")


def waits_for_loader(now: Look) -> bool:
    """The code that it is in was called by torch's loader, and not by the script."""
    for frame in now.frames or ():
        if _LOADER.search(frame.file):
            return True
        if not frame.library:
            return False
    return False


def stack_lines(now: Look, cwd: str) -> list[str]:
    """The most recent call first. Of a library's calls in a row, the innermost; of hvdlite's, which
    change while a rank waits, the one that the script made. Python's own, which began the script,
    are left out."""
    frames = list(now.frames or ())
    while len(frames) > 1 and frames[-1].library == PYTHON:
        frames.pop()
    lines: list[str] = []
    for library, group in groupby(frames, lambda frame: frame.library):
        calls = list(group)
        more = len(calls) - 1
        if not library:
            lines += [_line(frame, cwd) for frame in calls]
        elif library == "hvdlite":
            lines.append(_line(calls[-1], cwd))
        else:
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
