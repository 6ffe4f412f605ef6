"""The targets, and whether a run meets them. Pure.

A peer's time is compared with hvdlite's of the same run, in which both took turns; where a place
was measured with several MPIs, the least favourable of its runs counts, and of several sizes the
worst.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.figures import (
    ALONE,
    BOUND,
    DATASET,
    DDP,
    FLOOR,
    FREED,
    FSDP2,
    HALVES,
    IDLE,
    OPTIMIZER,
    OURS,
    PLAIN,
    SHARDED,
    SHARED,
    ZERO,
    Row,
    digits,
    idle_in_10_s,
    more_percent,
    not_hidden,
    of_bound,
    over_gloo,
    rows_by_place,
    size_text,
    waiting_share,
)
from benchmarks.limits import Scale, Verdict, at_least, at_most
from benchmarks.networks import TASKS
from benchmarks.plan import KIB, MIB, Place

# A Horovod step over DDP's, as it was measured elsewhere (it does not install here): the better of
# what it reaches with and without MPI's yield. None of the ResNet.
HOROVOD_SPEEDUPS = {"mlp": (1.18,), "deep": (0.90, 1.28)}
MOST = 1 << 40


PEER = Scale("×", "as fast as the best peer")
GLOO = Scale("×", "as fast as Gloo")
PLAIN_MPI = Scale("×", "as fast as mpi4py's Allreduce")
COPY = Scale(" %", "of the copy bound")
WIRE = Scale(" %", "of the wire")


def verdicts(report: Mapping[str, Any]) -> list[Verdict]:
    """In the order in which the targets are listed."""
    runs = report["runs"]
    places = rows_by_place(runs)
    return [
        *on_one_host(places),
        *types([row for run in runs for row in run.get("types", ())]),
        *between_hosts(places),
        *halves(runs),
        *training([row for run in runs for row in run.get("training", ())]),
        *operations(runs),
        *wrapped(runs),
        *sharded([row for run in runs for row in run.get("sharded", ())]),
        weighted([row for run in runs for row in run.get("weighted", ())]),
        *upkeep(runs),
        *memory(report.get("memory")),
        *copies(report.get("copies")),
        *asynchronous(report.get("asynchronous")),
        servers(report.get("servers")),
    ]


def as_rows(found: Iterable[Verdict]) -> list[dict[str, Any]]:
    return [asdict(verdict) for verdict in found]


def of_sizes(
    rows: Iterable[Row], low: int, high: int, figure: Callable[[Row], float]
) -> list[tuple[str, float]]:
    """The figure for each size from low to high, both included."""
    return [
        (size_text(row.size_bytes), figure(row)) for row in rows if low <= row.size_bytes <= high
    ]


def best_peer(row: Row) -> float:
    return row.ratio


def gloo(row: Row) -> float:
    return row.speedup["Gloo"]


def plain_mpi(row: Row) -> float:
    return row.against_mpi


def bound_percent(row: Row) -> float:
    return 100 * row.of_bound


def on_one_host(places: Mapping[Place, Sequence[Row]]) -> list[Verdict]:
    two, four, eight = (places.get(Place(ranks), []) for ranks in (2, 4, 8))

    def against(limit: float, rows: Sequence[Row], low: int, high: int, work: str) -> Verdict:
        return at_least(limit, PEER, work, of_sizes(rows, low, high, best_peer))

    large, tiny = "2 ranks, 64 and 256 MiB", "2 ranks, 4 B to 4 KiB"
    return [
        against(2.5, two, 64 * MIB, MOST, large),
        at_least(80, COPY, large, of_sizes(two, 64 * MIB, MOST, bound_percent)),
        against(1.5, two, MIB, 16 * MIB, "2 ranks, 1, 4 and 16 MiB"),
        against(1.2, two, 16 * KIB, 256 * KIB, "2 ranks, 16 to 256 KiB"),
        at_least(20, GLOO, tiny, of_sizes(two, 0, 4 * KIB, gloo)),
        at_least(0.25, PLAIN_MPI, tiny, of_sizes(two, 0, 4 * KIB, plain_mpi)),
        against(3, four, 64 * MIB, MOST, "4 ranks, from 64 MiB"),
        against(2, four, 16 * MIB, 16 * MIB, "4 ranks, 16 MiB"),
        against(1.4, four, 256 * KIB, 4 * MIB, "4 ranks, 256 KiB to 4 MiB"),
        against(1, four, 0, 64 * KIB, "4 ranks, below 256 KiB"),
        against(1, eight, 0, MOST, "8 ranks, all sizes"),
    ]


def types(rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """Elements per second against float32's, equal numbers of elements."""
    found = []
    for dtype in ("float16", "bfloat16"):
        figures = [
            (size_text(4 * row["elements"]), row["median_s"]["float32"] / row["median_s"][dtype])
            for row in rows
        ]
        scale = Scale("×", "float32's elements per second")
        found.append(
            at_least(1.8, scale, f"{dtype}, as many as 1 MiB of float32, or more", figures)
        )
    return found


