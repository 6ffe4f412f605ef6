"""The cost model of docs/design/cost.md: the time of each algorithm, fitted to measurements.

    python -m benchmarks.cost TABLE.json

prints that page's tables from a file of hvdlite.tune, which holds its measurements.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import torch

from benchmarks.figures import size_text
from benchmarks.plan import KIB, MIB

SEGMENT_BYTES = 60 * KIB
ACTIVE = 4  # steps of an alltoall that are under way at once


@dataclass(frozen=True)
class Parameters:
    """alpha_s: from a send until the receiver goes on, without bytes;
    overhead_s: of one more message at the same time; beta_s, gamma_s: per byte, on the wire and
    added up; kappa_s: per byte of a tensor on its way through a host's memory."""

    alpha_s: float
    overhead_s: float
    beta_s: float
    gamma_s: float
    kappa_s: float = 0.0


# How often each parameter counts: alpha, overhead, beta, gamma. slice_bytes: of one rail.
Terms = tuple[float, float, float, float]


def ring(hosts: int, slice_bytes: float) -> Terms:
    part = (hosts - 1) / hosts * slice_bytes
    return 2 * (hosts - 1), 0, 2 * part, part


def direct(hosts: int, slice_bytes: float) -> Terms:
    part = (hosts - 1) / hosts * slice_bytes
    return 2, 2 * (hosts - 2), 2 * part, part


def recursive_doubling(hosts: int, slice_bytes: float) -> Terms:
    rounds = hosts.bit_length() - 1
    folded = hosts != 2**rounds
    steps = rounds + 2 * folded
    return steps, 0, steps * slice_bytes, (rounds + folded) * slice_bytes


def half_ring(hosts: int, slice_bytes: float) -> Terms:
    part = (hosts - 1) / hosts * slice_bytes
    return hosts - 1, 0, part, part


def half_direct(hosts: int, slice_bytes: float) -> Terms:
    part = (hosts - 1) / hosts * slice_bytes
    return 1, hosts - 2, part, part


def chain(hosts: int, slice_bytes: float) -> Terms:
    return hosts - 1, 0, slice_bytes + (hosts - 2) * min(slice_bytes, SEGMENT_BYTES), 0


def gather(hosts: int, block_bytes: float) -> Terms:
    return hosts - 1, 0, (hosts - 1) * block_bytes, 0


