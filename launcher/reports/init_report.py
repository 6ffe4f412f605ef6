"""What hvdrun says about ranks that wait in hvd.init() or MPI_Init for others. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from hvdrun.errors import MpirunFailed, StartTimeout
from hvdrun.output.folding import spans
from hvdrun.reports.failure_report import duration
from hvdrun.reports.looks import Look, activity
from hvdrun.reports.stacks import stack_lines

# A report has no more entries, and an entry names no more hosts.
MOST_DESCRIBED = 8
# Of a rank that was not seen, and of several.
ENDED = " has ended with exit code 0", " have ended with exit code 0"
NOT_STARTED = " has not started", " have not started"
NO_ANSWER = ": the host does not answer", ": their hosts do not answer"

SHUTDOWN_VARIABLE = "HVDLITE_STALL_SHUTDOWN_TIME_SECONDS"
ADVICE = (
    "every rank must call hvd.init(): call it before any `sys.exit()`, `return` or `if` that only"
    " some of the ranks take"
)


class Missing(NamedTuple):
    """A rank that others wait for. before, now: its last two answers; now: None if it was not seen,
    and then `instead` is one of the texts above. failed: its hvd.init() has raised an error."""

    host: str
    before: Look | None = None
    now: Look | None = None
    instead: tuple[str, str] = ("", "")
    failed: bool = False


def what_they_do(
    missing: Mapping[int, Missing], cwd: str, uses_hvdlite: bool, rest: int = 0
) -> list[str]:
    """Ranks at the same place in their Python code are one entry, as are those of which the same is
    known. uses_hvdlite: the others wait in hvd.init(). rest: how many more are missing."""
    groups: dict[object, list[int]] = {}
    for rank, each in missing.items():
        groups.setdefault(_place(rank, each, cwd), []).append(rank)
    lines: list[str] = []
    for number, ranks in enumerate(groups.values()):
        if number < MOST_DESCRIBED:
            lines += _entry(ranks, missing, cwd, uses_hvdlite)
        else:
            rest += len(ranks)
    return [*lines, f"and {rest} more"] if rest else lines


def _place(rank: int, each: Missing, cwd: str) -> object:
    if each.now is None:
        return each.instead
    stack = stack_lines(each.now, cwd)
    return (each.failed, *stack) if stack and not each.now.no_frames else rank


def _entry(
    ranks: Sequence[int], missing: Mapping[int, Missing], cwd: str, uses_hvdlite: bool
) -> list[str]:
    first = missing[ranks[0]]
    hosts = list(dict.fromkeys(missing[rank].host for rank in ranks))
    more = f" and {len(hosts) - MOST_DESCRIBED} more hosts" if len(hosts) > MOST_DESCRIBED else ""
    head = f"{_the_ranks(ranks)} on {', '.join(hosts[:MOST_DESCRIBED])}{more}"
    if first.now is None:
        return [head + _of(ranks, *first.instead)]
    stack = [f"    {line}" for line in stack_lines(first.now, cwd)]
    if len(ranks) > 1:
        failed = ": their hvd.init() has raised an error" if first.failed else ""
        return [head + failed, *stack]
    failed = ": its hvd.init() has raised an error; it" if first.failed else ""
    does = activity(first.before, first.now, names_mpi=not stack)
    why = _why_no_stack(first.now) if uses_hvdlite or stack else ""
    return [f"{head}{failed} {does}{why}", *stack]


def _why_no_stack(now: Look) -> str:
    if not now.no_frames or not now.processes:
        return ""
    names = (process.command.partition(" ")[0] for process in now.processes)
    has_python = any(re.search("python|pypy", name, re.IGNORECASE) for name in names)
    return f"; {now.no_frames}{'' if has_python else ': no process of it is named python'}"


def _the_ranks(ranks: Collection[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + spans(sorted(ranks))


def _of(ranks: Collection[int], one: str, many: str) -> str:
    return one if len(ranks) == 1 else many


def waiting(
    waits: Collection[int],
    missing: Collection[int],
    where: str,
    for_s: float,
    lines: Iterable[str],
    shutdown_s: float,
) -> str:
    """`lines`: what the missing ranks do, by `what_they_do`. waits: empty if all have called it and
    the missing ones are still in it."""
    limit = f"; the job ends at {shutdown_s:g} s ({SHUTDOWN_VARIABLE})" if shutdown_s else ""
    who = (
        f"{_the_ranks(waits)} {_of(waits, 'waits', 'wait')} in {where} for {_the_ranks(missing)},"
        f" which {_of(missing, 'has', 'have')} not called it"
        if waits
        else f"all ranks have called {where}, but it has not ended on {_the_ranks(missing)}"
    )
    head = f"hvdrun: {who} ({duration(for_s)} so far{limit}):"
    return "\n".join([head, *(f"    {line}" for line in lines)])


def gathered(where: str, after_s: float, has_ended: bool = False) -> str:
    if has_ended:
        return f"hvdrun: {where} has ended on all ranks, after {duration(after_s)}"
    return f"hvdrun: all ranks are in {where}, after {duration(after_s)}"


def not_in_init(
    waits: Collection[int], missing: Mapping[int, str], where: str, shutdown_s: float
) -> StartTimeout:
    """`missing`: rank → its host. waits: empty if they are in it."""
    by_host: dict[str, list[int]] = {}
    for rank, host in missing.items():
        by_host.setdefault(host, []).append(rank)
    names = " and ".join(f"{_the_ranks(ranks)} on {host}" for host, ranks in by_host.items())
    if not waits:
        return StartTimeout(
            f"all ranks have called {where}, but it has not ended on {names} after {shutdown_s:g} s"
            f" ({SHUTDOWN_VARIABLE}); see that the hosts reach each other (hvdrun --check)"
        )
    return StartTimeout(
        f"{names} {_of(missing, 'has', 'have')} not called {where}, where {_the_ranks(waits)}"
        f" {_of(waits, 'has', 'have')} waited for {shutdown_s:g} s ({SHUTDOWN_VARIABLE}); {ADVICE};"
        " or give a longer time if a rank prepares something before"
    )


def left_before_init(
    rank: int, host: str, after_s: float, waits: Collection[int], where: str
) -> MpirunFailed:
    """A rank ended with 0 before it called init, where others wait."""
    return MpirunFailed(
        f"rank {rank} on {host} ended with exit code 0 after {duration(after_s)} and had not called"
        f" {where}, where {_the_ranks(waits)} waited for it; {ADVICE}"
    )
