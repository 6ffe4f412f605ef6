"""A rank's part of a program: makes the calls, and says what came of them.

What is merely wrong is reported and the program goes on, as a rank that stops would make the others
wait; only what should never raise (a refused argument, a name in flight) ends the case at once.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable

import hvdlite as hvd
from tests.properties.calls import AddSet, Join, RemoveSet
from tests.properties.posted import Outcome, Posted
from tests.properties.programs import Action, Program, Step, Turn, segments

# Counts the programs that these ranks have played, on all of them alike.
_serials = itertools.count()


def play(program: Program) -> dict[int, Outcome]:
    """The case: what came of each step that this rank has waited for."""
    hvd.init()
    return Player(program, hvd.rank(), next(_serials)).play()


def leave() -> None:
    """A case: after a program that went wrong, the next one finds another engine."""
    hvd.shutdown()


class Thread(threading.Thread):
    """One that does what it is given until it is given None."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._given: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self.start()

    def begin(self, work: Callable[[], None] | None) -> None:
        self._given.put(work)

    def end(self) -> None:
        """Waits for the work; raises what it has raised."""
        error = self._ended.get()
        if error is not None:
            raise error

    def run(self) -> None:
        while (work := self._given.get()) is not None:
            try:
                work()
            except BaseException as error:
                self._ended.put(error)
            else:
                self._ended.put(None)


class Player:
    """One rank's."""

    def __init__(self, program: Program, rank: int, serial: int) -> None:
        self.program = program
        self.rank = rank
        self.serial = serial
        self.sets: dict[int, hvd.ProcessSet] = {0: hvd.global_process_set}
        self.outcomes: dict[int, Outcome] = {}
        self._posted: dict[int, Posted] = {}
        self._threads = [Thread() for _ in range(program.num_threads - 1)]

    def play(self) -> dict[int, Outcome]:
        self._count_threads(0)
        for segment in segments(self.program, self.rank):
            self._do_segment(segment.actions)
            if segment.event is not None:
                self.outcomes[segment.event] = self._event(segment.event)
        for thread in self._threads:
            thread.begin(None)
            thread.join()
        for number in sorted(self.sets)[1:]:
            hvd.remove_process_set(self.sets[number])
        return self.outcomes

    def _do_segment(self, actions: list[list[Action]]) -> None:
        for thread, own in zip(self._threads, actions[1:], strict=True):
            thread.begin(lambda own=own: self._do_all(own))  # type: ignore[misc]
        self._do_all(actions[0])
        for thread in self._threads:
            thread.end()

    def _do_all(self, actions: list[Action]) -> None:
        for action in actions:
            if action.what != "wait":
                self._posted[action.index] = self._post(action.index)
            if action.what != "post":
                outcome = self._posted.pop(action.index).wait()
                self.outcomes[action.index] = outcome
            elif self._turn(action.index).form == "dropped":
                del self._posted[action.index]

    def _turn(self, index: int) -> Turn:
        step = self.program.steps[index]
        assert isinstance(step, Step)
        return step.turn(self.rank)

    def _count_threads(self, number: int) -> None:
        """Threads are counted by their first unnamed operation on a set, which has to come in the
        same order on all ranks."""
        steps = [s for _, s in self.program.collectives() if s.on == number and s.name is None]
        if all(step.thread == 0 for step in steps) or not self.sets[number].included():
            return
        for thread in sorted({step.thread for step in steps}):
            if thread == 0:
                hvd.barrier(self.sets[number])
            else:
                self._threads[thread - 1].begin(lambda: hvd.barrier(self.sets[number]))
                self._threads[thread - 1].end()

    def _event(self, index: int) -> Outcome:
        event = self.program.steps[index]
        if isinstance(event, Join):
            return Outcome(last=hvd.join())
        if isinstance(event, RemoveSet):
            removed = hvd.remove_process_set(self.sets.pop(event.number))
            return Outcome(wrong="" if removed is True else f"returned {removed}")
        assert isinstance(event, AddSet)
        number = sum(isinstance(step, AddSet) for step in self.program.steps[: index + 1])
        self.sets[number] = added = hvd.add_process_set(event.ranks)
        self._count_threads(number)
        ranks = sorted(event.ranks)
        own = ranks.index(self.rank) if self.rank in ranks else None
        wanted = ranks, len(ranks), own is not None, own
        got = added.ranks, added.size(), added.included(), added.rank()
        return Outcome(wrong="" if got == wanted else f"{got}, not {wanted}")

    def _post(self, index: int) -> Posted:
        step = self.program.steps[index]
        assert isinstance(step, Step)
        name, process_set = self._name_of(step), self.sets[step.on]
        return Posted(self.program, index, self.rank, name, process_set)

    def _name_of(self, step: Step) -> str | None:
        """The name to call it by: an operation whose handle is dropped may still be in flight when
        the next program begins."""
        if step.name is None or not (
            step.odd or any(turn.form == "dropped" for turn in step.turns.values())
        ):
            return step.name
        return f"{step.name} of {self.serial}"
