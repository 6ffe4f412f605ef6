"""Moves state from the ranks that have it to those that want it, one parameter after the other."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvdlite.collectives.alltoall import alltoall
from hvdlite.collectives.objects import allgather_object
from hvdlite.optimizer.sharding.division import Part, parts_of
from hvdlite.optimizer.sharding.pieces import Piece, State, Whole, by_index, states_of
from hvdlite.own_names import renamed
from hvdlite.world.teams.process_sets import ProcessSet


@dataclass(frozen=True)
class Move:
    """One collective move of state among the owners of the parameters.

    name: Of the operations, the same on every member of the process set. members: The owners, by
    their numbers in it. Where the ranks of each host share the state among them, they are those of
    this host, and give to each other only. owner: Which of them this rank is. held, wanted: What
    each of them has and wants.
    """

    name: str
    process_set: ProcessSet
    members: Sequence[int]
    owner: int
    wholes: Sequence[Whole]
    held: Sequence[Sequence[Part]]
    wanted: Sequence[Sequence[Part]]

    def states(
        self, own: Sequence[Piece], wanted: Sequence[Part], copies: bool = False
    ) -> list[State]:
        """The states of what this rank wants; in host memory where they have moved. Collective;
        blocks.

        own: What it holds. wanted: What it wants, in any portions; ascending. copies: Whether all
            of it is in host memory of its own, also where nothing moves.

        Raises:
            ValueError: The owners' states do not belong together; on every rank, with the same
                text.
        """
        pieces_of = by_index(own)
        stateful = self._gathered({part.index for part, state in own if state}, "keys")
        states: list[State] = []
        failure = None
        for index in range(len(self.wholes)):
            pieces = pieces_of.get(index, [])
            if any(index in each for each in stateful):
                pieces = pieces + self._exchanged(index, pieces)
            try:
                found = states_of(parts_of(index, wanted), pieces, self.wholes)
                states += [_in_host_memory(state, copies) for state in found] if copies else found
            except ValueError as error:
                failure = failure or str(error)
        for text in filter(None, self._gathered(failure, "errors")):
            raise ValueError(text)
        return states

    def _gathered(self, thing: Any, what: str) -> list[Any]:
        name = renamed(self.name, f"{self.name}.{what}")
        return allgather_object(thing, name=name, process_set=self.process_set)

    def _exchanged(self, index: int, pieces: Sequence[Piece]) -> list[Piece]:
        """What this rank gets of one parameter. pieces: what it holds of it. Collective."""
        import cloudpickle

        rows = [b""] * (self.process_set.size() or 1)
        for taker, member in enumerate(self.members):
            rows[member] = cloudpickle.dumps(self._given(index, taker, pieces))
        name = renamed(self.name, f"{self.name}.elements")
        sent = torch.frombuffer(bytearray().join(rows), dtype=torch.uint8)
        received, splits = alltoall(sent, list(map(len, rows)), name, self.process_set)
        came = [row.numpy().data for row in received.split(splits.tolist()) if len(row)]
        return [piece for row in came for piece in pickle.loads(row)]

    def _given(self, index: int, taker: int, pieces: Sequence[Piece]) -> list[Piece]:
        """What this rank gives to another owner: what that wants of a parameter, and has not."""
        has = parts_of(index, self.held[taker])
        given: list[Piece] = []
        for wanted in parts_of(index, self.wanted[taker]):
            for part, state in pieces if taker != self.owner and wanted not in has else ():
                if (common := part.common(wanted)) is not None:
                    # With its neighbours: one element does not tell a cut tensor from a number.
                    begin, end = max(part.begin, common.begin - 1), min(part.end, common.end + 1)
                    wider = Part(index, begin, end)
                    (cut,) = states_of([wider], [(part, state)], self.wholes)
                    given.append((wider, _in_host_memory(cut)))
        return given


def _in_host_memory(state: State, copy: bool = False) -> State:
    return {
        key: value.to("cpu", copy=copy) if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }
