"""The summary of a job in one line, from what its ranks have measured. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from hvdrun.records import Record


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
    least, most = min(by_rank.items(), key=_value), max(by_rank.items(), key=_value)
    texts = [f"{number:.{digits}f}{unit}" for _, number in (least, most)]
    if len(by_rank) == 1 or texts[0] == texts[1]:
        return texts[1]
    return f"{texts[0]} (rank {least[0]}) to {texts[1]} (rank {most[0]})"


def _value(item: tuple[int, float]) -> float:
    return item[1]
