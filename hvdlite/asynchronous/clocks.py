"""The rules of who may go on: a vector clock for bounded staleness, and rounds.

Pure: no messages, no tensors. Each server keeps these of its own, from what the workers send it.

The invariant of bounded staleness s: the parameters with which a worker computes its step t (its
steps are numbered from 0) contain the first t - s steps of every worker that takes part. As a
worker's step is contained only after it was made, no worker is more than s steps ahead of the
slowest one.
"""

from __future__ import annotations


class Clocks:
    """How many steps each worker has made, as far as its pushes have been applied here."""

    def __init__(self, num_workers: int) -> None:
        self.made = [0] * num_workers
        # They have joined: they do not count until all have.
        self.away: set[int] = set()
        # They have left for good.
        self.gone: set[int] = set()

    def counted(self) -> list[int]:
        """The workers that the others wait for."""
        return [w for w in range(len(self.made)) if w not in self.away and w not in self.gone]

    def step(self, worker: int) -> None:
        """A step of this worker has been applied."""
        self.made[worker] += 1

    def slowest(self) -> int | None:
        """The steps of the worker that has made the fewest; None if no worker counts."""
        return min((self.made[worker] for worker in self.counted()), default=None)

    def holds(self, needs: int) -> bool:
        """Whether the parameters here contain the first `needs` steps of every worker."""
        slowest = self.slowest()
        return slowest is None or slowest >= needs

    def join(self, worker: int) -> bool:
        """The worker has no more data. Whether all have joined: then all count again, and are level
        with the one that has made the most steps."""
        self.away.add(worker)
        return self._is_over()

    def leave(self, worker: int) -> bool:
        """The worker has ended. Whether that leaves only such that have joined, as above."""
        self.away.discard(worker)
        self.gone.add(worker)
        return bool(self.away) and self._is_over()

    def _is_over(self) -> bool:
        if self.counted():
            return False
        if self.away:
            most = max(self.made[worker] for worker in self.away)
            for worker in self.away:
                self.made[worker] = most
            self.away.clear()
        return True


class Rounds:
    """Steps that several workers make together, with the mean of their gradients.

    A round ends when `quorum` workers have given their gradients for it, or all that count have.
    What is given for a round that has ended is too late.
    """

    def __init__(self, num_workers: int, quorum: int) -> None:
        self.num_workers = num_workers
        self.quorum = quorum
        # The number of the current one.
        self.round = 0
        self.given: list[int] = []
        self.dropped = 0

    def give(self, worker: int, round_number: int) -> bool:
        """A worker's gradients of a round have come. Whether they count; else they are dropped."""
        if round_number > self.round or worker in self.given:
            raise ValueError(
                f"worker {worker} gives gradients of round {round_number}, but round {self.round} "
                f"is the current one, with gradients of {sorted(self.given)}"
            )
        if round_number < self.round:
            self.dropped += 1
            return False
        self.given.append(worker)
        return True

    def is_complete(self, counted: list[int]) -> bool:
        """counted: the workers that take part."""
        if not self.given:
            return False
        return len(self.given) >= self.quorum or all(worker in self.given for worker in counted)

    def finish(self) -> list[int]:
        """Begins the next round. The workers whose gradients count, ascending."""
        given = sorted(self.given)
        self.given = []
        self.round += 1
        return given
