"""In which order backward comes to the gradients: seen in a round, and agreed on in that round.

The order of the member with number 0 counts for all. It travels in an operation of its own, which
is posted when the gradients of the round have come, and waited for as one more bucket: so it
delays nothing, and after the round every member knows the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hvdlite.collectives.host_sum import HostSum
from hvdlite.optimizer.buckets.bucket import Slot
from hvdlite.world import world
from hvdlite.world.teams import Team


class BackwardOrder:
    """One round's order. Every member makes it for the same slots, before the same round."""

    def __init__(
        self, team: Team, name: str, slots: Sequence[Slot], start_hash: Callable[[], int]
    ) -> None:
        """name: the same on every member. start_hash: gives this member's when it is posted."""
        self._team = team
        self._slots = slots
        self._start_hash = start_hash
        # By member, once learnt.
        self.start_hashes: list[int] = []
        self._came: list[Slot] = []
        # Of each slot: which it was to come, from 1 on; 0: it did not. Then the members'
        # hashes of the values that they start from. Then the members that have
        # cores for reducing beside computing, and all that take part.
        self._sum = HostSum(team, name, len(slots) + team.size + 2)

    def note(self, slot: Slot) -> None:
        """Its gradient has come."""
        self._came.append(slot)

    def forget(self) -> None:
        """The round had no result: the next one counts."""
        self._came = []
        self._sum.forget()

    def post(self) -> None:
        """All gradients of the round have come. Collective; does not block; once in a round."""
        if self._sum.posted():
            return
        numbers = self._sum.numbers.zero_()
        if self._team.rank == 0:
            place = {id(slot): number for number, slot in enumerate(self._came, 1)}
            for index, slot in enumerate(self._slots):
                numbers[index] = place.get(id(slot), 0)
        numbers[len(self._slots) + self._team.rank] = self._start_hash()
        numbers[-2] = has_spare_cores()
        numbers[-1] = 1
        self._sum.post()

    def posted(self) -> bool:
        return self._sum.posted()

    def wait(self) -> str | None:
        """Returns when all members have posted it, or the text of the failure."""
        return self._sum.wait()

    def learn(self) -> bool | None:
        """After the wait: gives the slots their places in the order. May be called again.

        Returns:
            Whether all members have spare cores; None, and nothing is learnt, where a member has
            joined, as it would not know.
        """
        *numbers, spare, members = self._sum.numbers.tolist()
        if members < self._team.size:
            return None
        count = len(self._slots)
        for slot, place in zip(self._slots, numbers[:count], strict=True):
            slot.backward_index = place or count + 1
        self.start_hashes = numbers[count:]
        return bool(spare == members)


def has_spare_cores() -> bool:
    """Whether there are more cores than the ranks of this host compute on, if all are as this one:
    only then do reductions take nothing from computing."""
    return world.current().cpus_per_rank > torch.get_num_threads()