def between_hosts(places: Mapping[Place, Sequence[Row]]) -> list[Verdict]:
    def figures(
        hosts: Iterable[int], rate: str, low: int, high: int, figure: Callable[[Row], float]
    ) -> list[tuple[str, float]]:
        return [
            (f"{place}, {size}", value)
            for place, rows in places.items()
            if place.hosts in hosts and place.rate == rate
            for size, value in of_sizes(rows, low, high, figure)
        ]

    slow = figures((2, 4), "1gbit", 16 * MIB, MOST, bound_percent)
    slow_on_4 = figures((4,), "1gbit", 16 * MIB, MOST, best_peer)
    fast = figures((2, 4), "10gbit", 16 * MIB, MOST, best_peer)
    free = figures((2,), "", 64 * KIB, MOST, best_peer)
    free_small = "2 hosts, unshaped, below 64 KiB"
    return [
        at_least(95, WIRE, "2 and 4 hosts, 1 Gbit/s, ≥ 16 MiB", slow),
        at_least(1.2, PEER, "4 hosts, 1 Gbit/s, ≥ 16 MiB", slow_on_4),
        at_least(1.1, PEER, "2 and 4 hosts, 10 Gbit/s, ≥ 16 MiB", fast),
        at_least(1, PEER, "2 hosts, unshaped, from 64 KiB", free),
        at_least(0.25, PLAIN_MPI, free_small, figures((2,), "", 0, 64 * KIB - 1, plain_mpi)),
        at_least(1, GLOO, free_small, figures((2,), "", 0, 64 * KIB - 1, gloo)),
    ]


