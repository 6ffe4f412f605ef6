"""How a figure is held against a target. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.figures import digits


@dataclass(frozen=True)
class Verdict:
    work: str
    target: str
    found: str  # the worst figure, and where
    met: bool | None  # None: not measured in this run


Figures = Sequence[tuple[str, float]]  # where, and how much


class Scale(NamedTuple):
    """What a figure is measured in."""

    unit: str
    of: str


def at_least(limit: float, scale: Scale, work: str, figures: Figures) -> Verdict:
    worst = min(figures, key=_amount, default=None)
    return _verdict(f"≥ {limit:g}", scale, work, worst, worst is not None and worst[1] >= limit)


def at_most(limit: float, scale: Scale, work: str, figures: Figures) -> Verdict:
    worst = max(figures, key=_amount, default=None)
    return _verdict(f"≤ {limit:g}", scale, work, worst, worst is not None and worst[1] <= limit)


def _amount(figure: tuple[str, float]) -> float:
    return figure[1]


def _verdict(
    limit: str, scale: Scale, work: str, worst: tuple[str, float] | None, met: bool
) -> Verdict:
    target = f"{limit}{scale.unit} {scale.of}"
    if worst is None:
        return Verdict(work, target, "not measured", None)
    where, amount = worst
    return Verdict(work, target, f"{digits(amount)}{scale.unit} ({where})", met)
