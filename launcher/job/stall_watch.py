"""Hears what the ranks' stall checks report, and says where the ranks are. No clock."""

from __future__ import annotations

from collections.abc import Callable

from hvdrun.job.ranks import Ranks
from hvdrun.job.recorded import Recorded
from hvdrun.job.whereabouts import Whereabouts
from hvdrun.reports.stacks import Seen, Stall, read_stall, where_ranks_are

# A report shows no more ranks than this, those that others wait for first.
MOST_RANKS = 32
# The same for the answer to somebody who asks where all are.
MOST_ASKED = 256
# After one report, others are not answered for so long: many operations may wait at once.
PAUSE_S = 5.0


class StallWatch:
    """`cwd`: the job's folder; `say` gets texts to show."""

    def __init__(
        self,
        ranks: Ranks,
        whereabouts: Whereabouts,
        recorded: Recorded,
        cwd: str,
        say: Callable[[str], None],
    ) -> None:
        self.ranks = ranks
        self.whereabouts = whereabouts
        self.recorded = recorded
        self.cwd = cwd
        self.say = say
        self.silent_until = float("-inf")
        self.is_over = False  # the job is being ended: no rank waits for another one any more
        self.others: set[int] = set()  # ranks whose number in hvdlite's world is not the job's

    def on_init(self, rank: int, data: bytes) -> None:
        """The rank has made its world, as rank `data` says it is there."""
        if data and data.split() != [b"%d" % rank, b"%d" % self.ranks.num_proc]:
            self.others.add(rank)

    def on_report(self, now: float, data: bytes) -> None:
        if self.is_over or now < self.silent_until:
            return
        self.silent_until = now + PAUSE_S
        stall = read_stall(data.decode(errors="replace"), self.ranks.num_proc)
        if self.others or not stall.missing:
            stall = Stall(stall.operation)
        named = (*stall.missing, *stall.waiting) or tuple(sorted(self.ranks.started))
        rest = len(named) - MOST_RANKS
        self.recorded.forget_running()
        self.whereabouts.ask(
            now,
            named[:MOST_RANKS],
            lambda _, seen: self._report(stall, seen, max(0, rest)),
            with_boxes=True,
        )

    def ask(self, now: float, answer: Callable[[str], None]) -> None:
        """Somebody wants to know where all ranks are."""
        ranks = range(self.ranks.num_proc)

        def tell(_: float, seen: dict[int, Seen]) -> None:
            rest = len(ranks) - MOST_ASKED
            head = f"{len(ranks)} ranks"
            if ended := len(self.ranks.endings):
                head += f", {ended} of which {'has' if ended == 1 else 'have'} ended"
            answer(where_ranks_are(head, seen, self.cwd, max(0, rest)))

        self.whereabouts.ask(now, ranks[:MOST_ASKED], tell)

    def _report(self, stall: Stall, seen: dict[int, Seen], rest: int) -> None:
        if self.is_over or not seen:
            return
        head = f"where the ranks are while {stall.operation} waits"
        if stall.missing:
            head = f"where the ranks are that {stall.operation} waits for, and those in it"
        where = f"hvdrun: {where_ranks_are(head, seen, self.cwd, rest, stall.missing)}"
        answered = [rank for rank, each in seen.items() if each.now is not None]
        self.say("\n".join((where, *self.recorded.take_orders(answered))))
