"""From times to figures. Pure."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.plan import Place

OURS = "hvdlite"
PLAN = "hvdlite, plan"  # as in training: nothing is left to negotiate
DDP = "DDP (Gloo)"
GLOO = "Gloo"
ANY_CORE = "Gloo, any core"  # not bound to the cores of its rank
OPTIMIZER = "DistributedOptimizer"
IDLE = "a group that does nothing"
FLOOR = "no communication"  # what no contender can beat
BOUND = "bound"  # a copy, or streams between the hosts: likewise
# Between hosts: an allreduce, and its first half (halves.py).
ALLREDUCE = "allreduce"
REDUCESCATTER = "reducescatter"
WHOLE_PLAN = "plan of an allreduce"
TO_OWNERS = "plan of a reducescatter"
HALVES = {REDUCESCATTER: ALLREDUCE, TO_OWNERS: WHOLE_PLAN}
# Training whose update is divided (sharded.py), and one copy per host (copies.py).
SHARDED = "hvdlite, shard=True"
SHARED = "hvdlite, shard=True, shared parameters"
FREED = f"{SHARED}, free_gradients=True"
ZERO = "DDP with ZeroRedundancyOptimizer"
FSDP2 = "FSDP2"
ALONE = "one process"
DATASET = "dataset"
DATASETS = "dataset in each rank"
# Steps with set_weight (weighted.py).
PLAIN = "without weights"
ONES = "weights of 1"
EQUAL = "equal weights"
UNEQUAL = "unequal weights"
# Training beside a slow worker (asynchronous.py, reaching.py).
SYNCHRONOUS = "allreduce in each step"
SCALED = "allreduce in each step, learning rate times the workers"
PASSES = "passes"  # what an allreduce through shared memory can't beat on one host
PERCENTILES = (50.0, 90.0, 99.0, 99.9, 100.0)
BINS_PER_DECADE = 10


def slowest(times_s: Sequence[Sequence[float]]) -> list[float]:
    """times_s[rank][round] → the time of the slowest rank in each round."""
    return [max(of_round) for of_round in zip(*times_s, strict=True)]


def medians(times_s: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.median(times) for name, times in times_s.items()}


def algbw(size_bytes: int, time_s: float) -> float:
    """Bytes of the buffer per second: what a user sees."""
    return size_bytes / time_s


def busbw(size_bytes: int, time_s: float, ranks: int) -> float:
    """algbw · 2(n-1)/n: what each rank must at least send, per second.

    Comparable for any number of ranks, as an allreduce sends 2(n-1)/n times the buffer at best.
    """
    return algbw(size_bytes, time_s) * 2 * (ranks - 1) / ranks


def wire_bytes(size_bytes: int, hosts: int) -> int:
    """What each host must at least send, and receive, in an allreduce: 2(H-1)/H · N.

    >>> wire_bytes(1000, 2), wire_bytes(1000, 4)
    (1000, 1500)
    """
    return math.ceil(size_bytes * 2 * (hosts - 1) / hosts)


def ratio(medians_s: Mapping[str, float]) -> float:
    """The best peer's time over ours: above 1 hvdlite is faster."""
    return min(speedups(medians_s).values())


def speedups(medians_s: Mapping[str, float]) -> dict[str, float]:
    """Each peer's time over ours."""
    ours_s = medians_s[OURS]
    others = {name: time_s / ours_s for name, time_s in medians_s.items()}
    no_peers = (OURS, PLAN, FLOOR, BOUND, PASSES)
    return {name: r for name, r in others.items() if name not in no_peers}


def of_bound(medians_s: Mapping[str, float]) -> float:
    """The fraction of the bound's speed that hvdlite reaches."""
    return medians_s[BOUND] / medians_s[OURS]


def over_gloo(medians_s: Mapping[str, float]) -> float:
    """Gloo's time over ours, in the better of its bindings."""
    return min(medians_s[name] for name in (GLOO, ANY_CORE) if name in medians_s) / medians_s[OURS]


def not_hidden(medians_s: Mapping[str, float]) -> float:
    """The fraction of hvdlite's step that exceeds the step without communication."""
    return (medians_s[OURS] - medians_s[FLOOR]) / medians_s[OURS]


def more_percent(medians_s: Mapping[str, float], name: str) -> float:
    """By how much a step with weights exceeds that without."""
    return 100 * (medians_s[name] / medians_s[PLAIN] - 1)


@dataclass(frozen=True)
class Row:
    """Allreduces of one size at one place, from all runs there: one for each MPI."""

    size_bytes: int
    time_s: dict[str, float]  # by contender; of one that took part in several runs the median
    speedup: dict[str, float]  # by peer: its time over ours in the same run, the least of the runs
    of_bound: float  # the same way
    rounds: int
    cores: dict[str, float]  # between hosts: by contender, how many it keeps busy, of all hosts

    @property
    def ratio(self) -> float:
        return min(self.speedup.values())

    @property
    def against_mpi(self) -> float:
        """Ours against the MPIs' own Allreduce, the best of them."""
        return min(r for peer, r in self.speedup.items() if peer != "Gloo")


