"""The rounds of all optimizers that one backward reaches end together, or are given up together.

Autograd may reach the ends of several optimizers in another order on each rank. So the first end
starts what is left of all of them, and then waits for them in the order in which they were made.

If a rank's backward has raised, other ranks may wait in the rounds that it has begun, and it gives
them up. But it may have begun only some. So the ranks tell each other which, in the exchange of the
first round that is given up, and each rank takes part in all of these.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence

import torch

from hvdlite.errors import HorovodInternalError
from hvdlite.observe import program, waits
from hvdlite.optimizer.backward_pass import current_task
from hvdlite.optimizer.gradients import Gradients
from hvdlite.optimizer.weighted_rounds import WeightedRounds
from hvdlite.world.telling import last_line

# Those whose hooks live.
alive: weakref.WeakSet[BackwardRounds] = weakref.WeakSet()
_ages = itertools.count()

# A rank that waits for the round of one optimizer looks so often whether another's is given up. The
# engine takes a wait of 0.2 s for one that only another rank can end (watching/circle.c), and those
# of this rank and of one that gives up would be a circle.
_LOOKS_EVERY_S = 0.1
# After some looks within a backward it waits for longer, so that a real circle is named; none is an
# error there.
_SHORT_LOOKS = 20
_LOOKS_LATER_EVERY_S = 1.0


class BackwardRounds(WeightedRounds):
    """The rounds of one optimizer, which knows those of the others in the same backward."""

    def __init__(self, gradients: Gradients) -> None:
        super().__init__(gradients)
        # Greater than that of all made earlier.
        self._age = next(_ages)
        alive.add(self)

    def next_step(self) -> None:
        """The gradients are used or zeroed: the next backward belongs to another step."""
        raise NotImplementedError

    def look_for_changes(self) -> None:
        """The backward pass has ended, and its round has not: looks whether the script has made
        steps meanwhile."""
        raise NotImplementedError

    def release(self, params: Mapping[int, torch.Tensor]) -> None:
        """Stops reducing the gradients of these parameters. params: by their ids."""
        raise NotImplementedError

    def _ends_within(self, limit_s: float) -> bool:
        """Whether the round can be collected by then."""
        carrier = self.gradients.carrier
        return carrier is None or carrier.ends_within(limit_s)

    def _is_given_up(self) -> bool:
        """Whether all ranks have told that their positions differ, or that they give the round up.
        Does not block."""
        carrier = self.gradients.carrier
        if carrier is None or not carrier.ends_within(0):
            return False
        carrier.wait()
        exchange = self._exchange_positions()
        return exchange is not None and exchange.has_ended()

    def _task_of_backward(self) -> int | None:
        return None if self._backward is None else self._backward.task

    def _give_up_rounds(self) -> None:
        """Ends the rounds of a backward that has raised, without making a step with its gradients.

        Raises:
            HorovodInternalError: On other ranks it has not raised, and they would make the step:
                the same error there.
        """
        for rounds in self._reached(at_end=False):
            rounds._give_up()
        self._finish_rounds()

    def _finish_rounds(self, at_end: bool = False) -> None:
        """Ends the open round, and those of all other optimizers that its backward has reached.
        First starts everything, which does not wait for other rounds, then waits.

        at_end: see `_reached`.
        """
        reached = self._reached(at_end)
        for rounds in reached:
            if at_end:
                rounds._by_step = False
                rounds.look_for_changes()
                program.backward_ended(rounds._age, rounds.gradients.name)
            rounds._cancel_if_it_fails(rounds._start_rest)
        left = list(reached)
        differs = None
        joined: dict[BackwardRounds, list[torch.Tensor | None]] = {}
        while left:
            rounds = _first_to_end(left)
            try:
                rounds._cancel_if_it_fails(rounds._collect)
            except HorovodInternalError as error:
                if rounds._begun_anywhere is None:
                    raise
                differs = differs or error
            else:
                rounds._close_round()
                if rounds in joined:
                    rounds._forget_round(joined[rounds])
            left.remove(rounds)
            for other in rounds._take_part([*reached, *joined]):
                left.append(other)
                joined[other] = [slot.param.grad for slot in other.gradients.slots]
        if differs is not None:
            raise differs

    def _begun_here(self) -> list[int]:
        team, task = self.gradients.team, self._task_of_backward()
        return [
            rounds.gradients.number
            for rounds in alive
            if rounds is self
            or (
                rounds.round.is_open
                and rounds.gradients.team is team
                and rounds._task_of_backward() == task
                and rounds._has_started()
            )
        ]

    def _take_part(self, known: Sequence[BackwardRounds]) -> list[BackwardRounds]:
        """After a round in which backward has raised somewhere: begins the rounds that other ranks
        have begun in the same backward, and wait for, and gives them up. Returns them."""
        begun = self._begun_anywhere
        if begun is None:
            return []
        others = [
            rounds
            for rounds in alive
            if rounds is not self
            and rounds not in known
            and rounds.gradients.team is self.gradients.team
            and rounds.gradients.number in begun
        ]
        others.sort(key=lambda rounds: rounds._age)
        for rounds in others:
            if not rounds.round.is_open:
                rounds.gradients.rebuild_if_changed(rounds.round.number)
                rounds._open_round()
            rounds._give_up()
            rounds._cancel_if_it_fails(rounds._start_rest)
        return others

    def _forget_round(self, grads: Sequence[torch.Tensor | None]) -> None:
        """After a round in which this rank has only taken part: its program may have called
        zero_grad() before. grads: of all slots, before the round."""
        for slot, grad in zip(self.gradients.slots, grads, strict=True):
            slot.param.grad = grad
        self.next_step()

    def _give_up(self) -> None:
        """Says so in the open round, unless all gradients are there and the position is on its way:
        then the other ranks make the step."""
        carrier = self.gradients.carrier
        if carrier is None or not carrier.has_position():
            self._position.has_raised = True

    def _reached(self, at_end: bool) -> list[BackwardRounds]:
        """These rounds and those of all other optimizers that its backward has reached, in the same
        order on all ranks: autograd may reach their ends in a different order on each.

        at_end: the backward has ended. Otherwise it has raised, and only rounds that other ranks
            may wait for are ended with it.
        """
        task = self._task_of_backward()
        reached = [
            rounds
            for rounds in alive
            if rounds is self
            or (
                rounds.round.is_open
                and task is not None
                and rounds._task_of_backward() == task
                and (at_end or not rounds._by_step or rounds._has_started())
            )
        ]
        return sorted(reached, key=lambda rounds: rounds._age)


def _first_to_end(several: Sequence[BackwardRounds]) -> BackwardRounds:
    """The round to collect next: the first one, as on all ranks. Blocks until it has ended. Or else
    one that is given up: a rank whose backward has raised may not have begun the first one, and
    waits in the one that it has begun for what this rank has to say."""
    if len(several) > 1:
        last_line.look()
        if waits.observed():
            with waits.waiting(f"hvdlite::{several[0].gradients.name} waits for its gradients"):
                return _given_up_before_the_first(several)
        return _given_up_before_the_first(several)
    return several[0]


def _given_up_before_the_first(several: Sequence[BackwardRounds]) -> BackwardRounds:
    """Or the first one, when it has ended."""
    first, *others = several
    looks = 0
    while not first._ends_within(_LOOKS_EVERY_S if looks < _SHORT_LOOKS else _LOOKS_LATER_EVERY_S):
        looks += current_task() != -1
        for rounds in others:
            if rounds._is_given_up():
                return rounds
    return first
