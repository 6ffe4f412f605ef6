"""A job of the soak, drawn from a seed and a number. Pure: the same two give the same job."""

from __future__ import annotations

import random
from dataclasses import dataclass

MPIS = ("openmpi", "mpich")
# Ranks by host: server1, server2, …
LAYOUTS = ((2,), (3,), (1, 1), (2, 1), (1, 2), (2, 2), (1, 1, 1), (2, 1, 1), (1,))
LAYOUT_WEIGHTS = (2, 1, 3, 3, 3, 4, 3, 3, 1)
# The tiny ones take small tensors through every branch of the engine.
TINY = {
    "HVDLITE_INLINE_BYTES": "64",
    "HVDLITE_SEGMENT_BYTES": "256",
    "HVDLITE_BLOCK_BYTES": "256",
    "HVDLITE_PIECE_BYTES": "1024",
}
# Long enough for a machine that has much else to do.
STALL_S = 8
STALL_SHUTDOWN_S = 24
HOST_TIMEOUT_S = 8


@dataclass(frozen=True)
class Kind:
    """A fault that there is.

    weight: how often it is drawn; ranks, hosts: what a job needs at least to have it.
    inside: a worker does it to itself. has_victim: it happens to one rank. over_ssh: only where
        hvdrun has started the hosts. for_s: for how long, for what passes by itself.
    plain: the ranks only do what all of them take part in, so that it is known who waits for whom.
    """

    weight: int = 2
    ranks: int = 1
    hosts: int = 1
    inside: bool = False
    has_victim: bool = True
    over_ssh: bool = False
    for_s: tuple[float, float] = (0.0, 0.0)
    plain: bool = False
    knobs: tuple[tuple[str, str], ...] = ()
    options: tuple[str, ...] = ()


KINDS = {
    "none": Kind(weight=16, has_victim=False),
    "SIGKILL": Kind(weight=4),
    "SIGSEGV": Kind(),
    "exit": Kind(inside=True),
    "exception": Kind(inside=True),
    "pause": Kind(weight=4, for_s=(0.3, 3.0)),
    "stall": Kind(
        weight=3,
        ranks=2,
        for_s=(2.2 * STALL_S, 2.8 * STALL_S),
        plain=True,
        knobs=(("HVDLITE_STALL_CHECK_TIME_SECONDS", str(STALL_S)),),
    ),
    "stall for ever": Kind(
        ranks=2,
        plain=True,
        knobs=(
            ("HVDLITE_STALL_CHECK_TIME_SECONDS", str(STALL_S)),
            ("HVDLITE_STALL_SHUTDOWN_TIME_SECONDS", str(STALL_SHUTDOWN_S)),
        ),
    ),
    "Ctrl-C": Kind(has_victim=False),
    "TERM": Kind(has_victim=False),
    "hvdrun killed": Kind(has_victim=False),
    "hvdrun paused": Kind(has_victim=False, for_s=(7.5, 11.0), weight=1),
    "agent killed": Kind(hosts=2, over_ssh=True, has_victim=False),
    "keeper killed": Kind(),
    "link down": Kind(hosts=2, for_s=(1.0, 9.0), has_victim=False),
    "link cut": Kind(
        hosts=2,
        over_ssh=True,
        has_victim=False,
        options=("--host-timeout", str(HOST_TIMEOUT_S)),
        weight=1,
    ),
    "flipped bit": Kind(
        ranks=3,
        inside=True,
        knobs=(("HVDLITE_CHECK_PARAMETERS", "1"),),
    ),
    "NaN": Kind(ranks=2, inside=True, knobs=(("HVDLITE_CHECK_NUMERICS", "1"),)),
}


@dataclass(frozen=True)
class Fault:
    """kind: of KINDS. victim: the rank of the job that has it, or -1. host: the number of the host
    that has it, from 0. at_round: in which round, at the earliest; then after `wait_s`."""

    kind: str
    victim: int = -1
    host: int = 0
    at_round: int = 0
    wait_s: float = 0.0
    for_s: float = 0.0


@dataclass(frozen=True)
class Job:
    """rounds: of a job without a fault from outside; others go on until they are told to end."""

    seed: int
    number: int
    mpi: str
    layout: tuple[int, ...]
    start: str  # "ssh" or "rendezvous"
    servers: int
    knobs: tuple[tuple[str, str], ...]
    options: tuple[str, ...]
    timeline: bool
    rounds: int
    programs: int
    fault: Fault

    @property
    def size(self) -> int:
        return sum(self.layout)

    @property
    def workers(self) -> int:
        return self.size - self.servers

    @property
    def kind(self) -> Kind:
        return KINDS[self.fault.kind]

    @property
    def waits_for_end(self) -> bool:
        """It goes on until it is told to end: a fault comes from outside."""
        return self.fault.kind != "none" and not self.kind.inside

    def host_of(self, rank: int) -> str:
        """By name. The ranks are dealt out host by host."""
        for number, ranks in enumerate(self.layout, 1):
            if rank < ranks:
                return f"server{number}"
            rank -= ranks
        raise ValueError(rank)

    def __str__(self) -> str:
        what = [self.mpi, "+".join(map(str, self.layout)), self.start]
        what += [f"{self.servers} server"] if self.servers else []
        what += [name.removeprefix("HVDLITE_").lower() + "=" + value for name, value in self.knobs]
        what += [word for word in self.options if word.startswith("--")]
        what += ["timeline"] if self.timeline else []
        fault = self.fault
        what.append(fault.kind if fault.kind != "none" else "no fault")
        if fault.victim >= 0:
            what.append(f"rank {fault.victim}")
        if self.kind.hosts > 1:
            what.append(f"server{fault.host + 1}")
        if fault.for_s:
            what.append(f"{fault.for_s:.1f} s")
        return " ".join(what)


def draw(seed: int, number: int, kind: str | None = None) -> Job:
    """The job with that number. kind: a fault that it is to have instead of a drawn one."""
    chance = random.Random(f"{seed} {number}")
    name = chance.choices(list(KINDS), [each.weight for each in KINDS.values()])[0]
    name = kind or name
    wanted = KINDS[name]
    layout: tuple[int, ...] = chance.choices(LAYOUTS, LAYOUT_WEIGHTS)[0]
    while sum(layout) < wanted.ranks or len(layout) < wanted.hosts:
        layout = chance.choices(LAYOUTS, LAYOUT_WEIGHTS)[0]
    size = sum(layout)
    over_ssh = wanted.over_ssh or len(layout) == 1 or chance.random() < 0.7
    if not over_ssh:
        layout = tuple(sorted(layout, reverse=True))  # as hosts that meet share the ranks out
    may_serve = size > 1 and not (wanted.inside or wanted.plain)
    servers = int(chance.random() < 0.2 and may_serve)
    knobs = dict(wanted.knobs)
    for knobs_drawn, share in (
        (TINY, 0.15),
        ({"HVDLITE_DETERMINISTIC": "1"}, 0.15),
        ({"HVDLITE_CHECK_PARAMETERS": "2"}, 0.2),
        ({"HVDLITE_CHECK_NUMERICS": "1"}, 0.15),
        ({"HVDLITE_BLACK_BOX": "0"}, 0.2),
        ({"HVDLITE_STRICT": "1"}, 0.2),
    ):
        if chance.random() < share:
            knobs = {**knobs_drawn, **knobs}
    options = [*wanted.options]
    for option, share in (("--summary", 0.4), ("--disable-cache", 0.2), ("--verbose", 0.0)):
        if chance.random() < share:
            options.append(option)
    fault = Fault(
        name,
        victim=chance.randrange(size) if wanted.has_victim else -1,
        host=chance.randrange(1, max(2, len(layout))) if wanted.hosts > 1 else 0,
        at_round=chance.randrange(1, 12),
        wait_s=round(chance.uniform(0, 1.0), 2),
        for_s=round(chance.uniform(*wanted.for_s), 1),
    )
    return Job(
        seed,
        number,
        chance.choice(MPIS),
        layout,
        "ssh" if over_ssh else "rendezvous",
        servers,
        tuple(sorted(knobs.items())),
        tuple(options),
        chance.random() < 0.25,
        rounds=fault.at_round + chance.randrange(4, 30),
        programs=0 if wanted.plain or not 2 <= size - servers <= 4 else chance.randrange(5),
        fault=fault,
    )
