"""Where the ranks of a job were among its operations, from their black boxes. Pure.

Ranks need not post operations in the same order, and each knows only its own: an operation is the
same on all ranks by its name and by how often that name has come (`Operation.identity`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from hvdrun.output.folding import spans
from hvdrun.reports.black_box import MESSAGES, Box, Operation

Identity = tuple[int, int, int, int]
JOIN = "join"
# On the screen: entries of one report, and operations of one entry.
MOST_GROUPS = 3
MOST_SHOWN = 2
# The same while the job runs, where ranks are in different operations: the order shows the cause.
MOST_OF_AN_ORDER = 6
# In the file.
MOST_IN_FILE = 64
# Of all ranks together: some hundred thousand take a second. Of each rank at least so many.
MOST_COMPARED = 100_000
LEAST_COMPARED = 32


class Group(NamedTuple):
    """Ranks that have gone on in the same way since the last operation that all have ended.

    ahead: the operations, in the order of the group's first rank.
    """

    ranks: tuple[int, ...]
    ahead: tuple[Operation, ...]


class Standing(NamedTuple):
    """The ranks of one team. last: the last operation that all of them have ended, as the first has
    it; lacking: ranks that have not called an operation, by its identity."""

    ranks: tuple[int, ...]
    last: Operation | None
    groups: tuple[Group, ...]
    lacking: dict[Identity, tuple[int, ...]]

    @property
    def tells_more(self) -> bool:
        """The ranks are not all at the same place, or wait for each other."""
        return len(self.groups) > 1 or any(self.lacking.values())


def standings(boxes: Mapping[int, Box]) -> list[Standing]:
    """Of each team of several ranks, those with the most ranks first, and of these the latest."""
    by_team: dict[int, dict[int, list[Operation]]] = {}
    members: dict[int, int] = {}
    latest: dict[int, int] = {}
    most = max(LEAST_COMPARED, MOST_COMPARED // max(1, len(boxes)))
    for rank in sorted(boxes):
        for each in boxes[rank].operations[-most:]:
            if each.kind not in MESSAGES:
                by_team.setdefault(each.team, {}).setdefault(rank, []).append(each)
                members[each.team] = max(members.get(each.team, 0), each.members)
                latest[each.team] = max(latest.get(each.team, 0), each.number)
    found = []
    for team in sorted(by_team, key=lambda team: -latest[team]):
        by_rank = by_team[team]
        if members[team] >= len(boxes):  # those too that have called nothing
            by_rank = {rank: by_rank.get(rank, []) for rank in sorted(boxes)}
        if len(by_rank) > 1:
            found.append(_standing(by_rank))
    return sorted(found, key=lambda each: -len(each.ranks))


def _standing(by_rank: Mapping[int, Sequence[Operation]]) -> Standing:
    posted = {rank: {each.identity: each for each in ops} for rank, ops in by_rank.items()}
    ranks = tuple(posted)
    ended = set.intersection(
        *({key for key, each in ops.items() if each.has_succeeded} for ops in posted.values())
    )
    last = max((posted[ranks[0]][key] for key in ended), key=lambda each: each.number, default=None)
    joined = {
        rank
        for rank, ops in posted.items()
        if any(each.kind == JOIN and not each.ended for each in ops.values())
    }
    groups: dict[object, Group] = {}
    lacking: dict[Identity, tuple[int, ...]] = {}
    for rank, ops in posted.items():
        since = ops[last.identity].number if last else 0
        ahead = tuple(
            each
            for key, each in ops.items()
            if key not in ended and (each.number > since or not each.ended)
        )
        for each in ahead:
            key = each.identity
            lacking.setdefault(
                key, tuple(r for r in ranks if key not in posted[r] and r not in joined)
            )
        state = tuple((each.identity, _progress(each)) for each in ahead)
        group = groups.get(state, Group((), ahead))
        groups[state] = group._replace(ranks=(*group.ranks, rank))
    return Standing(ranks, last, tuple(groups.values()), lacking)


def _progress(each: Operation) -> tuple[bool, ...]:
    """How far it has come. What failed has failed since, on some ranks before it was killed."""
    return each.has_succeeded, each.started > 0, each.matched > 0


def report(boxes: Mapping[int, Box], endings: Mapping[int, str]) -> list[str]:
    """For the screen: nothing if it would not tell where the ranks differ. endings: of ranks that
    have ended with 0, in words."""
    telling = [standing for standing in standings(boxes) if standing.tells_more]
    return _lines(telling[0], endings, MOST_GROUPS, MOST_SHOWN) if telling else []


def orders(boxes: Mapping[int, Box]) -> list[str]:
    """Of ranks that run: nothing if none of them are in operations that others of them, which are
    in another one, have not called."""
    telling = (standing for standing in standings(boxes) if any(True for _ in _orders(standing)))
    first = next(telling, None)
    return _lines(first, {}, MOST_GROUPS, MOST_OF_AN_ORDER) if first else []


def summary(boxes: Mapping[int, Box], endings: Mapping[int, str]) -> list[str]:
    """For the file: of all teams."""
    lines: list[str] = []
    for standing in standings(boxes):
        lines += [*_lines(standing, endings, MOST_IN_FILE, MOST_IN_FILE), ""]
    return lines[:-1]


def _lines(
    standing: Standing, endings: Mapping[int, str], most_groups: int, most_shown: int
) -> list[str]:
    who = _ranks(standing.ranks)
    if standing.last:
        last = _title(standing.last)
        lines = [f"the last operation that {who} have all ended is {last}"]
    else:
        lines = [f"{who} have not all ended any of the operations that are kept"]
    for group in standing.groups[:most_groups]:
        lines.append(f"    {_went_on(group, standing, endings, most_shown)}")
    if more := len(standing.groups) - most_groups:
        lines += [f"    and {more} more groups of ranks"] if more > 0 else []
    lines += [f"    {line}" for line in _orders(standing)]
    return lines


def _went_on(group: Group, standing: Standing, endings: Mapping[int, str], most_shown: int) -> str:
    who = _ranks(group.ranks)
    ended = {endings[rank] for rank in group.ranks if rank in endings}
    left = f" and {ended.pop()}" if len(ended) == 1 and set(group.ranks) <= set(endings) else ""
    if not group.ahead:
        return f"{who} called no operation after that{left}"
    # In the order in which they were called, those in the same state together.
    runs = [
        (state, list(operations))
        for state, operations in groupby(
            group.ahead, lambda each: _state(each, standing.lacking[each.identity])
        )
    ]
    shown = [f"{_titles(operations, most_shown)}{state}" for state, operations in runs[:most_shown]]
    more = sum(len(operations) for _, operations in runs[most_shown:])
    rest = f", and to {more} more" if more else ""
    return f"{who} went on to {', to '.join(shown)}{rest}{left}"


def _titles(operations: Sequence[Operation], most: int) -> str:
    titles = [_title(each) for each in operations[:most]]
    if more := len(operations) - len(titles):
        titles.append(f"{more} more")
    *first, last = titles
    return f"{', '.join(first)} and {last}" if first else last


def _state(each: Operation, lacking: Sequence[int]) -> str:
    if lacking:
        have = "has" if len(lacking) == 1 else "have"
        return f", which {_ranks(lacking)} {have} not called"
    if each.has_succeeded:
        return " (ended)"
    if each.started:
        return " (its data moved)"
    if each.matched:
        return " (all had called it)"
    return " (called)"


def _orders(standing: Standing) -> Iterable[str]:
    """Ranks that called one operation where others called another one."""
    with_any = [group for group in standing.groups if group.ahead]
    if len(with_any) < 2:
        return
    first, *others = with_any
    a = first.ahead[0]
    for other in others:
        b = other.ahead[0]
        if set(standing.lacking[a.identity]) >= set(other.ranks) and set(
            standing.lacking[b.identity]
        ) >= set(first.ranks):
            yield (
                f"{_ranks(other.ranks)} called {_title(b)} where {_ranks(first.ranks)} called"
                f" {_title(a)}"
            )
            return


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {spans(sorted(ranks))}"


def _title(each: Operation) -> str:
    return f"{each.title} (no. {each.round})" if each.round > 1 else each.title
