"""Whether a program is a valid one: whether a user may write it, so that hvdlite has to run it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tests.properties.calls import Event, Gradient, Join, RemoveSet
from tests.properties.programs import Action, Program, Step, segments, waits_too_late


def faults(program: Program) -> list[str]:
    """What is wrong with a program, so that hvdlite need not be able to run it. Empty: nothing."""
    found = [
        *_structure_faults(program),
        *(f"step {index}: its name is in flight on a rank" for index in name_conflicts(program)),
        *_order_faults(program),
    ]
    return found or _deadlocks(program)


def _structure_faults(program: Program) -> Iterator[str]:
    sets = program.sets()
    for i, step in program.collectives():
        comers = program.comers(i)
        if step.on >= len(sets) or not program.added_at(step.on) < i < program.removed_at(step.on):
            yield f"step {i}: set {step.on} is not there"
            continue
        absent = set(program.joined(i)) & set(sets[step.on])
        if absent and step.on:
            yield f"step {i}: {absent} have joined, and are members of set {step.on}"
        for rank in comers:
            turn = step.turn(rank)
            if turn.form != "sync" and i - turn.early < program.begin(i):
                yield f"step {i}: rank {rank} posts it before {program.begin(i)}"
            if step.call_of(rank).blocks and turn.form != "sync":
                yield f"step {i}: rank {rank} can't but wait"
            if step.only is not None and not waits_too_late(program, i, turn):
                yield f"step {i}: rank {rank} waits for ranks that never come"
    last_join = -1
    for i, event in enumerate(program.steps):
        if isinstance(event, Join):
            if not all(last_join < at <= i for at in event.at) or len(event.at) != program.size:
                yield f"step {i}: {event}"
            last_join = i
        elif isinstance(event, Event) and program.joined(i):
            yield f"step {i}: ranks have joined"
        if isinstance(event, RemoveSet):
            number = event.number
            if not program.added_at(number) < i <= program.removed_at(number):
                yield f"step {i}: set {number} is not there"


def keys_of(program: Program, index: int) -> list[tuple[Any, ...]]:
    """What the engine matches a named step by; and its gradient, of whatever kind the step is."""
    step = program.steps[index]
    assert isinstance(step, Step)
    if step.name is None:
        return []
    families = [step.call.family, *(["gradient"] if isinstance(step.call, Gradient) else [])]
    return [(step.on, family, step.name) for family in families]


def name_conflicts(program: Program) -> list[int]:
    """The steps whose name another one has that may be in flight then, or is another thread's."""
    found = set()
    for rank in range(program.size):
        in_flight: set[tuple[Any, ...]] = set()
        threads: dict[tuple[Any, ...], int] = {}
        for segment in segments(program, rank):
            for thread, actions in enumerate(segment.actions):
                for action in actions:
                    for key in keys_of(program, action.index):
                        if threads.setdefault(key, thread) != thread:
                            found.add(action.index)
                        if action.what == "wait":
                            in_flight.discard(key)
                        elif key in in_flight:
                            found.add(action.index)
                        elif action.what == "post":
                            in_flight.add(key)
    return sorted(found)


def _order_faults(program: Program) -> Iterator[str]:
    """An unnamed step has the same number on all ranks that come to it, among those of its thread
    on its set (since the last join, on the global one)."""
    numbers: dict[int, tuple[int, int]] = {}
    for rank in range(program.size):
        joins = 0
        counts: dict[tuple[int, int], int] = {}
        for segment in segments(program, rank):
            for thread, actions in enumerate(segment.actions):
                for action in actions:
                    step = program.steps[action.index]
                    if action.what == "wait" or not isinstance(step, Step) or step.name is not None:
                        continue
                    count = counts.get((step.on, thread), 0)
                    counts[step.on, thread] = count + 1
                    number = (0 if step.on else joins, count)
                    if numbers.setdefault(action.index, number) != number:
                        yield f"step {action.index}: {number} on rank {rank}, not {numbers}"
            if segment.event is not None and isinstance(program.steps[segment.event], Join):
                joins += 1
                counts = {key: count for key, count in counts.items() if key[0]}


def _deadlocks(program: Program) -> list[str]:
    """Runs it with an engine that does nothing but count who has come."""
    waiting = {}
    come: set[tuple[int, int]] = set()  # (index, rank)
    joined = set()

    def ended(index: int) -> bool:
        step = program.steps[index]
        if isinstance(step, Step) and step.only is not None:
            return True  # its set has been removed
        return all((index, rank) in come for rank in program.comers(index)) and all(
            (_join_after(program, index), rank) in joined for rank in program.joined(index)
        )

    def thread(rank: int, actions: list[Action]) -> Iterator[Callable[[], bool]]:
        for action in actions:
            if action.what != "wait":
                come.add((action.index, rank))
            if action.what != "post":
                yield lambda index=action.index: ended(index)  # type: ignore[misc]

    def whole(rank: int) -> Iterator[Callable[[], bool]]:
        for segment in segments(program, rank):
            threads = [_run(thread(rank, actions)) for actions in segment.actions]
            yield lambda threads=threads: _all_end(threads)  # type: ignore[misc]
            if segment.event is not None:
                if isinstance(program.steps[segment.event], Join):
                    joined.add((segment.event, rank))
                come.add((segment.event, rank))
                yield lambda event=segment.event: ended(event)  # type: ignore[misc]

    waiting = {rank: _run(whole(rank)) for rank in range(program.size)}
    before = -1
    while waiting and len(come) + len(joined) - len(waiting) != before:
        before = len(come) + len(joined) - len(waiting)
        for rank in [rank for rank, run in waiting.items() if next(run)]:
            del waiting[rank]
    return [f"ranks {sorted(waiting)} wait for ever"] if waiting else []


def _run(conditions: Iterator[Callable[[], bool]]) -> Iterator[bool]:
    """Goes on as far as the conditions hold, each time it is asked; yields whether it has ended."""
    for holds in conditions:
        while not holds():
            yield False
    while True:
        yield True


def _all_end(runs: list[Iterator[bool]]) -> bool:
    """Each goes on; whether all have ended."""
    return all([next(run) for run in runs])  # noqa: C419


def _join_after(program: Program, index: int) -> int:
    return next(i for i, s in enumerate(program.steps) if i > index and isinstance(s, Join))
