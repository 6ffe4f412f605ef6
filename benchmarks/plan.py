"""What is measured, where and how long. Pure, so that a test can see every choice."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

KIB, MIB = 1024, 1024 * 1024

T = TypeVar("T")


@dataclass(frozen=True)
class Effort:
    """How often something is timed: at least min_rounds, then until the time is over."""

    max_rounds: int
    budget_s: float
    min_rounds: int = 3

    def enough(self, rounds: int, elapsed_s: float) -> bool:
        if rounds < self.min_rounds:
            return False
        return rounds >= self.max_rounds or elapsed_s >= self.budget_s


@dataclass(frozen=True)
class Place:
    """Where ranks stand."""

    ranks: int  # on each host
    hosts: int = 1  # more than one: hosts of the rig
    rate: str = ""  # of each host's link, each way, such as 10gbit; "": not shaped

    @property
    def size(self) -> int:
        return self.ranks * self.hosts

    def __str__(self) -> str:
        if self.hosts == 1:
            return f"{self.ranks} ranks on one host"
        each = "one rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return f"{self.hosts} hosts with {each} each, {rate_text(self.rate)}"


def rate_text(rate: str) -> str:
    """Of a link.

    >>> rate_text("10gbit"), rate_text("")
    ('10 Gbit/s', 'unshaped')
    """
    return rate.replace("gbit", " Gbit/s") if rate else "unshaped"


SLOWEST = "1gbit"
TRAINED_BETWEEN = Place(1, 2, "1gbit")  # where steps of FSDP2 between hosts are timed


@dataclass(frozen=True)
class Flavour:
    """An MPI: the Python that finds it, and the thread level that it is initialized with."""

    python: str
    thread_level: str

    def __str__(self) -> str:
        """Without the path, which a reader elsewhere does not have."""
        return f"{Path(self.python).parents[1].name} ({self.thread_level})"


@dataclass(frozen=True)
class Job:
    """One start of the worker on all ranks of a place; `parts` are those of worker.PARTS."""

    place: Place
    flavour: Flavour
    parts: tuple[str, ...]
    sizes_bytes: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """Everything that one run of the command measures."""

    ranks: tuple[int, ...]  # on this host
    sizes_bytes: tuple[int, ...]
    allreduce: Effort  # for each size
    types_bytes: tuple[int, ...]  # of the float32 tensor
    tail_bytes: tuple[int, ...]
    tail: Effort
    tasks: tuple[str, ...]
    training: Effort
    c10d: tuple[tuple[str, tuple[int, ...]], ...]  # operations of c10d.py, with sizes in bytes
    c10d_effort: Effort  # for each size
    wrapped: tuple[tuple[str, str], ...]  # of wrapped.py: DDP or FSDP2, and a task
    wrapped_effort: Effort
    upkeep_times: int
    idle_s: float  # each time
    late_s: float
    links: tuple[tuple[str, tuple[int, ...]], ...]  # of the rig: rate, sizes in bytes
    shapes: tuple[tuple[int, int], ...]  # of the rig: hosts, ranks on each
    between: Effort  # for each size of an allreduce between hosts
    halves_from_bytes: int  # the least size of a reducescatter between hosts
    instruction_counts: tuple[int, int]  # how many operations, in two runs
    sharded: Effort = Effort(max_rounds=40, budget_s=25.0, min_rounds=5)
    weighted: Effort = Effort(max_rounds=1000, budget_s=30.0)
    copied_layers: int = 24  # of copies.py: 100 million parameters
    dataset_bytes: int = 2048 * MIB
    asynchronous_s: float = 8.0  # how long each contender trains beside a slow worker
    asynchronous_loss: float = 0.5  # which they then reach


C10D_BYTES = (64 * KIB, MIB, 16 * MIB, 64 * MIB)
FULL = Plan(
    ranks=(2, 4, 8),
    sizes_bytes=tuple(4 ** (k + 1) for k in range(14)),  # 4 B, 16 B, … 256 MiB
    allreduce=Effort(max_rounds=100, budget_s=2.0, min_rounds=5),
    types_bytes=(MIB, 16 * MIB, 64 * MIB),
    tail_bytes=(4, KIB, 16 * KIB),
    tail=Effort(max_rounds=4000, budget_s=5.0),
    tasks=("mlp", "deep", "resnet", "tiny"),
    training=Effort(max_rounds=60, budget_s=20.0),
    c10d=(
        ("all_gather_into_tensor", C10D_BYTES),
        ("reduce_scatter_tensor", C10D_BYTES),
        ("all_to_all_single", C10D_BYTES),
        ("all_reduce", (16, *C10D_BYTES)),
        ("send and recv, there and back", (4, 64 * MIB)),
    ),
    c10d_effort=Effort(max_rounds=100, budget_s=2.0, min_rounds=9),
    wrapped=(("DDP", "mlp"), ("DDP", "deep"), ("FSDP2", "mlp"), ("FSDP2", "deep")),
    wrapped_effort=Effort(max_rounds=40, budget_s=15.0),
    upkeep_times=3,
    idle_s=10.0,
    late_s=5.0,
    links=(
        ("", (4, KIB, 4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB)),
        ("10gbit", (MIB, 16 * MIB, 64 * MIB)),
        ("1gbit", (MIB, 16 * MIB)),
    ),
    shapes=((2, 1), (2, 2), (4, 1), (4, 2)),
    between=Effort(max_rounds=60, budget_s=1.5, min_rounds=5),
    halves_from_bytes=MIB,
    instruction_counts=(500, 1500),
)
QUICK = replace(
    FULL,
    asynchronous_s=3.0,
    asynchronous_loss=1.0,
    sharded=Effort(max_rounds=10, budget_s=4.0),
    weighted=Effort(max_rounds=200, budget_s=4.0),
    copied_layers=6,
    dataset_bytes=256 * MIB,
    ranks=(2,),
    sizes_bytes=(4, KIB, 16 * KIB, 256 * KIB, MIB, 16 * MIB, 64 * MIB),
    allreduce=Effort(max_rounds=30, budget_s=0.7),
    types_bytes=(4 * MIB,),
    tail_bytes=(4,),
    tail=Effort(max_rounds=1000, budget_s=2.0),
    training=Effort(max_rounds=20, budget_s=3.0),
    c10d=tuple((name, tuple(s for s in sizes if s != MIB)) for name, sizes in FULL.c10d),
    c10d_effort=Effort(max_rounds=20, budget_s=0.4),
    wrapped=(("DDP", "mlp"), ("FSDP2", "mlp")),
    wrapped_effort=Effort(max_rounds=10, budget_s=2.0),
    upkeep_times=1,
    idle_s=2.0,
    late_s=1.0,
    links=(("1gbit", (16 * MIB,)),),
    shapes=((2, 1),),
)
# For the tests of the benchmark itself: everything once, no figures.
TINY = replace(
    QUICK,
    asynchronous_s=0.2,
    asynchronous_loss=10.0,
    sharded=Effort(max_rounds=2, budget_s=0.0, min_rounds=2),
    weighted=Effort(max_rounds=2, budget_s=0.0, min_rounds=2),
    copied_layers=1,
    dataset_bytes=MIB,
    sizes_bytes=(4, 256 * KIB),
    allreduce=Effort(max_rounds=2, budget_s=0.0, min_rounds=2),
    types_bytes=(MIB,),
    tail=Effort(max_rounds=3, budget_s=0.0),
    tasks=("mlp",),
    training=Effort(max_rounds=2, budget_s=0.0, min_rounds=2),
    c10d=(
        ("all_gather_into_tensor", (64 * KIB,)),
        ("reduce_scatter_tensor", (64 * KIB,)),
        ("all_to_all_single", (64 * KIB,)),
        ("all_reduce", (16,)),
        ("send and recv, there and back", (4,)),
    ),
    c10d_effort=Effort(max_rounds=2, budget_s=0.0, min_rounds=2),
    wrapped_effort=Effort(max_rounds=2, budget_s=0.0, min_rounds=2),
    upkeep_times=2,
    idle_s=0.1,
    late_s=0.1,
    links=(("1gbit", (64 * KIB,)),),
    between=Effort(max_rounds=2, budget_s=0.0, min_rounds=2),
    halves_from_bytes=KIB,
    instruction_counts=(10, 30),
)
PLANS = {"full": FULL, "quick": QUICK, "tiny": TINY}


def plan_from(fields: dict[str, Any]) -> Plan:
    """What asdict() and JSON have made of a plan, as a plan again."""
    efforts = tuple(name for name, default in vars(FULL).items() if isinstance(default, Effort))
    return Plan(**{**fields, **{name: Effort(**fields[name]) for name in efforts}})


def job_from(fields: dict[str, Any]) -> Job:
    """The same for a job."""
    parts = {"place": Place(**fields["place"]), "flavour": Flavour(**fields["flavour"])}
    return Job(**{**fields, **parts})


def request_of(plan: Plan, job: Job) -> dict[str, Any]:
    """The worker's argument, which plan_from and job_from read."""
    return {"plan": asdict(plan), "job": asdict(job)}


def jobs(plan: Plan, flavours: Sequence[Flavour], wanted: Collection[str], cores: int) -> list[Job]:
    """The jobs to start, in this order: this host's, then those of the rig.

    wanted: parts of worker.PARTS, and "rig", for those of several hosts. What does not depend on
    the MPI is measured under the first only, what the waiting depends on under the first of each
    Python.
    """
    return [
        *upkeep_jobs(plan, flavours, wanted),
        *host_jobs(plan, flavours, wanted, cores),
        *rig_jobs(plan, flavours, wanted, cores),
    ]


def upkeep_jobs(plan: Plan, flavours: Sequence[Flavour], wanted: Collection[str]) -> Iterator[Job]:
    """First: for tens of seconds after much memory was in use, even a program that only sleeps may
    be charged with several times as much CPU time (docs/benchmarks.md)."""
    if "upkeep" not in wanted:
        return
    places = [Place(2)]
    if "rig" in wanted and any(not rate for rate, _ in plan.links):
        places.append(Place(1, hosts=2))
    for place in places:
        for flavour in firsts(flavours):
            yield Job(place, flavour, ("upkeep",), ())


def host_jobs(
    plan: Plan, flavours: Sequence[Flavour], wanted: Collection[str], cores: int
) -> Iterator[Job]:
    for place in map(Place, plan.ranks):
        for flavour in fitting(flavours, place, cores):
            parts = ["allreduce"]
            if place.size == 2:
                parts += ["tail"] if flavour in firsts(flavours) else []
                once = ["types", "training", "sharded", "weighted"]
                parts += once if flavour == flavours[0] else []
            if place.size in (2, 4):
                parts += ["c10d", "wrapped"] if flavour == flavours[0] else []
            chosen = tuple(part for part in parts if part in wanted)
            if chosen:
                yield Job(place, flavour, chosen, plan.sizes_bytes)


def rig_jobs(
    plan: Plan, flavours: Sequence[Flavour], wanted: Collection[str], cores: int
) -> Iterator[Job]:
    """The allreduce between hosts, unless only other parts are wanted that are measured there;
    where links are slow, a reducescatter beside it, which is wanted there only."""
    if not {"rig", "reducescatter"} & set(wanted):
        return
    others = {"wrapped", "reducescatter"} & set(wanted)
    everywhere = "rig" in wanted and ("allreduce" in wanted or not others)
    basic = ("allreduce",) if everywhere else ()
    for rate, sizes_bytes in plan.links:
        for hosts, ranks in plan.shapes:
            place = Place(ranks, hosts, rate)
            for flavour in fitting(flavours, place, cores):
                trains = {"rig", "wrapped"} <= set(wanted) and place == TRAINED_BETWEEN
                halved = rate == SLOWEST and flavour in firsts(flavours)
                parts = (
                    *basic,
                    *(("reducescatter",) if halved and "reducescatter" in wanted else ()),
                    *(("wrapped",) if trains and flavour == flavours[0] else ()),
                )
                if parts:
                    yield Job(place, flavour, parts, sizes_bytes)


def fitting(flavours: Sequence[Flavour], place: Place, cores: int) -> list[Flavour]:
    """Where ranks outnumber the cores, those without serialized threads: MPICH, for which that is,
    then does not give up its core while it waits, and was seen to need minutes for one allreduce.
    """
    return [f for f in flavours if place.size <= cores or f.thread_level != "serialized"]


def firsts(flavours: Sequence[Flavour]) -> list[Flavour]:
    """The first of each Python."""
    return [f for i, f in enumerate(flavours) if f.python not in {g.python for g in flavours[:i]}]


def warm_up_rounds(size_bytes: int) -> int:
    return 1 if size_bytes >= 4 * MIB else 3


def calls(size_bytes: int) -> int:
    """How many allreduces, each on a buffer of its own, one timing covers.

    Ranks leave a barrier some microseconds apart, which would hide a call that is as short.
    """
    return 16 if size_bytes <= 16 * KIB else 1


def rotated(items: Sequence[T], by: int) -> list[T]:
    """The items from another start, so that none always follows the same other one.

    >>> rotated(["a", "b", "c"], 4)
    ['b', 'c', 'a']
    """
    by %= len(items)
    return [*items[by:], *items[:by]]
