"""State dicts as trees of containers, tensors and plain values: copies of them in host memory, and
their tensors apart from the rest."""

from __future__ import annotations

import copy
import io
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# Of these exact types; torch.load(weights_only=True) reads them.
CONTAINERS = (dict, OrderedDict, list, tuple, torch.Size)
VALUES = (type(None), bool, int, float, str, bytes)


class Copier:
    """Copies trees into host memory, again and again: tensors that are alike each time get the same
    memory, as that of new one costs more than the copying.

    Invariant: what `copy` has returned is overwritten by the next call of `copy`.
    """

    def __init__(self) -> None:
        self._former: Any = None

    def copy(self, tree: Any) -> Any:
        """The tree with copies of its tensors, on the CPU, and of all else that may change. Tensors
        that are the same memory, such as tied weights, stay the same.

        Raises:
            ValueError: Something in it could not be read again; the text names it by its keys.
        """
        once = _Copying()
        self._former = once.copy(tree, self._former, ())
        return self._former


class _Copying:
    """One run of Copier.copy."""

    def __init__(self) -> None:
        self._copies: dict[Any, torch.Tensor] = {}
        self._taken: set[int] = set()

    def copy(self, thing: Any, former: Any, path: tuple[Any, ...]) -> Any:
        kind = type(thing)
        if kind in VALUES:
            return thing
        if kind in CONTAINERS:
            former = former if type(former) is kind else None
            return _mapped(
                thing, lambda key, item: self.copy(item, _item(former, key), (*path, key))
            )
        if _is_plain_tensor(thing):
            return self._tensor(thing.detach(), former)
        if kind.__module__ == "numpy" and isinstance(thing, float):
            return float(thing)  # float64: the same number, the same arithmetic
        _check_readable(thing, path)
        with torch.no_grad():
            if isinstance(thing, torch.Tensor):
                return thing.detach().cpu().clone()
            return copy.deepcopy(thing)

    def _tensor(self, tensor: torch.Tensor, former: Any) -> torch.Tensor:
        key = _memory_key(tensor)
        if key not in self._copies:
            copied = former
            if not self._fits(former, tensor):
                copied = torch.empty_like(tensor, device="cpu")
            self._taken.add(id(copied))
            self._copies[key] = copied.copy_(tensor)
        return self._copies[key]

    def _fits(self, former: Any, tensor: torch.Tensor) -> bool:
        return (
            isinstance(former, torch.Tensor)
            and id(former) not in self._taken
            and former.dtype == tensor.dtype
            and former.shape == tensor.shape
            and (
                former.stride() == tensor.stride()
                # The copy of a tensor with gaps in its memory has none.
                or former.stride() == torch.empty_like(tensor, device="meta").stride()
            )
        )


@dataclass(frozen=True)
class TensorPlace:
    """Stands for a tensor in a tree without tensors."""

    index: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def empty(self) -> torch.Tensor:
        """A new tensor of this form, without values."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu")


def without_tensors(tree: Any) -> tuple[Any, list[torch.Tensor]]:
    """The tree with marks in place of its tensors, which can be pickled cheaply; and the tensors,
    each memory once. Tensors that are not strided stay in the tree."""
    tensors: list[torch.Tensor] = []
    places: dict[Any, TensorPlace] = {}

    def taken(thing: Any) -> Any:
        if type(thing) in CONTAINERS:
            return _mapped(thing, lambda _, item: taken(item))
        if not _is_plain_tensor(thing):
            return thing
        key = _memory_key(thing)
        if key not in places:
            places[key] = TensorPlace(len(tensors), tuple(thing.shape), thing.stride(), thing.dtype)
            tensors.append(thing.detach())
        return places[key]

    return taken(tree), tensors


def places_in(frame: Any) -> list[TensorPlace]:
    """All that stand for what `without_tensors` has taken out of the frame, each once."""
    found: dict[int, TensorPlace] = {}

    def look(thing: Any) -> Any:
        if isinstance(thing, TensorPlace):
            found[thing.index] = thing
        return _mapped(thing, lambda _, item: look(item)) if type(thing) in CONTAINERS else thing

    look(frame)
    return [found[index] for index in range(len(found))]


def places_of(frame: Any) -> list[torch.Tensor]:
    """New tensors without values, for all that `without_tensors` has taken out of the frame."""
    return [place.empty() for place in places_in(frame)]


def with_tensors(frame: Any, tensors: list[torch.Tensor]) -> Any:
    """The inverse of `without_tensors`."""
    if isinstance(frame, TensorPlace):
        return tensors[frame.index]
    if type(frame) in CONTAINERS:
        return _mapped(frame, lambda _, item: with_tensors(item, tensors))
    return frame


def _mapped(container: Any, function: Callable[[Any, Any], Any]) -> Any:
    """A container of the same type, with function(key, item) for each item."""
    if isinstance(container, dict):
        items: Any = ((key, function(key, item)) for key, item in container.items())
        made = type(container)(items)
        if isinstance(container, OrderedDict):
            vars(made).update(vars(container))  # a module's state dict has its versions there
        return made
    return type(container)(function(key, item) for key, item in enumerate(container))


def _item(container: Any, key: Any) -> Any:
    """The item, or None if there is none."""
    if isinstance(container, dict):
        return container.get(key)
    return container[key] if container is not None and key < len(container) else None


def _is_plain_tensor(thing: Any) -> bool:
    """Whether it is a dense tensor of torch's own class, with values."""
    return (
        type(thing) in (torch.Tensor, torch.nn.Parameter)
        and thing.layout == torch.strided
        and not thing.is_quantized
        and not thing.is_meta
    )


def _memory_key(tensor: torch.Tensor) -> Any:
    """Equal for tensors that are the same elements of the same memory."""
    # All without elements have the same address.
    where = tensor.data_ptr() if tensor.numel() else id(tensor)
    flags = (tensor.is_conj(), tensor.is_neg())
    return where, tensor.device, tensor.dtype, tensor.shape, tensor.stride(), flags


def _check_readable(thing: Any, path: tuple[Any, ...]) -> None:
    """Raises ValueError unless torch.load(weights_only=True) reads it."""
    name = _name(path)
    kind = f"{type(thing).__module__}.{type(thing).__qualname__}"
    if hasattr(thing, "device_mesh"):
        raise ValueError(
            f"Checkpointer.save: {name} is a {kind}, of which rank 0 has a part only; save such "
            "models with torch.distributed.checkpoint"
        )
    try:
        buffer = io.BytesIO()
        torch.save(thing, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        raise ValueError(
            f"Checkpointer.save: {name} is a {kind}, which torch.load(weights_only=True) does not "
            "read, so that the checkpoint could not be restored; save numbers, strings, tensors of "
            "torch, and lists, tuples and dicts of them, or name the class with "
            "torch.serialization.add_safe_globals"
        ) from error


def _name(path: tuple[Any, ...]) -> str:
    """
    >>> _name(("progress", "best", 0))
    "progress['best'][0]"
    """
    return str(path[0]) + "".join(f"[{key!r}]" for key in path[1:]) if path else "the state"
