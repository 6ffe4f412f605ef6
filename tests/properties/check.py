"""Plays a program on a world, and compares what came of it on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.harness.worlds import RanksFailed
from tests.properties.calls import (
    Barrier,
    Join,
)
from tests.properties.play import leave, play
from tests.properties.posted import Outcome
from tests.properties.programs import Program, Step, cannot_agree, fate, is_empty
from tests.properties.validity import faults

LIMIT_S = 20.0

Knobs = dict[str, str]


class Broken(AssertionError):
    """A program whose outcome is not the oracle's; the text has its code."""


def check(world: Any, program: Program, knobs: Knobs, limit_s: float = LIMIT_S) -> None:
    """Plays the program on all ranks of the world.

    Raises:
        Broken: it hangs, a rank dies, or something is wrong.
    """
    __tracebackhide__ = True
    bad = faults(program)
    assert not bad, f"this program is its author's fault: {bad}\n{program}"
    try:
        outcomes = world.run(play, program, knobs=knobs, limit_s=limit_s)
    except RanksFailed as failure:
        raise Broken(f"{program}\n{failure}") from None
    found = list(differences(program, outcomes))
    if found:
        world.run(leave, knobs=knobs)
        raise Broken("\n".join([repr(program), *found]))


def differences(program: Program, outcomes: list[dict[int, Outcome]]) -> Iterator[str]:
    """What is wrong on a rank, or not the same on all."""
    for index, step in enumerate(program.steps):
        came = {rank: found[index] for rank, found in enumerate(outcomes) if index in found}
        for rank, outcome in came.items():
            if outcome.wrong:
                yield f"step {index}, rank {rank}: {outcome.wrong}"
        if isinstance(step, Join):
            yield from _wrong_join(program, index, came)
        if not isinstance(step, Step):
            continue
        failing = {r: o for r, o in came.items() if fate(program, index, r) == "fails"}
        if failing:
            yield from _wrong_errors(program, index, failing)
            continue
        digests = {o.digest for o in came.values() if o.digest is not None}
        if len(digests) > 1:
            yield f"step {index}: the results are not the same bits on all ranks"
        if isinstance(step.call, Barrier) and all(o.error is None for o in came.values()):
            late = max(outcome.began for outcome in came.values())
            for rank, outcome in came.items():
                if outcome.ended < late:
                    yield f"step {index}, rank {rank}: it left before the last rank had come"


def _wrong_errors(program: Program, index: int, came: dict[int, Outcome]) -> Iterator[str]:
    step = program.steps[index]
    assert isinstance(step, Step)
    texts = {outcome.error for outcome in came.values() if outcome.error is not None}
    if len(texts) > 1:
        yield f"step {index}: ranks have different errors: {sorted(texts)}"
    for text in texts:
        if step.name is not None and f"'{step.name}" not in text:
            yield f"step {index}: the error does not name {step.name!r}: {text}"
        joined = [r for r in program.joined(index) if r in program.sets()[step.on]]
        named = [*joined, *([step.odd[0]] if step.odd and cannot_agree(program, index) else [])]
        if not any(f"rank {rank} " in text for rank in named):
            yield f"step {index}: the error names none of the ranks {named}: {text}"


def _wrong_join(program: Program, index: int, came: dict[int, Outcome]) -> Iterator[str]:
    event = program.steps[index]
    assert isinstance(event, Join)
    lasts = {outcome.last for outcome in came.values()}
    if len(lasts) != 1:
        yield f"step {index}: join returned {lasts}"
        return
    (last,) = lasts
    if last is None or last not in range(program.size):
        yield f"step {index}: join returned {last}"
        return
    # Who has ended a step in which `last` took part with zeros came to its own join later.
    for earlier in range(event.at[last], index):
        step = program.steps[earlier]
        if not isinstance(step, Step) or step.on or is_empty(step.call):
            continue
        if last in program.comers(earlier):
            continue
        for rank in program.comers(earlier):
            turn = step.turn(rank)
            when = earlier if turn.form == "sync" else earlier + turn.late
            if turn.form != "dropped" and when < event.at[rank]:
                yield f"step {index}: join returned {last}, but rank {rank} has joined later"
                return
