"""The order in which backward produces the gradients, observed and shared in one round.

All members use the order of member 0. It travels in an operation of its own, posted when the last
gradient of the round has come and waited for like one more bucket: so it delays nothing, and after
the round every member knows the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hvdlite.collectives.host_sum import HostSum
from hvdlite.optimizer.buckets.slot import Slot
from hvdlite.world import world
from hvdlite.world.teams.team import Team


class BackwardOrder:
    """The order of one round. Every member makes it for the same slots, before the same round."""

    def __init__(
        self, team: Team, name: str, slots: Sequence[Slot], start_hash: Callable[[], int]
    ) -> None:
        """name: the same on every member. start_hash: called by `post`, gives this member's hash of
        the values that it starts from."""
        self._team = team
        self._slots = slots
        self._start_hash = start_hash
        # By member, after `learn`.
        self.start_hashes: list[int] = []
        # In the order in which their gradients have come.
        self._came: list[Slot] = []
        # By slot: its index in the order, from 1; 0 if its gradient did not come. Then by member:
        # the hash of the values that it starts from. Then how many members have cores to spare for
        # reducing while they compute, and how many take part.
        self._sum = HostSum(team, name, len(slots) + team.size + 2)

    def note(self, slot: Slot) -> None:
        """Notes that its gradient has come."""
        self._came.append(slot)

    def forget(self) -> None:
        """The round had no result: starts over with the next one."""
        self._came = []
        self._sum.forget()

    def post(self) -> None:
        """Call it when all gradients of the round have come. Collective; does not block; posts once
        per round."""
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
        """Blocks until all members have posted it. Returns the text of the failure, or None."""
        return self._sum.wait()

    def learn(self) -> bool | None:
        """After `wait`: sets the slots' `backward_index`. May be called again.

        Returns:
            Whether all members have spare cores. None if a member has joined: it can't learn the
            order, so no member does.
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
    """Whether this host has more cores than its ranks compute on, if all compute on as many as this
    one: only then do reductions not slow down computing."""
    return world.current().cpus_per_rank > torch.get_num_threads()
