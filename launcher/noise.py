"""What mpirun and its daemons say, line by line."""

from __future__ import annotations

from dataclasses import dataclass, field

# Open MPI says it where the child was faster than the parent, and goes on; srun where it is told to
# bind nothing and can't bind.
MEANINGLESS = (
    b"plm:ssh: Warning: setpgid",
    b"plm:rsh: Warning: setpgid",
    b"lacks support for cpu binding",
)
# Open MPI's words where a machine under load did not start a thread of it in time.
ILL_LUCK = "listener thread failed to start"


@dataclass
class Noise:
    """Of both of its outputs; `take` gives what is to be shown, and each line once."""

    lines: list[tuple[float, str]] = field(default_factory=list)
    rest: bytes = b""
    all: list[str] = field(default_factory=list)

    def feed(self, data: bytes, now: float) -> None:
        *lines, self.rest = (self.rest + data.replace(b"\0", b"")).split(b"\n")
        self.lines += [
            (now, line.decode(errors="replace").rstrip())
            for line in lines
            if not any(part in line for part in MEANINGLESS)
        ]

    def take(self, until: float) -> list[str]:
        ready = [line for at, line in self.lines if at <= until]
        self.lines = [(at, line) for at, line in self.lines if at > until]
        self.all = (self.all + ready)[-200:]
        return ready

    def everything(self) -> list[str]:
        return self.all + [line for _, line in self.lines]

    def is_of_ill_luck(self) -> bool:
        """Whether mpirun or a daemon of it failed of what does not happen every time."""
        return any(ILL_LUCK in line for line in self.everything())
