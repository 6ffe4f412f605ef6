"""What hvdrun says about ranks that wait in hvd.init() or MPI_Init for others. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from hvdrun.errors import MpirunFailed, StartTimeout
from hvdrun.output.folding import spans
from hvdrun.reports.failure_report import duration

SHUTDOWN_VARIABLE = "HVDLITE_STALL_SHUTDOWN_TIME_SECONDS"
ADVICE = (
    "every rank must call hvd.init(): call it before any `sys.exit()`, `return` or `if` that only"
    " some of the ranks take"
)


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
    """`lines`: what the missing ranks do."""
    limit = f"; the job ends at {shutdown_s:g} s ({SHUTDOWN_VARIABLE})" if shutdown_s else ""
    head = (
        f"hvdrun: {_the_ranks(waits)} {_of(waits, 'waits', 'wait')} in {where} for"
        f" {_the_ranks(missing)}, which {_of(missing, 'has', 'have')} not called it"
        f" ({duration(for_s)} so far{limit}):"
    )
    return "\n".join([head, *(f"    {line}" for line in lines)])


def gathered(where: str, after_s: float) -> str:
    return f"hvdrun: all ranks are in {where}, after {duration(after_s)}"


def not_in_init(
    waits: Collection[int], missing: Mapping[int, str], where: str, shutdown_s: float
) -> StartTimeout:
    """`missing`: rank → its host."""
    by_host: dict[str, list[int]] = {}
    for rank, host in missing.items():
        by_host.setdefault(host, []).append(rank)
    names = " and ".join(f"{_the_ranks(ranks)} on {host}" for host, ranks in by_host.items())
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
