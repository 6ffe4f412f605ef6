"""Runs a case in a default process group of all ranks of a world."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

import hvdlite.distributed  # noqa: F401 - registers the backend
from tests.distributed.backend import BACKEND

LIMIT = timedelta(seconds=40)


def rank_and_size() -> tuple[int, int]:
    """What the launcher says."""
    rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
    size = os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ["PMI_SIZE"]
    return int(rank), int(size)


def begin(folder: Path, limit: timedelta = LIMIT) -> None:
    """The ranks meet in a file of the folder, which has none yet."""
    rank, size = rank_and_size()
    dist.init_process_group(
        BACKEND, init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=limit
    )


def in_a_group(case: Callable[..., Any]) -> Callable[..., Any]:
    """Makes case(rank, size, …) a case(folder, …) for a world of ranks."""

    @functools.wraps(case)
    def run(folder: Path, *args: Any, **kwargs: Any) -> Any:
        begin(folder)
        try:
            return case(*rank_and_size(), *args, **kwargs)
        finally:
            dist.destroy_process_group()

    return run