def halves(runs: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """A reducescatter beside the allreduce of as much."""
    times: list[tuple[str, float]] = []
    sent: list[tuple[str, float]] = []
    for run in runs:
        for row in run.get("reducescatter", ()):
            where = f"{Place(**run['place'])}, {size_text(row['bytes'])}"
            for half, whole in HALVES.items():
                times.append((where, row["median_s"][half] / row["median_s"][whole]))
                sent.append((where, row["sent_bytes"][half] / row["sent_bytes"][whole]))
    work = "reducescatter, 2 and 4 hosts, 1 Gbit/s, ≥ 1 MiB"
    return [
        at_most(0.55, Scale("×", "the bytes of our allreduce"), work, sent),
        at_most(0.65, Scale("×", "the time of our allreduce"), work, times),
    ]


def horovod_s(task: str, medians_s: Mapping[str, float]) -> float | None:
    """Horovod's step, derived from DDP's in this run; None where no ratio is known."""
    speedups = HOROVOD_SPEEDUPS.get(task)
    return medians_s[DDP] / max(speedups) if speedups else None


def training(rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    found = []
    for row in rows:
        medians_s, work = row["median_s"], f"step: {row['title']}"
        ours_s = medians_s[OURS]
        # No contender can be faster than the step without communication.
        most = digits(medians_s[DDP] / medians_s[FLOOR])
        speedup = [(f"without communication {most}×", medians_s[DDP] / ours_s)]
        found.append(at_least(1.3, Scale("×", "as fast as DDP with Gloo"), work, speedup))
        derived_s = horovod_s(row["task"], medians_s)
        if derived_s is not None:
            scale = Scale("×", "as fast as Horovod (derived)")
            found.append(at_least(1, scale, work, [("2 ranks", derived_s / ours_s)]))
        if row["task"] == "resnet":
            scale = Scale(" %", "of the step not hidden")
            found.append(at_most(10, scale, work, [("2 ranks", 100 * not_hidden(medians_s))]))
        if row["task"] == "tiny":
            scale = Scale("×", "DDP's time beside that of the step without communication")
            costs = [medians_s[name] - medians_s[FLOOR] for name in (OURS, DDP)]
            found.append(at_most(0.3, scale, work, [("2 ranks", costs[0] / costs[1])]))
    return found


@dataclass(frozen=True)
class Operation:
    """A target of an operation of torch.distributed on one host."""

    ranks: int
    name: str  # of benchmarks.c10d.OPERATIONS
    sizes_bytes: tuple[int, int]  # the least and the most
    speedup: float = 0.0  # over Gloo; 0: none
    copy_percent: float = 0.0
    most_us: float = 0.0


ALL_SIZES = (64 * KIB, 64 * MIB)
THERE_AND_BACK = "send and recv, there and back"
OPERATIONS = (
    Operation(2, "all_gather_into_tensor", ALL_SIZES, speedup=4),
    Operation(2, "all_gather_into_tensor", (16 * MIB, 64 * MIB), copy_percent=70),
    Operation(2, "reduce_scatter_tensor", ALL_SIZES, speedup=7),
    Operation(2, "all_to_all_single", ALL_SIZES, speedup=2),
    Operation(2, "all_reduce", (16, 16), most_us=20),
    Operation(2, "all_reduce", ALL_SIZES, speedup=4),
    Operation(2, THERE_AND_BACK, (4, 4), speedup=5),
    Operation(2, THERE_AND_BACK, (64 * MIB, 64 * MIB), speedup=3),
    Operation(4, "all_gather_into_tensor", ALL_SIZES, speedup=2.5),
    Operation(4, "reduce_scatter_tensor", ALL_SIZES, speedup=4),
)
# Steps of DDP and FSDP2 over groups of torch.distributed: where, and Gloo's time over ours.
WRAPPED = (
    (Place(2), "DDP", "mlp", 1.5),
    (Place(2), "DDP", "deep", 1.4),
    (Place(2), "FSDP2", "mlp", 2.3),
    (Place(2), "FSDP2", "deep", 2.35),
    (Place(4), "FSDP2", "mlp", 1.3),
    (Place(4), "FSDP2", "deep", 1.3),
    (Place(1, 2, "1gbit"), "FSDP2", "mlp", 1.1),
    (Place(1, 2, "1gbit"), "FSDP2", "deep", 1.1),
)


def operations(runs: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    return [verdict for target in OPERATIONS for verdict in operation(target, runs)]


def operation(target: Operation, runs: Sequence[Mapping[str, Any]]) -> Iterator[Verdict]:
    low, high = target.sizes_bytes
    rows = [
        (size_text(row["bytes"]), row["median_s"])
        for run in runs
        if Place(**run["place"]) == Place(target.ranks)
        for row in run.get("c10d", ())
        if row["operation"] == target.name and low <= row["bytes"] <= high
    ]
    sizes = size_text(low) if low == high else f"{size_text(low)} to {size_text(high)}"
    work = f"{target.name}, {target.ranks} ranks, {sizes}"
    if target.speedup:
        speedups = [(size, over_gloo(medians_s)) for size, medians_s in rows]
        yield at_least(target.speedup, GLOO, work, speedups)
    if target.copy_percent:
        percents = [(size, 100 * of_bound(medians_s)) for size, medians_s in rows]
        yield at_least(target.copy_percent, COPY, work, percents)
    if target.most_us:
        times_us = [(size, 1e6 * medians_s[OURS]) for size, medians_s in rows]
        yield at_most(target.most_us, Scale(" µs", "a call"), work, times_us)


def wrapped(runs: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    found = []
    for place, wrapper, task, limit in WRAPPED:
        rows = [
            row["median_s"]
            for run in runs
            if Place(**run["place"]) == place
            for row in run.get("wrapped", ())
            if (row["wrapper"], row["task"]) == (wrapper, task)
        ]
        work = f"{wrapper} step, {TASKS[task].title}, {place}"
        speedups = [
            # Of what torch itself costs, no group can take anything away.
            (f"a group that does nothing {digits(over_gloo(row) * row[OURS] / row[IDLE])}×", figure)
            for row in rows
            for figure in [over_gloo(row)]
        ]
        found.append(at_least(limit, GLOO, work, speedups))
        if wrapper == "DDP":
            more = [(str(place), 100 * (row[OURS] / row[OPTIMIZER] - 1)) for row in rows]
            scale = Scale(" %", "more than DistributedOptimizer")
            found.append(at_most(5, scale, work, more))
    return found


def upkeep(runs: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    measured = [
        (f"{Place(**run['place'])}, {run['mpi']}", run["upkeep"]) for run in runs if "upkeep" in run
    ]
    idle = [(where, 1e3 * max(idle_in_10_s(row, "cpu_s"))) for where, row in measured]
    waiting = [(where, 100 * waiting_share(row)) for where, row in measured]
    return [
        at_most(1, Scale(" ms", "of CPU in 10 s"), "a rank that is idle", idle),
        at_most(5, Scale(" %", "of a core"), "a rank that waits for a late one", waiting),
    ]


def memory(measured: Mapping[str, Any] | None) -> list[Verdict]:
    """A set of buckets and 32 MiB, in sets of buckets."""
    scale, work = Scale("", "sets of buckets"), "memory (PSS) over the same step without hvdlite"
    if measured is None:
        return [at_most(1, scale, f"{work}: one set + 32 MiB", [])]
    buckets_bytes = measured["buckets_bytes"]
    limit = round(1 + 32 * MIB / buckets_bytes, 2)
    excess = excess_bytes(measured, OURS) / buckets_bytes
    return [at_most(limit, scale, f"{work}: one set + 32 MiB", [("2 ranks", excess)])]


def sharded(rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """A divided update on 2 ranks of one host, with ordinary parameters and with shared ones."""
    found = []
    for name, ways in ((SHARDED, "ordinary parameters"), (SHARED, "shared parameters")):
        what = f"{ways}, Adam, 12 × 1024², 2 ranks"
        updates = [("2 ranks", row["update_s"][name] / row["update_s"][OURS]) for row in rows]
        of_unsharded = Scale("×", "the time unsharded")
        found.append(at_most(0.6, of_unsharded, f"divided update alone, {what}", updates))
        for limit, other, said in (
            (2.0, ZERO, f"{ZERO} (Gloo)"),
            (2.0, FSDP2, f"{FSDP2} (Gloo)"),
            (1.15, OURS, "unsharded"),
        ):
            speedups = [
                ("2 ranks", best_s(row["median_s"], other) / row["median_s"][name]) for row in rows
            ]
            scale = Scale("×", f"as fast as {said}")
            found.append(at_least(limit, scale, f"step with a divided update, {what}", speedups))
    return found


def weighted(rows: Sequence[Mapping[str, Any]]) -> Verdict:
    """A step with weights, on 2 ranks of one host."""
    found = [
        (name, more_percent(row["median_s"], name))
        for row in rows
        for name in row["median_s"]
        if name != PLAIN
    ]
    scale = Scale(" %", "more than without weights")
    return at_most(1, scale, "step with weights, MLP 784-700-500-10, 2 ranks", found)


def best_s(medians_s: Mapping[str, float], peer: str) -> float:
    """The time of hvdlite unsharded, or of a peer, on its rank's cores or on any."""
    return min(medians_s[name] for name in (peer, f"{peer}, any core") if name in medians_s)


def copies(measured: Mapping[str, Any] | None) -> list[Verdict]:
    """Sums over the ranks of one host."""
    state, data = [], []
    if measured is not None:
        alone, shared = (without_gradients(measured, variant) for variant in (ALONE, FREED))
        state = [("4 ranks", shared / alone)]
        dataset = sum(measured["pss_bytes"][DATASET])
        data = [("4 ranks", dataset / measured["dataset_bytes"])]
    process = Scale("×", "one process")
    dataset_scale = Scale("×", "the dataset")
    return [
        at_most(1.3, process, "memory (PSS) of parameters and Adam's state, all ranks", state),
        at_most(1.05, dataset_scale, "memory (PSS) of a dataset, all ranks", data),
    ]


def without_gradients(measured: Mapping[str, Any], variant: str) -> float:
    """PSS of all ranks in bytes. Without free_gradients hvdlite keeps the memory of gradients, in
    buckets, for the next step; one process gives it back."""
    pss = measured["pss_bytes"][variant]
    kept = len(pss) * measured["gradients_bytes"] if variant == OURS else 0
    return float(sum(pss) - kept)


def asynchronous(measured: Mapping[str, Any] | None) -> list[Verdict]:
    """4 workers and a server on one host; computing is simulated by sleeping in the first two."""
    apart, reached, pushed = [], [], []
    if measured is not None:
        slow, times_s = measured["straggler"], measured["loss_s"]
        apart = [("4 workers", slow[OURS] / slow[FLOOR])]
        peer_s = min(time_s for name, time_s in times_s.items() if name != OURS)
        reached = [(f"loss {measured['loss']:g}", peer_s / times_s[OURS])]
        pushed = [("64 MiB", percent_of_bound(measured))]
    each = Scale("×", "the steps of each worker for itself")
    slower = "asynchronous, one worker 5 times slower"
    return [
        at_least(0.9, each, slower, apart),
        at_least(
            1,
            Scale("×", "as fast as an allreduce in each step"),
            f"{slower}: until a loss is reached",
            reached,
        ),
        at_least(60, COPY, "pushes and pulls, 4 workers, 1 server", pushed),
    ]


def servers(measured: Mapping[str, Any] | None) -> Verdict:
    """The same between hosts, in which the server has one of its own."""
    pushed = [] if measured is None else [("64 MiB", percent_of_bound(measured))]
    work = "pushes and pulls, 4 workers, 1 server on another host, 1 Gbit/s"
    return at_least(60, WIRE, work, pushed)


def percent_of_bound(measured: Mapping[str, Any]) -> float:
    moved = measured["throughput"]
    return 100 * float(statistics.median(moved[OURS]) / statistics.median(moved[BOUND]))


def excess_bytes(measured: Mapping[str, Any], variant: str) -> float:
    """PSS per rank above that of the same step without hvdlite, of the worst rank."""
    pss = measured["pss_bytes"]
    return float(max(pss[variant]) - max(pss["without"]))
