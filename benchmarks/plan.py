"""What is measured and how often. Pure, so that a test can see every choice."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

KIB, MIB = 1024, 1024 * 1024

T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """What one run measures."""

    sizes_bytes: tuple[int, ...]
    tasks: tuple[str, ...]
    max_rounds: int


# 4 B, 16 B, … 256 MiB.
FULL = Plan(tuple(4 ** (k + 1) for k in range(14)), ("mlp", "deep"), max_rounds=30)
QUICK = Plan((4, 16 * KIB, MIB), ("mlp",), max_rounds=5)


def rounds(size_bytes: int, max_rounds: int) -> int:
    """How often a size is timed: fewer times where one takes long."""
    if size_bytes >= 256 * MIB:
        return min(5, max_rounds)
    if size_bytes >= 64 * MIB:
        return min(10, max_rounds)
    if size_bytes >= 16 * MIB:
        return min(15, max_rounds)
    return max_rounds


def calls(size_bytes: int) -> int:
    """How many allreduces, each on a buffer of its own, one timing covers.

    Ranks leave a barrier some microseconds apart, which would hide a call that is as short.
    """
    return 16 if size_bytes <= 16 * KIB else 1


def rotated(items: Sequence[T], by: int) -> list[T]:
    """The items from another start, so that none always follows the same other one.

    >>> rotated(["a", "b", "c"], 4)
    ['b', 'c', 'a']
    """
    by %= len(items)
    return [*items[by:], *items[:by]]
