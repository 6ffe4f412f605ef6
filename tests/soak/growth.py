"""One long job, whose processes may not grow. `python -m tests.soak.growth FOLDER SECONDS` is
one of its ranks.

In each lap it makes and drops process sets and optimizers, shared parameters and objects, and all
kinds of operations. After a warm-up of a third of the time, all its processes are measured: the
ranks, their keepers, the agents and hvdrun; and again at the end. Ranks first give the memory that
is free back to the system: what the allocator keeps of it differs by 30 MiB from lap to lap.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

import hvdlite as hvd
from tests.harness.worlds import ROOT, end_tree, python_of
from tests.rig.conftest import Rig
from tests.soak.leftovers import new_things, things
from tests.soak.works import collectives, objects, optimizer, process_sets

LAYOUT = "server1:2,server2:1"
HOSTS = ("server1", "server2")
RANKS = 3
WARM_UP = 1 / 3
# What a process may have more at the end than after the warm-up. Open MPI loses 1.4 kB with each
# communicator between hosts (docs/design/measurements.md), which is 0.8 kB in a lap.
MOST_MEMORY_MIB = 6.0
MOST_FILES = 2
MOST_THREADS = 1
MOST_MAPPINGS = 60
START_LIMIT_S = 240.0


class Size(NamedTuple):
    """memory_mib: what is its own, and what is shared and no file's."""

    memory_mib: float
    files: int
    threads: int
    mappings: int

    def grown(self, since: Size) -> list[str]:
        limits = (MOST_MEMORY_MIB, MOST_FILES, MOST_THREADS, MOST_MAPPINGS)
        names = ("MiB of memory", "descriptors", "threads", "mappings")
        return [
            f"{now:.0f} {name} instead of {was:.0f}"
            for now, was, name, limit in zip(self, since, names, limits, strict=True)
            if now > was + limit
        ]


def size_of(process: psutil.Process) -> Size:
    path = Path(f"/proc/{process.pid}")
    fields = dict(line.split(":", 1) for line in (path / "status").read_text().splitlines())
    memory_kib = sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))
    mappings = len((path / "maps").read_text().splitlines())
    return Size(memory_kib / 1024, process.num_fds(), process.num_threads(), mappings)


def lap(number: int) -> None:
    chance = random.Random(number)
    for work in (collectives, process_sets, objects, optimizer):
        work(chance, f"lap {number} {work.__name__}")


def main() -> None:
    folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
    hvd.init()
    for name, share in (("warm", WARM_UP), ("over", 1 - WARM_UP)):
        until, laps, is_over = time.monotonic() + seconds * share, 0, False
        while not is_over:
            # The same laps in both parts, so that both have met the same largest tensors.
            lap(laps % 20)
            laps += 1
            late = torch.tensor([int(time.monotonic() > until)])
            is_over = bool(hvd.allreduce(late, op=hvd.Max, name="late").item())
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        hvd.barrier()
        if hvd.rank() == 0:
            (folder / name).write_text(str(laps))
        # Nobody posts anything until all have been measured.
        while not (folder / f"{name} measured").exists():
            time.sleep(0.05)
        hvd.barrier()
    print("right", flush=True)


class Growth(NamedTuple):
    laps: int
    lines: list[str]
    grown: list[str]


def play(rig: Rig, mpi: str, seconds: float, kept: Path) -> Growth:
    """The job on the rig. What has grown, in words, and each process's sizes."""
    folder = rig.share / "growth"
    folder.mkdir()
    kept.mkdir(parents=True, exist_ok=True)
    before = things(rig, HOSTS)
    python = python_of(mpi)
    words: list[str | Path] = [python, "-m", "tests.soak.growth", folder, str(seconds)]
    command = rig.inside("server1", python.with_name("hvdrun"), "-H", LAYOUT, *words)
    with open(kept / "out", "wb") as out, open(kept / "err", "wb") as errors:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
            start_new_session=True,
        )
    try:
        sizes, inside = [], []
        for name in ("warm", "over"):
            deadline = time.monotonic() + seconds + START_LIMIT_S
            while not (folder / name).exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    said = (kept / "err").read_text(errors="replace")
                    return Growth(0, [], [f"the long job did not come to its end: {said}"])
                time.sleep(0.1)
            sizes.append(dict(_sizes(rig)))
            inside.append(things(rig, HOSTS))
            (folder / f"{name} measured").touch()
        laps = int((folder / "over").read_text())
        process.wait(START_LIMIT_S)
    finally:
        end_tree(process)
    grown = [f"{thing} (since the warm-up)" for thing in new_things(*inside)]
    grown += new_things(before, things(rig, HOSTS))
    lines = []
    warm, over = sizes
    for who, size in over.items():
        old = warm.get(who)
        if old is None:
            grown.append(f"{who} is new since the warm-up")
            continue
        grown += [f"{who}: {text}" for text in size.grown(old)]
        lines.append(
            f"{who}: {old.memory_mib:.1f} to {size.memory_mib:.1f} MiB, {old.files} to"
            f" {size.files} descriptors, {old.mappings} to {size.mappings} mappings"
        )
    said = (kept / "out").read_text(errors="replace") + (kept / "err").read_text(errors="replace")
    if sorted(said.splitlines()) != [f"[{rank}] right" for rank in range(RANKS)]:
        grown.append(f"the long job said: {said}")
    return Growth(laps, lines, grown)


def _sizes(rig: Rig) -> Iterator[tuple[str, Size]]:
    """Of all processes of the job, each with its host, number and command."""
    for host, process in rig.members():
        try:
            words = process.cmdline()
            if words and "_host" not in words and process.name() not in rig.services:
                name = " ".join(Path(word).name for word in words[:4])
                yield f"{host} {process.pid} {name}", size_of(process)
        except (psutil.Error, OSError):
            continue  # it has just ended


if __name__ == "__main__":
    main()