def pairwise(ranks: int, part_bytes: float) -> Terms:
    steps = -(-(ranks - 1) // ACTIVE)
    return steps, ranks - 1 - steps, (ranks - 1) * part_bytes, 0


ALLREDUCES: dict[str, Callable[[int, float], Terms]] = {
    "recursive_doubling": recursive_doubling,
    "direct": direct,
    "ring": ring,
}


UNSHARDED, SHARDED_ON_HOST, SHARDED = "unsharded", '`shard="host"`', "`shard=True`"
SHARDINGS = (UNSHARDED, SHARDED_ON_HOST, SHARDED)


@dataclass(frozen=True)
class Job:
    """Training. parameter_bytes: of all parameters, whose gradients are as large; state: how many
    times as large the optimizer's state is. Each host has local_size ranks."""

    hosts: int
    local_size: int
    parameter_bytes: int
    state: float = 2.0  # Adam

    @property
    def slice_bytes(self) -> float:
        return self.parameter_bytes / self.local_size


def sent_before_update(job: Job, sharding: str) -> float:
    """Bytes that a rank sends to other hosts for the gradients, with the ring or the direct
    exchange."""
    half = half_ring(job.hosts, job.slice_bytes)[2]
    return half if sharding == SHARDED else 2 * half


def sent_after_update(job: Job, sharding: str) -> float:
    """For the parameters, while the next forward runs."""
    chunk_bytes = job.slice_bytes / job.hosts
    return gather(job.hosts, chunk_bytes)[2] if sharding == SHARDED else 0.0


def messages(job: Job, sharding: str) -> tuple[int, int]:
    """How many a rank sends before and after the update; of one bucket with all gradients."""
    chunk_bytes = job.slice_bytes / job.hosts
    half = (job.hosts - 1) * math.ceil(chunk_bytes / SEGMENT_BYTES)
    return (half, half) if sharding == SHARDED else (2 * half, 0)


def updated_bytes(job: Job, sharding: str, shared: bool) -> float:
    """Of the parameters that a rank updates. Shared ones are updated by one rank of the host."""
    owners = {UNSHARDED: job.local_size if shared else 1, SHARDED_ON_HOST: job.local_size}
    return job.parameter_bytes / owners.get(sharding, job.local_size * job.hosts)


def memory_bytes(job: Job, sharding: str, shared: bool) -> float:
    """Of a rank, its part of shared memory included: parameters, gradients in their buckets, and
    the state of what it updates."""
    parameters = job.parameter_bytes / (job.local_size if shared else 1)
    return parameters + job.parameter_bytes + job.state * updated_bytes(job, sharding, shared)


def seconds(terms: Terms, p: Parameters, rails: int = 1) -> float:
    """rails: how many exchanges share each link."""
    alphas, overheads, wire_bytes, added_bytes = terms
    wire_s = rails * wire_bytes * p.beta_s
    return alphas * p.alpha_s + overheads * p.overhead_s + wire_s + added_bytes * p.gamma_s


def allreduce_s(
    name: str, hosts: int, tensor_bytes: float, p: Parameters, local_size: int = 1
) -> float:
    """Includes the way through the hosts' memory, where they have more than one rank."""
    within_s = 2 * tensor_bytes * p.kappa_s if local_size > 1 else 0.0
    return within_s + seconds(ALLREDUCES[name](hosts, tensor_bytes / local_size), p, local_size)


def best(hosts: int, slice_bytes: float, p: Parameters) -> str:
    return min(ALLREDUCES, key=lambda name: seconds(ALLREDUCES[name](hosts, slice_bytes), p))


def limits(hosts: int, p: Parameters) -> list[tuple[int | None, str]]:
    """The power of two up to which each algorithm is the fastest one."""
    rules: list[tuple[int | None, str]] = []
    for size_bytes in (2**k for k in range(8, 33)):
        name = best(hosts, size_bytes, p)
        if rules and rules[-1][1] == name:
            rules.pop()
        rules.append((size_bytes, name))
    return [*rules[:-1], (None, rules[-1][1])]


# By number of hosts, algorithm and bytes of a slice.
Measured = Mapping[int, Mapping[str, Mapping[int, float]]]


def fitted(
    hosts: int, times: Mapping[str, Mapping[int, float]], gamma_s: float, overhead_s: float
) -> Parameters:
    """alpha and beta by the least squares of the relative errors. gamma was measured by itself; the
    overhead is given, as two hosts say nothing of it, and more of them need more cores."""
    rows, rest = [], []
    for name, of_sizes in times.items():
        for size_bytes, time_s in of_sizes.items():
            alphas, overheads, wire_bytes, added_bytes = ALLREDUCES[name](hosts, size_bytes)
            known_s = overheads * overhead_s + added_bytes * gamma_s
            rows.append([alphas / time_s, wire_bytes / time_s])
            rest.append(1 - known_s / time_s)
    alpha_s, beta_s = np.linalg.lstsq(np.array(rows), np.array(rest), rcond=None)[0]
    return Parameters(max(0.0, float(alpha_s)), overhead_s, float(beta_s), gamma_s)


def adding_s(rounds: int = 400) -> float:
    """Per byte of a segment that is added to another one, both in the cache."""
    a, b = (torch.ones(SEGMENT_BYTES // 4) for _ in range(2))
    times_s = []
    for _ in range(rounds):
        start = time.perf_counter()
        torch.add(a, b, out=a)
        times_s.append(time.perf_counter() - start)
    return sorted(times_s)[rounds // 2] / SEGMENT_BYTES


def read(path: Path) -> Measured:
    found = json.loads(path.read_text())["microseconds"]
    return {
        int(hosts): {
            name: {int(size): us * 1e-6 for size, us in times.items()}
            for name, times in of_hosts.items()
        }
        for hosts, of_hosts in found.items()
    }


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def comparison(measured: Measured, fits: Mapping[int, Parameters]) -> str:
    rows = []
    for hosts, of_hosts in sorted(measured.items()):
        for size_bytes in of_hosts["ring"]:
            cells = [str(hosts), size_text(size_bytes)]
            for name, cost in ALLREDUCES.items():
                modelled_s = seconds(cost(hosts, size_bytes), fits[hosts])
                cells.append(f"{of_hosts[name][size_bytes] * 1e6:.0f} / {modelled_s * 1e6:.0f}")
            rows.append(cells)
    return table(("hosts", "slice", *ALLREDUCES), rows)


def prediction(p: Parameters, local_size: int) -> str:
    rows = []
    for ranks in (16, 256, 4096):
        hosts = ranks // local_size
        for size_bytes in (4 * KIB, 256 * KIB, 16 * MIB, 256 * MIB):
            times_s = {n: allreduce_s(n, hosts, size_bytes, p, local_size) for n in ALLREDUCES}
            fastest = min(times_s.values())
            cells = [f"{time_s * 1e3:.3g}" for time_s in times_s.values()]
            cells = [
                f"**{cell}**" if time_s == fastest else cell
                for cell, time_s in zip(cells, times_s.values(), strict=True)
            ]
            rows.append([str(ranks), str(hosts), size_text(size_bytes), *cells])
    return table(("ranks", "hosts", "tensor", *ALLREDUCES), rows)


def other_kinds(p: Parameters) -> str:
    rows = []
    for hosts in (16, 256, 4096):
        kinds = (chain(hosts, 16 * MIB), gather(hosts, 64 * KIB), pairwise(hosts, 4 * KIB))
        rows.append([str(hosts), *(f"{seconds(terms, p) * 1e3:.3g}" for terms in kinds)])
    head = ("hosts", "chain, 16 MiB", "gather, 64 KiB of each", "pairwise, 4 KiB to each")
    return table(head, rows)


def sharded_training(parameters: int = 100_000_000, local_size: int = 4) -> str:
    """What a step sends and holds: pure counts, whatever the network."""
    rows = []
    for hosts in (1, 2, 4, 16, 64):
        job = Job(hosts, local_size, 4 * parameters)
        for sharding in SHARDINGS:
            before, after = sent_before_update(job, sharding), sent_after_update(job, sharding)
            own, shared = (memory_bytes(job, sharding, is_shared) for is_shared in (False, True))
            megabytes = [before, after, local_size * (before + after), own, shared]
            of_rank = " + ".join(map(str, messages(job, sharding)))
            cells = [f"{count / 1e6:.0f}" for count in megabytes]
            rows.append([str(hosts), sharding, of_rank, *cells])
    head = ("hosts", "", "messages of a rank", "MB of a rank, before the update", "after it")
    more = ("MB of a host", "MB in the memory of a rank", "with shared parameters")
    return table([*head, *more], rows)


@click.command(context_settings={"show_default": True})
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--kappa-gbyte-s", default=3.0, help="Through a host's memory, GB/s of a tensor.")
@click.option("--overhead-us", default=3.0, help="Of one more message at the same time.")
def main(file: Path, kappa_gbyte_s: float, overhead_us: float) -> None:
    """Prints the tables of docs/design/measurements.md."""
    measured = read(file)
    gamma_s = adding_s()
    fits = {
        hosts: fitted(hosts, times, gamma_s, overhead_us * 1e-6)
        for hosts, times in measured.items()
    }
    for hosts, fit in sorted(fits.items()):
        click.echo(
            f"{hosts} hosts: alpha {fit.alpha_s * 1e6:.1f} us, beta 1 / {1e-9 / fit.beta_s:.3f} "
            f"GB/s, gamma 1 / {1e-9 / gamma_s:.1f} GB/s"
        )
    click.echo(f"\nmeasured / modelled, us\n\n{comparison(measured, fits)}\n")
    p = dataclasses.replace(fits[min(fits)], kappa_s=1e-9 / kappa_gbyte_s)
    for local_size in (1, 8):
        click.echo(f"ms, ranks on each host: {local_size}\n\n{prediction(p, local_size)}\n")
    click.echo(f"ms\n\n{other_kinds(p)}\n")
    click.echo(f"a step of 100 M parameters with Adam\n\n{sharded_training()}\n")
    for hosts in (2, 3, 4, 16, 64, 256, 4096):
        click.echo(f"{hosts} hosts: {limits(hosts, p)}")


if __name__ == "__main__":
    main()
