"""Which backward of which step a round belongs to, and whether that is the same on all ranks.

Ranks that run different numbers of backward passes would add gradients that do not belong together.
So every round carries this rank's position: on the host as two one-hot vectors, a few elements that
are summed with a bucket. If all ranks have the same position, exactly one element of each vector is
not zero. That holds in 16 bits, with every scale factor, and with joined ranks.
Only if the sums show a difference do the ranks exchange their positions
(`hvdlite.optimizer.checks.position_exchange`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Phases (begins and ends of steps) are told apart modulo _PHASES, rounds of a step modulo _ROUNDS.
_PHASES = 8
_ROUNDS = 4
ELEMS = _PHASES + _ROUNDS


class Position:
    """The position of one optimizer on this rank.

    phase: even between steps, odd inside one; it stays odd if an exception ends the step, as the
        parameters are in an unknown state then. rounds: since the last step.
    """

    __slots__ = ("phase", "rounds")

    def __init__(self) -> None:
        self.phase = 0
        self.rounds = 0

    def begin_step(self) -> None:
        self.phase += 1 + self.phase % 2

    def end_step(self) -> None:
        self.phase, self.rounds = self.phase + 2 - self.phase % 2, 0

    def restart(self, phase: int = 0) -> None:
        """Restarts between two steps, so that all ranks have the same position again."""
        self.phase, self.rounds = phase + phase % 2, 0

    def row(self) -> int:
        """The row of this position in `one_hots`."""
        return self.phase % _PHASES * _ROUNDS + self.rounds % _ROUNDS


def one_hots(like: torch.Tensor) -> Sequence[torch.Tensor]:
    """By row of a position: what a rank at it adds. like: gives dtype and device."""
    rows = torch.zeros(_PHASES * _ROUNDS, ELEMS, dtype=like.dtype, device=like.device)
    for row in range(len(rows)):
        rows[row, row // _ROUNDS] = rows[row, _PHASES + row % _ROUNDS] = 1
    return rows.unbind()


def is_one(total: torch.Tensor) -> bool:
    """Whether all ranks that have added to this total have the same position."""
    return total.tolist().count(0.0) == ELEMS - 2
