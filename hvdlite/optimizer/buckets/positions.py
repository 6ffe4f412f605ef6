"""Which backward of which step a round belongs to, and whether all ranks say the same of it.

Ranks that run different numbers of backwards reduce gradients that do not belong together. So every
round carries this rank's position: on the host as a one-hot of a few elements that are summed
with a bucket. Where all ranks have the same position, one element of each part is not zero. That
survives 16 bits and every scale factor, and ranks that have joined.
Only where the sums show a difference do the ranks exchange their positions
(`hvdlite.optimizer.checks.position_exchange`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Begins and ends of steps are told apart modulo this number, and rounds of a step modulo that one.
_PHASES = 8
_ROUNDS = 4
ELEMS = _PHASES + _ROUNDS


class Position:
    """Of one optimizer on this rank.

    phase: even between steps, odd inside one: also where an exception ended it, which leaves nobody
        knows what in the parameters. rounds: since the last step.
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
        """The ranks count alike again, between the same steps."""
        self.phase, self.rounds = phase + phase % 2, 0

    def row(self) -> int:
        """Which of the `one_hots` is this position's."""
        return self.phase % _PHASES * _ROUNDS + self.rounds % _ROUNDS


def one_hots(like: torch.Tensor) -> Sequence[torch.Tensor]:
    """By row: what a rank at this position adds. like: gives dtype and device."""
    rows = torch.zeros(_PHASES * _ROUNDS, ELEMS, dtype=like.dtype, device=like.device)
    for row in range(len(rows)):
        rows[row, row // _ROUNDS] = rows[row, _PHASES + row % _ROUNDS] = 1
    return rows.unbind()


def is_one(total: torch.Tensor) -> bool:
    """Whether all ranks that have added to this total have the same position."""
    return total.tolist().count(0.0) == ELEMS - 2
