"""Measures the algorithms between hosts and writes the table that `HVDLITE_ALGORITHM_TABLE` names.

    hvdrun -H server1:1,server2:1 python -m hvdlite.tune FILE

It keeps the rules in FILE for other numbers of hosts, so one file can hold those of several runs.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import click
import torch

import hvdlite as hvd
from hvdlite import _core
from hvdlite.world import world
from hvdlite.world.teams import algorithm_table
from hvdlite.world.teams.algorithm_table import Rules
from hvdlite.world.teams.team import Team, make_team

# The order in which they are best as slices grow: from few steps with much data to many steps with
# little data.
ORDER = ("recursive_doubling", "direct", "ring")
SIZES_BYTES = tuple(2**k for k in range(8, 25, 2))

Times = dict[str, dict[int, float]]  # seconds, by algorithm and bytes of a slice


def rules_of(times: Mapping[str, Mapping[int, float]], sizes_bytes: Sequence[int]) -> Rules:
    """The rules that minimize the time over all sizes. It sums logarithms, so that the large sizes
    do not decide alone; and has one limit between two algorithms, since single measurements are not
    exact."""

    def cost(cuts: tuple[int, ...]) -> float:
        parts = itertools.pairwise((0, *cuts, len(sizes_bytes)))
        return sum(
            math.log(times[name][size])
            for name, (begin, end) in zip(ORDER, parts, strict=True)
            for size in sizes_bytes[begin:end]
        )

    places = range(len(sizes_bytes) + 1)
    cuts = min(itertools.combinations_with_replacement(places, len(ORDER) - 1), key=cost)
    rules: list[tuple[int | None, str]] = []
    for name, (begin, end) in zip(
        ORDER, itertools.pairwise((0, *cuts, len(sizes_bytes))), strict=True
    ):
        if begin == end:
            continue
        last = end == len(sizes_bytes)
        limit = None if last else math.isqrt(sizes_bytes[end - 1] * sizes_bytes[end])
        rules.append((limit, name))
    return tuple(rules)


def measure(sizes_bytes: Sequence[int], rounds: int) -> Times:
    """Seconds per sum: the median over the rounds of the slowest rank's time. The algorithms take
    turns. Collective; the same result on every rank."""
    active = world.current()
    teams = {name: _team_with(name) for name in ORDER}
    comm = active.team.comm
    assert comm is not None
    rails = min(len(host) for host in active.placement.hosts)
    times: Times = {name: {} for name in ORDER}
    for size_bytes in sizes_bytes:
        x = torch.ones(size_bytes // 4 * rails)
        plans = {name: _plan(team, f"{size_bytes}", x) for name, team in teams.items()}
        calls = max(1, min(20, (1 << 18) // size_bytes))
        found: dict[str, list[float]] = {name: [] for name in ORDER}
        for round_ in range(rounds + 1):
            for name in ORDER:
                x.fill_(1.0)
                comm.Barrier()
                start = time.perf_counter()
                for _ in range(calls):
                    if problem := plans[name].start(x).wait():
                        raise hvd.HorovodInternalError(problem)
                if round_:
                    found[name].append((time.perf_counter() - start) / calls)
        for name, own in found.items():
            by_rank = comm.allgather(own)
            times[name][size_bytes] = statistics.median(
                max(of_round) for of_round in zip(*by_rank, strict=True)
            )
    for team in teams.values():
        team.close_together()
    return times


def _plan(team: Team, name: str, x: torch.Tensor) -> _core.Plan:
    address = x.data_ptr()
    return team.engine.plan(name, _core.FLOAT32, _core.SUM, address, address, len(x), 1.0, 1.0, x)


def _team_with(name: str) -> Team:
    """Another team of all ranks, with this algorithm for all sizes."""
    active = world.current()
    assert active.team.peers is not None
    config = dataclasses.replace(active.config, algorithm=name, deterministic=False)
    peers = active.team.peers.duplicate()
    table = algorithm_table.from_config(config)
    return make_team(config, table, peers, active.placement, active.team.ranks)


def _problem_with(file: Path) -> str | None:
    try:
        algorithm_table.contents_of(file)
    except ValueError as error:
        return f"{file}: {error}"
    return None


def _fail(problem: str) -> NoReturn:
    """Ends the job; rank 0 prints the problem. Collective."""
    if hvd.rank() == 0:
        click.echo(f"Error: {problem}", err=True)
    hvd.barrier()
    raise SystemExit(1)


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--rounds", default=15, show_default=True, type=click.IntRange(1))
@click.option(
    "--largest",
    default=max(SIZES_BYTES),
    show_default=True,
    type=click.IntRange(min(SIZES_BYTES)),
    help="Slice, in bytes.",
)
def main(file: Path, rounds: int, largest: int) -> None:
    """Measures which algorithm is best for which size on these hosts, and writes it to FILE."""
    hvd.init()
    placement = world.current().placement
    if len(placement.hosts) < 2:
        _fail(
            "this job runs on one host, where there is no algorithm to choose; start it on several "
            "hosts, for example with hvdrun -H server1:1,server2:1"
        )
    problem = hvd.broadcast_object(_problem_with(file) if hvd.rank() == 0 else None)
    if problem is not None:
        _fail(problem)
    sizes_bytes = [size for size in SIZES_BYTES if size <= largest]
    times = measure(sizes_bytes, rounds)
    if hvd.rank():
        return
    rules = rules_of(times, sizes_bytes)
    us = {
        name: {str(size): round(s * 1e6, 1) for size, s in of.items()} for name, of in times.items()
    }
    algorithm_table.add(file, len(placement.hosts), rules, us)
    click.echo(f"{'bytes':>10}" + "".join(f"{name:>20}" for name in ORDER) + "  (microseconds)")
    for size in sizes_bytes:
        click.echo(f"{size:>10}" + "".join(f"{times[name][size] * 1e6:>20.1f}" for name in ORDER))
    for limit, name in rules:
        click.echo(f"{'larger' if limit is None else f'up to {limit} bytes'}: {name}")


if __name__ == "__main__":
    main()
