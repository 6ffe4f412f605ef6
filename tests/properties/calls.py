"""What a step of a program calls: one collective, with the arguments that all ranks agree on.

Nothing here knows hvdlite: `play` makes the calls, `oracle` says what has to come out.
Whatever belongs to a rank is listed by world rank, also for the ranks that take no part.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

Shape = tuple[int, ...]


class Readable:
    """Its repr is the code that makes it, without what has its default."""

    def __repr__(self) -> str:
        given, positional = [], True
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            default = field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            if default is not dataclasses.MISSING and value == default:
                positional = False
                continue
            given.append(repr(value) if positional else f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(given)})"


@dataclass(frozen=True, repr=False)
class Tensor(Readable):
    """What the ranks pass; its values are the oracle's."""

    dtype: str = "float32"
    shape: Shape = (1,)


class Call(Readable):
    """family: under which kind the engine matches it by its name."""

    family = ""
    # Has it no form that returns before the end?
    blocks = False
    # Does a rank that has joined take part with zeros?
    joinable = False


@dataclass(frozen=True, repr=False)
class Allreduce(Call):
    """One tensor; or a group of them, then called by the grouped forms."""

    tensors: tuple[Tensor, ...] = (Tensor(),)
    op: str = "Sum"
    prescale: float = 1.0
    postscale: float = 1.0
    grouped: bool = False
    family = "allreduce"
    joinable = True


@dataclass(frozen=True, repr=False)
class Broadcast(Call):
    tensor: Tensor = Tensor()
    root: int = 0
    family = "broadcast"


@dataclass(frozen=True, repr=False)
class Allgather(Call):
    """tensors: without the first dimension, which is in `rows`: for each tensor by rank."""

    tensors: tuple[Tensor, ...] = (Tensor(shape=()),)
    rows: tuple[tuple[int, ...], ...] = ((1, 1, 1, 1),)
    grouped: bool = False
    family = "allgather"


@dataclass(frozen=True, repr=False)
class Alltoall(Call):
    """tensor: without the first dimension.

    splits: rows from each rank (the outer list) to each; None: `even` rows from each to each.
    rest: rows behind them that are sent to nobody.
    """

    tensor: Tensor = Tensor(shape=())
    splits: tuple[tuple[int, ...], ...] | None = None
    even: int = 1
    rest: int = 0
    family = "alltoall"


@dataclass(frozen=True, repr=False)
class Reducescatter(Call):
    tensors: tuple[Tensor, ...] = (Tensor(),)
    op: str = "Sum"
    prescale: float = 1.0
    postscale: float = 1.0
    grouped: bool = False
    family = "reducescatter"


@dataclass(frozen=True, repr=False)
class SparseAllreduce(Call):
    """A matrix of `shape` of which each rank has so many elements; it never blocks."""

    dtype: str = "float32"
    shape: Shape = (4, 3)
    elements: tuple[int, ...] = (1, 1, 1, 1)
    op: str = "Sum"
    family = "allgather"


@dataclass(frozen=True, repr=False)
class Barrier(Call):
    family = "barrier"
    blocks = True
    joinable = True


@dataclass(frozen=True, repr=False)
class AllgatherObject(Call):
    family = "allgather"
    blocks = True


@dataclass(frozen=True, repr=False)
class BroadcastObject(Call):
    root: int = 0
    family = "broadcast"
    blocks = True


@dataclass(frozen=True, repr=False)
class Gradient(Call):
    """The call (the form that waits), and the backward of the sum of its results times a weight
    that is another on every rank. Its tensors are floating-point."""

    of: Any = Allreduce()
    blocks = True

    @property
    def family(self) -> str:  # type: ignore[override]
        return str(self.of.family)

    @property
    def joinable(self) -> bool:  # type: ignore[override]
        return bool(self.of.joinable)


@dataclass(frozen=True, repr=False)
class Compressed(Call):
    """An allreduce or a reducescatter whose floating-point tensors travel as `by`."""

    of: Any = Allreduce()
    by: str = "fp16"
    blocks = True

    @property
    def family(self) -> str:  # type: ignore[override]
        return str(self.of.family)

    @property
    def joinable(self) -> bool:  # type: ignore[override]
        return bool(self.of.joinable)


class Event(Readable):
    """Not of the members of one process set, but of all ranks at once."""


@dataclass(frozen=True, repr=False)
class AddSet(Event):
    """The first one of a program is set 1, the next one 2, and so on."""

    ranks: tuple[int, ...] = (0,)


@dataclass(frozen=True, repr=False)
class RemoveSet(Event):
    number: int = 1


@dataclass(frozen=True, repr=False)
class Join(Event):
    """Every rank joins here, or earlier: rank r just before step `at[r]`; of the steps from there
    to this one it does none."""

    at: tuple[int, ...] = ()


def outer_tensors(call: Any) -> tuple[Tensor, ...]:
    """The tensors of a call that has any."""
    return call.tensors if hasattr(call, "tensors") else (call.tensor,)
