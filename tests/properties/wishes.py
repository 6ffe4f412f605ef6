"""From wishes, which know nothing of each other, to a valid program."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from tests.properties.calls import (
    AddSet,
    Allreduce,
    Broadcast,
    BroadcastObject,
    Call,
    Compressed,
    Event,
    Gradient,
    Join,
    RemoveSet,
    SparseAllreduce,
)
from tests.properties.disagreements import disagreements
from tests.properties.programs import Program, Step, Turn, is_empty
from tests.properties.validity import name_conflicts


@dataclass(frozen=True)
class Wish:
    """For a step. odd: a rank and a disagreement, by their numbers modulo how many there are.
    lost: if not 0, a mask of the ranks that are the only ones to come."""

    call: Call
    name: str | None
    on: int
    thread: int
    turns: tuple[Turn, ...]
    odd: tuple[int, int] | None
    lost: int


@dataclass(frozen=True)
class WishToAdd:
    mask: int


@dataclass(frozen=True)
class WishToRemove:
    number: int


@dataclass(frozen=True)
class WishToJoin:
    """How many steps before the others each rank joins."""

    earlier: tuple[int, ...]


def granted(size: int, wanted: list[Any]) -> Program:
    """The valid program that is nearest to the wishes."""
    steps, kept = _with_sets(size, wanted)
    program = Program(size, tuple(steps))
    for index, wish in enumerate(kept):
        if isinstance(wish, WishToJoin):
            program = _replaced(program, index, _join(program, index, wish))
    for index, wish in enumerate(kept):
        if isinstance(wish, Wish):
            program = _replaced(program, index, _whole_step(program, index, wish))
    while conflicts := name_conflicts(program):
        step = program.steps[conflicts[0]]
        assert isinstance(step, Step)
        renamed = dataclasses.replace(step, name=f"{step.name}{conflicts[0]}")
        program = _replaced(program, conflicts[0], renamed)
    return program


def _replaced(program: Program, index: int, step: Step | Event) -> Program:
    return Program(program.size, (*program.steps[:index], step, *program.steps[index + 1 :]))


def _with_sets(size: int, wanted: list[Any]) -> tuple[list[Step | Event], list[Any]]:
    """The steps, on sets that are there; and the wish of each. A wish that can't be is left out."""
    steps: list[Step | Event] = []
    kept = []
    live: dict[int, tuple[int, ...]] = {0: tuple(range(size))}
    added = 0
    for wish in wanted:
        if isinstance(wish, WishToAdd):
            ranks = tuple(rank for rank in range(size) if wish.mask >> rank & 1)
            if ranks in live.values():
                continue
            added += 1
            live[added] = ranks
            steps.append(AddSet(ranks))
        elif isinstance(wish, WishToRemove):
            removable = sorted(live)[1:]
            if not removable:
                continue
            number = removable[wish.number % len(removable)]
            del live[number]
            steps.append(RemoveSet(number))
        elif isinstance(wish, WishToJoin):
            steps.append(Join((len(steps),) * size))
        else:
            on = sorted(live)[wish.on % len(live)]
            call = _rooted(wish.call, live[on])
            steps.append(Step(call, wish.name, on, wish.thread))
        kept.append(wish)
    return steps, kept


def _rooted(call: Any, members: tuple[int, ...]) -> Any:
    if isinstance(call, Gradient):
        return dataclasses.replace(call, of=_rooted(call.of, members))
    if isinstance(call, (Broadcast, BroadcastObject)):
        return dataclasses.replace(call, root=members[call.root % len(members)])
    return call


def _join(program: Program, index: int, wish: WishToJoin) -> Join:
    """As early as wished, but not before what all ranks of the world or of a set have to do."""
    events = [i for i, s in enumerate(program.steps[:index]) if isinstance(s, Event)]
    first = events[-1] + 1 if events else 0
    least = min(wish.earlier)
    at = [max(first, index - (earlier - least)) for earlier in wish.earlier]
    for i in range(first, index):
        step = program.steps[i]
        if isinstance(step, Step) and step.on:
            for rank in program.sets()[step.on]:
                at[rank] = max(at[rank], i + 1)
    return Join(tuple(at))


def _whole_step(program: Program, index: int, wish: Wish) -> Step:
    step = program.steps[index]
    assert isinstance(step, Step)
    only = _only(program, index, wish)
    if only:
        return dataclasses.replace(
            step, only=only, turns={rank: _turn(program, index, wish, rank) for rank in only}
        )
    comers = program.comers(index)
    odd = None
    others = disagreements(step.call, step.name is not None, program.sets()[step.on])
    if wish.odd and len(comers) > 1 and others:
        odd = (comers[wish.odd[0] % len(comers)], others[wish.odd[1] % len(others)])
    step = dataclasses.replace(step, odd=odd)
    program = _replaced(program, index, step)
    turns = {rank: _turn(program, index, wish, rank) for rank in comers}
    if step.name is None:
        # All ranks post the unnamed ones in the same order, those of a few behind those of all.
        alike = comers == program.sets()[step.on]
        early = min(turn.early if turn.form != "sync" and alike else 0 for turn in turns.values())
        turns = {
            rank: turn if turn.form == "sync" else dataclasses.replace(turn, early=early)
            for rank, turn in turns.items()
        }
    said = {rank: turn for rank, turn in turns.items() if turn != Turn()}
    return dataclasses.replace(step, turns=said)


def _only(program: Program, index: int, wish: Wish) -> tuple[int, ...] | None:
    """Some members of a set that is removed later, for a step that the others don't come to."""
    step = program.steps[index]
    assert isinstance(step, Step)
    members = program.sets()[step.on]
    only = tuple(rank for rank in members if wish.lost >> rank & 1)
    removed = program.removed_at(step.on) < len(program.steps)
    if not removed or not only or only == members or step.name is None or step.call.blocks:
        return None
    return only


def _turn(program: Program, index: int, wish: Wish, rank: int) -> Turn:
    """As wished, as far as the call can be made so."""
    step = program.steps[index]
    assert isinstance(step, Step)
    turn, call = wish.turns[rank], step.call_of(rank)
    plain = isinstance(call, (Gradient, Compressed, SparseAllreduce)) or call.blocks
    in_place = turn.in_place and not plain and isinstance(call, (Allreduce, Broadcast))
    form, early, late = turn.form, turn.early, turn.late
    polls = turn.polls and not isinstance(call, SparseAllreduce)
    if wish.lost and _only(program, index, wish):
        form = "async" if form == "sync" else form
        late = program.removed_at(step.on) - index + 1
    if call.blocks:
        form = "sync"
    return Turn(
        form,
        0 if form == "sync" else min(early, index - program.begin(index)),
        late if form == "async" else 0,
        in_place,
        turn.strided and not plain and not in_place,
        polls and form == "async",
        turn.refused and not is_empty(call),
    )
