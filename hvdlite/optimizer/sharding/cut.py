"""Which rank owns which elements of the parameters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Part:
    """Some elements of one parameter, counted in the order of its memory.

    index: The parameter's number in the optimizer, counted through all its groups.
    """

    index: int
    begin: int
    end: int


# The parts of each owner. The owners are the members of a process set, in its order, or the ranks
# of a host; each element has exactly one.
Cut = tuple[tuple[Part, ...], ...]
