"""shared_tensor: data of which a host has one copy, as a dataset that all its ranks read."""

from __future__ import annotations

import contextlib
import faulthandler
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdlite.collectives.differing_ranks import which_ranks
from hvdlite.collectives.objects import gather_results
from hvdlite.errors import HorovodInternalError
from hvdlite.shared import spawned
from hvdlite.shared.memory import PAGE_BYTES, Region, open_region
from hvdlite.world import world
from hvdlite.world.teams.process_sets import as_int, global_process_set, team_of

_FORM = "shared_tensor"


def shared_tensor(
    shape: int | Sequence[int],
    dtype: torch.dtype = torch.float32,
    fill: Callable[..., object] | None = None,
    *,
    parts: bool = False,
) -> torch.Tensor:
    """A tensor of which each host has one copy, in the memory of all its ranks. Blocks.

    Every rank calls it, with the same shape and dtype. Once it is filled it is read-only on every
    rank: a rank that writes to it, also by numpy, ends with SIGSEGV and its Python stack; write to
    a `clone()`. Forked and spawned children, such as a DataLoader's workers, have the same memory.
    It is freed when the last process of the host has dropped it.

    Args:
        shape: Its dimensions.
        dtype: Any but quantized ones.
        fill: Called on the lowest rank of each host with a tensor of zeros, which it fills in
            place. With parts=True it is called on every rank, as `fill(part, begin)`: `part` is
            this rank's rows of the first dimension, which begin at row `begin`; a rank may have
            none. None: the tensor stays zeros, and every rank of the host may write to it; the
            ranks must agree by barriers on who writes when.
        parts: Whether every rank fills a part.

    Returns:
        A contiguous tensor in host memory, one per host, with the data that its ranks have filled
        in.

    Raises:
        ValueError: A bad argument.
        HorovodInternalError: The arguments differ, `fill` has raised on another rank, or the ranks
            of a host can't share memory; on every rank. Where `fill` itself raises: its
            exception.
        MemoryError: A host has too little memory; on every rank.

    Example:
        >>> def load(images: torch.Tensor) -> None:
        ...     images.copy_(torch.arange(6).view(3, 2))  # as from a file
        >>> hvd.shared_tensor((3, 2), torch.int64, load)
        tensor([[0, 1],
                [2, 3],
                [4, 5]])
    """
    team = team_of(_FORM, global_process_set)
    dims: tuple[int, ...] = ()

    def look() -> str:
        nonlocal dims
        dims = _dims(shape)
        if not isinstance(dtype, torch.dtype) or dtype in _QUANTIZED:
            raise ValueError(f"{_FORM}: dtype={dtype!r}, expected a dtype that is not quantized")
        if fill is not None and not callable(fill):
            raise ValueError(f"{_FORM}: fill is {type(fill).__name__}, expected a function")
        if parts and (fill is None or not dims):
            raise ValueError(f"{_FORM}: parts=True needs a fill function, and a dimension to cut")
        how = ("" if fill is None else ", filled") + (" by parts" if parts else "")
        return f"{str(dtype).removeprefix('torch.')}{list(dims)}{how}"

    forms = gather_results(_FORM, look, f"hvdlite.{_FORM}", global_process_set)
    if len(set(forms)) > 1:
        found = which_ranks(forms, team.ranks)
        raise HorovodInternalError(
            f"{_FORM}: the ranks' arguments differ: {found}; make them the same on every rank"
        )
    size_bytes = math.prod(dims) * dtype.itemsize
    spawned.allow()
    region: Region | None = None
    # Without elements there is nothing to share.
    tensor = torch.empty(0 if size_bytes else dims, dtype=dtype, device="cpu")
    if size_bytes:
        region = open_region(_FORM, size_bytes, "make a smaller tensor")
        strides = torch.empty(dims, dtype=dtype, device="meta").stride()
        tensor.set_(region.storage(PAGE_BYTES, size_bytes), 0, dims, strides)
    if fill is None:
        return tensor

    def run() -> None:
        placement = world.current().placement
        with torch.no_grad():
            if parts:
                begin, end = (
                    dims[0] * (placement.local_rank + i) // placement.local_size for i in (0, 1)
                )
                fill(tensor[begin:end], begin)
            elif placement.local_rank == 0:
                fill(tensor)

    gather_results(_FORM, run, f"hvdlite.{_FORM}.filled", global_process_set)
    if region is not None:
        region.make_read_only()
    _show_who_writes()
    return tensor


_QUANTIZED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)


def _dims(shape: Any) -> tuple[int, ...]:
    one = as_int(shape)
    dims: list[int | None] | None = None if one is None else [one]
    if dims is None and isinstance(shape, Sequence) and not isinstance(shape, str):
        dims = [as_int(dim) for dim in shape]
    if dims is None or not all(dim is not None and dim >= 0 for dim in dims):
        raise ValueError(f"{_FORM}: shape={shape!r}, expected the size of each dimension")
    return tuple(dim for dim in dims if dim is not None)


def _show_who_writes() -> None:
    """A rank that writes to read-only memory prints its Python stack before it ends."""
    if not faulthandler.is_enabled():
        # A notebook's stderr has no descriptor; and there may be none at all.
        with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
            faulthandler.enable(sys.__stderr__)  # type: ignore[arg-type]
