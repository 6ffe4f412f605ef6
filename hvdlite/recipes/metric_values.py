"""The values of metrics, as scripts have them: numbers, tensors of one element, also in dicts,
lists and tuples, nested."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy
import torch

from hvdlite.collectives.differing_ranks import ranks_in_words

Path = tuple[Any, ...]  # the keys and indices that lead to a value
Number = float | torch.Tensor  # a tensor is on another device: reading it waits for that

Change = Callable[[Path, Any], Any]


def mapped(values: Any, change: Change, path: Path = ()) -> Any:
    """The same structure, with each value changed. None is no value and stays."""
    if isinstance(values, Mapping):
        return {key: mapped(value, change, (*path, key)) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        made = [mapped(value, change, (*path, at)) for at, value in enumerate(values)]
        return values._make(made) if hasattr(values, "_make") else type(values)(made)
    return None if values is None and not path else change(path, values)


def flattened(values: Any) -> dict[Path, Any]:
    """The values by their paths."""
    found: dict[Path, Any] = {}
    mapped(values, found.__setitem__)
    return found


def checked_number(form: str, what: str, value: Any) -> Number:
    """The value as a float, or a copy of it as a 0-d float64 tensor where it is on a device.

    Raises:
        ValueError: It is no real number."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            kind = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
            raise ValueError(
                f"{form}: {what} is a tensor {kind}, expected a real one with one element; "
                "reduce it first, for example by .mean()"
            )
        if value.device.type == "cpu":
            return float(value.detach())
        # A copy, as the script may go on to change its tensor in place.
        return value.detach().reshape(()).to(torch.float64, copy=True)
    real = (int, float, numpy.integer, numpy.floating, numpy.bool_)
    if isinstance(value, real):
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{form}: {what} is an integer beyond what a float64 holds") from None
    raise ValueError(
        f"{form}: {what} is {type(value).__name__}, expected a number or a tensor of one element"
    )


def checked_weight(form: str, weight: float) -> float:
    if not (weight >= 0 and math.isfinite(weight)):
        raise ValueError(f"{form}: weight={weight}, expected a finite number of at least 0")
    return weight


def in_host_memory(numbers: Iterable[Number]) -> list[float]:
    """All as floats; waits once for each device."""
    numbers = list(numbers)
    by_device: dict[torch.device, list[int]] = {}
    for at, number in enumerate(numbers):
        if isinstance(number, torch.Tensor):
            by_device.setdefault(number.device, []).append(at)
    for places in by_device.values():
        values = torch.stack([torch.as_tensor(numbers[at]) for at in places]).tolist()
        for at, value in zip(places, values, strict=True):
            numbers[at] = value
    return [float(number) for number in numbers]


def in_words(path: Path) -> str:
    """As the keys stand in the script.

    >>> in_words(("val", "loss", 0)), in_words(())
    ("'val' 'loss' 0", 'the value')
    """
    return " ".join(map(repr, path)) or "the value"


def which_ranks_have(paths: Mapping[int, Iterable[Path]]) -> str:
    """Which keys are on which ranks, of those that not all have; empty if all have the same.

    paths: by rank."""
    having: dict[Path, list[int]] = {}
    for rank, some in paths.items():
        for path in some:
            having.setdefault(path, []).append(rank)
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for path, found in having.items():
        if len(found) < len(paths):
            by_ranks.setdefault(tuple(found), []).append(in_words(path))
    return "; ".join(
        f"{', '.join(keys)} only on {ranks_in_words(found)}" for found, keys in by_ranks.items()
    )
