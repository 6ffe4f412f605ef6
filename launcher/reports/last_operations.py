"""Where the ranks of a job were among its operations, from their black boxes. Pure.

Ranks need not post operations in the same order, and each knows only its own: an operation is the
same on all ranks by its name and by how often that name has come (`Operation.identity`). One that
is not counted (round 0) is not compared, nor are the others of its name.

A rank keeps its latest operations. That one is not among them says that the rank has not called it
only if the rank has kept one that another rank called before it; or, if the operation has come so
far that all may have called it, the one before of the same name. Otherwise the rank may have ended
it long ago, and nothing is said. Of a rank that has kept all that it ever called, all is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from hvdrun.machine.notes import ENTRIES
from hvdrun.reports.black_box import MESSAGES, Box, Operation
from hvdrun.reports.failure_report import named

Identity = tuple[int, int, int, int]
JOIN = "join"
# On the screen: entries of one report, and operations of one entry.
MOST_GROUPS = 3
MOST_SHOWN = 2
# The same while the job runs, where ranks are in different operations: the order shows the cause.
MOST_OF_AN_ORDER = 6
# In the file.
MOST_IN_FILE = 64
# Of all ranks together: a hundred thousand of a thousand ranks take some seconds at most, one if
# most of them are the same. Of each rank at least so many.
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


def most_compared(num_boxes: int) -> int:
    """Of each rank's operations."""
    return max(LEAST_COMPARED, MOST_COMPARED // max(1, num_boxes))


def standings(boxes: Mapping[int, Box], num_ranks: int) -> list[Standing]:
    """Of each team of several ranks, those with the most ranks first, and of these the latest.
    num_ranks: of the job; boxes of some may be missing."""
    by_team: dict[int, dict[int, list[Operation]]] = {}
    members: Counter[int] = Counter()
    latest: Counter[int] = Counter()
    most = most_compared(len(boxes))
    kept = {rank: boxes[rank].operations for rank in sorted(boxes)}
    # Numbers count from 1, and an operation that waits may be kept for longer than newer ones.
    are_cut = {
        rank
        for rank, ops in kept.items()
        if len(ops) > most or (ops and (ops[0].number > 1 or ops[-1].number > ENTRIES))
    }
    kept = {
        rank: tuple(each for each in ops[-most:] if each.kind not in MESSAGES)
        for rank, ops in kept.items()
    }
    lack_counts: dict[int, set[int]] = {}  # by team
    uncounted = {each.identity[:3] for ops in kept.values() for each in ops if not each.round}
    for rank, ops in kept.items():
        for each in ops:
            if not each.round:
                lack_counts.setdefault(each.team, set()).add(rank)
            if each.identity[:3] not in uncounted:
                by_team.setdefault(each.team, {}).setdefault(rank, []).append(each)
                members[each.team] = max(members[each.team], each.members)
                latest[each.team] = max(latest[each.team], each.number)
    found = []
    for team in sorted(by_team, key=lambda team: -latest[team]):
        are_unsure = are_cut | lack_counts.get(team, set())
        # Of a team of all ranks, those too that have called nothing.
        ranks = kept if members[team] >= num_ranks else by_team[team]
        by_rank = {
            rank: by_team[team].get(rank, [])
            for rank in ranks
            if rank in by_team[team] or rank not in are_unsure
        }
        if len(by_rank) > 1:
            found.append(_standing(by_rank, are_unsure))
    return sorted(found, key=lambda each: -len(each.ranks))


class _Knowledge:
    """Which ranks have called an operation, which have not, and which may have.

    Sets of ranks are the bits of an integer, by the place of a rank in `ranks`: there may be a
    thousand ranks with hundreds of operations each.
    """

    def __init__(
        self, posted: Mapping[int, Mapping[Identity, Operation]], are_unsure: set[int]
    ) -> None:
        self.ranks = tuple(posted)
        self.all = (1 << len(self.ranks)) - 1
        self.unsure = self._bits(rank for rank in self.ranks if rank in are_unsure)
        self.have: dict[Identity, int] = {}
        self.succeeded: dict[Identity, int] = {}
        # Of buckets these may mean the ranks of one host.
        self.matched: set[Identity] = set()
        joined = []
        for place, (rank, operations) in enumerate(posted.items()):
            for key, each in operations.items():
                self.have[key] = self.have.get(key, 0) | 1 << place
                if each.has_succeeded:
                    self.succeeded[key] = self.succeeded.get(key, 0) | 1 << place
                if each.matched or each.started:
                    self.matched.add(key)
                if each.kind == JOIN and not each.ended:
                    joined.append(rank)
        self.joined = self._bits(joined)
        # By operation: ranks that have kept one that was called before it.
        self.kept_earlier: dict[Identity, int] = {}
        for operations in posted.values():
            seen = 0
            for key in operations:
                self.kept_earlier[key] = self.kept_earlier.get(key, 0) | seen
                seen |= self.have[key]
        self._lists: dict[int, tuple[int, ...]] = {}

    def is_over(self, key: Identity) -> bool:
        """All have ended it, as far as is known."""
        succeeded = self.succeeded.get(key, 0)
        return succeeded != 0 and not self.all & ~succeeded & ~(self.unsure & ~self.have[key])

    def all_keep(self, key: Identity) -> bool:
        return self.have[key] == self.all

    def lacking(self, key: Identity) -> tuple[int, ...]:
        if key in self.succeeded:
            sure = 0  # all have called it
        elif key in self.matched:
            # A rank that had called it after the one before of the same name would have kept both.
            sure = self.have.get((*key[:3], key[3] - 1), 0)
        else:
            sure = self.kept_earlier[key]
        bits = self.all & ~self.have[key] & ~self.joined & ~(self.unsure & ~sure)
        if bits not in self._lists:
            self._lists[bits] = tuple(
                rank for place, rank in enumerate(self.ranks) if bits >> place & 1
            )
        return self._lists[bits]

    def _bits(self, ranks: Iterable[int]) -> int:
        places = {rank: place for place, rank in enumerate(self.ranks)}
        return sum(1 << places[rank] for rank in set(ranks))


def _standing(by_rank: Mapping[int, Sequence[Operation]], are_unsure: set[int]) -> Standing:
    """are_unsure: ranks that may have called more than is known of them."""
    posted = {rank: {each.identity: each for each in ops} for rank, ops in by_rank.items()}
    ranks = tuple(posted)
    known = _Knowledge(posted, are_unsure)
    over = {key for key in known.have if known.is_over(key)}
    last = max(
        (posted[ranks[0]][key] for key in over if known.all_keep(key)),
        key=lambda each: each.number,
        default=None,
    )
    groups: dict[object, Group] = {}
    lacking: dict[Identity, tuple[int, ...]] = {}
    for rank, ops in posted.items():
        since = ops[last.identity].number if last else 0
        ahead = tuple(
            each
            for key, each in ops.items()
            if key not in over and (each.number > since or not each.ended)
        )
        for each in ahead:
            if each.identity not in lacking:
                lacking[each.identity] = known.lacking(each.identity)
        # Unnamed operations may be of two kinds and still be matched: that is the ranks' mistake.
        state = tuple((each.identity, each.kind, _progress(each)) for each in ahead)
        group = groups.get(state, Group((), ahead))
        groups[state] = group._replace(ranks=(*group.ranks, rank))
    return Standing(ranks, last, tuple(groups.values()), lacking)


def _progress(each: Operation) -> tuple[bool, ...]:
    """How far it has come. What failed has failed since, on some ranks before it was killed."""
    return each.has_succeeded, each.started > 0, each.matched > 0


def awaited_by(rank: int, boxes: Mapping[int, Box], num_ranks: int) -> set[int]:
    """The ranks that have not called an operation in which this one still was."""
    return {
        other
        for standing in standings(boxes, num_ranks)
        for group in standing.groups
        if rank in group.ranks
        for each in group.ahead
        if not each.has_succeeded
        for other in standing.lacking[each.identity]
    }


def report(boxes: Mapping[int, Box], endings: Mapping[int, str], num_ranks: int) -> list[str]:
    """For the screen: nothing if it would not tell where the ranks differ. endings: of ranks that
    have ended with 0, in words."""
    telling = [standing for standing in standings(boxes, num_ranks) if standing.tells_more]
    return _lines(telling[0], endings, MOST_GROUPS, MOST_SHOWN) if telling else []


def orders(boxes: Mapping[int, Box], num_ranks: int) -> list[str]:
    """Of ranks that run: nothing if none of them are in operations that others of them, which are
    in another one, have not called."""
    telling = (each for each in standings(boxes, num_ranks) if any(True for _ in _orders(each)))
    first = next(telling, None)
    return _lines(first, {}, MOST_GROUPS, MOST_OF_AN_ORDER) if first else []


def summary(boxes: Mapping[int, Box], endings: Mapping[int, str], num_ranks: int) -> list[str]:
    """For the file: of all teams."""
    lines: list[str] = []
    for standing in standings(boxes, num_ranks):
        lines += [*_lines(standing, endings, MOST_IN_FILE, MOST_IN_FILE), ""]
    return lines[:-1]


def _lines(
    standing: Standing, endings: Mapping[int, str], most_groups: int, most_shown: int
) -> list[str]:
    who = named(standing.ranks)
    lines = [f"{who} have not all ended any of the operations that are kept"]
    if standing.last:
        lines = [f"the last operation that {who} have all ended is {_title(standing.last)}"]
    lines += [
        f"    {_went_on(group, standing, endings, most_shown)}"
        for group in standing.groups[:most_groups]
    ]
    if (more := len(standing.groups) - most_groups) > 0:
        lines.append(f"    and {more} more groups of ranks")
    return lines + [f"    {line}" for line in _orders(standing)]


def _went_on(group: Group, standing: Standing, endings: Mapping[int, str], most_shown: int) -> str:
    who = named(group.ranks)
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
        return f", which {named(lacking)} {have} not called"
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
                f"{named(other.ranks)} called {_title(b)} where {named(first.ranks)} called"
                f" {_title(a)}"
            )
            return


def _title(each: Operation) -> str:
    return f"{each.title} (no. {each.round})" if each.round > 1 else each.title
