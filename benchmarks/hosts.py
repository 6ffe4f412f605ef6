"""Allreduce between hosts, on those of tests/cluster: real ssh and addresses, links of any rate.

    python -m benchmarks.hosts --hosts 2 --hosts 4 --rate 1gbit --rate unshaped

Needs root, as tests/cluster does. Both ends of every link run on this machine's cores.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.figures import OURS, ratio, size_text
from benchmarks.plan import KIB, MIB, Plan

ROOT = Path(__file__).resolve().parent.parent
UNSHAPED = "unshaped"
SIZES_BYTES = (4, KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 16 * MIB, 64 * MIB)
STREAM_S = 1.0


@dataclass(frozen=True)
class Scene:
    """Hosts, ranks on each, and the rate of each host's link, as tests/cluster takes it."""

    hosts: int
    ranks: int
    rate: str


class Cluster:
    """The hosts server1 … serverN, while they are up."""

    def __init__(self, folder: Path, shared: Path) -> None:
        self._environment = {**os.environ, "CLUSTER_DIR": str(folder)}
        self._shared = shared

    def __call__(self, *words: str | Path, quiet: bool = True) -> str:
        done = subprocess.run(
            [ROOT / "tests" / "cluster", *words],
            env=self._environment,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if quiet else None,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"cluster {words[0]}: exit code {done.returncode}\n{done.stderr}")
        return done.stdout

    @contextlib.contextmanager
    def up(self, scene: Scene) -> Iterator[None]:
        rate = () if scene.rate == UNSHAPED else ("--rate", scene.rate)
        try:
            self("up", str(scene.hosts), *rate, "--share", self._shared)
            yield
        finally:
            self("down")

    def goodput_bytes_per_s(self, hosts: int) -> float:
        """Of the slowest link, while all are busy in both directions: each host sends to the
        next."""
        running = []
        for host in range(1, hosts + 1):
            command: list[str | Path] = [ROOT / "tests" / "cluster", "exec", f"server{host}", "--"]
            command += [sys.executable, ROOT / "benchmarks" / "streams.py"]
            command += [f"server{host % hosts + 1}", str(STREAM_S)]
            running.append(
                subprocess.Popen(command, env=self._environment, stdout=subprocess.PIPE, text=True)
            )
        answers = [each.communicate()[0] for each in running]
        return min(float(answer) for answer in answers)


def rows(
    scenes: Sequence[Scene],
    pythons: Sequence[tuple[Path, str]],
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    max_rounds: int = 10,
) -> Iterator[dict[str, Any]]:
    """One row per scene, MPI and size: `median_s` by contender, `goodput` of a link in bytes per
    second (None where the links are unshaped), measured just before, and `wire_s`, what the bytes
    of an allreduce take with that.

    pythons: interpreters, each with an MPI, and the thread level to start that with.
    """
    plan = asdict(Plan(tuple(sizes_bytes), (), max_rounds))
    with tempfile.TemporaryDirectory(prefix="hvdlite-hosts-") as folder:
        shared = Path(folder, "share")
        shared.mkdir()
        cluster = Cluster(Path(folder, "cluster"), shared)
        for scene in scenes:
            with cluster.up(scene):
                for python, thread_level in pythons:
                    goodput = None
                    if scene.rate != UNSHAPED:
                        goodput = cluster.goodput_bytes_per_s(scene.hosts)
                    result = _measure(cluster, scene, python, plan, thread_level, shared)
                    for row in result["allreduce"]:
                        sent = 2 * (scene.hosts - 1) / scene.hosts * row["bytes"]
                        yield {
                            **asdict(scene),
                            **row,
                            "mpi": result["mpi"],
                            "thread_level": thread_level,
                            "goodput": goodput,
                            "wire_s": sent / goodput if goodput else None,
                        }


def _measure(
    cluster: Cluster,
    scene: Scene,
    python: Path,
    plan: dict[str, Any],
    thread_level: str,
    shared: Path,
) -> dict[str, Any]:
    for file in shared.iterdir():  # Gloo's ranks would meet those of the run before
        file.unlink()
    output = shared / "result.json"
    request = {"plan": plan, "thread_level": thread_level, "output": str(output)}
    hosts = ",".join(f"server{host}:{scene.ranks}" for host in range(1, scene.hosts + 1))
    cluster(
        *("exec", "server1", "--", "env", "OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=eth0"),
        *(python.with_name("hvdrun"), "-H", hosts),
        *(python, "-m", "benchmarks.worker", json.dumps(request)),
        quiet=False,
    )
    result: dict[str, Any] = json.loads(output.read_text())
    return result


def text(row: dict[str, Any]) -> str:
    """For the terminal."""
    times = row["median_s"]
    figures = "  ".join(f"{name} {times[name] * 1e6:9.0f}" for name in (OURS, "MPI", "Gloo"))
    wire = f"  of the wire {row['wire_s'] / times[OURS]:4.0%}" if row["wire_s"] else ""
    where = f"{row['hosts']} hosts x {row['ranks']}, {row['rate']}, {row['mpi']}"
    return f"{where}: {size_text(row['bytes']):>8}: {figures} us, {ratio(times):5.2f}{wire}"


@click.command(context_settings={"show_default": True})
@click.option("--hosts", multiple=True, type=click.IntRange(2, 9), default=[2, 4])
@click.option("--ranks", multiple=True, type=click.IntRange(1), default=[1], help="On each host.")
@click.option("--rate", "rates", multiple=True, default=["1gbit", "10gbit", UNSHAPED])
@click.option("--size", "sizes", multiple=True, type=int, default=SIZES_BYTES, help="Bytes.")
@click.option("--rounds", default=10)
@click.option(
    "--python",
    "pythons",
    multiple=True,
    nargs=2,
    type=(click.Path(exists=True, dir_okay=False, path_type=Path), str),
    default=[(Path(sys.executable), "multiple")],
    help="An interpreter and its MPI's thread level.",
)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="JSON.")
def main(
    hosts: Sequence[int],
    ranks: Sequence[int],
    rates: Sequence[str],
    sizes: Sequence[int],
    rounds: int,
    pythons: Sequence[tuple[Path, str]],
    output: Path | None,
) -> None:
    scenes = [Scene(h, r, rate) for rate in rates for h in hosts for r in ranks]
    found = []
    for row in rows(scenes, pythons, sizes, rounds):
        click.echo(text(row))
        found.append(row)
    if output:
        output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
