"""Which backward of which step a round belongs to, and whether that is the same on all ranks.

Ranks that run different numbers of backward passes would add gradients that do not belong together.
So every round carries this rank's position: on the host as one-hot vectors, a few elements that
are summed with a bucket. If all ranks have the same position, exactly one element of each vector is
not zero. That holds in 16 bits, with every scale factor, and with joined ranks.
Only if the sums show a difference do the ranks exchange their positions
(`hvdlite.optimizer.checks.position_exchange`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Phases (begins and ends of steps) are told apart modulo _PHASES, rounds of a step modulo _ROUNDS;
# and rounds with weights from those without.
_PHASES = 8
_ROUNDS = 4
_WEIGHTED = 2
ELEMS = _PHASES + _ROUNDS + _WEIGHTED


class Position:
    """The position of one optimizer on this rank.

    phase: even between steps, odd inside one; it stays odd if an exception ends the step, as the
        parameters are in an unknown state then. rounds: since the last step. weight: of this rank
        in the round; None: the round has no weights. weight_in_input: its gradients come to the
        buckets multiplied by it.
    """

    __slots__ = ("phase", "rounds", "weight", "weight_in_input")

    def __init__(self) -> None:
        self.phase = 0
        self.rounds = 0
        self.weight: float | None = None
        self.weight_in_input = False

    def begin_step(self) -> None:
        self.phase += 1 + self.phase % 2

    def end_step(self) -> None:
        self.phase, self.rounds = self.phase + 2 - self.phase % 2, 0

    def restart(self, phase: int = 0) -> None:
        """Restarts between two steps, so that all ranks have the same position again."""
        self.phase, self.rounds = phase + phase % 2, 0

    def numbers(self) -> tuple[int, int, int]:
        """Phase, rounds, and whether the round has weights: what the ranks compare."""
        return self.phase, self.rounds, int(self.weight is not None)

    def row(self) -> int:
        """The row of this position in `one_hots`."""
        phase, rounds, weighted = self.numbers()
        return (phase % _PHASES * _ROUNDS + rounds % _ROUNDS) * _WEIGHTED + weighted


def one_hots(like: torch.Tensor) -> Sequence[torch.Tensor]:
    """By row of a position: what a rank at it adds. like: gives dtype and device."""
    rows = torch.zeros(_PHASES * _ROUNDS * _WEIGHTED, ELEMS, dtype=like.dtype, device=like.device)
    for row in range(len(rows)):
        rest, weighted = divmod(row, _WEIGHTED)
        phase, rounds = divmod(rest, _ROUNDS)
        rows[row, [phase, _PHASES + rounds, _PHASES + _ROUNDS + weighted]] = 1
    return rows.unbind()


def is_one(total: torch.Tensor) -> bool:
    """Whether all ranks that have added to this total have the same position."""
    return total.tolist().count(0.0) == ELEMS - 3
