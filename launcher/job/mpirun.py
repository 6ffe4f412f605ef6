"""What is known about mpirun, or what starts the ranks in its place, and what it and its daemons
print, line by line. No clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hvdrun.plan.facts import in_users_words

# Open MPI writes the first two when a child was faster than its parent, and continues. srun writes
# the third if it can't bind, even when asked to bind nothing.
MEANINGLESS = (
    b"plm:ssh: Warning: setpgid",
    b"plm:rsh: Warning: setpgid",
    b"lacks support for cpu binding",
)
# Open MPI's message when a machine under load does not start one of its threads in time.
ILL_LUCK = "listener thread failed to start"
LINE_BYTES = 1 << 16  # a longer line is split into pieces of about this size
KEPT_LINES = 200
# mpirun's output is held back for this long: if a rank has failed, it is noise and is not shown.
NOISE_DELAY_S = 0.5


class MpirunOutput:
    """The lines of mpirun's stdout and stderr (one pipe) and of its daemons. No clock. `take`
    returns the lines to show, each once. `hosts`: the job's."""

    def __init__(self, hosts: Sequence[str] = ()) -> None:
        self.hosts = hosts
        self.waiting: list[tuple[float, str]] = []  # when each line came
        self.rest = bytearray()  # the start of a line whose end has not come
        self.taken: list[str] = []

    def feed(self, data: bytes, now: float) -> None:
        *lines, rest = data.replace(b"\0", b"").split(b"\n")
        if lines:
            lines[0] = bytes(self.rest) + lines[0]
            self.rest.clear()
        self.rest += rest
        if len(self.rest) > LINE_BYTES:
            lines.append(bytes(self.rest))
            self.rest.clear()
        self.waiting += [
            (now, in_users_words(line.decode(errors="replace").rstrip(), self.hosts))
            for line in lines
            if not any(part in line for part in MEANINGLESS)
        ]

    def end(self, now: float) -> None:
        """No more comes: a last line without its newline is a line."""
        if self.rest:
            self.feed(b"\n", now)

    def take(self, now: float, delay_s: float) -> list[str]:
        """The lines that have waited for at least `delay_s`."""
        ready = [line for at, line in self.waiting if at + delay_s <= now]
        del self.waiting[: len(ready)]
        self.taken = (self.taken + ready)[-KEPT_LINES:]
        return ready

    def untaken(self) -> list[str]:
        return [line for _, line in self.waiting]

    def everything(self) -> list[str]:
        return self.taken + self.untaken()

    def shows_ill_luck(self) -> bool:
        """Whether mpirun or one of its daemons failed with an error that a new start may avoid."""
        return any(ILL_LUCK in line for line in self.everything())


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
