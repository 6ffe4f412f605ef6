"""A program: what n ranks do, step by step, each in its own order, and when it is a valid one.

Time has a tick for each step. A rank that does step i in the form that waits does it at tick i, on
every rank the same. Otherwise it posts the step at tick i - early and waits for it at tick
i + late. So all have posted step i by tick i, and nobody waits for it before: whatever the numbers,
ranks that each do their own actions in the order of the ticks never wait for each other in a
circle, and one that hangs is hvdlite's fault.

At one tick a rank first posts, the later steps first, then waits, the later steps first, and then
does what blocks. Each of its threads goes through the ticks on its own; all threads of the rank
meet at each event of all ranks (a process set that is added, a join).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.properties.calls import AddSet, Call, Event, Join, Readable, RemoveSet


@dataclass(frozen=True, repr=False)
class Turn(Readable):
    """How one rank does a step.

    form: 'sync'; 'async': posts it `early` ticks before and waits `late` ticks after; 'dropped':
        the same, but never waits for it, and lets the handle go.
    refused: before, it makes the same call with a bad argument, which must leave no trace.
    """

    form: str = "sync"
    early: int = 0
    late: int = 0
    in_place: bool = False
    strided: bool = False
    polls: bool = False
    refused: bool = False


@dataclass(frozen=True, repr=False)
class Step(Readable):
    """One collective.

    on: the number of the process set, 0 for the global one.
    turns: by world rank; a rank that is not in it has `Turn()`.
    odd: a rank, and what it calls instead, with which the others' call does not agree.
    only: the ranks that come to it; the other members never do, and the set is removed.
    """

    call: Call
    name: str | None = None
    on: int = 0
    thread: int = 0
    turns: dict[int, Turn] = field(default_factory=dict)
    odd: tuple[int, Call] | None = None
    only: tuple[int, ...] | None = None

    def turn(self, rank: int) -> Turn:
        return self.turns.get(rank, Turn())

    def call_of(self, rank: int) -> Any:
        """What this rank calls."""
        return self.odd[1] if self.odd and self.odd[0] == rank else self.call


@dataclass(frozen=True, repr=False)
class Program(Readable):
    size: int
    steps: tuple[Step | Event, ...]

    def __repr__(self) -> str:
        steps = "".join(f"\n        {step!r},  # {i}" for i, step in enumerate(self.steps))
        return f"Program(\n    {self.size},\n    ({steps}\n    ),\n)"

    @property
    def num_threads(self) -> int:
        return 1 + max((s.thread for s in self.steps if isinstance(s, Step)), default=0)

    def collectives(self) -> Iterator[tuple[int, Step]]:
        """The steps that are no events, with their numbers."""
        for i, step in enumerate(self.steps):
            if isinstance(step, Step):
                yield i, step

    def sets(self) -> list[tuple[int, ...]]:
        """The ranks of each process set that there is at some time, by its number."""
        added = [tuple(sorted(s.ranks)) for s in self.steps if isinstance(s, AddSet)]
        return [tuple(range(self.size)), *added]

    def added_at(self, number: int) -> int:
        """The step that adds this set; -1 for the global one."""
        added = [i for i, s in enumerate(self.steps) if isinstance(s, AddSet)]
        return [-1, *added][number]

    def removed_at(self, number: int) -> int:
        """The step that removes this set; behind the last one if none does."""
        removed = RemoveSet(number)
        return next((i for i, s in enumerate(self.steps) if s == removed), len(self.steps))

    def joined(self, index: int) -> tuple[int, ...]:
        """The ranks that have joined when the others come to this step."""
        for i in range(index + 1, len(self.steps)):
            event = self.steps[i]
            if isinstance(event, Join):
                return tuple(r for r, at in enumerate(event.at) if at <= index)
        return ()

    def comers(self, index: int) -> tuple[int, ...]:
        """The ranks that call this step."""
        step = self.steps[index]
        if not isinstance(step, Step):
            return tuple(range(self.size))
        joined = self.joined(index)
        return tuple(
            rank
            for rank in self.sets()[step.on]
            if rank not in joined and (step.only is None or rank in step.only)
        )

    def begin(self, index: int) -> int:
        """The first tick at which this step can be posted: behind the events that it needs."""
        step = self.steps[index]
        assert isinstance(step, Step)
        joins = [i for i, s in enumerate(self.steps[:index]) if isinstance(s, Join)]
        return 1 + max(self.added_at(step.on), joins[-1] if joins else -1)


@dataclass(frozen=True)
class Action:
    """What a rank does at some time. what: 'do', 'post' or 'wait'."""

    what: str
    index: int


@dataclass(frozen=True)
class Segment:
    """What a rank's threads do beside each other, and the event that it comes to then."""

    actions: list[list[Action]]  # by thread
    event: int | None


def segments(program: Program, rank: int) -> list[Segment]:
    """All that a rank does."""
    timed: list[tuple[tuple[int, int, int], Action, int]] = []
    events: list[tuple[tuple[int, int, int], int]] = []
    for index, step in enumerate(program.steps):
        if isinstance(step, Join):
            events.append(((step.at[rank], -1, 0), index))
        elif isinstance(step, Event):
            events.append(((index, 2, 0), index))
        elif rank in program.comers(index):
            turn = step.turn(rank)
            if turn.form == "sync":
                timed.append(((index, 2, 0), Action("do", index), step.thread))
                continue
            timed.append(((index - turn.early, 0, -index), Action("post", index), step.thread))
            if turn.form == "async":
                timed.append(((index + turn.late, 1, -index), Action("wait", index), step.thread))
    timed.sort(key=lambda item: item[0])
    found = []
    at = 0
    for time, event in [*sorted(events), ((len(program.steps) + 1 << 30, 0, 0), None)]:
        actions: list[list[Action]] = [[] for _ in range(program.num_threads)]
        while at < len(timed) and timed[at][0] < time:
            actions[timed[at][2]].append(timed[at][1])
            at += 1
        found.append(Segment(actions, event))
    return found


# ---- what becomes of a step ----


def cannot_agree(program: Program, index: int) -> bool:
    """Whether ranks that do not agree come to this step."""
    step = program.steps[index]
    assert isinstance(step, Step)
    comers = program.comers(index)
    return step.odd is not None and step.odd[0] in comers and len(comers) > 1


def fate(program: Program, index: int, rank: int) -> str:
    """What becomes of a step on a rank that comes to it.

    'value'; 'fails': with the same text as on the other ranks; 'fails alone': with some text;
    'either': a value or that, as its set is removed before the rank waits for it.
    """
    step = program.steps[index]
    assert isinstance(step, Step)
    too_late = waits_too_late(program, index, step.turn(rank))
    absent = set(program.joined(index)) & set(program.sets()[step.on])
    if is_empty(step.call_of(rank)):
        return "value"
    if step.only is not None:
        return "fails alone"
    if cannot_agree(program, index) or (absent and not step.call_of(rank).joinable):
        return "fails alone" if too_late else "fails"
    return "either" if too_late else "value"


def is_empty(call: Any) -> bool:
    """Whether it is a group of no tensors: then nothing is sent, and nobody is waited for."""
    return getattr(getattr(call, "of", call), "tensors", None) == ()


def waits_too_late(program: Program, index: int, turn: Turn) -> bool:
    """Whether the set is removed before the rank would wait."""
    step = program.steps[index]
    assert isinstance(step, Step)
    if turn.form == "dropped":
        return True
    return turn.form == "async" and index + turn.late > program.removed_at(step.on)
