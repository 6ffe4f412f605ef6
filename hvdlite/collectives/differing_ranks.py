"""Words for texts about ranks that differ."""

from __future__ import annotations

from collections.abc import Sequence

_MOST_RANKS = 8


def which_ranks(values: Sequence[str], ranks: Sequence[int]) -> str:
    """Which ranks have which value; empty if all have the same. values: by member; ranks: by
    member, its world rank."""
    by_value: dict[str, list[int]] = {}
    for value, rank in zip(values, ranks, strict=True):
        by_value.setdefault(value, []).append(rank)
    if len(by_value) == 1:
        return ""
    return ", ".join(f"{value} on {ranks_in_words(found)}" for value, found in by_value.items())


def ranks_in_words(ranks: Sequence[int]) -> str:
    """As 'rank 3' or 'ranks 0, 2'; at most 8 of them."""
    shown = ("ranks " if len(ranks) > 1 else "rank ") + ", ".join(map(str, ranks[:_MOST_RANKS]))
    return shown + (f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else "")
