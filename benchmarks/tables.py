"""The tables of a report, as texts, for the terminal and for the page. Pure."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.figures import (
    ALONE,
    BOUND,
    DATASET,
    DATASETS,
    DDP,
    FLOOR,
    HALVES,
    OURS,
    PASSES,
    PERCENTILES,
    SCALED,
    SYNCHRONOUS,
    Row,
    busbw,
    digits,
    idle_in_10_s,
    more_percent,
    most_idle_cpu_s_in_10_s,
    not_hidden,
    of_bound,
    over_gloo,
    rows_by_place,
    size_text,
    sleeper_cpu_s_in_10_s,
    time_text,
    waiting_share,
    wire_bytes,
)
from benchmarks.limits import Verdict
from benchmarks.networks import TASKS
from benchmarks.plan import MIB, Place, rate_text
from benchmarks.targets import excess_bytes, horovod_s, without_gradients

LARGE_BYTES = 16 * MIB  # from here on the table of cores begins
SAID = {True: "met", False: "missed", None: "–"}


@dataclass(frozen=True)
class Table:
    title: str
    columns: Sequence[str]  # the first is text, the others are figures, unless `prose`
    rows: Sequence[Sequence[str]]
    prose: bool = False


def tables(report: Mapping[str, Any], verdicts: Sequence[Verdict]) -> list[Table]:
    """All that a report has figures for."""
    runs = report["runs"]
    found = [targets(verdicts)]
    found += [allreduce(place, rows) for place, rows in rows_by_place(runs).items()]
    found += cores(rows_by_place(runs))
    found += [halves(run) for run in runs if run.get("reducescatter")]
    found += [types(run) for run in runs if run.get("types")]
    found += [training(run) for run in runs if run.get("training")]
    found += [operations(run) for run in runs if run.get("c10d")]
    found += [wrapped(run) for run in runs if run.get("wrapped")]
    found += [sharded(run) for run in runs if run.get("sharded")]
    found += [weighted(run) for run in runs if run.get("weighted")]
    found += [tail(run) for run in runs if run.get("tail")]
    if any("upkeep" in run for run in runs):
        found.append(upkeep(run for run in runs if "upkeep" in run))
    if report.get("memory"):
        found.append(memory(report["memory"]))
    if report.get("copies"):
        found.append(copies(report["copies"]))
    if report.get("asynchronous"):
        found += asynchronous(report["asynchronous"])
    if report.get("servers"):
        found.append(servers(report["servers"]))
    if report.get("instructions"):
        found.append(instructions(report["instructions"]))
    return found


def targets(verdicts: Sequence[Verdict]) -> Table:
    rows = [[v.work, v.target, v.found, SAID[v.met]] for v in verdicts]
    return Table("Targets", ["work", "target", "found", ""], rows, prose=True)


def allreduce(place: Place, rows: Sequence[Row]) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row.time_s))
    bounds = [name for name in (BOUND, PASSES) if name in names]
    names = [*(name for name in names if name not in bounds), *bounds]
    bound = "copy" if place.hosts == 1 else "streams"
    columns = [bound if name == BOUND else name for name in names]
    cells = [
        [
            size_text(row.size_bytes),
            *[time_text(row.time_s[name]) if name in row.time_s else "–" for name in names],
            bound_speed(row, place),
            digits(busbw(row.size_bytes, row.time_s[OURS], place.size) / 1e9),
            f"{row.of_bound:.0%}",
            digits(row.ratio),
            str(row.rounds),
        ]
        for row in rows
    ]
    title = f"Allreduce in place, float32 sum, {place}"
    speeds = [f"speed of {bound}", "busbw", f"of {bound}"]
    return Table(title, ["size", *columns, *speeds, "ratio", "rounds"], cells)


def cores(places: Mapping[Place, Sequence[Row]]) -> list[Table]:
    """Where several hosts share this machine: whether its cores are what limits."""
    cells, names = [], dict[str, None]()
    for place, rows in places.items():
        for row in rows:
            names |= dict.fromkeys(row.cores)
            if row.size_bytes >= LARGE_BYTES and row.cores:
                cells.append((f"{place}, {size_text(row.size_bytes)}", row.cores))
    order = [*(name for name in names if name != BOUND), BOUND]
    columns = ["streams" if name == BOUND else name for name in order]
    lines = [[what, *(digits(of[n]) if n in of else "–" for n in order)] for what, of in cells]
    title = "Cores in use during an allreduce between hosts, all ranks together"
    return [Table(title, ["work", *columns], lines)] if lines else []


def bound_speed(row: Row, place: Place) -> str:
    """What the copy reads, or the goodput of a link in each direction."""
    if place.hosts > 1:
        sent_bytes = wire_bytes(row.size_bytes, place.hosts)
        return f"{digits(8e-9 * sent_bytes / row.time_s[BOUND])} Gbit/s"
    return f"{digits(1e-9 * row.size_bytes / row.time_s[BOUND])} GB/s"


def halves(run: Mapping[str, Any]) -> Table:
    names = [name for pair in HALVES.items() for name in reversed(pair)]
    cells = []
    for row in run["reducescatter"]:
        times_s, sent_bytes = row["median_s"], row["sent_bytes"]
        shares = [
            f"{of[half] / of[whole]:.0%}"
            for of in (times_s, sent_bytes)
            for half, whole in HALVES.items()
        ]
        times = [time_text(times_s[name]) for name in names]
        cells.append([size_text(row["bytes"]), *times, *shares, str(row["rounds"])])
    ratios = [f"{what}, {half}" for what in ("time", "bytes") for half in HALVES]
    title = f"Reducescatter beside allreduce, {Place(**run['place'])}, {run['mpi']}"
    return Table(title, ["size", *names, *ratios, "rounds"], cells)


def types(run: Mapping[str, Any]) -> Table:
    cells = []
    for row in run["types"]:
        times = [row["median_s"], row["passes_s"]]
        cells.append(
            [
                f"{row['elements']}",
                *[time_text(time_s) for of_all in times for time_s in of_all.values()],
                *[
                    digits(of_all["float32"] / time_s)
                    for of_all in times
                    for dtype, time_s in of_all.items()
                    if dtype != "float32"
                ],
            ]
        )
    dtypes = list(run["types"][0]["median_s"])
    columns = [*dtypes, *(f"{dtype}, passes" for dtype in dtypes)]
    faster = [f"{column}: elements/s over float32's" for column in columns if "32" not in column]
    title = f"hvdlite's allreduce by type, {Place(**run['place'])}"
    return Table(title, ["elements", *columns, *faster], cells)


def training(run: Mapping[str, Any]) -> Table:
    names = list(run["training"][0]["median_s"])
    cells = []
    for row in run["training"]:
        medians_s = row["median_s"]
        derived_s = horovod_s(row["task"], medians_s)
        cells.append(
            [
                row["title"],
                *[time_text(medians_s[name]) for name in names],
                "–" if derived_s is None else time_text(derived_s),
                f"{not_hidden(medians_s):.1%}",
                digits(medians_s[DDP] / medians_s[OURS]),
            ]
        )
    title = f"Training step, {Place(**run['place'])}, {run['mpi']}"
    return Table(title, ["step", *names, "Horovod (derived)", "not hidden", "ratio to DDP"], cells)


def operations(run: Mapping[str, Any]) -> Table:
    names = list(dict.fromkeys(name for row in run["c10d"] for name in row["median_s"]))
    cells = []
    for row in run["c10d"]:
        medians_s = row["median_s"]
        cells.append(
            [
                f"{row['operation']}, {size_text(row['bytes'])}",
                *[time_text(medians_s[name]) if name in medians_s else "–" for name in names],
                f"{of_bound(medians_s):.0%}" if BOUND in medians_s else "–",
                digits(over_gloo(medians_s)),
                str(row["rounds"]),
            ]
        )
    columns = ["copy" if name == BOUND else name for name in names]
    title = f"Operations of torch.distributed, float32, {Place(**run['place'])}"
    return Table(title, ["operation", *columns, "of copy", "ratio", "rounds"], cells)


def wrapped(run: Mapping[str, Any]) -> Table:
    names = list(dict.fromkeys(name for row in run["wrapped"] for name in row["median_s"]))
    cells = []
    for row in run["wrapped"]:
        medians_s = row["median_s"]
        cells.append(
            [
                f"{row['wrapper']}, {row['title']}",
                *[time_text(medians_s[name]) if name in medians_s else "–" for name in names],
                digits(over_gloo(medians_s)),
                str(row["rounds"]),
            ]
        )
    title = f"Steps of DDP and FSDP2 over groups of torch.distributed, {Place(**run['place'])}"
    return Table(title, ["step", *names, "ratio", "rounds"], cells)


def sharded(run: Mapping[str, Any]) -> Table:
    (row,) = run["sharded"]
    steps_s, updates_s = row["median_s"], row["update_s"]
    cells = [
        [
            name,
            time_text(step_s),
            time_text(updates_s[name]) if name in updates_s else "–",
            digits(steps_s[OURS] / step_s),
        ]
        for name, step_s in steps_s.items()
    ]
    title = f"Steps with a divided update, {row['title']}, {Place(**run['place'])}, {run['mpi']}"
    columns = ["", "step", "the update alone", "as fast as unsharded"]
    return Table(title, columns, cells)


def weighted(run: Mapping[str, Any]) -> Table:
    (row,) = run["weighted"]
    cells = [
        [name, time_text(step_s), f"{more_percent(row['median_s'], name):+.2f} %"]
        for name, step_s in row["median_s"].items()
    ]
    title = f"Steps with weights, {row['title']}, {Place(**run['place'])}, {run['mpi']}"
    return Table(title, ["", "step", "more than without"], cells)


def tail(run: Mapping[str, Any]) -> Table:
    cells = [
        [
            f"{size_text(row['bytes'])}, {row['situation']}",
            row["contender"],
            *[time_text(time_s) for time_s in row["percentiles_s"]],
            str(row["calls"]),
        ]
        for row in run["tail"]
    ]
    named = ["max" if p == 100 else f"p{p:g}" for p in PERCENTILES]
    title = f"Single allreduces, {Place(**run['place'])}, {run['mpi']}"
    return Table(title, ["size", "contender", *named, "calls"], cells)


def upkeep(runs: Iterable[Mapping[str, Any]]) -> Table:
    cells = [
        [
            f"{Place(**run['place'])}, {run['mpi']}",
            time_text(max(idle_in_10_s(run["upkeep"], "cpu_s"))),
            time_text(most_idle_cpu_s_in_10_s(run["upkeep"])),
            f"{max(idle_in_10_s(run['upkeep'], 'sleeps')):.0f}",
            *map(time_text, sleeper_cpu_s_in_10_s(run["upkeep"])),
            f"{waiting_share(run['upkeep']):.2%}",
        ]
        for run in runs
    ]
    columns = [
        "ranks",
        "idle, CPU time in 10 s",
        "the most",
        "sleeps",
        "a program that sleeps as often",
        "the most",
        "of a core, waiting for a late rank",
    ]
    return Table("Ranks that do nothing: medians, of the worst of them", columns, cells)


def memory(measured: Mapping[str, Any]) -> Table:
    buckets_bytes = measured["buckets_bytes"]
    cells = []
    for variant, pss in measured["pss_bytes"].items():
        excess = excess_bytes(measured, variant)
        cells.append(
            [
                variant,
                *[digits(max(pss) / MIB), digits(excess / MIB)],
                digits(excess / buckets_bytes),
            ]
        )
    gradients = f"{digits(buckets_bytes / MIB)} MiB of gradients"
    title = f"Memory of a step, 2 ranks: {TASKS['deep'].title} ({gradients})"
    columns = ["", "PSS per rank, MiB", "above the step without, MiB", "in sets of buckets"]
    return Table(title, columns, cells)


def copies(measured: Mapping[str, Any]) -> Table:
    pss = measured["pss_bytes"]
    alone = without_gradients(measured, ALONE)
    cells = []
    for variant, of_ranks in pss.items():
        whole = sum(of_ranks)
        dataset = variant in (DATASET, DATASETS)
        rest = whole if dataset else without_gradients(measured, variant)
        once = measured["dataset_bytes"] if dataset else alone
        ranks = len(of_ranks)
        cells.append(
            [
                f"{variant}, {ranks} ranks" if ranks > 1 else variant,
                *[digits(size / MIB) for size in (whole, rest)],
                digits(rest / once),
            ]
        )
    gradients, data = (digits(measured[of] / MIB) for of in ("gradients_bytes", "dataset_bytes"))
    title = (
        f"Memory of one host beyond imports: {gradients} MiB of parameters with Adam; "
        f"a dataset of {data} MiB"
    )
    columns = ["", "PSS of all ranks, MiB", "without gradients, MiB", "copies"]
    return Table(title, columns, cells)


def asynchronous(measured: Mapping[str, Any]) -> list[Table]:
    steps, times_s = measured["straggler"], measured["loss_s"]
    where = f"{measured['workers']} workers and 1 server on one host"
    named = {
        FLOOR: "each for itself",
        SYNCHRONOUS: SYNCHRONOUS,
        SCALED: SCALED,
        OURS: "AsyncOptimizer",
    }
    cells = [
        [
            title,
            digits(steps[name]) if name in steps else "–",
            time_text(times_s[name]) if name in times_s else "–",
        ]
        for name, title in named.items()
    ]
    columns = ["", "steps per second, of all workers", f"until the loss is {measured['loss']:g}"]
    peers = {BOUND: "only copied", FLOOR: "copied, and updated by each"}
    return [
        Table(f"One worker is 5 times slower, {where}", columns, cells),
        pushes(measured, peers, where),
    ]


def servers(measured: Mapping[str, Any]) -> Table:
    link = rate_text(measured["rate"])
    where = f"{measured['workers']} workers, 1 server on another host, {link}"
    return pushes(measured, {BOUND: "plain TCP streams"}, where)


def pushes(measured: Mapping[str, Any], peers: Mapping[str, str], where: str) -> Table:
    cells = []
    for name, title in {**peers, OURS: "AsyncOptimizer"}.items():
        steps = statistics.median(measured["throughput"][name])
        cells.append([title, digits(steps), digits(1e-9 * steps * measured["bytes"])])
    title = f"{measured['bytes'] // MIB} MiB of gradients pushed, parameters pulled, {where}"
    return Table(title, ["", "steps per second, of all workers", "GB/s each way"], cells)


def instructions(rows: Sequence[Mapping[str, Any]]) -> Table:
    cells = [[row["operation"], f"{row['core']:.0f}", f"{row['all']:.0f}"] for row in rows]
    columns = ["operation", "in the core", "with Python and libraries"]
    return Table("Instructions of one operation, on each rank", columns, cells)
