"""The rounds of all optimizers that one backward reaches end together, or are given up together.

Autograd may reach the ends of several optimizers in another order on each rank. So the first end
starts what is left of all of them, and then waits for them in the order in which they were made.

If a rank's backward has raised, other ranks may wait in the rounds that it has begun, and it gives
them up. But it may have begun only some. So the ranks tell each other which, in the exchange of the
first round that is given up, and each rank takes part in all of these.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from hvdlite.errors import HorovodInternalError
from hvdlite.observe import program, waits
from hvdlite.optimizer.buckets.positions import error_in_words
from hvdlite.optimizer.overlap import in_flight
from hvdlite.optimizer.round import Round
from hvdlite.world.telling import last_line

if TYPE_CHECKING:
    from hvdlite.optimizer.reducer import Reducer

# Those whose hooks live.
alive: weakref.WeakSet[Reducer] = weakref.WeakSet()

# A rank that waits for the round of one optimizer looks so often whether another's is given up.
_LOOKS_EVERY_S = 0.1


def give_up_rounds(reducer: Reducer) -> None:
    """Ends the rounds of a backward or a step that has raised, without making a step with its
    gradients.

    Raises:
        HorovodInternalError: On other ranks it has not raised, and they would make the step: the
            same error there.
    """
    error = error_in_words()
    for each in _reached(reducer):
        _round_of(each).give_up(error)
        each.must_zero = True
    finish_rounds(reducer)


def finish_rounds(reducer: Reducer, at_end: bool = False) -> None:
    """Ends the reducer's open round, and those of all others that its backward has reached. First
    starts everything, which does not wait for other rounds, then waits.

    at_end: the backward has ended; else it has raised, or `step` reduces.
    """
    reached = _reached(reducer)
    for each in reached:
        if at_end:
            _round_of(each).by_step = False
            each.look_for_changes()
            program.backward_ended(each.age, each.gradients.name)
        each.end_part(_round_of(each).start_rest)
    left = list(reached)
    differs = None
    joined: dict[Reducer, list[torch.Tensor | None]] = {}
    while left:
        each = _first_to_end(left)
        round_ = _round_of(each)
        try:
            each.collect_round()
        except HorovodInternalError as error:
            if round_.begun_anywhere is None:
                raise
            differs = differs or error
        if each in joined:
            _forget_round(each, joined[each])
        left.remove(each)
        for other in _take_part(each, round_.begun_anywhere, [*reached, *joined]):
            left.append(other)
            joined[other] = [slot.param.grad for slot in other.gradients.slots]
    if differs is not None:
        raise differs


def begun_here(reducer: Reducer) -> list[int]:
    """The optimizers of the reducer's team whose rounds this rank has begun in the same backward,
    by their numbers in it."""
    team = reducer.gradients.team
    return [each.gradients.number for each in _reached(reducer) if each.gradients.team is team]


def _round_of(reducer: Reducer) -> Round:
    assert reducer.round is not None
    return reducer.round


def _reached(reducer: Reducer) -> list[Reducer]:
    """The reducer and all others whose rounds its backward has begun, in the same order on all
    ranks."""
    task = reducer.task_of_backward()
    reached = [
        each
        for each in alive
        if each is reducer
        or (each.round is not None and task is not None and each.task_of_backward() == task)
    ]
    return sorted(reached, key=lambda each: each.age)


def _take_part(reducer: Reducer, begun: set[int] | None, known: Sequence[Reducer]) -> list[Reducer]:
    """After a round in which backward has raised somewhere: begins the rounds that other ranks have
    begun in the same backward, and wait for, and gives them up. Returns their reducers.

    begun: the optimizers of these rounds, by their numbers; None: it has raised nowhere.
    """
    if begun is None:
        return []
    others = [
        each
        for each in alive
        if each is not reducer
        and each not in known
        and each.gradients.team is reducer.gradients.team
        and each.gradients.number in begun
    ]
    others.sort(key=lambda each: each.age)
    for each in others:
        if each.round is None:
            each.gradients.rebuild_if_changed()
            each.open_round()
        round_ = _round_of(each)
        round_.give_up(error_in_words())
        each.end_part(round_.start_rest)
    return others


def _forget_round(reducer: Reducer, grads: Sequence[torch.Tensor | None]) -> None:
    """After a round in which this rank has only taken part: its program may have called zero_grad()
    before. grads: of all slots, before the round."""
    for slot, grad in zip(reducer.gradients.slots, grads, strict=True):
        slot.param.grad = grad
    reducer.next_step()


def _first_to_end(several: Sequence[Reducer]) -> Reducer:
    """The one whose round to collect next: the first one, as on all ranks. Blocks until its round
    has ended. Or else one whose round is given up: a rank whose backward has raised may not have
    begun the first one, and waits in the one that it has begun for what this rank has to say."""
    if len(several) > 1:
        last_line.look()
        if waits.observed():
            with waits.waiting(f"hvdlite::{several[0].gradients.name} waits for its gradients"):
                return _given_up_before_the_first(several)
        return _given_up_before_the_first(several)
    return several[0]


def _given_up_before_the_first(several: Sequence[Reducer]) -> Reducer:
    """Or the first one, when its round has ended."""
    first, *others = several
    round_ = _round_of(first)
    while not round_.ends_within(_LOOKS_EVERY_S):
        for each in others:
            if _round_of(each).is_given_up():
                return each
    return first


def release(params: Iterable[torch.Tensor]) -> None:
    """Makes all existing optimizers stop reducing these parameters: they belong to the newest
    optimizer, and are reduced once. Blocks if they are in flight."""
    by_id = {id(param): param for param in params}
    in_flight.wait_for(by_id.values())
    for reducer in list(alive):
        reducer.release(by_id)
