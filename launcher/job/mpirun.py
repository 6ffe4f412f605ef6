"""What is known about mpirun, or what starts the ranks in its place. No clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hvdrun.job.mpirun_output import MpirunOutput

# mpirun's output is held back for this long: if a rank has failed, it is noise and is not shown.
NOISE_DELAY_S = 0.5


class Mpirun:
    """`name`: the program's, for its lines. `verbose`: its output is not held back. `hosts`: the
    job's. `code` is None while it runs."""

    def __init__(self, name: str, verbose: bool, hosts: Sequence[str]) -> None:
        self.name = name
        self.noise_delay_s = 0.0 if verbose else NOISE_DELAY_S
        self.output = MpirunOutput(hosts)
        self.output_is_open = True
        self.code: int | None = None
        self.ended_at = 0.0

    @property
    def runs(self) -> bool:
        return self.code is None

    def noise_at(self) -> float | None:
        """When a line is to be shown."""
        waiting = self.output.waiting
        return waiting[0][0] + self.noise_delay_s if waiting else None

    def noise(self, now: float) -> Iterator[str]:
        """The lines to be shown now."""
        for line in self.output.take(now, self.noise_delay_s):
            yield f"[{self.name}] {line}"
