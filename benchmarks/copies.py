"""Measures how much memory all ranks of a host together need for what it may have once.

    hvdrun -np 4 python -m benchmarks.copies '{"variant": "…", "folder": "FOLDER", …}'

The proportional set size (PSS) counts a page that several processes map as a part of each, so that
the sum over the ranks counts it once. What the imports take, which is read before anything is made,
is subtracted.
"""

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.figures import ALONE, DATASET, DATASETS, FREED, OURS
from benchmarks.memory import meet, pss_bytes

# In this order; by variant the number of ranks.
VARIANTS = {ALONE: 1, OURS: 4, FREED: 4, DATASETS: 4, DATASET: 4}
WIDTH = 2048
LAYER_BYTES = 4 * WIDTH * (WIDTH + 1)
STEPS = 2


def step(model: nn.Module, optimizer: torch.optim.Optimizer, samples: torch.Tensor) -> None:
    model(samples).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def import_everything(variant: str) -> None:
    """Also what torch imports with the first step of an optimizer."""
    if variant != ALONE:
        import hvdlite  # noqa: F401
    model = nn.Linear(1, 1)
    step(model, torch.optim.Adam(model.parameters()), torch.ones(1, 1))


def train(variant: str, layers: int) -> Any:
    """A few steps. Returns what then stays: the parameters, and the optimizer with its state."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    if variant == FREED:
        import hvdlite as hvd

        hvd.share_parameters(model)
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-4)
    if variant != ALONE:
        import hvdlite as hvd

        frees = variant == FREED
        optimizer = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            shard=frees,
            free_gradients=frees,
        )
    for _ in range(STEPS):
        step(model, optimizer, torch.ones(1, WIDTH))
    return model, optimizer


def load(variant: str, size_bytes: int) -> Any:
    """A dataset of which the host has one copy, or each rank has its own; every rank reads all of
    it."""
    import hvdlite as hvd

    def fill(elements: torch.Tensor) -> None:
        for begin in range(0, len(elements), 1 << 24):  # torch.arange would need as much again
            part = elements[begin : begin + (1 << 24)]
            part.fill_(begin >> 24)

    if variant == DATASET:
        dataset = hvd.shared_tensor(size_bytes // 4, torch.float32, fill)
    else:
        dataset = torch.empty(size_bytes // 4)
        fill(dataset)
    found = sum(float(part.sum()) for part in dataset.split(1 << 24))
    wanted = sum(float(len(part) * number) for number, part in enumerate(dataset.split(1 << 24)))
    if found != wanted:
        raise AssertionError(f"the dataset's sum is {found}, not {wanted}")
    return dataset


def measure(variant: str, folder: Path, make: Callable[[], Any]) -> None:
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    import_everything(variant)
    gc.collect()
    meet(folder, "imported", rank, size)
    before = pss_bytes()
    meet(folder, "read", rank, size)
    if variant != ALONE:
        import hvdlite as hvd

        hvd.init()
    kept = make()
    gc.collect()
    meet(folder, "made", rank, size)
    everyones = meet(folder, "measured", rank, size, str(pss_bytes() - before))
    if rank == 0:
        (folder / "pss.json").write_text(json.dumps([int(text) for text in everyones]))
    del kept


def main() -> None:
    request = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    variant, folder = request["variant"], Path(request["folder"])
    if variant in (DATASET, DATASETS):
        measure(variant, folder, lambda: load(variant, request["dataset_bytes"]))
    else:
        measure(variant, folder, lambda: train(variant, request["layers"]))


if __name__ == "__main__":
    main()
