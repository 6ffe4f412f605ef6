"""Measures the memory of a training step with hvdlite, with DDP and without either.

    hvdrun -np 2 python -m benchmarks.memory '{"variant": "hvdlite", "folder": "FOLDER"}'

The proportional set size (PSS) counts a page that several processes map as a part of each; pages of
files, as of torch's libraries, are left out. It is read while all ranks are there, after a few
steps, and with all gradients in place. The ranks meet by files in FOLDER: the variant without
hvdlite has no MPI.
"""

import gc
import json
import os
import re
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.networks import TASKS, batch

TASK = TASKS["deep"]
VARIANTS = ("without", "hvdlite", "DDP (Gloo)")
STEPS = 5
LIMIT_S = 120.0


def gradient_bytes() -> int:
    """The size of one set of buckets."""
    return sum(parameter.nbytes for parameter in TASK.network().parameters())


def pss_bytes() -> int:
    """The PSS of this process without pages of files: the kernel takes those back, and other
    processes begin to share them, whenever they like."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    found = dict(re.findall(r"^Pss_(Anon|Shmem):\s+(\d+) kB", rollup, re.MULTILINE))
    assert len(found) == 2, rollup
    return sum(map(int, found.values())) * 1024


def meet(folder: Path, what: str, rank: int, size: int, text: str = "") -> list[str]:
    """Waits until all ranks are here. Returns what each one wrote."""
    own = folder / f"{what}.{rank}.new"
    own.write_text(text)
    own.rename(folder / f"{what}.{rank}")
    files = [folder / f"{what}.{of}" for of in range(size)]
    deadline = time.monotonic() + LIMIT_S
    while not all(file.exists() for file in files):
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank {rank}: not all ranks have come to {what!r}")
        time.sleep(0.01)
    return [file.read_text() for file in files]


def train(variant: str, folder: Path, rank: int, size: int) -> None:
    """Runs a few steps and returns everything that is measured, so that it stays alive."""
    network = TASK.network()
    model: nn.Module = network
    optimizer = TASK.make_optimizer(network.parameters())
    if variant == "hvdlite":
        import hvdlite as hvd

        hvd.init()
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=network.named_parameters())
    elif variant == "DDP (Gloo)":
        store = (folder / "gloo").as_uri()
        torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
        model = nn.parallel.DistributedDataParallel(network)
    for step in range(STEPS):
        samples, labels = batch(TASK, step, rank, size)
        optimizer.zero_grad()
        cross_entropy(model(samples), labels).backward()
        optimizer.step()
    gc.collect()
    meet(folder, "trained", rank, size)
    everyones = meet(folder, "measured", rank, size, str(pss_bytes()))
    if rank == 0:
        (folder / "pss.json").write_text(json.dumps([int(text) for text in everyones]))


def main() -> None:
    request = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    train(request["variant"], Path(request["folder"]), rank, size)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