def rows_by_place(runs: Iterable[Mapping[str, Any]]) -> dict[Place, list[Row]]:
    """The runs' rows of an allreduce, those of one place and size put together."""
    found: dict[Place, dict[int, list[Mapping[str, Any]]]] = {}
    for run in runs:
        place = found.setdefault(Place(**run["place"]), {})
        for row in run.get("allreduce", ()):
            place.setdefault(row["bytes"], []).append(row)
    return {
        place: [joined(size_bytes, rows) for size_bytes, rows in sizes.items()]
        for place, sizes in found.items()
        if sizes
    }


def joined(size_bytes: int, rows: Sequence[Mapping[str, Any]]) -> Row:
    """One row of several runs'."""
    times: dict[str, list[float]] = {}
    against: dict[str, list[float]] = {}
    cores: dict[str, list[float]] = {}
    for row in rows:
        for name, busy in row.get("cores", {}).items():
            cores.setdefault(name, []).append(busy)
        for name, time_s in row["median_s"].items():
            times.setdefault(name, []).append(time_s)
        for name, speedup in speedups(row["median_s"]).items():
            against.setdefault(name, []).append(speedup)
    return Row(
        size_bytes,
        medians(times),
        {name: min(values) for name, values in against.items()},
        min(of_bound(row["median_s"]) for row in rows),
        min(row["rounds"] for row in rows),
        medians(cores),
    )


def _in_10_s(upkeep: Mapping[str, Any]) -> float:
    return 10 / float(upkeep["idle_for_s"])


def idle_in_10_s(upkeep: Mapping[str, Any], figure: str) -> list[float]:
    """Each rank's median over the repetitions, scaled to the same idle time.
    figure: of benchmarks.upkeep.idle()."""
    return [
        _in_10_s(upkeep) * statistics.median(repetition[figure] for repetition in repetitions)
        for repetitions in upkeep["idle"]
    ]


def most_idle_cpu_s_in_10_s(upkeep: Mapping[str, Any]) -> float:
    """Of all ranks and repetitions."""
    return _in_10_s(upkeep) * max(
        float(once["cpu_s"]) for times in upkeep["idle"] for once in times
    )


def sleeper_cpu_s_in_10_s(upkeep: Mapping[str, Any]) -> tuple[float, float]:
    """For a program that sleeps as often as an idle rank: the worst one's median, and the
    maximum."""
    programs, scale = upkeep["sleeper_cpu_s"], _in_10_s(upkeep)
    return scale * max(map(statistics.median, programs)), scale * max(map(max, programs))


def waiting_share(upkeep: Mapping[str, Any]) -> float:
    """The median of the worst rank."""
    return max(float(statistics.median(shares)) for shares in upkeep["waiting_share"])


def percentiles(times_s: Sequence[float]) -> list[float]:
    """For each of PERCENTILES the time that so many of the times do not exceed.

    >>> percentiles([float(i) for i in range(1, 1001)])
    [500.0, 900.0, 990.0, 999.0, 1000.0]
    """
    ordered = sorted(times_s)
    return [ordered[max(0, math.ceil(len(ordered) * p / 100) - 1)] for p in PERCENTILES]


def histogram(times_s: Iterable[float]) -> list[tuple[float, int]]:
    """(lower edge, how many times lie from there to the next edge), on a logarithmic scale, from
    the first bin with any to the last.

    >>> [(round(edge, 2), count) for edge, count in histogram([1.0, 1.01, 2.0])]
    [(1.0, 2), (1.26, 0), (1.58, 0), (2.0, 1)]
    """
    counts = Counter(math.floor(math.log10(time_s) * BINS_PER_DECADE) for time_s in times_s)
    bins = range(min(counts), max(counts) + 1)
    return [(10 ** (number / BINS_PER_DECADE), counts[number]) for number in bins]


def size_text(size_bytes: int) -> str:
    """
    >>> size_text(4), size_text(65536), size_text(64 << 20)
    ('4 B', '64 KiB', '64 MiB')
    """
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:g} {unit}"
    return f"{size_bytes} B"


def time_text(time_s: float) -> str:
    """Three digits, in the unit that fits.

    >>> time_text(2.5e-6), time_text(0.0123), time_text(1.5)
    ('2.50 µs', '12.3 ms', '1.50 s')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if time_s >= factor:
            return f"{digits(time_s / factor)} {unit}"
    return f"{digits(time_s * 1e6)} µs"


def digits(value: float) -> str:
    """Three significant ones, never with an exponent.

    >>> digits(1234.5), digits(12.345), digits(0.01234)
    ('1234', '12.3', '0.0123')
    """
    if value == 0:
        return "0"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{places}f}"
