"""Which backward of which step a round belongs to, and whether that is the same on all ranks.

Ranks that run different numbers of backward passes would add gradients that do not belong together;
and a rank whose backward has raised brings only some of its gradients. So every round carries this
rank's position: on the host as one-hot vectors, a few elements that are summed with the last
bucket. If all ranks have the same position, exactly one element of each vector is not zero. That
holds in 16 bits, with every scale factor, and with joined ranks.
Only if the sums show a difference do the ranks exchange their positions
(`hvdlite.optimizer.checks.position_exchange`).
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence

import torch

# Phases (begins and ends of steps) are told apart modulo _PHASES, rounds of a step modulo _ROUNDS;
# rounds with weights from those without; and those whose backward has raised from others.
_PHASES = 8
_ROUNDS = 4
_WEIGHTED = 2
_RAISED = 2
_SIZES = (_PHASES, _ROUNDS, _WEIGHTED, _RAISED)
ELEMS = sum(_SIZES)


class Position:
    """The position of one optimizer on this rank.

    phase: even between steps, odd inside one; it stays odd if an exception ends the step, as the
        parameters are in an unknown state then. rounds: since the last step. weight: of this rank
        in the round; None: the round has no weights. weight_in_input: its gradients come to the
        buckets multiplied by it. error: what the round's backward or step has raised here, so that
        gradients may be missing, and no step will be made with them; else empty.
    """

    __slots__ = ("error", "phase", "rounds", "weight", "weight_in_input")

    def __init__(self) -> None:
        self.phase = 0
        self.rounds = 0
        self.weight: float | None = None
        self.weight_in_input = False
        self.error = ""

    def begin_step(self) -> None:
        self.phase += 1 + self.phase % 2

    def end_step(self) -> None:
        self.phase, self.rounds = self.phase + 2 - self.phase % 2, 0

    def restart(self, phase: int = 0) -> None:
        """Restarts between two steps, so that all ranks have the same position again."""
        self.phase, self.rounds = phase + phase % 2, 0

    def numbers(self) -> tuple[int, int, int, int]:
        """Phase, rounds, whether the round has weights, and whether its backward has raised: what
        the ranks compare."""
        return self.phase, self.rounds, int(self.weight is not None), int(bool(self.error))

    def row(self) -> int:
        """The row of this position in `one_hots`."""
        row = 0
        for number, size in zip(self.numbers(), _SIZES, strict=True):
            row = row * size + number % size
        return row


def error_in_words() -> str:
    """What the program handles now, which is mostly what has raised; "an exception" if nothing."""
    error = sys.exc_info()[0]
    return "an exception" if error is None else error.__name__


def one_hots(like: torch.Tensor) -> Sequence[torch.Tensor]:
    """By row of a position: what a rank at it adds. like: gives dtype and device."""
    rows = torch.zeros(math.prod(_SIZES), ELEMS, dtype=like.dtype, device=like.device)
    for row, numbers in enumerate(itertools.product(*map(range, _SIZES))):
        begin = 0
        for number, size in zip(numbers, _SIZES, strict=True):
            rows[row, begin + number] = 1
            begin += size
    return rows.unbind()


def is_one(total: torch.Tensor) -> bool:
    """Whether all ranks that have added to this total have the same position."""
    return total.tolist().count(0.0) == ELEMS - len(_SIZES)
